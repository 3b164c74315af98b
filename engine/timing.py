"""What a pass of a target costs by its number of rows, measured at the start."""

from __future__ import annotations

import statistics
import time

from engine.runner import TargetRunner
from speculation.passes import Sampling, VerifyPass, VerifyResult

CONTEXT_TOKENS = 64
REPEATS = 5


def measure_pass_costs(target: TargetRunner) -> dict[int, float]:
    """Rows to seconds (median of a few passes), for powers of two up to the most rows of a pass.

    Also the warm-up: whatever a first pass of each size has to set up is set up when this returns. Slot 0 is used and
    freed.
    """
    buckets = sorted({min(1 << i, target.max_rows) for i in range(target.max_rows.bit_length() + 1)})
    room = target.max_length - 2
    tokens = [0] * max(1, min(CONTEXT_TOKENS, room - REPEATS * len(buckets) * 2))
    target.open(0, sampling=Sampling(), tokens=tokens, num_prompt=len(tokens), stop_ids=())
    costs: dict[int, float] = {}
    try:
        target.prefill(0, 0, len(tokens) - 1)
        for rows in buckets:
            seconds = []
            for _ in range(REPEATS):
                if len(tokens) + 1 >= room:
                    break
                request = VerifyPass(
                    slot=0,
                    start=len(tokens),
                    tokens=(tokens[-1], *([0] * (rows - 1))),
                    # All beside one another: how deep a tree is makes no difference to its pass.
                    parents=(-1, *([0] * (rows - 1))),
                    max_tokens=1,
                )
                started = time.perf_counter()
                (result,) = target.verify([request])
                seconds.append(time.perf_counter() - started)
                if not isinstance(result, VerifyResult):
                    raise result
                tokens += result.tokens
            if seconds:
                costs[rows] = statistics.median(seconds)
    finally:
        target.close(0)
    return costs or {1: 1.0}
