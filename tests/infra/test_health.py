"""The probe against servers that answer like relays, with and without TLS."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from infra.agent import make_certificate
from infra.health import Health, RelayAddress, probe

SECRET = "0123456789abcdef"
METRICS = """\
# TYPE foredraft_sessions gauge
foredraft_sessions 0
# TYPE foredraft_rtt_seconds gauge
foredraft_rtt_seconds{peer="peer-1",name="verify-0"} 0.02
foredraft_rtt_seconds{peer="peer-2",name="draft-0"} 0.03
foredraft_paced_frames_total{credential="x",name="not-a-node"} 0
"""


class Pages(BaseHTTPRequestHandler):
    """A relay's pages, by path."""

    pages: ClassVar[dict[str, tuple[int, str]]] = {}

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {SECRET}"
        upgrade = self.headers.get("Upgrade") == "websocket"
        if upgrade:
            self.send_response(101 if known else 401)
            self.end_headers()
            return
        status, body = self.pages.get(self.path, (426, ""))
        if self.path == "/metrics" and not known:
            status, body = 401, ""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def address(server: ThreadingHTTPServer, *, certificate: str | None = None, secret: str = SECRET) -> RelayAddress:
    return RelayAddress(
        host="127.0.0.1", port=server.server_address[1], name="127.0.0.1", secret=secret, certificate=certificate
    )


def answers(monkeypatch: pytest.MonkeyPatch, **pages: tuple[int, str]) -> None:
    monkeypatch.setattr(Pages, "pages", {f"/{name}": page for name, page in pages.items()})


def test_linked_nodes_are_read_from_the_metrics(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, healthz=(200, "ok\n"), readyz=(200, "ok\n"), metrics=(200, METRICS))
    assert probe(address(server)) == Health(True, frozenset({"verify-0", "draft-0"}), "/readyz: 200")


def test_a_relay_that_is_not_ready_says_why(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, healthz=(200, "ok\n"), readyz=(503, "no verify node is connected\n"))
    assert probe(address(server)) == Health(True, frozenset(), "/readyz: no verify node is connected")


def test_metrics_that_are_not_ours_to_see_leave_it_open(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, healthz=(200, "ok\n"), readyz=(200, "ok\n"))
    assert probe(address(server, secret="wrong")).nodes is None


def test_an_unhealthy_relay_is_not_up(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, healthz=(503, "its event loop stands still\n"))
    assert probe(address(server)) == Health(False, frozenset(), "/healthz: 503")


def test_a_relay_without_pages_is_asked_for_an_upgrade(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch)
    assert probe(address(server)) == Health(True, None, "WebSocket upgrade: 101")
    assert probe(address(server, secret="wrong")) == Health(False, frozenset(), "WebSocket upgrade: 401")


def test_nobody_there_is_an_answer_too() -> None:
    nobody = RelayAddress(host="127.0.0.1", port=9, name="x", secret=SECRET, certificate=None)
    health = probe(nobody)
    assert not health.up
    assert "ConnectionRefusedError" in health.told


@pytest.fixture
def certificate(tmp_path: Path, server: ThreadingHTTPServer) -> str:
    make_certificate(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "relay.pem", tmp_path / "relay.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return (tmp_path / "relay.pem").read_text()


def test_the_certificate_that_the_agent_makes_is_one_that_is_trusted_for_its_name_alone(
    server: ThreadingHTTPServer, certificate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers(monkeypatch, healthz=(200, "ok\n"), readyz=(200, "ok\n"), metrics=(200, METRICS))
    assert probe(address(server, certificate=certificate)).up
    stranger = probe(address(server, certificate=""))
    assert not stranger.up
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.told
    other_name = RelayAddress(
        host="127.0.0.1", port=server.server_address[1], name="10.0.0.1", secret=SECRET, certificate=certificate
    )
    assert "IP address mismatch" in probe(other_name).told
    assert (tmp_path / "relay.key").stat().st_mode & 0o777 == 0o640


def test_the_certificate_passes_the_strict_check_of_newer_pythons(tmp_path: Path) -> None:
    make_certificate(tmp_path, "203.0.113.7")
    context = ssl.create_default_context(cafile=str(tmp_path / "relay.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "relay.pem", tmp_path / "relay.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname="203.0.113.7")
    server = served.wrap_bio(to_server, to_client, server_side=True)
    done = set()
    for _ in range(10):
        for side in (client, server):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    assert done == {client, server}
