"""Tokens per second to expect of a placement, before anything is paid for.

Where torch is installed, `scripts/simulate.py` is asked: the schedulers of the nodes under a virtual clock. It is run
as a process of its own because this package imports nothing of ours. Elsewhere the closed form of the synchronous
chain stands in (docs/design.md, "What the numbers say"): tokens per round (1 - a^(k+1)) / (1 - a) over round trip + k
drafts + one pass, the better of it and decoding with the target alone, for the verify node decodes on while
candidates are late.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from infra.errors import InfraError
from infra.spec import Prediction

SIMULATOR = Path(__file__).parents[1] / "scripts" / "simulate.py"
SIMULATOR_S = 120.0
MAX_CHAIN = 64


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens per second of one session, and what said so."""

    tokens_per_s: float
    target_only_tokens_per_s: float
    method: str

    def usd_per_million_tokens(self, usd_per_hour: float) -> float:
        return usd_per_hour / (self.tokens_per_s * 3600) * 1e6


def closed_form(prediction: Prediction, path_ms: float) -> Forecast:
    """The best synchronous chain, or the target alone where that is faster."""
    target_only = 1e3 / prediction.verify_ms
    best, best_k = target_only, 0
    for k in range(1, MAX_CHAIN + 1):
        a = prediction.acceptance
        tokens = k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)
        rate = 1e3 * tokens / (path_ms + k * prediction.draft_ms + prediction.verify_ms)
        if rate > best:
            best, best_k = rate, k
    return Forecast(best, target_only, f"closed form, synchronous chain, k = {best_k}")


def forecast(prediction: Prediction, path_ms: float, *, simulator: Path = SIMULATOR) -> Forecast:
    """Ask the simulator, else the closed form.

    Raises:
        InfraError: the simulator is there and fails, for example over an unknown growth policy.
    """
    # The simulator comes with the package, torch does not: who provisions need not have it.
    if not simulator.exists() or importlib.util.find_spec("torch") is None:
        return closed_form(prediction, path_ms)
    arguments = {
        "--rtt-ms": path_ms,
        "--verify-ms": prediction.verify_ms,
        "--draft-ms": prediction.draft_ms,
        "--acceptance": prediction.acceptance,
        "--growth": prediction.growth,
    }
    command = [sys.executable, str(simulator), *(str(part) for pair in arguments.items() for part in pair)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=simulator.parents[1], check=False, timeout=SIMULATOR_S
        )
    except subprocess.TimeoutExpired:
        return closed_form(prediction, path_ms)
    if done.returncode:
        raise InfraError(
            f"the simulator failed: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}"
        )
    figures = json.loads(done.stdout.splitlines()[-1])
    return Forecast(figures["tokens_per_s"], figures["target_only_tokens_per_s"], "scripts/simulate.py")
