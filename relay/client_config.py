"""Settings of the commands `foredraft chat` and `foredraft stream`: flags, a TOML file and the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relay.config import seconds
from wire.errors import ProtocolError
from wire.messages import MAX_POSITION
from wire.sampling import Sampling
from wire.settings import parser, read_secret, whole

DESCRIPTIONS = {
    "chat": "Ask a question and print the answer as it arrives. Without a question, on a terminal: a conversation.",
    "stream": "Continue a text and print the continuation as it arrives.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What the command was told.

    Attributes:
        text: the question, or the text to continue; None to read it from standard input.
        chat: by the checkpoint's chat template; otherwise the text as it is.
        system: the system message of a chat; empty for the template's own.
    """

    relay: str
    secret: str
    text: str | None
    chat: bool
    system: str
    model: str
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    target_only: bool
    ignore_eos: bool
    json: bool
    panel: bool
    ca_file: Path | None
    open_timeout_s: float
    log_level: str

    @classmethod
    def read(cls, command: str, argv: Sequence[str] | None = None, *, prog: str | None = None) -> ClientConfig:
        """Read the settings of "chat" or "stream"; a usage error exits with code 2 and says what to do."""
        args = parser("client", DESCRIPTIONS[command])
        args.prog = prog or f"foredraft {command}"
        args.add_argument("text", nargs="?", help="left out, or -: read from standard input")
        args.add_argument(
            "--relay", default="ws://127.0.0.1:8765", help="address of the relay, ws://HOST:PORT or wss://HOST:PORT"
        )
        args.add_argument("--ca-file", type=Path, help="PEM file of a private certificate authority, for wss://")
        args.add_argument("--open-timeout-s", type=seconds(0.1, 600), default=10.0, help="how long to try to connect")
        args.add_argument("--model", default="", help="model to ask; empty for any")
        if command == "chat":
            args.add_argument("--raw", action="store_true", help="continue the text instead of answering it")
            args.add_argument("--system", default="", help="system message; empty for the model's own")
        args.add_argument(
            "--max-tokens", type=whole(0, MAX_POSITION), default=256, help="longest answer; 0 up to the context limit"
        )
        args.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token each time")
        args.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability")
        args.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens, 0 for all")
        args.add_argument("--min-p", type=float, default=0.0, help="keep tokens so many times as likely as the best")
        args.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: tokens seen before lose")
        args.add_argument("--presence-penalty", type=float, default=0.0, help="off each token of the answer, once")
        args.add_argument(
            "--frequency-penalty", type=float, default=0.0, help="off each token of the answer, each time"
        )
        args.add_argument("--seed", type=int, default=0, help="same seed, same answer")
        args.add_argument("--stop", action="append", default=[], help="text that ends the answer; may be repeated")
        args.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")
        args.add_argument("--target-only", action="store_true", help="use no draft node: the baseline of a speed-up")
        shown = args.add_mutually_exclusive_group()
        shown.add_argument("--json", action="store_true", help="print each event as a line of JSON")
        shown.add_argument("--panel", action="store_true", help="show sources, speed and where the time goes, live")
        given = args.parse_args(argv)
        try:
            sampling = Sampling(
                temperature=given.temperature,
                top_p=given.top_p,
                top_k=given.top_k,
                min_p=given.min_p,
                repetition_penalty=given.repetition_penalty,
                presence_penalty=given.presence_penalty,
                frequency_penalty=given.frequency_penalty,
                seed=given.seed,
            )
        except ProtocolError as exc:
            args.error(str(exc))
        return cls(
            relay=given.relay,
            secret=read_secret(args, given),
            text=given.text if given.text != "-" else None,
            chat=command == "chat" and not given.raw,
            system=getattr(given, "system", ""),
            model=given.model,
            max_tokens=given.max_tokens,
            sampling=sampling,
            stop=tuple(given.stop),
            target_only=given.target_only,
            ignore_eos=given.ignore_eos,
            json=given.json,
            panel=given.panel,
            ca_file=given.ca_file,
            open_timeout_s=given.open_timeout_s,
            log_level=given.log_level,
        )
