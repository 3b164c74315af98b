"""The gateway over a real relay and real nodes in this process, with the clients that people use."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from engine.bytes import ByteTokenizer
from engine.scripted_logits import agreeing, hash_logits, reference
from tests.e2e.asking import CHAT, PROMPT, chunks, post
from tests.e2e.conftest import ANSWER, SECRET, says
from wire.sampling import Sampling

BOUND_S = 20.0


@pytest.fixture
async def pipeline(in_process: Any) -> Any:
    return await in_process(says(ANSWER), drafter=agreeing(says(ANSWER), 0.7), pass_s=0.003)


@pytest.fixture
async def client(pipeline: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key=SECRET, max_retries=0) as client:
        yield client


async def test_the_openai_client_chats(client: Any) -> None:
    answer = await client.chat.completions.create(**CHAT)
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.model == "scripted-verify"
    assert answer.usage.completion_tokens == len(ANSWER) + 1
    assert answer.usage.prompt_tokens == len(ByteTokenizer().encode_chat(CHAT["messages"]))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_the_openai_client_streams(client: Any) -> None:
    text, reasons = "", []
    async for chunk in await client.chat.completions.create(**CHAT, stream=True):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert text == ANSWER
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


async def test_the_openai_client_completes_whole_and_streamed(client: Any) -> None:
    whole = await client.completions.create(**PROMPT, max_tokens=100)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (ANSWER, "stop")
    streamed = [chunk async for chunk in await client.completions.create(**PROMPT, max_tokens=100, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in streamed) == ANSWER
    short = await client.completions.create(**PROMPT)
    assert (short.choices[0].text, short.choices[0].finish_reason) == (ANSWER[:16], "length")
    ids = await client.completions.create(**PROMPT | {"prompt": list(b"Q: ")}, max_tokens=100)
    assert ids.choices[0].text == ANSWER


async def test_the_synchronous_openai_client_does_the_same(pipeline: Any) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{pipeline.url}/v1", api_key=SECRET, max_retries=0) as client:
            whole = client.chat.completions.create(**CHAT)
            streamed = client.chat.completions.create(**CHAT, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
            return whole.choices[0].message.content or "", text

    assert await asyncio.to_thread(ask) == (ANSWER, ANSWER)


async def test_the_openai_client_lists_models(client: Any) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == ["scripted-verify"]
    assert (await client.models.retrieve("scripted-verify")).id == "scripted-verify"
    with pytest.raises(openai.NotFoundError, match="no verify node serves other"):
        await client.models.retrieve("other")


async def test_the_openai_clients_errors_are_the_ones_it_knows(pipeline: Any, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        await client.chat.completions.create(**CHAT, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="no verify node serves gpt; connected models: scripted-verify"):
        await client.chat.completions.create(**CHAT | {"model": "gpt"})
    async with openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            await stranger.chat.completions.create(**CHAT)
    assert SECRET not in str(refused.value)
    assert pipeline.target.passes == []


async def test_langchain_asks_whole_and_streamed(pipeline: Any) -> None:
    from langchain_openai import ChatOpenAI

    async with httpx.AsyncClient() as http:
        llm = ChatOpenAI(
            model="scripted-verify", base_url=f"{pipeline.url}/v1", api_key=SECRET, max_retries=0, stream_usage=True,
            http_async_client=http,
        )  # fmt: skip
        answer = await llm.ainvoke("What is baked?")
        pieces = [piece async for piece in llm.astream("What is baked?")]
    assert answer.content == ANSWER
    assert answer.usage_metadata["output_tokens"] == len(ANSWER) + 1
    assert "".join(piece.content for piece in pieces) == ANSWER
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) == len(ANSWER) + 1


async def test_every_response_carries_its_timing(client: Any, pipeline: Any) -> None:
    answer = await client.chat.completions.create(**CHAT, seed=5)
    figures = answer.model_extra["foredraft"]
    assert figures["speculation"] is True
    assert figures["no_speculation_because"] is None
    assert sum(figures["tokens_by_source"].values()) == answer.usage.completion_tokens
    assert figures["tokens_by_source"]["draft"] == figures["accepted"] > 0
    assert figures["mean_acceptance_length"] == pytest.approx(1 + figures["accepted"] / figures["rounds"], abs=1e-5)
    assert figures["time_to_first_token_s"] > 0
    assert figures["seed"] == 5
    assert (figures["verify_node"], figures["draft_node"]) == ("verify", "draft")
    assert set(figures["ledger"]) >= {"verify_compute_s", "first_token_s", "answer_s"}
    assert figures["round_ms"]["verify compute"] >= 3.0
    assert all(part >= 0 for part in figures["round_ms"].values())
    *_, last, end = await chunks(pipeline, "/v1/chat/completions", **CHAT)
    assert end == "[DONE]"
    assert sum(last["foredraft"]["tokens_by_source"].values()) == answer.usage.completion_tokens
    assert set(last["foredraft"]) == set(figures)


async def test_an_answer_without_speculation_says_why(in_process: Any, client: Any, pipeline: Any) -> None:
    alone = await client.chat.completions.create(**CHAT, extra_body={"speculate": False})
    figures = alone.model_extra["foredraft"]
    assert (figures["speculation"], figures["no_speculation_because"]) == (
        False, "the request asked for the target alone"
    )  # fmt: skip
    assert figures["tokens_by_source"] == {"draft": 0, "local": 0, "plain": len(ANSWER) + 1}
    undrafted = await in_process(says(ANSWER))
    _, body = await post(undrafted, "/v1/chat/completions", CHAT)
    assert "no draft node" in body["foredraft"]["no_speculation_because"]
    assert body["foredraft"]["draft_node"] is None


async def test_sampled_answers_are_those_of_the_target_under_the_stated_seeds(in_process: Any) -> None:
    target = hash_logits(257, 3)
    pipeline = await in_process(target, drafter=agreeing(target, 0.6), stop_ids=())
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01}
    asked = PROMPT | {"prompt": [1, 2, 3], "max_tokens": 20, "n": 3, "seed": 41, "logprobs": 0} | sampling
    status, body = await post(pipeline, "/v1/completions", asked)
    assert status == 200, body
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [answer["seed"] for answer in body["foredraft"]["answers"]] == [41, 42, 43]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 60, "total_tokens": 63}
    tokenizer = ByteTokenizer()
    for number, choice in enumerate(body["choices"]):
        expected = reference(target, Sampling(**sampling, seed=41 + number), (1, 2, 3), 20)
        assert choice["text"] == tokenizer.decode(expected)
    _, again = await post(pipeline, "/v1/completions", asked | {"n": 1, "seed": 43})
    assert again["choices"][0]["text"] == body["choices"][2]["text"]
    _, unseeded = await post(pipeline, "/v1/completions", {**asked, "seed": None, "n": 1})
    _, repeated = await post(pipeline, "/v1/completions", {**asked, "seed": unseeded["foredraft"]["seed"], "n": 1})
    assert repeated["choices"][0]["text"] == unseeded["choices"][0]["text"]


async def test_tokenize_and_detokenize_are_answered_by_the_verify_node(pipeline: Any) -> None:
    status, body = await post(pipeline, "/tokenize", {"prompt": "Hi 🙂"})
    assert (status, body["tokens"]) == (200, list("Hi 🙂".encode()))
    assert (body["count"], body["max_model_len"]) == (7, 512)
    _, back = await post(pipeline, "/detokenize", {"tokens": body["tokens"]})
    assert back == {"prompt": "Hi 🙂"}
    _, chat = await post(pipeline, "/tokenize", {"messages": CHAT["messages"]})
    assert chat["tokens"] == ByteTokenizer().encode_chat(CHAT["messages"])
    status, body = await post(pipeline, "/detokenize", {"tokens": [1, 257]})
    assert (status, body["error"]["param"]) == (400, "tokens")
    assert body["error"]["message"] == "tokens[1] must be in 0..256, got 257"
    status, body = await post(pipeline, "/tokenize", {"prompt": "x", "model": "other"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert pipeline.server.router.sessions == {}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_c053_a_client_that_goes_away_frees_both_nodes_and_is_cancelled_once(
    in_process: Any, stream: bool
) -> None:
    target = hash_logits(257, 3)
    pipeline = await in_process(target, drafter=agreeing(target, 0.6), max_length=4000, stop_ids=(), pass_s=0.002)
    frames: list[str] = []
    pipeline.verify.on_frame, on_frame = (
        lambda frame, now: (frames.append(json.loads(frame)["type"]), on_frame(frame, now)),
        pipeline.verify.on_frame,
    )
    body = {"prompt": [1, 2, 3], "max_tokens": 2000, "stream": stream}
    async with aiohttp.ClientSession() as session:
        asking = session.post(
            f"{pipeline.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {SECRET}"}
        )
        if stream:
            async with asking as response:
                await response.content.readline()
                await pipeline.until(lambda: pipeline.open_slots() == (2, 2))
                response.close()
        else:
            waiting = asyncio.ensure_future(asking.__aenter__())
            await pipeline.until(lambda: pipeline.open_slots() == (2, 2) and len(pipeline.target.passes) > 5)
            waiting.cancel()
            await asyncio.wait([waiting])
    await pipeline.until(lambda: "cancel" in frames)
    num_passes = len(pipeline.target.passes)
    await pipeline.until(lambda: pipeline.open_slots() == (0, 0))
    assert len(pipeline.target.passes) - num_passes <= 1, "what was running ends, nothing is begun"
    assert frames.count("cancel") == 1
    assert pipeline.server.router.sessions == {}
    status, body = await post(pipeline, "/v1/completions", {"prompt": [1, 2], "max_tokens": 3})
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    assert frames.count("cancel") == 1


async def test_c053_the_openai_client_closes_a_stream(in_process: Any) -> None:
    target = hash_logits(257, 3)
    pipeline = await in_process(target, drafter=agreeing(target, 0.6), max_length=4000, stop_ids=(), pass_s=0.002)
    async with openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key=SECRET, max_retries=0) as client:
        stream = await client.completions.create(model="scripted-verify", prompt="x", max_tokens=2000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await pipeline.until(lambda: pipeline.open_slots() == (0, 0))


async def test_c053_cancelled_while_it_waits_for_a_slot_and_during_prefill(in_process: Any) -> None:
    target = hash_logits(257, 3)
    pipeline = await in_process(target, max_length=4000, stop_ids=(), num_slots=1, pass_s=0.005)
    tasks = [
        asyncio.create_task(post(pipeline, "/v1/completions", {"prompt": [1] * 1000, "max_tokens": 50}))
        for _ in range(3)
    ]
    await pipeline.until(lambda: len(pipeline.verify.scheduler.sessions) == 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await pipeline.until(lambda: pipeline.open_slots() == (0, 0))


async def test_a_lost_verify_node_is_told_in_the_openai_form(in_process: Any) -> None:
    target = hash_logits(257, 3)
    pipeline = await in_process(target, max_length=4000, stop_ids=(), pass_s=0.002)
    asking = asyncio.create_task(post(pipeline, "/v1/completions", {"prompt": [1, 2], "max_tokens": 2000}))
    await pipeline.until(lambda: len(pipeline.target.passes) > 2)
    pipeline.verify.link.abort()
    status, body = await asyncio.wait_for(asking, BOUND_S)
    assert (status, body["error"]["code"], body["error"]["type"]) == (502, "verify_lost", "server_error")


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_another_verify_node_ends_the_answer_of_a_lost_one(in_process: Any, stream: bool) -> None:
    target = hash_logits(257, 3)
    pipeline = await in_process(target, max_length=4000, stop_ids=(), pass_s=0.002, spare=True)
    expected = ByteTokenizer().decode(reference(target, Sampling(temperature=0.7, seed=5), (1, 2), 150))
    asked = {"prompt": [1, 2], "max_tokens": 150, "temperature": 0.7, "seed": 5}
    if stream:
        asking: Any = asyncio.create_task(chunks(pipeline, "/v1/completions", **asked))
    else:
        asking = asyncio.create_task(post(pipeline, "/v1/completions", asked))
    sessions = pipeline.server.router.sessions
    await pipeline.until(lambda: any(len(session.kept.tokens()) > 20 for session in sessions.values()))
    (session,) = sessions.values()
    pipeline.server.links[session.verify].abort()
    answer = await asyncio.wait_for(asking, BOUND_S)
    if stream:
        *events, end = answer
        assert end == "[DONE]"
        text = "".join(event["choices"][0]["text"] for event in events)
    else:
        text = answer[1]["choices"][0]["text"]
        assert answer[1]["usage"]["completion_tokens"] == 150
    assert text == expected
    assert pipeline.server.router.num_moved == 1


@pytest.mark.slow
async def test_over_processes_and_a_real_tokenizer_and_in_little_memory(
    start_pipeline: Any, checkpoints: dict[str, Any]
) -> None:
    async with start_pipeline(
        target=checkpoints["target"], drafter=checkpoints["drafter"], relay_flags=("--http-port", "0")
    ) as pipeline, pipeline.client() as streaming:  # fmt: skip
        relay = pipeline.by_name["relay"]
        base_url = f"http://127.0.0.1:{relay.ready['http_port']}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=SECRET, max_retries=0) as client:
            for prompt in ("the 'mint' tea", "x     y", "Hi 🙂🙂 日本語", " a space first"):
                sampling = Sampling(temperature=1.0, seed=3)
                _, text, finished = await pipeline.ask(
                    streaming, messages=[("user", prompt)], max_tokens=40, sampling=sampling, stop=["e q"]
                )
                asked = {"model": "target", "messages": [{"role": "user", "content": prompt}], "max_tokens": 40,
                         "temperature": 1.0, "seed": 3, "stop": ["e q"]}  # fmt: skip
                whole = await client.chat.completions.create(**asked)
                pieces = [piece async for piece in await client.chat.completions.create(**asked, stream=True)]
                assert whole.choices[0].message.content == text
                assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
                assert whole.usage.completion_tokens == finished.completion_tokens
            top = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
            entries = top.choices[0].logprobs.content
            spelled = b"".join(bytes(entry.bytes) for entry in entries)
            assert spelled.decode(errors="replace").startswith(text[:20])
            await asyncio.gather(*(client.chat.completions.create(**asked, n=4) for _ in range(5)))
        assert relay.resident_mb() < 150
