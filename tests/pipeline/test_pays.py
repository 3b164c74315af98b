"""Speculation that pays goes on, speculation that does not is switched off, and neither floods the wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.scripted_logits import LogitsFn, Prefix, agreeing, as_row, hash_logits, hopeless, reference
from scripts.simulation import Simulation, Times
from speculation.gate import GateState
from wire.codec import encode
from wire.messages import Acceptance, Candidates, Message
from wire.sampling import Sampling

VOCAB_SIZE = 32
PROMPT = (1, 2, 3)
Simulate = Callable[..., Simulation]
# On a machine where every row costs, wrong candidates are dear.
DEAR_ROWS = {rows: 0.030 + 0.004 * (rows - 1) for rows in (1, 2, 4, 8, 16)}
TIMES = Times(rtt_s=0.080, verify_s=0.030, verify_row_s=0.004, draft_s=0.005)


def turning_good(target: LogitsFn, position: int) -> LogitsFn:
    """Hopeless before a position, right in nine cases of ten from there on."""
    bad, good = hopeless(target), agreeing(target, 0.9, 3)

    def logits(prefix: Prefix) -> object:
        return as_row((bad if len(prefix) < position else good)(prefix))

    return logits  # type: ignore[return-value]


@pytest.mark.parametrize("growth", ["tree:4x4", "chain:2+14"])
@pytest.mark.parametrize("local", [(False, False), (True, True)])
def test_c069_a_hopeless_drafter_costs_at_most_three_percent(
    simulate: Simulate, growth: str, local: tuple[bool, bool]
) -> None:
    target = hash_logits(VOCAB_SIZE, 1)
    while_off: list[int] = []

    def count(simulation: Simulation) -> None:
        simulation.at(14.5, lambda: while_off.append(simulation.num_frames["draft>relay"]))

    simulation = simulate(
        target, hopeless(target), max_tokens=600, times=TIMES, growth=growth, costs=DEAR_ROWS, local=local,
        prepare=count,
    )  # fmt: skip
    answer = simulation.answers["s"]
    alone_s = 600 * TIMES.verify_s
    assert answer.token_times[-1] - answer.opened_at <= 1.03 * alone_s + TIMES.rtt_s
    assert tuple(answer.tokens) == reference(target, Sampling(), PROMPT, 600)
    (gate,) = simulation.verify.gates.values()
    assert gate.num_closed >= 1
    # Off for the third time from about 13 s on: not a frame more crosses the wire.
    assert gate.num_closed == 3
    assert while_off == [simulation.num_frames["draft>relay"]]


def test_c069_it_recovers_when_acceptance_returns(simulate: Simulate) -> None:
    target = hash_logits(VOCAB_SIZE, 1, 60.0)
    drafter = turning_good(target, len(PROMPT) + 100)
    simulation = simulate(target, drafter, max_tokens=800, times=TIMES, growth="tree:4x2", costs=DEAR_ROWS)
    answer = simulation.answers["s"]
    assert tuple(answer.tokens) == reference(target, Sampling(), PROMPT, 800)
    assert "draft" not in answer.sources[:100]
    assert answer.sources[-200:].count("draft") > 60
    (gate,) = simulation.verify.gates.values()
    assert gate.state is GateState.ON


def test_candidates_of_an_unsure_drafter_take_no_rows_that_do_not_pay(simulate: Simulate) -> None:
    """Acceptance 0.15 by a drafter that says 0.9: rated by what happens, most passes go without it."""
    target = hash_logits(VOCAB_SIZE, 1, 60.0)
    drafter = agreeing(target, 0.15, 2)
    simulation = simulate(target, drafter, max_tokens=400, times=TIMES, growth="chain:2+14", costs=DEAR_ROWS)
    done = simulation.answers["s"].done
    assert done is not None
    assert simulation.answers["s"].tokens_per_s >= 0.97 / TIMES.verify_s


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)], ids=["greedy", "T"])
def test_c073_a_round_is_ids_not_rows_of_probabilities(simulate: Simulate, sampling: Sampling) -> None:
    """Vocabulary 152,064: a synchronous round of four stays below a kilobyte, whatever the sampling."""
    sizes: dict[str, list[int]] = {"draft>relay": [], "verify>relay": []}

    def fault(leg: str, message: Message) -> tuple[float, ...]:
        if leg in sizes and isinstance(message, Candidates | Acceptance):
            sizes[leg].append(len(encode(message)))
        return (0.0,)

    def target(prefix: Prefix) -> object:
        return as_row(narrow(prefix)).repeat(152_064 // 32)

    narrow = hash_logits(32, 1)
    simulation = simulate(
        target, target, max_tokens=24, growth="chain:4", patience_s=5.0, sampling=sampling, vocab_size=152_064,
        fault=fault,
    )  # fmt: skip
    assert len(simulation.answers["s"].tokens) == 24
    assert max(sizes["draft>relay"]) + max(sizes["verify>relay"]) < 1024


def test_c072_a_round_costs_one_round_trip_and_what_is_computed(simulate: Simulate) -> None:
    """Acceptance 0.7 a place, chains of four: 2.77 tokens a round trip + draft + verify, within 15 %."""
    target = hash_logits(VOCAB_SIZE, 1)
    times = Times(rtt_s=0.080, verify_s=0.030, draft_s=0.005)
    simulation = simulate(
        target, agreeing(target, 0.7, 5), growth="chain:4", patience_s=5.0, max_tokens=1500, times=times
    )
    answer = simulation.answers["s"]
    expected = 2.77 / (times.rtt_s + 4 * times.draft_s + times.verify_s)
    assert answer.tokens_per_s == pytest.approx(expected, rel=0.15)
