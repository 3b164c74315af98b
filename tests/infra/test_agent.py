"""What runs on an instance: secrets, certificate, model; and C068, the spot notice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra.agent import Places, fetch_model, follow_relay, prepare, watch_spot
from infra.aws.client import Clients
from infra.boot import Place, node_config
from infra.spec import Machine
from tests.infra.doubles import a_spec, a_table

SECRET = "a-secret-of-the-test-0123456789"
PLACE = Place(
    region="us-west-2", relay_region="us-east-2", relay_address="203.0.113.7", expires_at="2026-12-01T16:00:00+00:00"
)


class Waits:
    """Stands for sleeping: counts, and does something at the n-th time."""

    def __init__(self, at: int = 0, what: Any = None) -> None:
        self.count = 0
        self._at, self._what = at, what

    def __call__(self, seconds: float) -> None:
        self.count += 1
        assert self.count < 50, "it waits for ever"
        if self.count == self._at:
            self._what()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(
        config=tmp_path / "node.json", tls=tmp_path / "tls", runtime=tmp_path / "run", state=tmp_path / "state"
    )


def configure(places: Places, machine: Machine, **spec: Any) -> None:
    places.config.write_text(json.dumps(node_config(a_spec(**spec), machine, PLACE)))


def put_secret(clients: Clients) -> None:
    clients("ssm", "us-east-2").put_parameter(Name="/foredraft/demo/secret", Value=SECRET, Type="SecureString")


def client_for(clients: Clients) -> Any:
    return lambda service, region_name="us-east-2": clients(service, region_name)


def test_the_relay_makes_a_certificate_once_and_publishes_it(clients: Clients, places: Places) -> None:
    put_secret(clients)
    configure(places, a_spec().relay)
    prepare(places, client=client_for(clients), sleep=Waits())
    pem = (places.tls / "relay.pem").read_text()
    published = clients("ssm", "us-east-2").get_parameter(Name="/foredraft/demo/relay-certificate")
    assert published["Parameter"]["Value"] == pem
    assert (places.runtime / "secret").read_text() == SECRET
    assert (places.runtime / "secret").stat().st_mode & 0o777 == 0o640
    assert "PRIVATE" not in pem
    prepare(places, client=client_for(clients), sleep=Waits())
    assert (places.tls / "relay.pem").read_text() == pem


def test_a_node_waits_until_the_relay_has_published_its_certificate(clients: Clients, places: Places) -> None:
    put_secret(clients)
    configure(places, a_spec().nodes[0])
    ssm = clients("ssm", "us-east-2")

    def publish() -> None:
        ssm.put_parameter(Name="/foredraft/demo/relay-certificate", Value="PEM", Type="String")

    waits = Waits(3, publish)
    prepare(places, client=client_for(clients), sleep=waits)
    assert waits.count == 3
    assert (places.runtime / "relay.pem").read_text() == "PEM"


def test_the_certificate_of_a_relay_that_took_another_s_place_reaches_the_running_node(
    clients: Clients, places: Places
) -> None:
    put_secret(clients)
    configure(places, a_spec().nodes[0])
    ssm = clients("ssm", "us-east-2")
    seen: list[str] = []

    def publish(pem: str) -> None:
        ssm.put_parameter(Name="/foredraft/demo/relay-certificate", Value=pem, Type="String", Overwrite=True)

    class Enough(Exception):
        """The test has seen what it wanted."""

    def sleep(seconds: float) -> None:
        path = places.runtime / "relay.pem"
        seen.append(path.read_text() if path.exists() else "none")
        match len(seen):
            case 2:
                publish("NEW")
            case 4:
                path.unlink()
            case 5:
                ssm.delete_parameter(Name="/foredraft/demo/relay-certificate")
            case 7:
                raise Enough

    publish("OLD")
    prepare(places, client=client_for(clients), sleep=Waits())
    with pytest.raises(Enough):
        follow_relay(places, client=client_for(clients), sleep=sleep)
    assert seen == ["OLD", "OLD", "NEW", "NEW", "none", "none", "none"]


def test_a_certificate_of_ones_own_comes_from_the_parameter_store(clients: Clients, places: Places) -> None:
    put_secret(clients)
    ssm = clients("ssm", "us-east-2")
    for name in ("certificate", "key"):
        ssm.put_parameter(Name=f"/my/{name}", Value=name.upper(), Type="SecureString")
    relay = {
        "regions": ["us-east-2"], "domain": "relay.example.org",
        "certificate_parameter": "/my/certificate", "key_parameter": "/my/key",
    }  # fmt: skip
    configure(places, a_spec(relay=relay).relay, relay=relay)
    prepare(places, client=client_for(clients), sleep=Waits())
    assert (places.tls / "relay.pem").read_text() == "CERTIFICATE"
    assert (places.tls / "relay.key").read_text() == "KEY"


def test_a_hub_token_reaches_the_service_in_its_environment(clients: Clients, places: Places) -> None:
    put_secret(clients)
    ssm = clients("ssm", "us-east-2")
    ssm.put_parameter(Name="/my/token", Value="hf_x", Type="SecureString")
    ssm.put_parameter(Name="/foredraft/demo/relay-certificate", Value="PEM", Type="String")
    verify, draft = a_table()["node"]
    node = [{**verify, "hub_token_parameter": "/my/token"}, draft]
    configure(places, a_spec(node=node).nodes[0], node=node)
    prepare(places, client=client_for(clients), sleep=Waits())
    assert (places.runtime / "environment").read_text() == "HF_TOKEN=hf_x\n"


def test_a_model_in_s3_is_copied_once_and_whole(clients: Clients, tmp_path: Path) -> None:
    s3 = clients("s3", "us-east-1")
    s3.create_bucket(Bucket="models")
    for key in ("m/config.json", "m/weights/a.safetensors", "other/config.json"):
        s3.put_object(Bucket="models", Key=key, Body=key.encode())
    fetch_model(s3, "s3://models/m", tmp_path / "model")
    assert (tmp_path / "model" / "weights" / "a.safetensors").read_bytes() == b"m/weights/a.safetensors"
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "weights"]
    s3.put_object(Bucket="models", Key="m/config.json", Body=b"newer")
    fetch_model(s3, "s3://models/m", tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == b"m/config.json"
    with pytest.raises(FileNotFoundError, match="there is nothing"):
        fetch_model(s3, "s3://models/none", tmp_path / "none")


def test_a_key_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    class Listing:
        def get_paginator(self, _: str) -> Listing:
            return self

        def paginate(self, **_: str) -> list[dict[str, Any]]:
            return [{"Contents": [{"Key": "m/../../etc/passwd"}]}]

    with pytest.raises(ValueError, match="leads out of the folder"):
        fetch_model(Listing(), "s3://models/m", tmp_path / "model")


# C068


class Metadata(BaseHTTPRequestHandler):
    """IMDSv2 with an interruption notice from the n-th question on."""

    asked = 0
    notice_from = 3

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200, "token")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "token":
            self._answer(401, "")
            return
        type(self).asked += 1
        if self.asked < self.notice_from:
            self._answer(404, "")
        else:
            self._answer(200, json.dumps({"action": "terminate", "time": "2026-12-01T12:02:00Z"}))

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Metadata, "asked", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_c068_the_first_notice_drains_the_node_once(metadata: str) -> None:
    ran: list[list[str]] = []
    waits = Waits()
    told = watch_spot(metadata, ["systemctl", "stop"], sleep=waits, run=lambda command: ran.append(list(command)))
    assert waits.count == 2
    assert ran == [["systemctl", "stop"]]
    assert told["action"] == "terminate"


def test_c068_a_metadata_service_that_is_away_is_asked_again(metadata: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [True, True]

    def do_put(self: Metadata) -> None:
        if failing:
            failing.pop()
            self._answer(500, "")
        else:
            self._answer(200, "token")

    monkeypatch.setattr(Metadata, "do_PUT", do_put)
    waits = Waits()
    watch_spot(metadata, ["x"], sleep=waits, run=lambda command: None)
    assert waits.count == 4


def test_c068_the_command_of_the_unit_sends_a_real_process_its_sigterm(
    metadata: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the unit, but for the program that is told: `python -m infra.agent watch-spot -- COMMAND`."""
    monkeypatch.setattr(Metadata, "notice_from", 1)
    code = "import signal; print('up', flush=True); signal.sigwait([signal.SIGTERM]); print('draining')"
    program = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); {code}"
    node = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    assert node.stdout.readline() == "up\n"
    stop = ["kill", f"-{signal.SIGTERM.value}", str(node.pid)]
    watch = [sys.executable, "-m", "infra.agent", "watch-spot", "--metadata", metadata, "--", *stop]
    done = subprocess.run(watch, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert node.stdout.read() == "draining\n"
    assert node.wait(timeout=20) == 0
    node.stdout.close()
    assert "spot notice: terminate at 2026-12-01T12:02:00Z; draining" in done.stderr
