"""Who is served next: nobody starves, budgets are kept, prompts hold nobody up for long."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from speculation.batching import Rota, Turns, fill_pass
from speculation.costs import PassCosts
from speculation.selection import Pick, share_rows


@st.composite
def offers(draw: st.DrawFn, *, most: int = 12) -> list[list[Pick]]:
    """What some sessions could have scored: chains with falling path probabilities."""
    found = []
    for _ in range(draw(st.integers(1, most))):
        steps = draw(st.lists(st.floats(0.0, 3.0), max_size=10))
        logprob = 0.0
        picks = []
        for depth, step in enumerate(steps, 1):
            logprob -= step
            picks.append(Pick(depth, depth - 2, "draft", depth, logprob))
        found.append(picks)
    return found


def streams(of: list[list[Pick]]) -> list[Iterator[Pick]]:
    return [iter(picks) for picks in of]


COSTS = st.one_of(st.none(), st.floats(0.0, 0.3).map(lambda row: PassCosts({1: 1.0, 64: 1.0 + 63 * row})))


@given(offers(), st.integers(0, 40), COSTS)
def test_each_session_gets_a_first_part_of_what_it_offers_within_the_budget(
    of: list[list[Pick]], spare: int, costs: PassCosts | None
) -> None:
    max_rows = len(of) + spare
    shares = share_rows(streams(of), max_rows=max_rows, costs=costs)
    assert [picks[: len(share)] for picks, share in zip(of, shares, strict=True)] == shares
    num = sum(map(len, shares))
    assert num <= spare
    if costs is None:
        assert num == min(spare, sum(map(len, of)))


@given(offers(), st.integers(0, 40), COSTS)
def test_rows_go_to_the_best_candidates_of_all_sessions_and_to_as_many_as_pay(
    of: list[list[Pick]], spare: int, costs: PassCosts | None
) -> None:
    shares = share_rows(streams(of), max_rows=len(of) + spare, costs=costs)
    taken = sorted((pick.logprob for share in shares for pick in share), reverse=True)
    ranked = sorted((pick.logprob for picks in of for pick in picks), reverse=True)
    assert taken == ranked[: len(taken)]
    if costs is not None:
        expected, rates = float(len(of)), [len(of) / costs.seconds(len(of))]
        for n, logprob in enumerate(ranked[:spare], 1):
            expected += math.exp(logprob)
            rates.append(expected / costs.seconds(len(of) + n))
        assert math.isclose(rates[len(taken)], max(rates))


@given(offers(most=10), st.integers(1, 14), COSTS, st.booleans(), st.data())
def test_nobody_starves_whatever_the_others_offer_and_however_they_come_and_go(
    of: list[list[Pick]], max_rows: int, costs: PassCosts | None, whole: bool, data: st.DataObject
) -> None:
    """The sessions are ready or not as the test likes; one that stays ready is served within the stated passes."""
    turns = Turns(prefill_chunk=8)
    names = [str(number) for number in range(len(of))]
    offered = dict(zip(names, of, strict=True))
    for name in names:
        turns.running.join(name)
    bound = len(names) if whole else -(-len(names) // max_rows)
    waited = dict.fromkeys(names, 0)
    for _ in range(30):
        away = data.draw(st.sets(st.sampled_from(names)))
        ready = [name for name in turns.running if name not in away]
        shares = fill_pass(
            streams([offered[name] for name in ready]), max_rows=max_rows, costs=costs, whole=whole
        )  # fmt: skip
        served = ready[: len(shares)]
        assert sum(1 + len(share) for share in shares) <= max_rows
        assert served or not ready
        for name, share in zip(served, shares, strict=True):
            assert share == offered[name][: len(share)]
        turns.on_pass(served)
        for name in names:
            waited[name] = waited[name] + 1 if name in ready and name not in served else 0
            assert waited[name] < bound


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 128))
def test_a_piece_of_prefill_has_its_bound_and_all_prompts_get_through_side_by_side(
    lengths: list[int], chunk: int
) -> None:
    turns = Turns(prefill_chunk=chunk)
    left = {str(number): length for number, length in enumerate(lengths)}
    for name in left:
        turns.reading.join(name)
    waited = dict.fromkeys(left, 0)
    num_pieces = 0
    while left:
        pieces = turns.prefill(left)
        assert 0 < sum(num for _, num in pieces) <= chunk
        turns.on_prefill(name for name, _ in pieces)
        num_pieces += 1
        for name in list(left):
            num = dict(pieces).get(name, 0)
            waited[name] = 0 if num else waited[name] + 1
            assert waited[name] < len(lengths)
            left[name] -= num
            if left[name] == 0:
                del left[name]
                turns.leave(name)
    # No piece is given out half empty while there is something left to read.
    assert num_pieces == -(-sum(lengths) // chunk)


def test_passes_and_prefill_alternate_while_there_is_both() -> None:
    turns = Turns(prefill_chunk=8)
    assert turns.pass_is_next
    turns.reading.join("long")
    assert not turns.pass_is_next
    turns.on_prefill(["long"])
    assert turns.pass_is_next
    turns.running.join("a")
    turns.on_pass(["a"])
    assert not turns.pass_is_next
    turns.leave("long")
    assert turns.pass_is_next


def test_who_comes_goes_to_the_end_and_who_goes_leaves_no_gap() -> None:
    rota = Rota()
    for name in "abcd":
        rota.join(name)
    rota.join("a")
    assert "".join(rota) == "abcd"
    rota.served("ac")
    assert "".join(rota) == "bdac"
    rota.leave("d")
    rota.leave("d")
    assert "".join(rota) == "bac"
    assert len(rota) == 3
