"""The sampler: what each parameter does, that drafted tokens count, and that shortcuts change nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import NumericalError
from engine.noise import gumbel
from engine.sampler import HEAD, TOP_P_HEAD, Sampler
from speculation.passes import Sampling
from speculation.walk import walk

torch.set_num_threads(1)
NUM_DRAWS = 20_000
P = [0.5, 0.3, 0.2]
INF = float("inf")


def logs(probabilities: Sequence[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def sampler(
    prompt: Sequence[int] = (0,), answer: Sequence[int] = (), vocab_size: int | None = None, **fields: object
) -> Sampler:
    stop_ids = fields.pop("stop_ids", ())
    made = Sampler(Sampling(**fields), num_prompt=len(prompt), stop_ids=stop_ids, vocab_size=vocab_size)
    made.commit(prompt)
    made.commit(answer)
    return made


def decode(
    target: Sampler, rows: Callable[[int], torch.Tensor], draft: Callable[[int], list[int]], num: int
) -> list[int]:
    """Decode with chains from `draft(position)`; `rows(position)` is the target's row."""
    start = target.num_committed
    tokens: list[int] = []
    while len(tokens) < num:
        position = start + len(tokens)
        chain = draft(position)
        result = walk(
            [-1, *range(len(chain))],
            [0, *chain],
            lambda row, path: target.choose(rows(position + len(path)), position + len(path), path),  # noqa: B023
            max_tokens=num - len(tokens),
        )
        tokens += result.tokens
        target.commit(result.tokens)
    return tokens


def frequencies(tokens: Sequence[int], width: int) -> list[float]:
    counts = Counter(tokens)
    assert set(counts) <= set(range(width))
    return [counts[i] / len(tokens) for i in range(width)]


