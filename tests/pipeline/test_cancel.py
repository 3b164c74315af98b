"""An answer that nobody wants any more: both nodes stop, their caches are free, and who comes next is served (C053)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.scripted_logits import agreeing, hash_logits, reference
from scripts.simulation import Simulation, Times
from wire.messages import Acceptance, Cancel, Done, Message, OpenSession, Release, SessionMessage
from wire.sampling import Sampling

VOCAB_SIZE = 32
NEXT_PROMPT = (4, 5)
TARGET = hash_logits(VOCAB_SIZE, 3)
TIMES = Times(rtt_s=0.086, verify_s=0.034, prefill_token_s=0.001, draft_prefill_token_s=0.0005)
LEG_S = TIMES.rtt_s / 4
Simulate = Callable[..., Simulation]


class Log:
    """What went over which leg when, through the simulation's hook for faults."""

    def __init__(self) -> None:
        self.simulation: Simulation | None = None
        self.seen: list[tuple[str, Message, float]] = []

    def __call__(self, leg: str, message: Message) -> tuple[float, ...]:
        assert self.simulation is not None
        self.seen.append((leg, message, self.simulation.now))
        return (0.0,)

    def of(self, leg: str, kind: type[SessionMessage]) -> list[float]:
        """When a message of this kind about the cancelled session went over a leg."""
        return [
            at for where, message, at in self.seen
            if where == leg and isinstance(message, kind) and message.session == "s"
        ]  # fmt: skip


def cancelled(
    simulate: Simulate, *cancel_at: float, prompt: tuple[int, ...] = (1, 2, 3), after_s: float = 0.5
) -> tuple[Simulation, Log]:
    """An answer of 2000 tokens that is cancelled at these times, and another request `after_s` after the last."""
    log = Log()

    def prepare(simulation: Simulation) -> None:
        log.simulation = simulation
        for at_s in cancel_at:
            simulation.cancel("s", at_s=at_s)
        simulation.open(
            OpenSession(session="next", prompt_ids=NEXT_PROMPT, max_tokens=30), at_s=cancel_at[-1] + after_s
        )

    drafter = agreeing(TARGET, 0.8)
    return simulate(TARGET, drafter, prompt=prompt, max_tokens=2000, times=TIMES, fault=log, prepare=prepare), log


def check_is_over(simulation: Simulation, log: Log, cancel_at: float) -> None:
    """Everything that C053 asks for."""
    answer = simulation.answers["s"]
    assert answer.finish_reason == "cancelled"
    assert answer.done is not None
    assert answer.done.completion_tokens == len(answer.tokens) < 2000
    work = [busy for busy in simulation.busy if busy.session == "s"]
    # The verify node begins nothing once it has heard of it, the draft node one more way across later.
    heard_at = cancel_at + LEG_S
    told_at = heard_at + 2 * LEG_S
    assert not [busy for busy in work if busy.kind != "draft" and busy.start_s > heard_at]
    assert not [busy for busy in work if busy.kind == "draft" and busy.start_s > told_at]
    assert not simulation.router.sessions
    assert not simulation.verify.sessions
    assert not simulation.draft.sessions
    assert (simulation.target._slots.num_open, simulation.drafter._slots.num_open) == (0, 0)  # type: ignore
    # One end, however often it is asked for: the client and the draft node hear of it once.
    assert len(log.of("verify>relay", Done)) == len(log.of("relay>client", Done)) == 1
    assert len(log.of("relay>draft", Release)) == 1
    assert tuple(simulation.answers["next"].tokens) == reference(TARGET, Sampling(), NEXT_PROMPT, 30)


# Two rounds and more, in steps that no duration is a multiple of: while frames, a pass, an acceptance are under way.
@pytest.mark.parametrize("at_ms", [400 + 7 * step for step in range(30)])
def test_c053_cancelled_at_any_moment_of_a_round_both_nodes_are_free(simulate: Simulate, at_ms: int) -> None:
    simulation, log = cancelled(simulate, at_ms / 1e3)
    check_is_over(simulation, log, at_ms / 1e3)
    assert len(log.of("relay>verify", Cancel)) == 1


@pytest.mark.parametrize("leg", ["verify>relay", "relay>draft"])
def test_c053_cancelled_while_a_verdict_is_in_flight(simulate: Simulate, leg: str) -> None:
    undisturbed, log = cancelled(simulate, 2.0)
    sent_at = next(at for at in log.of(leg, Acceptance) if at > 0.5)
    assert undisturbed.answers["s"].finish_reason == "cancelled"
    simulation, log = cancelled(simulate, sent_at + LEG_S / 2)
    assert sent_at in log.of(leg, Acceptance), "the same run up to there"
    check_is_over(simulation, log, sent_at + LEG_S / 2)


@pytest.mark.parametrize("gap_s", [0.0, 0.01, LEG_S, 2 * LEG_S, 0.2], ids=str)
def test_c053_cancelled_twice_ends_once(simulate: Simulate, gap_s: float) -> None:
    check_is_over(*cancelled(simulate, 0.5, 0.5 + gap_s), 0.5)


@pytest.mark.parametrize("at_ms", [1, 30, 100, 250, 500])
def test_c053_cancelled_during_prefill_no_pass_is_begun(simulate: Simulate, at_ms: int) -> None:
    simulation, log = cancelled(simulate, at_ms / 1e3, prompt=tuple(range(1, 31)) * 30)
    kinds = {busy.kind for busy in simulation.busy if busy.session == "s"}
    assert "prefill" in kinds
    assert "verify" not in kinds
    check_is_over(simulation, log, at_ms / 1e3)
    assert simulation.answers["s"].tokens == []
