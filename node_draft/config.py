"""Settings of the draft node: flags, a TOML file and the environment, read once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speculation.growth import GrowthPolicy, parse_growth
from wire.settings import add_node_arguments, parser, read_secret, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """What `python -m node_draft` was told; units are in the names."""

    relay: str
    secret: str
    name: str
    region: str
    model: str
    drafter: str
    growth: GrowthPolicy
    dtype: str
    slots: int
    max_length: int
    threads: int
    self_check: bool
    grace_s: float
    log_level: str
    trace: Path | None
    ca_file: Path | None

    @classmethod
    def read(cls, argv: Sequence[str] | None = None) -> DraftConfig:
        """Read the settings; a usage error exits with code 2 and says what to do."""
        args = parser(
            "draft",
            "The draft node: proposes tokens for a target that runs elsewhere. It dials the relay, so it needs no "
            "open port. Its tokenizer must be the target's; it cannot change a single token of the answer.",
        )
        add_node_arguments(args, default_name="draft")
        args.add_argument(
            "--model", required=True, help="checkpoint directory or hub id of a causal LM with the target's tokenizer"
        )
        args.add_argument(
            "--drafter", type=drafter_kind, default="model",
            help="model: the whole checkpoint; distilled:FOLDER: a drafter trained for the target that --model names; "
            "layers:N: the first N layers of --model; ngram: no model, suffix matching over prompt and answer",
        )  # fmt: skip
        args.add_argument(
            "--growth", type=growth, default="chain:2+22",
            help="chain:K waits for each frame of K tokens, chain:K+AHEAD drafts up to AHEAD tokens past it",
        )  # fmt: skip
        args.add_argument(
            "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16", "int8"],
            help="auto: bfloat16 on a GPU, int8 on a CPU where the model is Llama-shaped and distilled, else float32",
        )  # fmt: skip
        args.add_argument("--slots", type=whole(1, 256), default=4, help="sessions served at a time")
        args.add_argument(
            "--max-length", type=whole(16, 1 << 20), default=2048, help="most tokens of prompt + answer in a session"
        )
        given = args.parse_args(argv)
        return cls(
            relay=given.relay,
            secret=read_secret(args, given),
            name=given.name,
            region=given.region,
            model=given.model,
            drafter=given.drafter,
            growth=given.growth,
            dtype=given.dtype,
            slots=given.slots,
            max_length=given.max_length,
            threads=given.threads,
            self_check=given.self_check,
            grace_s=given.grace_s,
            log_level=given.log_level,
            trace=given.trace,
            ca_file=given.ca_file,
        )


def growth(text: str) -> GrowthPolicy:
    """A growth policy by name, with argparse's kind of error."""
    try:
        return parse_growth(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def drafter_kind(text: str) -> str:
    """`model`, `ngram`, `layers:N` or `distilled:FOLDER`."""
    kind, _, rest = text.partition(":")
    if text in ("model", "ngram") or (kind == "distilled" and rest):
        return text
    if kind == "layers" and rest.isdecimal() and int(rest) >= 1:
        return text
    raise argparse.ArgumentTypeError(f"must be model, ngram, layers:N with N >= 1 or distilled:FOLDER, got {text!r}")
