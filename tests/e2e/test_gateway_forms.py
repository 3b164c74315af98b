"""How the gateway's answers look: ends, stops, characters, special tokens, log-probabilities, edges of the context."""

from __future__ import annotations

from typing import Any

import pytest

from engine.bytes import EOS
from engine.scripted_logits import agreeing
from tests.e2e.asking import CHAT, PROMPT, chunks, post
from tests.e2e.conftest import ANSWER, says


@pytest.fixture
async def pipeline(in_process: Any) -> Any:
    return await in_process(says(ANSWER), drafter=agreeing(says(ANSWER), 0.7), pass_s=0.003)


@pytest.mark.parametrize(
    ("asked", "text", "reason"),
    [
        ({}, ANSWER, "stop"),
        ({"stop": ["ple pie"]}, "a green ap", "stop"),
        ({"max_completion_tokens": 7}, ANSWER[:7], "length"),
    ],
    ids=["end token", "stop string", "length"],
)
@pytest.mark.parametrize("include_usage", [True, False, None])
async def test_c054_a_stream_ends_in_the_openai_form(
    pipeline: Any, asked: dict[str, Any], text: str, reason: str, include_usage: bool | None
) -> None:
    _, whole = await post(pipeline, "/v1/chat/completions", CHAT | asked)
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    first, *events, end = await chunks(pipeline, "/v1/chat/completions", **CHAT | asked | options)
    assert end == "[DONE]"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    if include_usage:
        *events, counted = events
        assert counted["choices"] == []
        assert counted["usage"] == whole["usage"]
        assert [event["usage"] for event in (first, *events)] == [None] * (len(events) + 1)
    else:
        assert not any("usage" in event for event in events)
    *events, last = events
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == reason == whole["choices"][0]["finish_reason"]
    assert [event["choices"][0]["finish_reason"] for event in (first, *events)] == [None] * (len(events) + 1)
    assert all(event["choices"][0]["delta"]["content"] for event in events), "no empty piece in between"
    joined = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert joined == text == whole["choices"][0]["message"]["content"]
    for name in ("id", "created", "model", "system_fingerprint"):
        assert len({event[name] for event in (first, *events, last)}) == 1
    verify = next(iter(pipeline.server.router.nodes("verify")))
    assert last["system_fingerprint"] == whole["system_fingerprint"] == verify.model.fingerprint


@pytest.mark.parametrize(
    ("asked", "text", "reason"),
    [({}, ANSWER, "stop"), ({"stop": ["ple pie"]}, "a green ap", "stop"), ({"max_tokens": 7}, ANSWER[:7], "length")],
    ids=["end token", "stop string", "length"],
)
@pytest.mark.parametrize("include_usage", [True, False, None])
async def test_c054_the_older_endpoint_ends_alike_with_several_answers(
    pipeline: Any, asked: dict[str, Any], text: str, reason: str, include_usage: bool | None
) -> None:
    body = PROMPT | {"n": 2, "max_tokens": 100} | asked
    _, whole = await post(pipeline, "/v1/completions", body)
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    *events, end = await chunks(pipeline, "/v1/completions", **body | options)
    assert end == "[DONE]"
    if include_usage:
        *events, counted = events
        assert (counted["choices"], counted["usage"]) == ([], whole["usage"])
        assert [event["usage"] for event in events] == [None] * len(events)
    else:
        assert not any("usage" in event for event in events)
    for index in range(2):
        *pieces, last = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert (last["text"], last["finish_reason"]) == ("", reason)
        assert [piece["finish_reason"] for piece in pieces] == [None] * len(pieces)
        assert all(piece["text"] for piece in pieces), "no empty piece in between"
        assert "".join(piece["text"] for piece in pieces) == text == whole["choices"][index]["text"]
        assert whole["choices"][index]["finish_reason"] == reason
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("growth", ["chain:1", "chain:3", "chain:7", "chain:16"])
async def test_c005_c051_a_stop_string_inside_a_block_leaks_nothing(in_process: Any, growth: str) -> None:
    text = "abcSTOPdefghijklmnop"
    pipeline = await in_process(says(text), drafter=says(text), growth=growth)
    _, whole = await post(pipeline, "/v1/chat/completions", CHAT | {"stop": ["STOP"]})
    assert whole["choices"][0]["message"]["content"] == "abc"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 7
    *pieces, _, _ = await chunks(pipeline, "/v1/chat/completions", **CHAT, stop="STOP")
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == "abc"
    *_, last, _ = await chunks(pipeline, "/v1/chat/completions", **CHAT, stop=[f"{i}" for i in range(16)])
    assert last["choices"][0]["finish_reason"] == "stop"


async def test_c048_characters_of_several_tokens_are_never_cut(in_process: Any) -> None:
    text = "Hi 🙂🙂 日本語"
    pipeline = await in_process(says(text), drafter=agreeing(says(text), 0.6))
    *pieces, _, _ = await chunks(pipeline, "/v1/chat/completions", **CHAT)
    deltas = [piece["choices"][0]["delta"]["content"] for piece in pieces]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


