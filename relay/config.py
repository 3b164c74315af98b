"""Settings of the relay: flags, a TOML file and the environment, read once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relay.books import KEEP_S, MAX_KEPT_BYTES, TAKEOVER_WAIT_S
from relay.router import MALFORMED_LIMIT
from wire.settings import parser, read_secret, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """What `python -m relay` was told; units are in the names."""

    secret: str
    host: str = "127.0.0.1"
    port: int = 8765
    grace_s: float = 20.0
    ping_interval_s: float = 5.0
    ping_timeout_s: float = 10.0
    handshake_timeout_s: float = 10.0
    max_queued_frames: int = 4096
    max_queued_bytes: int = 4 << 20
    malformed_limit: int = MALFORMED_LIMIT
    keep_s: float = KEEP_S
    takeover_wait_s: float = TAKEOVER_WAIT_S
    max_kept_bytes: int = MAX_KEPT_BYTES
    credentials: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    reload_s: float = 2.0
    log_level: str = "info"
    trace: Path | None = None
    http_host: str = "127.0.0.1"
    http_port: int | None = None

    @classmethod
    def read(cls, argv: Sequence[str] | None = None) -> RelayConfig:
        """Read the settings; a usage error exits with code 2 and says what to do."""
        args = parser(
            "relay",
            "The relay: draft nodes, verify nodes and clients dial it; it pairs them and carries their frames. It "
            "needs no GPU, no model and little memory. When it listens it prints one JSON line with its port.",
        )
        args.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
        args.add_argument("--port", type=whole(0, 65535), default=8765, help="port to listen on, 0 for a free one")
        args.add_argument("--grace-s", type=seconds(0, 3600), default=20.0, help="how long SIGTERM lets answers finish")
        args.add_argument(
            "--ping-interval-s", type=seconds(0.01, 3600), default=5.0, help="how often each link is asked for life"
        )
        args.add_argument(
            "--ping-timeout-s", type=seconds(0.01, 3600), default=10.0, help="silence after which a link is dead"
        )
        args.add_argument(
            "--handshake-timeout-s", type=seconds(0.1, 600), default=10.0, help="how long a peer may take to say hello"
        )
        args.add_argument(
            "--max-queued-bytes", type=whole(1 << 20, 1 << 30), default=4 << 20,
            help="a peer for which more than this waits is closed: it reads too slowly",
        )  # fmt: skip
        args.add_argument(
            "--malformed-limit", type=whole(1, 1_000_000), default=MALFORMED_LIMIT,
            help="malformed frames after which a peer is closed",
        )  # fmt: skip
        args.add_argument(
            "--keep-s", type=seconds(0, 3600), default=KEEP_S,
            help="how long an answer outlives the link of a client that may come back for it",
        )  # fmt: skip
        args.add_argument(
            "--takeover-wait-s", type=seconds(0, 3600), default=TAKEOVER_WAIT_S,
            help="how long a session waits for another verify node before its client is told that it was lost",
        )  # fmt: skip
        args.add_argument(
            "--max-kept-bytes", type=whole(0, 1 << 40), default=MAX_KEPT_BYTES,
            help="bound of what is kept of all requests and answers so that they can be resumed and taken over",
        )  # fmt: skip
        args.add_argument(
            "--credentials", type=Path,
            help="TOML file of credentials by role, instead of one secret; read again when it changes",
        )  # fmt: skip
        args.add_argument("--tls-cert", type=Path, help="PEM file of the certificate chain for wss://; read again too")
        args.add_argument("--tls-key", type=Path, help="PEM file of its private key, if it is not in --tls-cert")
        args.add_argument(
            "--reload-s", type=seconds(0.01, 3600), default=2.0, help="how often these files are looked at"
        )
        args.add_argument("--trace", type=Path, help="write a JSONL trace of every decision to this file")
        args.add_argument(
            "--http-port", type=whole(0, 65535),
            help="serve the OpenAI-compatible API and the status page on this port, 0 for a free one; left out: not",
        )  # fmt: skip
        args.add_argument("--http-host", default="127.0.0.1", help="address for --http-port; 0.0.0.0 for all")
        given = args.parse_args(argv)
        if given.tls_key is not None and given.tls_cert is None:
            args.error("--tls-key needs --tls-cert")
        return cls(
            http_host=given.http_host,
            http_port=given.http_port,
            secret=read_secret(args, given) if given.credentials is None else "",
            host=given.host,
            port=given.port,
            grace_s=given.grace_s,
            ping_interval_s=given.ping_interval_s,
            ping_timeout_s=given.ping_timeout_s,
            handshake_timeout_s=given.handshake_timeout_s,
            max_queued_bytes=given.max_queued_bytes,
            malformed_limit=given.malformed_limit,
            keep_s=given.keep_s,
            takeover_wait_s=given.takeover_wait_s,
            max_kept_bytes=given.max_kept_bytes,
            credentials=given.credentials,
            tls_cert=given.tls_cert,
            tls_key=given.tls_key,
            reload_s=given.reload_s,
            log_level=given.log_level,
            trace=given.trace,
        )


def seconds(low: float, high: float) -> Callable[[str], float]:
    """An argument type: a number of seconds in low..high."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a number of seconds in {low:g}..{high:g}, got {text!r}")
        return value

    return convert
