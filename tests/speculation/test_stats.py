"""Each figure of a session means what its definition says."""

from __future__ import annotations

import pytest

from speculation.stats import MAX_PLACES, SessionStats
from wire.messages import SOURCES, Done

# Proposed depth, candidates accepted, whether the answer ended on the last of them. K changes 4, 2, 4; one round is cut
# by EOS at offset 1, its second token, though four candidates were proposed.
ROUNDS = [
    (4, 4, False),
    (4, 0, False),
    (4, 2, False),
    (2, 2, False),
    (2, 1, False),
    (2, 0, False),
    (4, 3, False),
    (4, 1, False),
    (4, 4, False),
    (4, 2, True),
]


def counted(rounds: list[tuple[int, int, bool]]) -> SessionStats:
    stats = SessionStats()
    for depth, num_accepted, cut in rounds:
        sources = ["draft"] * num_accepted + ([] if cut else ["plain"])
        stats.on_pass(proposed_depth=depth, num_accepted=num_accepted, num_rows=depth + 1, cut=cut, sources=sources)
    return stats


def test_c076_totals_match_the_script() -> None:
    stats = counted(ROUNDS)
    assert stats.num_rounds == stats.num_passes == 10
    assert stats.num_accepted == 19
    assert stats.num_drafted == 6 * 4 + 3 * 2 + 2
    assert stats.mean_acceptance_length == 1 + 19 / 10
    assert stats.acceptance_rate == 19 / 32
    assert stats.num_rows == 7 * 5 + 3 * 3
    assert stats.tokens_by_source == {"draft": 19, "plain": 9}


def test_c076_the_rate_at_a_place_is_over_the_rounds_that_proposed_it() -> None:
    stats = counted(ROUNDS)
    rates = [stats.rate_at(place) for place in range(1, 6)]
    # Place 1 fails in two of ten rounds; places 3 and 4 were proposed by six, the round that EOS cut not among them.
    assert rates == [8 / 10, 6 / 10, 3 / 6, 2 / 6, None]


def test_c076_sessions_add_up_to_the_same_figures() -> None:
    total = SessionStats()
    for part in (ROUNDS[:3], ROUNDS[3:6], ROUNDS[6:]):
        total.merge(counted(part))
    assert total == counted(ROUNDS)


def test_merge_adds_every_count() -> None:
    one = SessionStats(num_received=1, num_stale=2, num_duplicate=3, num_orphaned=4, num_malformed=5)
    one.on_pass(proposed_depth=2, num_accepted=1, num_rows=3, cut=False, sources=("local", "plain"))
    total = SessionStats()
    total.merge(one)
    assert total == one
    total.merge(one)
    # Rates stay; everything that is counted doubles.
    rates = {"acceptance_rate", "mean_acceptance_length", "acceptance_at_1", "acceptance_at_2"}
    assert total.report() == {name: value if name in rates else 2 * value for name, value in one.report().items()}
    assert total.proposed is not one.proposed


def test_plain_passes_are_counted_apart_and_change_no_rate() -> None:
    stats = counted(ROUNDS)
    before = stats.report()
    for _ in range(5):
        stats.on_pass(proposed_depth=0, num_accepted=0, num_rows=1, cut=False, sources=("plain",))
    after = stats.report()
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"passes", "plain_passes", "rows", "tokens_plain"}
    assert (after["passes"], after["plain_passes"], after["rounds"]) == (15, 5, 10)


def test_a_session_without_rounds_has_a_report() -> None:
    report = SessionStats().report()
    assert report["acceptance_rate"] == 0
    assert report["mean_acceptance_length"] == 1
    assert not [name for name in report if name.startswith("acceptance_at")]


def test_the_report_is_flat_names_all_sources_and_fits_the_final_message() -> None:
    stats = counted(ROUNDS)
    stats.on_pass(proposed_depth=40, num_accepted=40, num_rows=41, cut=False, sources=("local",) * 40)
    report = stats.report()
    assert Done(session="s", finish_reason="stop", prompt_tokens=1, completion_tokens=1, report=report)
    assert all(type(value) in (int, float) for value in report.values())
    assert {f"tokens_{source}" for source in SOURCES} <= set(report)
    assert report["tokens_local"] == 40
    assert [name for name in report if name.startswith("acceptance_at_")] == [
        f"acceptance_at_{place}" for place in range(1, MAX_PLACES + 1)
    ]


@pytest.mark.parametrize(("depth", "num_accepted"), [(0, 1), (2, 3), (2, -1)])
def test_more_accepted_than_proposed_is_an_error_and_counts_nothing(depth: int, num_accepted: int) -> None:
    stats = SessionStats()
    with pytest.raises(ValueError, match=f"0..{depth}, got {num_accepted}"):
        stats.on_pass(proposed_depth=depth, num_accepted=num_accepted, num_rows=3, cut=False)
    assert stats == SessionStats()
