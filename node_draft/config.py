"""Settings of the draft node: flags, a TOML file and the environment, read once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from engine.replay import Pace
from speculation.growth import GrowthPolicy, parse_growth
from wire.settings import NodeConfig, add_node_arguments, named, node_values, parser


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(NodeConfig):
    """What `python -m node_draft` was told; units are in the names."""

    drafter: str
    growth: GrowthPolicy
    pace: Pace

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
            "layers:N: the first N layers of --model; ngram: no model, suffix matching over prompt and answer; for "
            "benchmarks, recorded:FILE and emulated:FILE propose along recorded answers",
        )  # fmt: skip
        args.add_argument(
            "--growth", type=named(parse_growth), default="tree:8x4",
            help="tree:ROWSxCHILDREN[@NATS] grows the ROWS most probable nodes a step, down to paths of e^-NATS (7); "
            "chain:K waits for each frame of K tokens, chain:K+AHEAD drafts up to AHEAD tokens past it",
        )  # fmt: skip
        args.add_argument(
            "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16", "int8"],
            help="auto: bfloat16 on a GPU (float16 on one too old for it), int8 on a CPU where the model "
            "is Llama-shaped and distilled, else float32",
        )  # fmt: skip
        args.add_argument(
            "--pace", type=named(Pace.parse), default="3+0.02", metavar="MS[+ROW_MS]",
            help="duration of a step with --drafter recorded or emulated",
        )  # fmt: skip
        given = args.parse_args(argv)
        return cls(drafter=given.drafter, growth=given.growth, pace=given.pace, **node_values(args, given))


def drafter_kind(text: str) -> str:
    """`model`, `ngram`, `layers:N`, `distilled:FOLDER`, `recorded:FILE` or `emulated:FILE`."""
    kind, _, rest = text.partition(":")
    if text in ("model", "ngram") or (kind in ("distilled", "recorded", "emulated") and rest):
        return text
    if kind == "layers" and rest.isdecimal() and int(rest) >= 1:
        return text
    raise argparse.ArgumentTypeError(
        f"must be model, ngram, layers:N with N >= 1, distilled:FOLDER, recorded:FILE or emulated:FILE, got {text!r}"
    )