async def test_c052_end_tokens_are_hidden_also_past_an_end(in_process: Any) -> None:
    pipeline = await in_process(says("one", after=" two"), drafter=says("one", after=" two"))
    _, body = await post(pipeline, "/v1/chat/completions", CHAT | {"ignore_eos": True, "max_tokens": 8})
    assert body["choices"][0]["message"]["content"] == "one two"
    assert body["usage"]["completion_tokens"] == 8


async def test_c028_any_of_several_end_tokens_ends_the_answer(in_process: Any) -> None:
    text = "first turn\x02second turn"
    pipeline = await in_process(says(text), drafter=says(text), stop_ids=(EOS, 2))
    _, body = await post(pipeline, "/v1/chat/completions", CHAT)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["message"]["content"].rstrip("\x02") == "first turn"
    assert body["usage"]["completion_tokens"] == len("first turn") + 1


async def test_c007_c008_logprobs_are_those_of_the_target_and_of_the_tokens_that_count(in_process: Any) -> None:
    pipeline = await in_process(says("abcSTOPdef", sharpness=6.0), drafter=agreeing(says("abcSTOPdef"), 0.8))
    asked = CHAT | {"stop": ["STOP"], "logprobs": True, "top_logprobs": 2, "temperature": 0}
    bodies = []
    for speculate in (True, False):
        _, body = await post(pipeline, "/v1/chat/completions", asked | {"speculate": speculate})
        entries = body["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == list("abcSTOP")
        assert body["usage"]["completion_tokens"] == len(entries) == 7
        assert [bytes(entry["bytes"]).decode() for entry in entries] == list("abcSTOP")
        for entry in entries:
            assert entry["top_logprobs"][0]["token"] == entry["token"]
            assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-5)
            assert -1.0 < entry["logprob"] < 0.0
        bodies.append(entries)
    for drafted, alone in zip(*bodies, strict=True):
        assert drafted["logprob"] == pytest.approx(alone["logprob"], abs=1e-5)
    *events, _, _ = await chunks(pipeline, "/v1/chat/completions", **asked)
    streamed = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [entry["token"] for entry in streamed] == list("abcSTOP")
    _, older = await post(pipeline, "/v1/completions", PROMPT | {"logprobs": 1, "stop": "STOP", "temperature": 0})
    columns = older["choices"][0]["logprobs"]
    assert "".join(columns["tokens"]) == "abcSTOP"
    assert columns["text_offset"] == list(range(7))
    assert [list(top) for top in columns["top_logprobs"]] == [[token] for token in columns["tokens"]]


async def test_c014_bias_min_tokens_and_penalties_reach_every_row(in_process: Any) -> None:
    pipeline = await in_process(says("aaaa", sharpness=6.0), drafter=says("aaaa", sharpness=6.0))

    async def tokens(**asked: Any) -> str:
        _, body = await post(pipeline, "/v1/chat/completions", CHAT | {"temperature": 0} | asked)
        return str(body["choices"][0]["message"]["content"])

    assert await tokens() == "aaaa"
    assert "a" not in await tokens(logit_bias={"97": -100}, max_tokens=6)
    assert len(await tokens(min_tokens=9, max_tokens=12)) >= 9
    assert "aa" not in await tokens(presence_penalty=2, frequency_penalty=2, repetition_penalty=10.0, max_tokens=4)
    assert await tokens(logit_bias={"98": 100}, max_tokens=3) == "bbb"


async def test_several_answers_stream_side_by_side(pipeline: Any) -> None:
    body = PROMPT | {"prompt": ["Q: ", "Why? A: "], "n": 2, "max_tokens": 100}
    *events, counted, end = await chunks(pipeline, "/v1/completions", **body, stream_options={"include_usage": True})
    assert end == "[DONE]"
    texts = [""] * 4
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [ANSWER] * 4
    assert counted["usage"]["prompt_tokens"] == len("Q: ") + len("Why? A: ")
    assert counted["usage"]["completion_tokens"] == 4 * (len(ANSWER) + 1)


async def test_c056_prompts_at_the_edge_of_the_context(in_process: Any) -> None:
    pipeline = await in_process(says(ANSWER), drafter=says(ANSWER), max_length=32)

    async def ask(num_tokens: int, **asked: Any) -> tuple[int, Any]:
        prompt = "x" * (num_tokens - 2) + ": " if num_tokens else ""
        return await post(pipeline, "/v1/completions", PROMPT | {"prompt": prompt} | asked)

    status, body = await ask(31)
    assert (status, body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (200, 1, "length")
    num_passes, num_steps = len(pipeline.target.passes), len(pipeline.draft.runner.steps)
    for length in (32, 33):
        status, body = await ask(length)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert body["error"]["param"] == "prompt"
        assert f"{length} tokens, the limit is 31" in body["error"]["message"]
    status, body = await ask(0)
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert (len(pipeline.target.passes), len(pipeline.draft.runner.steps)) == (num_passes, num_steps)
    streamed, body = await post(pipeline, "/v1/completions", PROMPT | {"prompt": "x" * 40, "stream": True})
    assert (streamed, body["error"]["code"]) == (400, "context_length_exceeded"), "a status, not an event of a stream"
    status, body = await ask(20, max_tokens=500)
    assert (status, body["usage"]["completion_tokens"]) == (200, 12), "clamped, as documented"
