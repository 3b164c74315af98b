"""User data, units and boot script: checked by the tools that read them, and run for real in a root of their own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import boot
from infra.aws.client import Clients
from infra.boot import Place, boot_script, command, units, user_data
from infra.health import Health, RelayAddress, probe
from infra.spec import Machine, Spec
from tests.infra.doubles import a_spec, a_table

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).with_name("stand_in_systemctl.py")
PLACE = Place(
    region="us-east-2", relay_region="us-east-2", relay_address="203.0.113.7", expires_at="2026-12-01T16:00:00+00:00"
)
SECRET = "a-secret-of-the-test-0123456789"
SPEC = a_spec()
BOOT_S = 420


def files_of(spec: Spec, machine: Machine, place: Place = PLACE) -> dict[str, dict[str, Any]]:
    document = yaml.safe_load(user_data(spec, machine, place))
    return {file["path"]: file for file in document["write_files"]}


def needs(program: str, package: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian package {package})")


@pytest.mark.parametrize("machine", SPEC.machines, ids=lambda machine: machine.slot)
def test_user_data_is_small_and_holds_names_of_secrets_not_secrets(machine: Machine) -> None:
    text = user_data(SPEC, machine, PLACE)
    assert text.startswith("#cloud-config\n")
    assert len(text.encode()) < 16_384 / 1.5
    config = json.loads(files_of(SPEC, machine)[boot.CONFIG]["content"])
    assert config["secret_parameter"] == "/foredraft/demo/secret"
    assert "FOREDRAFT_SECRET" not in text
    assert "AWS_SECRET" not in text


@pytest.mark.parametrize("machine", SPEC.machines, ids=lambda machine: machine.slot)
def test_cloud_init_accepts_the_user_data(machine: Machine, tmp_path: Path) -> None:
    needs("cloud-init", "cloud-init")
    path = tmp_path / "user-data"
    path.write_text(user_data(SPEC, machine, PLACE))
    done = subprocess.run(
        ["cloud-init", "schema", "--config-file", str(path)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid" in done.stdout


@pytest.mark.parametrize("machine", SPEC.machines, ids=lambda machine: machine.slot)
def test_systemd_accepts_the_units(machine: Machine, tmp_path: Path) -> None:
    """All but that the programs are not installed here: their paths are replaced by one that exists."""
    needs("systemd-analyze", "systemd")
    names = units(SPEC, machine, PLACE)
    for name, text in names.items():
        lines = []
        for line in text.splitlines():
            key, sign, value = line.partition("=")
            if key in ("ExecStart", "ExecStartPre"):
                mark = "+" if value.startswith("+") else ""
                value = mark + "/bin/true " + value.partition(" ")[2]
            lines.append(key + sign + value if key not in ("User", "Group") else f"{key}=root")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    told = [line for line in done.stderr.splitlines() if "foredraft" in line]
    assert done.returncode == 0, done.stderr
    assert told == []


def test_the_spot_watcher_runs_on_spot_machines_alone_and_the_time_to_live_on_all() -> None:
    relay, verify, draft = (units(SPEC, machine, PLACE) for machine in SPEC.machines)
    assert "foredraft-spot.service" not in relay | verify
    assert "foredraft-spot.service" in draft
    for made in (relay, verify, draft):
        assert "OnCalendar=2026-12-01 16:00:00 UTC" in made["foredraft-ttl.timer"]


def test_only_nodes_that_trust_the_relay_s_own_certificate_follow_it() -> None:
    own = a_table()["relay"] | {"domain": "x.example.org", "certificate_parameter": "/c", "key_parameter": "/k"}
    for spec, wanted in ((SPEC, ["verify-0", "draft-0"]), (a_spec(relay=own), [])):
        following = [m.slot for m in spec.machines if "foredraft-certificate.service" in units(spec, m, PLACE)]
        assert following == wanted
        started = [m.slot for m in spec.machines if " foredraft-certificate.service" in boot_script(spec, m, PLACE)]
        assert started == wanted


def test_what_apt_s_locks_or_a_mirror_hold_up_is_tried_again() -> None:
    script = boot_script(SPEC, SPEC.relay, PLACE)
    function = next(line for line in script.splitlines() if line.startswith("again()"))
    flaky = 'tries=0; flaky() { tries=$((tries + 1)); test $tries -ge "$1"; }; sleep() { :; }'
    for needed, told in ((3, "3"), (99, "no")):
        text = f"set -euo pipefail\ntrap 'echo no' ERR\n{function}\n{flaky}\nagain flaky {needed}\necho $tries"
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, timeout=20)
        assert done.stdout == f"{told}\n", done.stderr
    assert "again apt-get update" in script
    assert "DPkg::Lock::Timeout=300 install" in script


def test_nodes_dial_the_relay_over_tls_with_its_own_certificate() -> None:
    words = command(SPEC, SPEC.nodes[0], PLACE)
    assert words[0].endswith("/foredraft-verify")
    assert words[words.index("--relay") + 1] == "wss://203.0.113.7:443"
    assert words[words.index("--ca-file") + 1] == "/run/foredraft/relay.pem"
    own = a_spec(
        relay={
            "regions": ["us-east-2"],
            "domain": "relay.example.org",
            "certificate_parameter": "/my/certificate",
            "key_parameter": "/my/key",
        }
    )
    words = command(own, own.nodes[0], PLACE)
    assert words[words.index("--relay") + 1] == "wss://relay.example.org:443"
    assert "--ca-file" not in words


def test_arguments_reach_the_service_word_for_word() -> None:
    verify, draft = a_table()["node"]
    odd = ['--x=a b"c', "100%", "$HOME", "back\\slash", "it's"]
    spec = a_spec(node=[{**verify, "arguments": odd}, draft])
    line = next(x for x in units(spec, spec.nodes[0], PLACE)["foredraft.service"].splitlines() if "ExecStart=" in x)
    assert '"--x=a b\\"c" 100%% $$HOME "back\\\\slash" "it\'s"' in line


def test_commands_of_the_units_are_ones_that_the_programs_take(tmp_path: Path) -> None:
    """The flags are those of this repository: a wrong one would only be seen on a machine that is paid for."""
    modules = {
        "relay": "relay.config:RelayConfig",
        "verify": "node_verify.config:VerifyConfig",
        "draft": "node_draft.config:DraftConfig",
    }
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    for machine in SPEC.machines:
        module, _, name = modules[machine.role].partition(":")
        words = [str(secret) if word == "/run/foredraft/secret" else word for word in command(SPEC, machine, PLACE)]
        code = f"import sys; from {module} import {name}; {name}.read(sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-c", code, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr


# For real: the boot script of a relay in a root of its own


def can_have_a_root_of_its_own() -> str:
    """ "" when a mount namespace with an overlay over / can be made, else why not."""
    if os.geteuid() != 0:
        return "needs root, for a mount namespace"
    if shutil.which("unshare") is None:
        return "needs unshare (Debian package util-linux)"
    if shutil.which("apt-get") is None:
        return "needs apt-get: the boot script is for Debian and Ubuntu"
    made = subprocess.run(
        ["unshare", "-m", "bash", "-c", "mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w /mnt/m && " + OVERLAY],
        capture_output=True,
        check=False,
        timeout=30,
    )
    return "" if made.returncode == 0 else "needs a kernel with overlay mounts in a namespace"


OVERLAY = "mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/m"
ENTER = f"""
set -e
mount -t tmpfs -o size=4g t /mnt
mkdir /mnt/u /mnt/w /mnt/m
cp -a "$1"/. /mnt/u/
{OVERLAY}
mount -t proc proc /mnt/m/proc
mount --rbind /dev /mnt/m/dev
mount -t tmpfs t /mnt/m/run
mkdir -p /mnt/m/run/lock
chroot /mnt/m {boot.SCRIPT}
# The first process of the namespace stays, and with it the services.
sleep 600
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository's wheel, from a copy: building writes into the tree."""
    copy = tmp_path_factory.mktemp("wheel") / "src"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "docs", "models", "tests")
    )
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(copy.parent), str(copy)]
    subprocess.run(build, check=True, timeout=200, capture_output=True)
    return next(copy.parent.glob("*.whl"))


