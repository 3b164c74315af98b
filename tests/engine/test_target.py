import math
import random

import pytest
import torch

from engine.errors import CacheError, NumericalError
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.target import HFTarget
from speculation.passes import Sampling, VerifyPass, VerifyResult

VOCAB = 320
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=0.8, seed=5),
    "penalties": Sampling(
        temperature=1.0, top_p=0.9, seed=9, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2
    ),
}


def make_target(lm: CausalLM, *, max_length: int = 128, num_slots: int = 1) -> tuple[HFTarget, CachedModel]:
    model = CachedModel(lm, num_slots=num_slots, max_length=max_length, max_tree_rows=24)
    return HFTarget(model, vocab_size=VOCAB), model


def start(target: HFTarget, prompt: list[int], *, sampling: Sampling | None = None, slot: int = 0) -> None:
    target.open(slot, sampling=sampling or Sampling(), tokens=prompt, num_prompt=len(prompt), stop_ids=())
    target.prefill(slot, 0, len(prompt) - 1)


def verify(
    target: HFTarget,
    tokens: list[int],
    candidates: list[int] | None = None,
    parents: list[int] | None = None,
    *,
    slot: int = 0,
    max_tokens: int = 100,
    num_logprobs: int | None = None,
) -> VerifyResult:
    candidates = candidates or []
    request = VerifyPass(
        slot=slot,
        start=len(tokens),
        tokens=(tokens[-1], *candidates),
        parents=(-1, *(range(len(candidates)) if parents is None else parents)),
        max_tokens=max_tokens,
        num_logprobs=num_logprobs,
    )
    (result,) = target.verify([request])
    if isinstance(result, Exception):
        raise result
    return result


def decode_alone(lm: CausalLM, prompt: list[int], num_tokens: int, sampling: Sampling) -> list[int]:
    target, _ = make_target(lm)
    start(target, prompt, sampling=sampling)
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens += verify(target, tokens).tokens
    return tokens[len(prompt) :]


def random_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]


def test_greedy_tokens_are_the_argmax_of_the_plain_model(lm: CausalLM) -> None:
    prompt = [5, 9, 200, 31]
    answer = decode_alone(lm, prompt, 20, Sampling())
    with torch.inference_mode():
        logits = lm.model(input_ids=torch.tensor([prompt + answer])).logits[0]
    assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len(set(answer)) > 5  # the tiny model does say something


@pytest.mark.parametrize("name", SAMPLINGS)
def test_any_tree_of_candidates_gives_the_tokens_of_the_target_alone(lm: CausalLM, name: str) -> None:
    """Trees mix the right path, cut short or not, with random branches, for chains of 1 to 8 and bushy trees."""
    rng = random.Random(2)
    for _ in range(6):
        prompt = random_prompt(rng)
        expected = decode_alone(lm, prompt, 40, SAMPLINGS[name])
        target, model = make_target(lm)
        start(target, prompt, sampling=SAMPLINGS[name])
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 40:
            done = len(tokens) - len(prompt)
            right = expected[done : done + rng.randint(0, 8)]
            candidates, parents, tip = [], [], 0
            for token in right:
                for _ in range(rng.randint(0, 2)):
                    candidates.append(rng.randrange(VOCAB))
                    parents.append(rng.randrange(len(candidates)))
                if len(candidates) < 22:
                    candidates.append(token)
                    parents.append(tip)
                    tip = len(candidates)
            result = verify(target, tokens, candidates, parents, max_tokens=len(prompt) + 40 - len(tokens))
            assert len(result.tokens) - len(result.rows) in (0, 1)
            assert [candidates[row - 1] for row in result.rows] == list(result.tokens[: len(result.rows)])
            tokens += result.tokens
            assert model.rows[0].used == model.rows[0].length == len(tokens) - 1
        assert tokens[len(prompt) :] == expected


