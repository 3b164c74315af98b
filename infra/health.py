"""Asks the relay, from here, over TLS: is it up, and which nodes are behind it?

`/healthz` says that it lives, `/readyz` why no request would be served, `/metrics` (for whoever has the secret) names
every node that is linked; a node links when its model is loaded and has passed its self-check. A relay without these
pages is asked for a WebSocket upgrade instead: it lives if it grants one to the secret, and cannot speak for its nodes.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import ssl
from dataclasses import dataclass
from typing import Protocol

TIMEOUT_S = 10.0
NO_SUCH_PAGE = (400, 401, 403, 404, 426)
# A sample of the exposition format that is about one peer, with the name it has given itself.
NAMED = re.compile(r'^\w+\{[^}]*\bpeer="[^}]*\bname="([^"]*)"', re.MULTILINE)


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
        status, _ = _get(address, "/healthz", {}, timeout_s)
        if status == 200:
            return _ask_on(address, timeout_s)
        if status not in NO_SUCH_PAGE:
            return Health(False, frozenset(), f"/healthz: {status}")
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


def _ask_on(address: RelayAddress, timeout_s: float) -> Health:
    """The relay lives; who is behind it?"""
    status, body = _get(address, "/readyz", {}, timeout_s)
    if status == 503:
        return Health(True, frozenset(), f"/readyz: {' '.join(body.decode('utf-8', 'replace').split())}")
    status, body = _get(address, "/metrics", {}, timeout_s)
    if status != 200:
        return Health(True, None, f"/healthz: 200, /metrics: {status}")
    return Health(True, frozenset(NAMED.findall(body.decode("utf-8", "replace"))), "/readyz: 200")


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
