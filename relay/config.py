"""Settings of the relay and of the client command: flags, a TOML file and the environment, read once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relay.router import MALFORMED_LIMIT
from wire.errors import ProtocolError
from wire.messages import MAX_POSITION
from wire.sampling import Sampling
from wire.settings import parser, read_secret, read_secret_file, whole


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
    log_level: str = "info"
    trace: Path | None = None
    http_host: str = "127.0.0.1"
    http_port: int | None = None
    admin_secret: str = ""

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
        args.add_argument("--trace", type=Path, help="write a JSONL trace of every decision to this file")
        args.add_argument(
            "--http-port", type=whole(0, 65535),
            help="serve the OpenAI-compatible API and the status page on this port, 0 for a free one; left out: not",
        )  # fmt: skip
        args.add_argument("--http-host", default="127.0.0.1", help="address for --http-port; 0.0.0.0 for all")
        args.add_argument(
            "--admin-secret-file", type=Path, help="file with the secret that opens the status page (else: the secret)"
        )
        given = args.parse_args(argv)
        return cls(
            http_host=given.http_host,
            http_port=given.http_port,
            admin_secret=read_secret_file(args, "--admin-secret-file", given.admin_secret_file),
            secret=read_secret(args, given),
            host=given.host,
            port=given.port,
            grace_s=given.grace_s,
            ping_interval_s=given.ping_interval_s,
            ping_timeout_s=given.ping_timeout_s,
            handshake_timeout_s=given.handshake_timeout_s,
            max_queued_bytes=given.max_queued_bytes,
            malformed_limit=given.malformed_limit,
            log_level=given.log_level,
            trace=given.trace,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What `foredraft-client` was told. `question` is None when it is to be read from standard input."""

    relay: str
    secret: str
    question: str | None
    raw: bool
    model: str
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    target_only: bool
    json: bool
    ca_file: Path | None
    log_level: str

    @classmethod
    def read(cls, argv: Sequence[str] | None = None) -> ClientConfig:
        """Read the settings; a usage error exits with code 2 and says what to do."""
        args = parser("client", "Ask a question and print the answer as it arrives, with figures at the end.")
        args.add_argument("question", nargs="?", help="what to ask; read from standard input when left out, or -")
        args.add_argument(
            "--relay", default="ws://127.0.0.1:8765", help="address of the relay, ws://HOST:PORT or wss://HOST:PORT"
        )
        args.add_argument("--ca-file", type=Path, help="PEM file of a private certificate authority, for wss://")
        args.add_argument("--model", default="", help="model to ask; empty for any")
        args.add_argument("--raw", action="store_true", help="continue the text instead of answering it as a chat")
        args.add_argument(
            "--max-tokens", type=whole(0, MAX_POSITION), default=256, help="longest answer; 0 up to the context limit"
        )
        args.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token each time")
        args.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability")
        args.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens, 0 for all")
        args.add_argument("--seed", type=int, default=0, help="same seed, same answer")
        args.add_argument("--stop", action="append", default=[], help="text that ends the answer; may be repeated")
        args.add_argument("--target-only", action="store_true", help="use no draft node: the baseline of a speed-up")
        args.add_argument("--json", action="store_true", help="print each event as a line of JSON")
        given = args.parse_args(argv)
        try:
            sampling = Sampling(temperature=given.temperature, top_p=given.top_p, top_k=given.top_k, seed=given.seed)
        except ProtocolError as exc:
            args.error(str(exc))
        return cls(
            relay=given.relay,
            secret=read_secret(args, given),
            question=given.question if given.question != "-" else None,
            raw=given.raw,
            model=given.model,
            max_tokens=given.max_tokens,
            sampling=sampling,
            stop=tuple(given.stop),
            target_only=given.target_only,
            json=given.json,
            ca_file=given.ca_file,
            log_level=given.log_level,
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