def softmax(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


# Expected distributions, worked out by hand from P = .5 .3 .2 where no formula is given.
COMBINATIONS: dict[str, tuple[dict[str, object], list[float]]] = {
    "temperature 1": ({"temperature": 1.0}, P),
    "temperature 2": ({"temperature": 2.0}, softmax([math.log(p) / 2 for p in P])),
    "temperature 0.5": ({"temperature": 0.5}, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
    "top_k 2": ({"temperature": 1.0, "top_k": 2}, [0.625, 0.375, 0.0]),
    "top_p 0.6": ({"temperature": 1.0, "top_p": 0.6}, [0.625, 0.375, 0.0]),
    "min_p 0.5 (C014c)": ({"temperature": 1.0, "min_p": 0.5}, [0.625, 0.375, 0.0]),
    "bias": ({"temperature": 1.0, "logit_bias": {"2": math.log(2.5)}}, [0.5 / 1.3, 0.3 / 1.3, 0.5 / 1.3]),
    "temperature before top_p": ({"temperature": 0.5, "top_p": 0.65}, [1.0, 0.0, 0.0]),
    "top_k before top_p": ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, [1.0, 0.0, 0.0]),
}
DRAFTERS: dict[str, Callable[[int], list[int]]] = {
    "none": lambda position: [],
    "always the best": lambda position: [0, 0, 0],
    "always a filtered one": lambda position: [2, 2],
    "by position": lambda position: [position % 3, position * position % 3],
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_frequencies_match_the_distribution_with_any_drafter(name: str) -> None:
    fields, expected = COMBINATIONS[name]
    drafter = DRAFTERS[list(DRAFTERS)[list(COMBINATIONS).index(name) % len(DRAFTERS)]]
    row = logs(P)
    tokens = decode(sampler(**fields), lambda position: row, drafter, NUM_DRAWS)
    assert frequencies(tokens, 3) == pytest.approx(expected, abs=0.015)
    assert [f > 0 for f in frequencies(tokens, 3)] == [e > 0 for e in expected]


def test_frequencies_match_the_distribution_under_penalties() -> None:
    # Token 0 is in the prompt, 1 is there and twice in the answer, once of it drafted.
    fixed = sampler([0, 1], [1], temperature=1.0, repetition_penalty=2.0, frequency_penalty=0.3, presence_penalty=0.2)
    logits = [1.0, -0.5, 0.2]
    expected = softmax([0.5, -1.0 - 2 * 0.3 - 0.2, 0.2])
    row = torch.tensor(logits)
    tokens = [fixed.choose(row, position, (1,)) for position in range(NUM_DRAWS)]
    assert frequencies(tokens, 3) == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("draft", DRAFTERS)
def test_the_drafter_changes_no_token(draft: str) -> None:
    fields = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.02, "repetition_penalty": 1.05, "seed": 3}
    alone = decode(sampler(**fields), lambda position: logs(P), DRAFTERS["none"], 300)
    assert decode(sampler(**fields), lambda position: logs(P), DRAFTERS[draft], 300) == alone


def test_c009_a_drafter_under_the_same_filter_does_not_bias() -> None:
    fields = {"temperature": 1.0, "top_k": 2}
    drafter = sampler(**fields)
    target_row, draft_row = logs([0.4, 0.6, 0.0]), logs(P)
    tokens = decode(
        sampler(**fields),
        lambda position: target_row,
        lambda position: [child.token for child in drafter.propose(draft_row, position, (), 1)],
        NUM_DRAWS,
    )
    assert frequencies(tokens, 3) == pytest.approx([0.4, 0.6, 0.0], abs=0.015)


@pytest.mark.parametrize("drafting", ["argmax", "sampling"])
def test_c010_c011a_neither_an_argmax_nor_a_sampling_drafter_biases(drafting: str) -> None:
    drafter = sampler(temperature=1.0 if drafting == "sampling" else 0.0, seed=99)
    draft_row, target_row = logs([0.8, 0.1, 0.1]), logs(P)
    tokens = decode(
        sampler(temperature=1.0),
        lambda position: target_row,
        lambda position: [drafter.propose(draft_row, position, (), 1)[0].token],
        NUM_DRAWS,
    )
    assert frequencies(tokens, 3) == pytest.approx(P, abs=0.015)


def test_c011b_a_certain_token_is_always_chosen() -> None:
    certain = sampler(temperature=1.0, top_p=0.9)
    row = torch.tensor([-INF, 0.0, -INF])
    assert {certain.choose(row, position) for position in range(200)} == {1}


def test_c011c_an_impossible_drafted_token_is_never_emitted() -> None:
    row = logs([1e-20, 0.6, 0.4])
    tokens = decode(sampler(temperature=1.0), lambda position: row, lambda position: [0, 0], 2000)
    assert 0 not in tokens
    with pytest.raises(NumericalError):
        sampler(temperature=1.0).propose(torch.full((3,), math.nan), 5, (), 1)


@pytest.mark.parametrize("fields", [{}, *(fields for fields, _ in COMBINATIONS.values())])
@pytest.mark.parametrize("row", [[math.nan] * 3, [0.0, math.nan, 1.0], [-INF] * 3, [0.0, INF, 1.0]])
def test_c011d_rows_that_are_no_numbers_are_an_error(fields: dict[str, object], row: list[float]) -> None:
    with pytest.raises(NumericalError, match="position 7"):
        sampler(**fields).choose(torch.tensor(row), 7)


def test_c012_penalties_see_drafted_tokens() -> None:
    row = torch.tensor([2.0, 1.5])
    for draft in ([], [0, 0, 0, 0], [0, 1, 0, 1]):
        tokens = decode(sampler(frequency_penalty=0.6), lambda position: row, lambda position: draft, 8)  # noqa: B023
        assert tokens == [0, 1, 0, 1, 0, 1, 0, 1]


def test_c012_presence_and_frequency_count_the_answer_only() -> None:
    row = torch.tensor([2.0, 1.5])
    for name in ("presence_penalty", "frequency_penalty"):
        assert sampler([0, 0], [], **{name: 0.6}).choose(row, 2) == 0
        assert sampler([0, 0], [0], **{name: 0.6}).choose(row, 3) == 1
        assert sampler([0, 0], [], **{name: 0.6}).choose(row, 3, (0,)) == 1
    assert sampler([0], [], repetition_penalty=2.0).choose(row, 1) == 1
    assert sampler([1], [], repetition_penalty=2.0).choose(row, 2, (0, 0)) == 0


@pytest.mark.parametrize("draft", [[0, 0], [1, 1, 1]])
def test_c014_bias_holds_on_every_row(draft: list[int]) -> None:
    for temperature in (0.0, 1.0):
        biased = sampler(temperature=temperature, logit_bias={"0": -100.0})
        assert 0 not in decode(biased, lambda position: logs(P), lambda position: draft, 500)


def test_c015_the_seed_and_the_position_decide() -> None:
    def answer(seed: int, temperature: float) -> list[int]:
        return decode(
            sampler(temperature=temperature, seed=seed), lambda position: logs(P), DRAFTERS["by position"], 100
        )

    first = answer(1234, 0.8)
    for seed in range(50):
        answer(seed, 0.8)
    assert answer(1234, 0.8) == first
    assert answer(1235, 0.8) != first
    assert answer(1234, 0.0) == answer(1235, 0.0)
    resumed = sampler([0], first[:40], temperature=0.8, seed=1234)
    assert decode(resumed, lambda position: logs(P), DRAFTERS["none"], 60) == first[40:]


@pytest.mark.parametrize("widths", [(300, 320), (320, 300), (290, 320)])
@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {}])
def test_c017_padded_widths_do_not_matter(widths: tuple[int, int], fields: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(1)
    real = torch.randn(200, 290, generator=generator)

    def padded(width: int, position: int) -> torch.Tensor:
        # Padding that would win, were it looked at.
        return torch.cat([real[position % 200], torch.full((width - 290,), 9.0)])

    drafter, target = sampler(vocab_size=290, **fields), sampler(vocab_size=290, **fields)

    def draft(position: int) -> list[int]:
        path: list[int] = []
        for i in range(3):
            path.append(drafter.propose(padded(widths[0], position + i), position + i, path, 1)[0].token)
        return path

    alone = decode(sampler(**fields), lambda position: real[position % 200], DRAFTERS["none"], 150)
    assert decode(target, lambda position: padded(widths[1], position), draft, 150) == alone
    # A row that is narrower than an id in the history or the bias does not fail.
    narrow = sampler([310], [305], logit_bias={"315": 1.0}, repetition_penalty=1.2)
    assert narrow.choose(real[0], 2, (319,)) == int(real[0].argmax())


def test_min_tokens_bans_stop_ids_until_then_drafted_tokens_included() -> None:
    row = torch.tensor([0.0, 1.0, 5.0])
    banning = sampler([0], [0], min_tokens=3, stop_ids=(2, 7))
    assert [banning.choose(row, 2 + n, (0,) * n) for n in range(4)] == [1, 1, 2, 2]


def test_greedy_ties_go_to_the_lowest_id_in_choice_and_proposal() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0, 2.0], dtype=torch.bfloat16)
    greedy = sampler()
    assert greedy.choose(row, 1) == 1
    assert [child.token for child in greedy.propose(row, 1, (), 5)] == [1, 2, 4, 3, 5]


