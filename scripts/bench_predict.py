"""What the simulator says of the reference setting of `scripts/bench.py`, before it and after it.

The simulator is told what the same run measured of its own costs: the loopback, the Python around a step of the drafter
and around a pass. Outcomes (what was accepted, how many rows) are its own.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.replay import Recording, emulated
from scripts.bench_report import ALONE, Run
from scripts.simulate import Policies, simulate_recordings
from scripts.simulation import Times

REFERENCE_TIMES = Times(rtt_s=0.0, verify_s=0.034, verify_row_s=0.0001, free_rows=16, draft_s=0.003, draft_row_s=2e-5)
CHAIN_SIZES = (2, 3, 4, 5, 6, 8, 10, 12)
BACK_TO_BACK_S = 0.005


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """Seconds that the machine and Foredraft add to the modelled ones.

    Attributes:
        loopback_s: draft node to verify node and back with links that delay nothing.
        draft_step_s: from the end of a step's model time to the start of the next step.
    """

    loopback_s: float = 0.0
    draft_step_s: float = 0.0


def own_times(trace: Path) -> OwnTimes:
    """From the draft node's trace of a run that began without a delay on the links."""
    hops: list[float] = []
    steps: list[tuple[float, float, float]] = []
    for line in trace.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "round":
            hops.append(event["draft_hop_rtt_s"] + event["verify_hop_rtt_s"])
        elif event["event"] == "draft":
            steps.append((event["began"], event["now"], event["compute_s"]))
    between = [
        later[0] - earlier[0] - earlier[2]
        for earlier, later in itertools.pairwise(steps)
        if later[0] - earlier[1] < BACK_TO_BACK_S
    ]
    if not hops or not between:
        return OwnTimes()
    return OwnTimes(statistics.quantiles(hops, n=20)[0], statistics.fmean(between))


def best_chains(recordings: Sequence[Recording]) -> tuple[int, int]:
    """The best size of a synchronous chain side by side and at 86 ms, in the reference setting, by simulation."""
    best = []
    for rtt_s in (0.0, 0.086):
        rates: dict[int, float] = defaultdict(float)
        for size in CHAIN_SIZES:
            policies = Policies(growth=f"chain:{size}", local="none", patience_s=5.0, gated=False)
            times = replace(REFERENCE_TIMES, rtt_s=rtt_s)
            rates[size] = simulate_recordings(recordings, emulated, times, policies)["tokens_per_s"]
        best.append(max(rates, key=lambda size: rates[size]))
    return best[0], best[1]


def pass_overhead_s(runs: Sequence[Run]) -> float:
    """What a pass takes beyond its model time, all answers together."""
    beyond_s = sum(run.report["answer_s"] - run.report["verify_compute_s"] for run in runs)
    return beyond_s / sum(run.report["passes"] for run in runs)


def predictions(
    runs: Sequence[Run], own: OwnTimes, recordings: Sequence[Recording], *, growth: str, max_tokens: int
) -> dict[str, float]:
    """Tokens/s of the reference setting's far configurations, by "CONFIGURATION, RTT ms"."""
    reference = [run for run in runs if run.setting == "reference"]
    alone_s = pass_overhead_s([run for run in reference if run.configuration == ALONE])
    predicted = {}
    for rtt_ms in sorted({run.rtt_ms for run in reference}):
        for name, local in (("WAN streamed tree", "none"), ("default", "recycle+suffix")):
            same = [run for run in reference if run.configuration == name and run.rtt_ms == rtt_ms]
            times = replace(
                REFERENCE_TIMES,
                rtt_s=rtt_ms / 1e3 + own.loopback_s,
                draft_overhead_s=own.draft_step_s,
                verify_overhead_s=pass_overhead_s(same) if same else alone_s,
            )
            policies = Policies(growth=growth, local=local)
            figures = simulate_recordings(recordings, emulated, times, policies, max_tokens=max_tokens)
            predicted[f"{name}, {rtt_ms:g} ms"] = figures["tokens_per_s"]
    return predicted
