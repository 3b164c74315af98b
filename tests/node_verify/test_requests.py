"""A request is served within the limits of the model, or refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from node_verify.requests import Request, RequestRefused, make_request
from wire.messages import OpenSession
from wire.sampling import Sampling


def checked(prompt_ids: Sequence[int], **fields: object) -> Request:
    """The request as a model with a context of 32 and 100 ids takes it."""
    message = OpenSession(session="s", prompt="the same as the ids", **fields)  # type: ignore[arg-type]
    return make_request(message, prompt_ids=prompt_ids, context_length=32, vocab_size=100, stop_ids=(98, 99))


def refusal(prompt_ids: Sequence[int], **fields: object) -> tuple[str, str]:
    with pytest.raises(RequestRefused) as caught:
        checked(prompt_ids, **fields)
    return caught.value.code, str(caught.value)


@pytest.mark.parametrize("max_tokens", [0, 100])
@pytest.mark.parametrize(("num_prompt", "num_answer"), [(20, 12), (27, 5), (31, 1), (1, 31)])
def test_c023_c056_prompt_and_answer_never_exceed_the_context(
    num_prompt: int, num_answer: int, max_tokens: int
) -> None:
    request = checked([7] * num_prompt, max_tokens=max_tokens)
    assert len(request.prompt_ids) == num_prompt
    assert request.limit == num_prompt + num_answer == 32


@pytest.mark.parametrize(("max_tokens", "num_answer"), [(1, 1), (11, 11), (12, 12), (13, 12)])
def test_c056_max_tokens_holds_where_it_fits_and_is_clamped_where_not(max_tokens: int, num_answer: int) -> None:
    assert checked([7] * 20, max_tokens=max_tokens).limit == 20 + num_answer


@pytest.mark.parametrize("num_prompt", [32, 33, 5000])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_c023_c056_a_prompt_without_room_for_a_token_is_refused_with_the_counts(
    num_prompt: int, max_tokens: int
) -> None:
    code, text = refusal([7] * num_prompt, max_tokens=max_tokens)
    assert code == "prompt_too_long"
    assert f"prompt has {num_prompt} tokens" in text
    assert "limit is 31" in text
    assert "32" in text


def test_c056_an_empty_prompt_is_refused() -> None:
    code, text = refusal([])
    assert code == "empty_prompt"
    assert "0 tokens" in text


@pytest.mark.parametrize("token", [100, 2**31 - 1, -1])
def test_prompt_ids_outside_the_vocabulary_are_refused_with_field_value_and_limit(token: int) -> None:
    assert refusal([0, 99, token]) == ("bad_request", f"prompt_ids[2] must be in 0..99, got {token}")


def test_biases_outside_the_vocabulary_are_refused_with_field_value_and_limit() -> None:
    code, text = refusal([1], sampling=Sampling(logit_bias={"99": 1.0, "100": 1.0}))
    assert (code, text) == ("bad_request", "logit_bias must be keyed by ids in 0..99, got 100")
    assert checked([1], sampling=Sampling(logit_bias={"0": 1.0, "99": 1.0}))


def test_the_models_end_tokens_stop_the_answer_unless_the_client_goes_on() -> None:
    assert checked([1]).stop_ids == (98, 99)
    assert checked([1], ignore_eos=True).stop_ids == ()


def test_what_the_client_asked_for_is_kept() -> None:
    sampling = Sampling(temperature=0.8, seed=5)
    request = checked([1, 2], sampling=sampling, stop=("a", "b"), logprobs=3, speculate=False, max_tokens=4)
    assert request == Request(
        prompt_ids=(1, 2),
        limit=6,
        sampling=sampling,
        stop_ids=(98, 99),
        stop=("a", "b"),
        num_logprobs=3,
        speculate=False,
    )
    plain = checked([1])
    assert (plain.stop, plain.num_logprobs, plain.speculate) == ((), None, True)