def test_top_k_keeps_what_equals_the_kth() -> None:
    kept = sampler(temperature=1.0, top_k=2)
    row = torch.tensor([2.0, 1.0, 1.0, 0.0])
    assert {kept.choose(row, position) for position in range(300)} == {0, 1, 2}


def test_a_tiny_temperature_is_greedy() -> None:
    assert {sampler(temperature=1e-300).choose(torch.tensor([1.0, 1.1, -3.0]), p) for p in range(20)} == {1}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.3, "min_tokens": 9}])
def test_the_callers_row_is_not_written_to(fields: dict[str, object]) -> None:
    row = torch.randn(50, dtype=torch.float64)
    before = row.clone()
    made = sampler(logit_bias={"3": 2.0}, stop_ids=(4,), **fields)
    made.choose(row, 1)
    made.propose(row, 1, (3,), 4)
    made.logprobs(row, (3,), 1, 2)
    assert torch.equal(row, before)


shapes = st.sampled_from([(40, 1.0), (2 * HEAD + 1, 1.0), (3000, 0.01), (3000, 4.0), (3000, 30.0)])
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 40]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.1]),
        "min_p": st.sampled_from([0.0, 0.0, 0.2]),
        "seed": st.integers(-(2**63) + 1, 2**63 - 1),
    }
)


