"""One session of scripted models under the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import LogitsFn
from scripts.simulation import Fault, Simulation, Times, no_fault
from speculation.costs import PassCosts
from speculation.growth import GrowthPolicy, parse_growth
from speculation.selection import BestFirst
from wire.messages import OpenSession
from wire.sampling import Sampling

VOCAB_SIZE = 32


@pytest.fixture
def simulate() -> Callable[..., Simulation]:
    """Run one request to its end and return the simulation; the answer is `answers["s"]`."""

    def run(
        target: LogitsFn,
        drafter: LogitsFn,
        *,
        prompt: Sequence[int] = (1, 2, 3),
        max_tokens: int = 40,
        sampling: Sampling | None = None,
        growth: str | GrowthPolicy = "chain:2+14",
        patience_s: float = 0.0,
        stop_ids: tuple[int, ...] = (),
        context: int = 4096,
        max_rows: int = 16,
        vocab_size: int = VOCAB_SIZE,
        rtt_s: float = 0.086,
        fault: Fault = no_fault,
        times: Times | None = None,
        local: tuple[bool, bool] = (False, False),
        costs: dict[int, float] | None = None,
        prepare: Callable[[Simulation], None] = lambda simulation: None,
        **request: Any,
    ) -> Simulation:
        simulation = Simulation(
            target=ScriptedTarget(target, num_slots=2, max_length=context, max_rows=max_rows, vocab_size=vocab_size),
            drafter=ScriptedDrafter(drafter, num_slots=2, max_length=context, max_rows=64, vocab_size=vocab_size),
            times=times or Times(rtt_s=rtt_s),
            growth=parse_growth(growth) if isinstance(growth, str) else growth,
            selection=BestFirst(max_rows),
            vocab_size=vocab_size,
            stop_ids=stop_ids,
            patience_s=patience_s,
            local=local,
            costs=PassCosts(costs) if costs else None,
            fault=fault,
        )
        prepare(simulation)
        simulation.open(
            OpenSession(
                session="s", prompt_ids=tuple(prompt), max_tokens=max_tokens, sampling=sampling or Sampling(), **request
            )
        )
        simulation.run()
        return simulation

    return run