@pytest.mark.parametrize("chain", range(1, 9))
def test_c026_chains_of_any_length_equal_the_target_alone(lm: CausalLM, chain: int) -> None:
    """A perfect chain with one wrong token at a random place, 8 prompts of 64 tokens for each length."""
    rng = random.Random(chain)
    for _ in range(8):
        prompt = random_prompt(rng)
        expected = decode_alone(lm, prompt, 64, Sampling())
        target, _ = make_target(lm)
        start(target, prompt)
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 64:
            done = len(tokens) - len(prompt)
            candidates = expected[done : done + chain]
            wrong = rng.randrange(2 * len(candidates))
            if wrong < len(candidates):
                candidates[wrong] = (candidates[wrong] + 1) % VOCAB
            tokens += verify(target, tokens, candidates, max_tokens=len(prompt) + 64 - len(tokens)).tokens
        assert tokens[len(prompt) :] == expected


def test_rejected_candidates_leave_the_cache_at_the_same_addresses(lm: CausalLM) -> None:
    target, model = make_target(lm)
    before = model.cache.addresses()
    start(target, [5, 9, 200])
    tokens = [5, 9, 200]
    for _ in range(5):
        tokens += verify(target, tokens, [1, 2, 3, 4]).tokens
    assert model.cache.addresses() == before


def test_a_stop_id_or_the_limit_ends_the_walk_on_a_candidate(lm: CausalLM) -> None:
    prompt = [5, 9, 200]
    expected = decode_alone(lm, prompt, 6, Sampling())
    for options in ({"max_tokens": 2}, {}):
        target, model = make_target(lm)
        stop_ids = () if options else (expected[1],)
        target.open(0, sampling=Sampling(), tokens=prompt, num_prompt=3, stop_ids=stop_ids)
        target.prefill(0, 0, 2)
        result = verify(target, prompt, expected[:4], **options)
        assert (list(result.tokens), result.rows) == (expected[:2], (1, 2))
        assert model.rows[0].used == len(prompt) + 1
        # Decoding on is possible: the last token is pending again.
        assert verify(target, prompt + expected[:2]).tokens == (expected[2],)


@pytest.mark.parametrize(("num_prompt", "num_answer"), [(20, 12), (27, 5), (31, 1)])
def test_c023_prompt_and_answer_never_exceed_the_slot(lm: CausalLM, num_prompt: int, num_answer: int) -> None:
    target, model = make_target(lm, max_length=32)
    prompt = list(range(num_prompt))
    start(target, prompt)
    tokens = list(prompt)
    while len(tokens) < 32:
        candidates = [1] * min(5, 32 - len(tokens))
        tokens += verify(target, tokens, candidates).tokens
    assert len(tokens) == num_prompt + num_answer
    with pytest.raises(CacheError, match="no token fits at position 32"):
        verify(target, tokens)
    target.close(0)
    start(target, [1, 2])
    assert len(verify(target, [1, 2]).tokens) == 1
    assert model.rows[0].used == 2


def test_c023_too_long_prompts_and_candidates_are_refused_alone(lm: CausalLM) -> None:
    target, model = make_target(lm, max_length=32)
    with pytest.raises(CacheError, match="32 tokens leave no room"):
        start(target, [1] * 32)
    start(target, [1] * 30)
    used = model.rows[0].used
    with pytest.raises(CacheError, match="beyond the limit"):
        verify(target, [1] * 30, [1, 2, 3])
    assert model.rows[0].used == used
    assert verify(target, [1] * 30).tokens


def test_prefill_in_chunks_equals_prefill_at_once(lm: CausalLM) -> None:
    target, _ = make_target(lm, num_slots=2)
    prompt = list(range(60))
    target.open(0, sampling=Sampling(), tokens=prompt, num_prompt=60, stop_ids=())
    for first in range(0, 59, 7):
        target.prefill(0, first, min(first + 7, 59))
    start(target, prompt, slot=1)
    one, two = (verify(target, prompt, slot=slot, num_logprobs=5) for slot in (0, 1))
    assert one.tokens == two.tokens
    assert one.logprobs is not None
    assert two.logprobs is not None
    assert one.logprobs[0].top_logprobs == pytest.approx(two.logprobs[0].top_logprobs, abs=1e-4)
    with pytest.raises(CacheError, match="cannot prefill"):
        target.prefill(0, 0, 5)