@pytest.fixture
def free_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The relay's inner port is moved to a free one; the port for TLS."""
    with socket.create_server(("127.0.0.1", 0)) as inner, socket.create_server(("127.0.0.1", 0)) as outer:
        monkeypatch.setattr(boot, "RELAY_PORT", inner.getsockname()[1])
        return int(outer.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(BOOT_S + 120)
def test_the_boot_script_runs_until_the_relay_answers_its_health_check(
    clients: Clients, moto: str, wheel: Path, free_port: int, tmp_path: Path
) -> None:
    """Real but for systemd (a stand-in runs the units), AWS (moto) and Amazon's log agent (a stand-in notes its call).

    So packages, virtual environment, wheel from S3, secret from the parameter store, key and certificate, TLS, and the
    relay as a user without rights are what they will be.
    """
    reason = can_have_a_root_of_its_own()
    if reason:
        pytest.skip(reason)
    spec = a_spec(package={"wheel": f"s3://wheels/{wheel.name}"}, relay={"regions": ["us-east-2"], "port": free_port})
    clients("s3", "us-east-1").create_bucket(Bucket="wheels")
    clients("s3", "us-east-1").upload_file(str(wheel), "wheels", wheel.name)
    ssm = clients("ssm", "us-east-2")
    ssm.put_parameter(Name="/foredraft/demo/secret", Value=SECRET, Type="SecureString")
    place = Place(
        region="us-east-2", relay_region="us-east-2", relay_address="127.0.0.1", expires_at="2099-12-01T16:00:00+00:00"
    )
    upper = tmp_path / "upper"
    for path, file in files_of(spec, spec.relay, place).items():
        target = upper / path.removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file["content"])
        target.chmod(int(file["permissions"], 8))
    put_program(upper / "usr/local/sbin/systemctl", STAND_IN.read_text())
    # Nothing is to be fetched from Amazon; with its agent there, the script has no reason to.
    put_program(
        upper / "opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl", "#!/bin/sh\necho agent: $@\n"
    )
    log = tmp_path / "boot.log"
    environment = {
        **{key: value for key, value in os.environ.items() if key.startswith(("PIP_", "AWS_", "http", "HTTP", "no_"))},
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "AWS_ENDPOINT_URL": moto,
        "HOME": "/root",
    }
    with log.open("wb") as sink:
        root = subprocess.Popen(
            # Its own process namespace: when its first process ends, everything that it started does.
            ["unshare", "-m", "-p", "-f", "--kill-child", "bash", "-c", ENTER + "\n", "enter", str(upper)],
            stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        try:
            health = await_relay(root, clients, free_port)
        finally:
            root.kill()
            root.wait(timeout=20)
    text = log.read_text()
    assert health.up, f"{health.told}\n{text[-4000:]}"
    assert boot.FAILED not in text
    assert "agent: -a fetch-config -m ec2 -s -c file:/etc/foredraft/cloudwatch.json" in text


def put_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)


def await_relay(root: subprocess.Popen[bytes], clients: Clients, port: int) -> Health:
    """Ask like `up` does, until the relay answers, the boot script ends badly or the time is up."""
    ssm = clients("ssm", "us-east-2")
    end = time.monotonic() + BOOT_S
    health = Health(False, frozenset(), "not asked")
    while time.monotonic() < end and root.poll() is None and not health.up:
        found = ssm.describe_parameters()["Parameters"]
        if any(parameter["Name"].endswith("relay-certificate") for parameter in found):
            pem = ssm.get_parameter(Name="/foredraft/demo/relay-certificate")["Parameter"]["Value"]
            health = probe(
                RelayAddress(host="127.0.0.1", port=port, name="127.0.0.1", secret=SECRET, certificate=pem), timeout_s=5
            )
        time.sleep(0.5)
    return health