@settings(max_examples=60, deadline=None)
@given(shapes, filters, st.integers(0, 10**6))
def test_shortcuts_change_no_choice_and_no_ranking(
    shape: tuple[int, float], fields: dict[str, object], position: int
) -> None:
    width, spread = shape
    row = torch.randn(width, generator=torch.Generator().manual_seed(position)) * spread
    made = sampler(**fields)
    sampling = made.sampling
    scores = row.to(torch.float64)
    if not sampling.greedy:
        scaled = (scores - scores.max()) / sampling.temperature
        ordered, order = scaled.sort(descending=True)
        ordered = ordered[: sampling.top_k or width]
        probabilities = ordered.softmax(0)
        num = int((probabilities.cumsum(0)[:-1] < sampling.top_p).sum()) + 1 if sampling.top_p < 1 else len(ordered)
        num = min(num, int((ordered.exp() >= sampling.min_p).sum()))
        scores = torch.full_like(scaled, -INF)
        kept = order[:num]
        scores[kept] = scaled[kept] + gumbel(sampling.seed, position, kept)
    expected = [int(i) for i in scores.sort(descending=True).indices[:6] if scores[i] > -INF]
    assert made.choose(row, position) == expected[0]
    children = made.propose(row, position, (), 6)
    assert [child.token for child in children] == expected
    assert all(child.logprob <= 0 for child in children)
    assert [child.logprob for child in children] == sorted((child.logprob for child in children), reverse=True)


@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_the_race_skips_nobody_who_is_placed(spread: float) -> None:
    width = 12 * HEAD
    row = torch.randn(width, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * spread
    racing = sampler(temperature=1.0)
    for position in range(150):
        scores = row + gumbel(0, position, torch.arange(width))
        placed = scores.topk(3).indices.tolist()
        assert racing.choose(row, position) == placed[0]
        assert [child.token for child in racing.propose(row, position, (), 3)] == placed


def test_top_p_over_a_flat_row_keeps_all_it_must() -> None:
    width = 2 * TOP_P_HEAD
    made = sampler(temperature=1.0, top_p=(1500 - 0.5) / width)
    kept, _ = made._kept(torch.zeros(width))
    assert kept.tolist() == list(range(1500))


def test_a_row_with_fewer_possible_tokens_than_asked_for() -> None:
    row = torch.full((3 * HEAD,), -INF)
    row[[5, 700]] = 1.0
    for fields in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 9}):
        assert {child.token for child in sampler(**fields).propose(row, 1, (), 8)} == {5, 700}


def test_greedy_child_logprobs_are_the_rows() -> None:
    children = sampler().propose(logs(P), 1, (), 3)
    assert [math.exp(child.logprob) for child in children] == pytest.approx(P)


def test_logprobs_are_after_bias_and_before_temperature_and_filters() -> None:
    made = sampler(temperature=0.5, top_k=1, logit_bias={"2": -100.0, "1": math.log(5 / 3)})
    reported = made.logprobs(logs(P), (), 1, 2)
    assert reported.logprob == pytest.approx(math.log(0.5))
    assert reported.top_ids == (0, 1)
    assert reported.top_logprobs == pytest.approx((math.log(0.5), math.log(0.5)))
    assert made.logprobs(logs(P), (), 0, 0).top_ids == ()


@given(st.integers(1, 6), st.integers(0, 10_000), st.sampled_from([0.0, 0.8]), st.booleans())
def test_proposals_for_many_rows_are_those_of_each_row(num: int, seed: int, temperature: float, tied: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 40, generator=generator)
    if tied:
        logits[2] = logits[2].round()
    sampler = Sampler(Sampling(temperature=temperature, seed=seed), num_prompt=1, vocab_size=33)
    sampler.commit((1, 2))
    positions, paths = [2, 3, 3, 4, 9], [(), (5,), (6,), (5, 7), (1, 1)]
    many = sampler.propose_rows(logits, positions, paths, num)
    for i, children in enumerate(many):
        alone = sampler.propose(logits[i], positions[i], paths[i], num)
        assert [child.token for child in children] == [child.token for child in alone]
        assert [child.logprob for child in children] == pytest.approx([child.logprob for child in alone], abs=1e-5)
