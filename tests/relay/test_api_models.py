"""Every field of a request is honoured or refused by name, and what is honoured reaches the verify node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay import api_models
from relay.api_errors import ApiError, from_wire
from relay.api_models import (
    MAX_ANSWERS,
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    nth_seed,
    parse,
)
from wire.codec import decode, encode
from wire.errors import ProtocolError
from wire.sampling import MAX_SEED

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, orjson.dumps({"messages": MESSAGES, **fields}))


def refusal(kind: Any, body: Any) -> ApiError:
    def read() -> None:
        request = parse(kind, body if isinstance(body, bytes) else orjson.dumps(body))
        try:
            request.check()
            request.requests()
        except ProtocolError as exc:
            raise from_wire(exc, prompt_field="messages") from exc

    with pytest.raises(ApiError) as refused:
        read()
    assert refused.value.status == 400
    return refused.value


def test_everything_asked_for_reaches_the_session() -> None:
    asked = chat(
        model="m", temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, seed=7, presence_penalty=0.1,
        frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={"5": -100}, min_tokens=2, ignore_eos=True,
        max_completion_tokens=9, stop=["a", "b"], logprobs=True, top_logprobs=3, speculate=False, user="u",
    )  # fmt: skip
    asked.check()
    (session,) = asked.requests()
    sampling = session.sampling
    assert (session.model, session.max_tokens, session.stop, session.logprobs) == ("m", 9, ("a", "b"), 3)
    assert (session.ignore_eos, session.speculate) == (True, False)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.seed, sampling.min_tokens, sampling.logit_bias) == (7, 2, {"5": -100})
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, 0.2, 1.1)
    assert decode(encode(session)) == session


def test_defaults_are_those_of_openais_api() -> None:
    (session,) = chat().requests()
    assert (session.sampling.temperature, session.max_tokens, session.logprobs) == (1.0, 0, None)
    assert chat().requests()[0].sampling.seed != chat().requests()[0].sampling.seed
    (completion,) = parse(CompletionRequest, b'{"prompt":"x"}').requests()
    assert completion.max_tokens == 16


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for value in NEUTRAL[name]:
        chat(**{name: value})
    error = refusal(ChatRequest, {"messages": MESSAGES, name: {"something": 1}})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert error.message.startswith(f"{name} is not supported")


@pytest.mark.parametrize(
    ("fields", "param", "saying"),
    [
        ({"temperature": -0.1}, "temperature", "0..100, got -0.1"),
        ({"temperature": "hot"}, "temperature", "got 'hot'"),
        ({"top_p": 0}, "top_p", "1e-06..1, got 0"),
        ({"top_k": -2}, "top_k", "got -2"),
        ({"min_p": 1.5}, "min_p", "0..1, got 1.5"),
        ({"seed": 2**63}, "seed", "must be in"),
        ({"seed": 1.5}, "seed", "got 1.5"),
        ({"presence_penalty": 3}, "presence_penalty", "-2..2, got 3"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-2..2, got -3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "got 0"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "[5] must be in -100..100, got 101"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "keyed by token ids"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "[5] must be a finite number, got 'x'"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, got 0"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "give one"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "at most max_tokens, 5, got 6"),
        ({"n": 0}, "n", "got 0"),
        ({"n": MAX_ANSWERS + 1}, "n", f"less than or equal to {MAX_ANSWERS}"),
        ({"stop": ["x"] * 17}, "stop", "has 17 strings, the limit is 16"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"stop": [1]}, "stop", "at most 16 strings, got [1]"),
        ({"logprobs": 3}, "logprobs", "got 3"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20, got 21"),
        ({"max_completion_tokens": 1 << 40}, "max_completion_tokens", "less than or equal to 16777216"),
        ({"user": "u" * 257}, "user", "user must have at most 256 characters"),
        ({"prompt": "x"}, "prompt", "not a parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options.x", "not a parameter"),
        ({"return_sources": True}, "return_sources", "needs stream"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "got 'hi'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'assistant', got 'tool'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "got None"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "x"}]}]}, "messages[1].content", "text parts"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name", "got 'bob'"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls", "support"),
        ({"temprature": 1}, "temprature", "not a parameter"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_is_refused_with_field_value_and_limit(fields: dict[str, Any], param: str, saying: str) -> None:
    error = refusal(ChatRequest, {"messages": MESSAGES, **fields})
    assert error.param == param
    assert error.message.startswith(param.partition("[")[0])
    assert saying in error.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"null"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    assert refusal(ChatRequest, body).code == "invalid_json"


MANY = 5_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [None] * MANY}),
        (CompletionRequest, {"prompt": [[None] * MANY] * 3}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}),
        (ChatRequest, {"messages": [{**MESSAGES[0], **{f"x{i}": i for i in range(MANY)}}]}),
        (ChatRequest, {"messages": MESSAGES, **{f"x{i}": i for i in range(MANY)}}),
        (ChatRequest, {"messages": MESSAGES, "stop": [0] * MANY}),
        (ChatRequest, {"messages": MESSAGES, "logit_bias": {str(i): None for i in range(MANY)}}),
        (TokenizeRequest, {"messages": [0] * MANY}),
        (DetokenizeRequest, {"tokens": [None] * MANY}),
    ],
    ids=[
        "prompt",
        "prompts",
        "messages",
        "parts",
        "fields of a message",
        "fields",
        "stop",
        "biases",
        "turns",
        "tokens",
    ],
)
def test_of_a_body_full_of_faults_a_few_are_looked_at(
    kind: Any, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counted(exc: Any, data: Any) -> ApiError:
        counts.append(exc.error_count())
        return real(exc, data)

    real = api_models._api_error
    monkeypatch.setattr(api_models, "_api_error", counted)
    refusal(kind, body)
    assert all(count <= 5 for count in counts), "each fault that pydantic notes costs the event loop some microseconds"


def test_a_null_asks_for_nothing_whatever_field_it_stands_in() -> None:
    every = {name: None for name in ChatRequest.model_fields if name != "messages"} | {"a_field_of_tomorrow": None}
    # What openai's client makes of an answer's message, by `model_dump()`.
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": None, "audio": None,
              "function_call": None, "tool_calls": None}  # fmt: skip
    (session,) = chat(**every | {"messages": [*MESSAGES, answer], "stream_options": None}).requests()
    (plain,) = chat(messages=[*MESSAGES, {"role": "assistant", "content": "hi"}], seed=session.sampling.seed).requests()
    assert replace(session, session=plain.session) == plain
    assert not chat(stream=True, stream_options={"include_usage": None}).include_usage
    assert refusal(ChatRequest, {"messages": None}).param == "messages"
    assert refusal(CompletionRequest, {"prompt": None}).param == "prompt"


def test_ids_out_of_range_are_told_by_the_name_of_their_field() -> None:
    def message(kind: Any, field: str) -> str:
        with pytest.raises(ProtocolError) as refused:
            parse(kind, orjson.dumps({field: [-1]})).requests()
        return from_wire(refused.value, prompt_field=field).message

    assert message(CompletionRequest, "prompt").startswith("prompt must hold integers in 0..")
    assert message(DetokenizeRequest, "tokens").startswith("tokens must hold integers in 0..")


def test_prompts_may_be_text_or_ids_one_or_several() -> None:
    def prompts(prompt: Any) -> list[Any]:
        sessions = parse(CompletionRequest, orjson.dumps({"prompt": prompt, "n": 2})).requests()
        return [session.prompt if session.prompt is not None else session.prompt_ids for session in sessions[::2]]

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [(1, 2)]
    assert prompts([[1], [2, 3]]) == [(1,), (2, 3)]
    assert refusal(CompletionRequest, {"prompt": []}).param == "prompt"
    assert refusal(CompletionRequest, {"prompt": [1, "x"]}).param == "prompt"
    assert refusal(CompletionRequest, {"prompt": ["x"] * 20, "n": 2}).param == "n"
    assert refusal(CompletionRequest, {}).message == "prompt is required"
    assert refusal(CompletionRequest, {"prompt": "x", "echo": True}).param == "echo"


def test_contents_in_parts_are_joined_and_the_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (session,) = chat(
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    ).requests()
    assert [(turn.role, turn.content) for turn in session.messages or ()] == [("system", "be brief"), ("user", "ab")]


def test_tokenize_takes_a_text_or_a_conversation() -> None:
    (asked,) = parse(TokenizeRequest, b'{"prompt":"x"}').requests()
    assert asked.prompt == "x"
    for body in (b"{}", b'{"prompt":"x","messages":[]}'):
        with pytest.raises(ApiError, match="exactly one of prompt and messages"):
            parse(TokenizeRequest, body)
    (ids,) = parse(DetokenizeRequest, b'{"tokens":[1,2]}').requests()
    assert ids.prompt_ids == (1, 2)


@given(seed=st.integers(-MAX_SEED, MAX_SEED), number=st.integers(0, MAX_ANSWERS - 1))
def test_the_seeds_of_several_answers_are_different_and_in_range(seed: int, number: int) -> None:
    seeds = [nth_seed(seed, i) for i in range(MAX_ANSWERS)]
    assert len(set(seeds)) == MAX_ANSWERS
    assert seeds[0] == seed
    assert all(-MAX_SEED <= each <= MAX_SEED for each in seeds)
    assert nth_seed(seeds[number], 0) == seeds[number]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_parameter_is_on_the_page(kind: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    table = page[page.index("| parameter |") : page.index("Not supported")]
    for name in kind.model_fields:
        assert f"`{name}" in table, f"docs/api.md does not tell of {name}"
