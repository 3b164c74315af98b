"""The drafter beside the verifier: what it proposes, that it learns, and that it stays bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.local import (
    MAX_SUFFIX,
    NUM_TOPS,
    PAIR_KEY,
    SINGLE_KEY,
    SUFFIX_KEY,
    SUFFIX_WINDOW,
    LocalDrafter,
    Recycled,
    parse_local,
    prior_rate,
)

texts = st.lists(st.integers(0, 5), min_size=1, max_size=60)


def tokens_of(proposals: list[tuple[int, int]]) -> list[int]:
    return [token for token, _ in proposals]


def test_what_followed_the_same_words_is_proposed_and_the_match_is_followed() -> None:
    local = LocalDrafter([1, 2, 3, 4, 9, 1, 2], recycled=None, suffix=True)
    place = local.root
    assert local.proposals(place) == [(3, SUFFIX_KEY + 2)]
    place = local.follow(place, 3)
    assert local.proposals(place) == [(4, SUFFIX_KEY + 3)]
    assert local.proposals(local.follow(place, 8)) == []


def test_the_longest_match_wins() -> None:
    local = LocalDrafter([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], recycled=None, suffix=True)
    assert local.proposals(local.root) == [(7, SUFFIX_KEY + 3)]


def test_the_targets_own_tops_are_proposed_where_the_same_tokens_come_again() -> None:
    recycled = Recycled()
    local = LocalDrafter([5, 6], recycled=recycled, suffix=False)
    local.commit([7], [(7, 8, 9)])
    local.commit([5, 6], [(5, 1), (6, 2)])
    assert local.proposals(local.root) == [(7, PAIR_KEY), (8, PAIR_KEY + 1), (9, PAIR_KEY + 2)]
    other = LocalDrafter([4, 6], recycled=recycled, suffix=False)
    assert other.proposals(other.root) == [(7, SINGLE_KEY), (8, SINGLE_KEY + 1), (9, SINGLE_KEY + 2)]


@given(texts, st.lists(st.integers(0, 5), max_size=8))
def test_a_place_reached_by_following_proposes_no_token_twice_and_only_known_ones(
    text: list[int], path: list[int]
) -> None:
    local = LocalDrafter(text, recycled=Recycled(), suffix=True)
    local.commit(text, [(t, (t + 1) % 6) for t in text])
    place = local.root
    for token in path:
        place = local.follow(place, token)
        proposed = tokens_of(local.proposals(place))
        assert len(set(proposed)) == len(proposed)
        assert place.matched <= MAX_SUFFIX
        assert all(0.0 < prior_rate(key) < 1.0 for _, key in local.proposals(place))


@given(texts)
def test_a_match_is_one(text: list[int]) -> None:
    local = LocalDrafter(text, recycled=None, suffix=True)
    root = local.root
    if root.cursor >= 0:
        assert text[root.cursor - root.matched : root.cursor] == text[len(text) - root.matched :]
        assert root.cursor < len(text)


def test_every_proposal_for_a_committed_position_is_judged_scored_or_not() -> None:
    local = LocalDrafter([1, 2, 3, 1, 2], recycled=None, suffix=True)
    before = local.rates.probability(SUFFIX_KEY + 2)
    local.commit([9])
    assert local.rates.probability(SUFFIX_KEY + 2) < before


def test_the_adjacency_is_bounded_and_forgets_the_oldest() -> None:
    recycled = Recycled(max_entries=100)
    for i in range(1000):
        recycled.put(i, i + 1, (i,))
    assert len(recycled) == 100
    assert recycled.get(999, 1000) == (999,)
    assert recycled.get(3, 4) == ()


def test_tables_stay_bounded_over_ten_thousand_tokens() -> None:
    rng = random.Random(1)
    recycled = Recycled(max_entries=500)
    local = LocalDrafter([0], recycled=recycled, suffix=True)
    for _ in range(10_000):
        token = rng.randrange(5000)
        local.commit([token], [(token, token + 1)])
    assert len(recycled) <= 500
    assert len(local.proposals(local.root)) <= 2 * NUM_TOPS + 1


def test_a_long_prompt_is_indexed_by_its_end_alone() -> None:
    prompt = [1, 2, 3, *([0] * SUFFIX_WINDOW), 1, 2]
    local = LocalDrafter(prompt, recycled=None, suffix=True)
    assert local.proposals(local.root) == []


def test_the_local_drafter_is_read_from_its_name() -> None:
    assert parse_local("none") == (False, False)
    assert parse_local("recycle") == (True, False)
    assert parse_local("recycle+suffix") == parse_local("suffix+recycle") == (True, True)
    for text in ("", "all", "recycle+recycle", "none+suffix"):
        with pytest.raises(ValueError, match="local must be none, recycle"):
            parse_local(text)
