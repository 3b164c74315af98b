"""Settings of the verify node: flags, a TOML file and the environment, read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.replay import Pace
from speculation.local import parse_local
from wire.settings import NodeConfig, add_node_arguments, named, node_values, parser, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig(NodeConfig):
    """What `python -m node_verify` was told; units are in the names."""

    max_rows: int
    max_waiting: int
    patience_s: float
    device_map: str
    local: tuple[bool, bool]
    gated: bool
    calibrate: bool
    priced: bool
    replay: Path | None
    pace: Pace

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
            help="auto: bfloat16 on a GPU (float16 on one too old for it), float32 on a CPU",
        )  # fmt: skip
        args.add_argument(
            "--max-rows", type=whole(1, 256), default=32,
            help="most rows of a verify pass, of all sessions together, their pending tokens included",
        )  # fmt: skip
        args.add_argument(
            "--max-waiting", type=whole(0, 65_536), default=64,
            help="sessions that may wait in line for a slot; more are refused",
        )  # fmt: skip
        args.add_argument(
            "--patience-ms", type=whole(0, 60_000), default=0,
            help="wait so long for candidates before decoding plainly; 0: never idle (the default)",
        )  # fmt: skip
        args.add_argument(
            "--device-map", default="", choices=["", "auto", "balanced", "balanced_low_0", "sequential"],
            help="spread the target's layers over the GPUs as transformers' device_map does; empty: the first GPU only",
        )  # fmt: skip
        args.add_argument(
            "--local", type=named(parse_local), default="recycle+suffix",
            help="what drafts beside the target: recycle (the target's own top tokens after the same words), suffix "
            "(what followed them in this text), recycle+suffix, or none",
        )  # fmt: skip
        args.add_argument(
            "--switch-off", choices=["auto", "never"], default="auto",
            help="auto: starve a far drafter while it does not pay, and try it again later",
        )  # fmt: skip
        args.add_argument(
            "--scores", choices=["calibrated", "given"], default="calibrated",
            help="calibrated: rate candidates by how often their kind was right; given: take the drafter at its word",
        )  # fmt: skip
        args.add_argument(
            "--row-costs", choices=["measured", "free"], default="measured",
            help="measured: score as many candidates as pay by what a pass costs; free: fill every pass",
        )  # fmt: skip
        args.add_argument(
            "--replay", type=Path, metavar="FILE",
            help="for benchmarks: commit the answers recorded in FILE instead of running the model",
        )  # fmt: skip
        args.add_argument(
            "--pace", type=named(Pace.parse), default="34+0.1/16", metavar="MS[+ROW_MS[/FREE_ROWS]]",
            help="duration of a pass with --replay",
        )  # fmt: skip
        given = args.parse_args(argv)
        return cls(
            max_rows=given.max_rows, max_waiting=given.max_waiting, patience_s=given.patience_ms / 1e3,
            device_map=given.device_map, local=given.local, gated=given.switch_off == "auto",
            calibrate=given.scores == "calibrated",
            priced=given.row_costs == "measured", replay=given.replay, pace=given.pace, **node_values(args, given),
        )  # fmt: skip
