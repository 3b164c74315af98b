"""Asks the relay, from here, over TLS: is it up, and which nodes are behind it?

`/healthz` answers 200 with JSON in which every connected node stands with its name. A relay of a version without it is
asked for a WebSocket upgrade instead: it lives if it grants one to the secret; it then cannot speak for its nodes.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
from dataclasses import dataclass
from typing import Any, Protocol

TIMEOUT_S = 10.0
NO_SUCH_PAGE = (400, 401, 403, 404, 426)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayAddress:
    """Where and as whom to ask. `name` is what the certificate is for; `certificate` None asks without TLS."""

    host: str
    port: int
    name: str
    secret: str
    certificate: str | None


@dataclass(frozen=True, slots=True)
class Health:
    """The answer.

    Attributes:
        up: the relay answers.
        nodes: names of the nodes that are ready behind it; None when it cannot say.
        told: what was answered, in a few words.
    """

    up: bool
    nodes: frozenset[str] | None
    told: str


class Prober(Protocol):
    """Asks one relay."""

    def __call__(self, address: RelayAddress) -> Health: ...


def probe(address: RelayAddress, *, timeout_s: float = TIMEOUT_S) -> Health:
    """Ask once; whatever goes wrong is an answer too."""
    try:
        status, body = _get(address, "/healthz", {}, timeout_s)
        if status not in NO_SUCH_PAGE:
            return Health(status == 200, _ready_nodes(body) if status == 200 else frozenset(), f"/healthz: {status}")
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        }
        status, _ = _get(address, "/", upgrade, timeout_s)
        return Health(status == 101, None if status == 101 else frozenset(), f"WebSocket upgrade: {status}")
    except (OSError, http.client.HTTPException, ssl.SSLError, ValueError) as exc:
        return Health(False, frozenset(), f"{type(exc).__name__}: {exc}")


def _get(address: RelayAddress, path: str, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
    connection: http.client.HTTPConnection
    if address.certificate is None:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    else:
        context = ssl.create_default_context(cadata=address.certificate or None)
        connection = _NamedConnection(address, context, timeout_s)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {address.secret}", **headers})
        answer = connection.getresponse()
        # After 101 the connection is the WebSocket's: there is no body to read.
        return answer.status, b"" if answer.status == 101 else answer.read(1 << 20)
    finally:
        connection.close()


class _NamedConnection(http.client.HTTPSConnection):
    """Connects to an address, checks the certificate for a name: a domain may not point at the relay yet."""

    def __init__(self, address: RelayAddress, context: ssl.SSLContext, timeout_s: float) -> None:
        super().__init__(address.host, address.port, timeout=timeout_s, context=context)
        self._name = address.name
        self._given = context

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._given.wrap_socket(self.sock, server_hostname=self._name)


def _ready_nodes(body: bytes) -> frozenset[str] | None:
    """Names in the answer's `nodes`; None when it has no such list."""
    answer: Any = json.loads(body)
    nodes = answer.get("nodes") if isinstance(answer, dict) else None
    if not isinstance(nodes, list):
        return None
    return frozenset(str(n.get("name")) for n in nodes if isinstance(n, dict) and n.get("ready", True))