def test_a_resumed_session_goes_on_as_if_never_interrupted(lm: CausalLM) -> None:
    prompt, sampling = [5, 9, 200], SAMPLINGS["penalties"]
    expected = decode_alone(lm, prompt, 20, sampling)
    tokens = prompt + expected[:8]
    target, _ = make_target(lm)
    target.open(0, sampling=sampling, tokens=tokens, num_prompt=3, stop_ids=())
    target.prefill(0, 0, len(tokens) - 1)
    for _ in range(12):
        tokens += verify(target, tokens).tokens
    assert tokens == prompt + expected


def test_logprobs_are_those_of_the_target_at_each_position(lm: CausalLM) -> None:
    prompt = [5, 9, 200]
    expected = decode_alone(lm, prompt, 4, Sampling())
    target, _ = make_target(lm)
    start(target, prompt)
    result = verify(target, prompt, [7, *expected[:3]], [0, 0, 2, 3], num_logprobs=2)
    assert result.rows == (2, 3, 4)
    with torch.inference_mode():
        logits = lm.model(input_ids=torch.tensor([prompt + expected])).logits[0, 2:6]
    assert result.logprobs is not None
    for given, row, token in zip(result.logprobs, logits.log_softmax(-1), expected, strict=True):
        assert given.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert given.top_ids[0] == token
        assert len(given.top_ids) == 2


def test_a_candidate_that_turns_to_nan_costs_its_pass_only(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 9, 200]
    expected = decode_alone(lm, prompt, 3, Sampling())
    target, _ = make_target(lm)
    start(target, prompt)
    embedding = lm.model.get_input_embeddings().weight
    bad = next(token for token in range(VOCAB) if token not in prompt + expected)
    saved = embedding[bad].clone()
    with torch.no_grad():
        embedding[bad] = math.nan
    try:
        assert list(verify(target, prompt, [expected[0], bad], [0, 0]).tokens) == expected[:1]
        assert list(verify(target, prompt + expected[:1], [expected[1]]).tokens)[:1] == expected[1:2]
    finally:
        with torch.no_grad():
            embedding[bad] = saved


def test_nan_logits_end_one_session_of_the_batch(lm: CausalLM) -> None:
    target, model = make_target(lm, num_slots=2)
    start(target, [5, 9, 200])
    start(target, [5, 9, 200], slot=1)
    model.cache.fill(0, 0, 2, math.nan)
    passes = [VerifyPass(slot=slot, start=3, tokens=(200,), parents=(-1,), max_tokens=5) for slot in (0, 1)]
    bad, good = target.verify(passes)
    assert isinstance(bad, NumericalError)
    assert isinstance(good, VerifyResult)
    # The slot is usable by the next session.
    target.close(0)
    start(target, [5, 9, 200])
    assert verify(target, [5, 9, 200]).tokens == good.tokens


def test_misused_slots_and_passes_are_refused_without_a_change(lm: CausalLM) -> None:
    target, model = make_target(lm)
    with pytest.raises(CacheError, match="not open"):
        verify(target, [1, 2])
    start(target, [1, 2, 3])
    with pytest.raises(CacheError, match="in use"):
        start(target, [1, 2, 3])
    for tokens, candidates, parents in (
        ([1, 2], [4], None),
        ([1, 2, 9], [4], None),
        ([1, 2, 3], [VOCAB], None),
        ([1, 2, 3], [4], [-1]),
        ([1, 2, 3], [4], [1]),
        ([1, 2, 3], [4] * 30, None),
    ):
        with pytest.raises(CacheError):
            verify(target, tokens, candidates, parents)
        assert model.rows[0].used == 2
    target.close(0)
    target.close(0)


def test_times_are_reported(lm: CausalLM) -> None:
    target, _ = make_target(lm)
    start(target, [1, 2, 3])
    result = verify(target, [1, 2, 3])
    assert result.compute_s > 0
    assert result.overhead_s >= 0
