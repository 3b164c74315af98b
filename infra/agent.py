"""What runs on an instance besides the node: `python -m infra.agent prepare`, `... follow-relay` and
`... watch-spot -- COMMAND`.

`prepare` runs as root before each start of the service: the shared secret, the relay's certificate, a hub token and a
model from S3 go where the service can read them. `follow-relay` puts the certificate of a relay that took another's
place where the node looks when it dials again. `watch-spot` asks the instance's metadata for an interruption notice
and, at the first, runs a command: the one that drains the node.
"""

from __future__ import annotations

import argparse
import grp
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

log = logging.getLogger("infra.agent")

METADATA = "http://169.254.169.254"
POLL_S = 5.0
FOLLOW_S = 30.0
CERTIFICATE_DAYS = 90
TOKEN_TTL_S = 300


@dataclass(frozen=True, slots=True)
class Places:
    """Where things go; tests put them elsewhere."""

    config: Path = Path("/etc/foredraft/node.json")
    tls: Path = Path("/etc/foredraft/tls")
    runtime: Path = Path("/run/foredraft")
    state: Path = Path("/var/lib/foredraft")


def prepare(
    places: Places,
    *,
    client: Callable[..., Any] = boto3.client,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Fetch what the service needs; waits for what is not there yet."""
    config = json.loads(places.config.read_text())
    ssm = client("ssm", region_name=config["parameter_region"])
    write(places.runtime / "secret", _parameter(ssm, config["secret_parameter"], sleep), group="foredraft")
    environment = ""
    if config["hub_token_parameter"]:
        environment = f"HF_TOKEN={_parameter(ssm, config['hub_token_parameter'], sleep)}\n"
    write(places.runtime / "environment", environment, group="foredraft")
    if config["role"] == "relay":
        _prepare_certificate(places, config, ssm, sleep)
    elif not config["certificate_parameter"]:
        pem = _parameter(ssm, config["published_certificate_parameter"], sleep)
        write(places.runtime / "relay.pem", pem, group="foredraft")
    if config["model"].startswith("s3://"):
        fetch_model(client("s3"), config["model"], places.state / "model")


def write(path: Path, text: str, *, group: str) -> None:
    """For root and one group, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    try:
        os.chown(temporary, -1, grp.getgrnam(group).gr_gid)
    except KeyError:
        log.warning("no group %s: only root reads %s", group, path)
    temporary.replace(path)


def make_certificate(folder: Path, name: str) -> None:
    """A key that never leaves this machine and a certificate for `name`, an address or a domain."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "IP" if name.replace(".", "").isdecimal() else "DNS"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"),
            *(
                "-days",
                str(CERTIFICATE_DAYS),
                "-subj",
                "/CN=foredraft relay",
                "-addext",
                f"subjectAltName={kind}:{name}",
            ),
            *("-addext", "basicConstraints=critical,CA:TRUE,pathlen:0"),
            *("-keyout", str(folder / "relay.key.new"), "-out", str(folder / "relay.pem.new")),
        ],
        check=True,
        capture_output=True,
    )
    write(folder / "relay.key", (folder / "relay.key.new").read_text(), group="stunnel4")
    write(folder / "relay.pem", (folder / "relay.pem.new").read_text(), group="stunnel4")
    for made in ("relay.key.new", "relay.pem.new"):
        (folder / made).unlink()


def fetch_model(s3: Any, address: str, folder: Path) -> None:
    """Copy a checkpoint from S3, once: a folder that is whole is kept."""
    if folder.exists():
        return
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/") + "/"
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    count = 0
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            relative = item["Key"].removeprefix(prefix)
            if not relative or relative.endswith("/"):
                continue
            target = (partial / relative).resolve()
            if not target.is_relative_to(partial.resolve()):
                raise ValueError(f"{address}: the key {item['Key']!r} leads out of the folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, item["Key"], str(target))
            count += 1
    if not count:
        raise FileNotFoundError(f"{address}: there is nothing")
    partial.rename(folder)


def notice(metadata: str, *, timeout_s: float = 2.0) -> Mapping[str, str] | None:
    """The interruption notice, or None; over IMDSv2."""
    try:
        request = urllib.request.Request(
            f"{metadata}/latest/api/token",
            method="PUT",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            token = answer.read().decode()
        request = urllib.request.Request(
            f"{metadata}/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            told: Mapping[str, str] = json.loads(answer.read())
            return told
    except urllib.error.HTTPError as exc:
        if exc.code != 404:
            log.warning("the metadata service answers %d", exc.code)
    except (OSError, ValueError) as exc:
        log.warning("the metadata service does not answer: %s", exc)
    return None


def watch_spot(
    metadata: str,
    command: Sequence[str],
    *,
    sleep: Callable[[float], None] = time.sleep,
    run: Callable[[Sequence[str]], object] = lambda command: subprocess.run(command, check=True),
) -> Mapping[str, str]:
    """Ask every few seconds; at the first notice run `command`, and return the notice."""
    while (told := notice(metadata)) is None:
        sleep(POLL_S)
    log.warning("spot notice: %s at %s; draining", told.get("action"), told.get("time"))
    run(command)
    return told


def follow_relay(
    places: Places, *, client: Callable[..., Any] = boto3.client, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Keep the relay's certificate as it is published, for ever: a new relay machine makes a new one."""
    config = json.loads(places.config.read_text())
    ssm = client("ssm", region_name=config["parameter_region"])
    path = places.runtime / "relay.pem"
    while True:
        sleep(FOLLOW_S)
        try:
            pem = str(ssm.get_parameter(Name=config["published_certificate_parameter"])["Parameter"]["Value"])
        except (ClientError, BotoCoreError) as exc:
            log.warning("the relay's certificate cannot be read: %s", exc)
            continue
        # Without the file the service is not running, and fetches it itself when it starts.
        if path.exists() and path.read_text() != pem:
            log.info("the relay has a new certificate")
            write(path, pem, group="foredraft")


def _parameter(ssm: Any, name: str, sleep: Callable[[float], None]) -> str:
    """Read a parameter; one that is not there yet is waited for, as is a role that is not known everywhere yet."""
    while True:
        try:
            return str(ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"])
        except (ClientError, BotoCoreError) as exc:
            log.warning("waiting for %s: %s", name, exc)
            sleep(POLL_S)


def _prepare_certificate(places: Places, config: Mapping[str, str], ssm: Any, sleep: Callable[[float], None]) -> None:
    if config["certificate_parameter"]:
        write(places.tls / "relay.key", _parameter(ssm, config["key_parameter"], sleep), group="stunnel4")
        write(places.tls / "relay.pem", _parameter(ssm, config["certificate_parameter"], sleep), group="stunnel4")
        return
    if not (places.tls / "relay.pem").exists():
        make_certificate(places.tls, config["relay_name"])
    # Nodes and clients trust exactly this one.
    ssm.put_parameter(
        Name=config["published_certificate_parameter"],
        Value=(places.tls / "relay.pem").read_text(),
        Type="String",
        Overwrite=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="infra.agent", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare", help="fetch secrets, certificate and model")
    commands.add_parser("follow-relay", help="keep the relay's certificate as it is published")
    watch = commands.add_parser("watch-spot", help="run a command on an interruption notice")
    watch.add_argument("--metadata", default=METADATA, help="address of the metadata service")
    watch.add_argument("run", nargs="+", metavar="COMMAND")
    given = parser.parse_args(argv)
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    if given.command == "prepare":
        prepare(Places())
    elif given.command == "follow-relay":
        follow_relay(Places())
    else:
        watch_spot(given.metadata, given.run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
