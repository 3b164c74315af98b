"""Settings of the verify node: flags, a TOML file and the environment, read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wire.settings import add_node_arguments, parser, read_secret, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """What `python -m node_verify` was told; units are in the names."""

    relay: str
    secret: str
    name: str
    region: str
    model: str
    dtype: str
    slots: int
    max_length: int
    max_rows: int
    patience_s: float
    threads: int
    self_check: bool
    grace_s: float
    log_level: str
    trace: Path | None
    ca_file: Path | None

    @classmethod
    def read(cls, argv: Sequence[str] | None = None) -> VerifyConfig:
        """Read the settings; a usage error exits with code 2 and says what to do."""
        args = parser(
            "verify",
            "The verify node: runs the target model, owns every token of an answer. It dials the relay, so it needs "
            "no open port.",
        )
        add_node_arguments(args, default_name="verify")
        args.add_argument("--model", required=True, help="target: checkpoint directory or hub id of a causal LM")
        args.add_argument(
            "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
            help="auto: bfloat16 on a GPU, float32 on a CPU",
        )  # fmt: skip
        args.add_argument("--slots", type=whole(1, 256), default=4, help="sessions served at a time")
        args.add_argument(
            "--max-length", type=whole(16, 1 << 20), default=2048,
            help="most tokens of prompt + answer in a session; the cache is allocated for it",
        )  # fmt: skip
        args.add_argument(
            "--max-rows", type=whole(1, 256), default=8, help="rows of a verify pass, the pending token included"
        )
        args.add_argument(
            "--patience-ms", type=whole(0, 60_000), default=0,
            help="wait so long for candidates before decoding plainly; 0: never idle (the default)",
        )  # fmt: skip
        given = args.parse_args(argv)
        return cls(
            relay=given.relay,
            secret=read_secret(args, given),
            name=given.name,
            region=given.region,
            model=given.model,
            dtype=given.dtype,
            slots=given.slots,
            max_length=given.max_length,
            max_rows=given.max_rows,
            patience_s=given.patience_ms / 1e3,
            threads=given.threads,
            self_check=given.self_check,
            grace_s=given.grace_s,
            log_level=given.log_level,
            trace=given.trace,
            ca_file=given.ca_file,
        )
