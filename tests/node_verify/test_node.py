"""The verify node's shell: a failure of the runner ends the session it belongs to, or the whole node, and nothing
between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from engine.errors import CacheError, EngineDead
from engine.executor import ModelExecutor
from engine.scripted import ScriptedTarget
from engine.scripted_logits import hash_logits
from node_verify.node import VerifyNode
from node_verify.scheduler import VerifyScheduler
from node_verify.text import DecodeStream
from speculation.passes import Sampling, VerifyPass, VerifyResult
from speculation.selection import BestFirst
from wire.aio.quiet import MAX_BURST
from wire.aio.trace import TraceWriter
from wire.codec import encode
from wire.messages import Cancel, ChatMessage, Done, Error, Message, OpenSession, Paired, TextDelta, Tokenize

VOCAB = 64


class Letters:
    """Tokenizer and decode stream of one letter a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        raise ValueError("the chat template refuses these messages: " + messages[0]["content"])

    def special_id(self, text: str) -> int | None:
        return int(text.strip("<>")) if text.startswith("<") else None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x100 + token) for token in ids)

    def decode_stream(self, prompt_ids: list[int]) -> DecodeStream:
        return self

    def push(self, token: int) -> str:
        return chr(0x100 + token)

    def flush(self) -> str:
        return ""


class FakeLink:
    """Keeps what is sent, and tells when a session has ended."""

    rtt_s = 0.0

    def __init__(self) -> None:
        self.sent: dict[str, list[Message]] = {}
        self.ended: dict[str, asyncio.Event] = {}

    def send(self, message: Message) -> None:
        encode(message)
        session = str(getattr(message, "session", ""))
        self.sent.setdefault(session, []).append(message)
        if isinstance(message, (Done, Error)):
            self.ended.setdefault(session, asyncio.Event()).set()

    def num_tokens(self, session: str) -> int:
        return sum(len(m.tokens) for m in self.sent.get(session, []) if isinstance(m, TextDelta))


class FailingTarget(ScriptedTarget):
    """Fails where it is told to, for prompts that begin with token 13."""

    def __init__(self, failing: str, exc: BaseException, **limits: Any) -> None:
        super().__init__(hash_logits(VOCAB, 1), **limits)
        self.failing = failing
        self.exc = exc
        self.cursed: set[int] = set()

    def open(
        self, slot: int, *, sampling: Sampling, tokens: Sequence[int], num_prompt: int, stop_ids: Sequence[int]
    ) -> None:
        self.cursed.discard(slot)
        if tokens[0] == 13:
            self.cursed.add(slot)
            self._fail("open", slot)
        super().open(slot, sampling=sampling, tokens=tokens, num_prompt=num_prompt, stop_ids=stop_ids)

    def prefill(self, slot: int, start: int, end: int) -> None:
        self._fail("prefill", slot)
        super().prefill(slot, start, end)

    def verify(self, batch: Sequence[VerifyPass]) -> list[VerifyResult | Exception]:
        for request in batch:
            self._fail("verify", request.slot)
        return super().verify(batch)

    def _fail(self, where: str, slot: int) -> None:
        if where == self.failing and slot in self.cursed:
            raise self.exc


Start = Callable[..., tuple[VerifyNode, FakeLink, "asyncio.Task[None]"]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    running: list[tuple[asyncio.Task[None], ModelExecutor]] = []

    def begin(failing: str, exc: BaseException, *, num_slots: int = 2) -> tuple[VerifyNode, FakeLink, Any]:
        executor = ModelExecutor("target")
        link = FakeLink()
        node = VerifyNode(
            scheduler=VerifyScheduler(
                selection=BestFirst(4), patience_s=0.0, num_slots=num_slots, max_rows=4, vocab_size=VOCAB,
                prefill_chunk=4,
            ),
            runner=FailingTarget(failing, exc, num_slots=num_slots, max_length=256, max_rows=4, vocab_size=VOCAB),
            executor=executor,
            tokenizer=Letters(),
            context_length=256,
            vocab_size=VOCAB,
            stop_ids=(),
            trace=TraceWriter(None),
        )  # fmt: skip
        node.on_link(link)  # type: ignore[arg-type]
        task = asyncio.create_task(node.feed_model())
        running.append((task, executor))
        return node, link, task

    yield begin
    for task, executor in running:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await executor.close()


def request(node: VerifyNode, session: str, first: int, max_tokens: int = 20) -> None:
    prompt = (first, *range(2, 12))
    node.on_frame(encode(OpenSession(session=session, prompt_ids=prompt, max_tokens=max_tokens)), node.now())


async def ended(link: FakeLink, session: str) -> Message:
    async with asyncio.timeout(20):
        await link.ended.setdefault(session, asyncio.Event()).wait()
    return link.sent[session][-1]


@pytest.mark.parametrize("failing", ["open", "prefill", "verify"])
@pytest.mark.parametrize("exc", [CacheError("slot 0 is cursed"), ValueError("a bug of ours")], ids=["cache", "bug"])
async def test_a_runner_that_fails_ends_that_session_alone(start: Start, failing: str, exc: Exception) -> None:
    node, link, task = start(failing, exc)
    request(node, "good", 1, max_tokens=40)
    request(node, "bad", 13)
    told = await ended(link, "bad")
    assert isinstance(told, Error)
    assert told.code == "target_failed"
    assert str(exc) in told.message
    assert isinstance(await ended(link, "good"), Done)
    assert link.num_tokens("good") == 40
    # The slot serves whoever comes next.
    for number in range(3):
        request(node, f"next {number}", 1)
    for number in range(3):
        assert isinstance(await ended(link, f"next {number}"), Done)
        assert link.num_tokens(f"next {number}") == 20
    assert not task.done()


async def test_a_cancelled_session_whose_slot_could_not_be_opened_leaves_no_trace(start: Start) -> None:
    node, link, _ = start("open", CacheError("cursed"), num_slots=1)
    request(node, "bad", 13)
    assert isinstance(await ended(link, "bad"), Error)
    request(node, "after", 1)
    assert isinstance(await ended(link, "after"), Done)


async def test_a_stop_string_that_spells_a_special_token_stops_at_its_id(start: Start) -> None:
    node, link, _ = start("", ValueError())

    async def tokens(session: str, *stop: str, ignore_eos: bool = False) -> tuple[list[int], str]:
        asked = OpenSession(
            session=session, prompt_ids=(1, 2, 3), max_tokens=20, stop=stop, ignore_eos=ignore_eos
        )  # fmt: skip
        node.on_frame(encode(asked), node.now())
        done = await ended(link, session)
        assert isinstance(done, Done)
        return [
            token for delta in link.sent[session] if isinstance(delta, TextDelta) for token in delta.tokens
        ], done.finish_reason

    whole, reason = await tokens("whole", "no such text")
    assert (len(whole), reason) == (20, "length")
    cut = whole.index(whole[7]) + 1
    assert await tokens("cut", "no such text", f"<{whole[7]}>") == (whole[:cut], "stop")
    assert await tokens("asked for", f"<{whole[7]}>", ignore_eos=True) == (whole[:cut], "stop")


async def test_messages_that_the_template_refuses_are_their_senders_fault(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    node, link, _ = start("", ValueError())
    chat = OpenSession(session="s", messages=(ChatMessage(role="user", content="private " * 2000),))
    node.on_frame(encode(chat), node.now())
    told = await ended(link, "s")
    assert isinstance(told, Error)
    assert told.code == "bad_request"
    assert told.message.startswith("the chat template refuses these messages: private")
    assert "private" not in caplog.text


@pytest.mark.parametrize("failing", ["prefill", "verify"])
@pytest.mark.parametrize(
    ("exc", "told"),
    [
        (EngineDead("the device is lost"), "device is lost"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "illegal memory access"),
        (SystemExit(3), "thread has died.*SystemExit"),
    ],
    ids=["dead", "device", "thread"],
)
async def test_c079_what_is_lost_for_all_sessions_ends_the_node(
    start: Start, failing: str, exc: BaseException, told: str
) -> None:
    """Green while nothing can be computed any more would be worse than gone."""
    node, _, task = start(failing, exc)
    request(node, "bad", 13)
    with pytest.raises((EngineDead, RuntimeError), match=told):
        await asyncio.wait_for(task, 20)


async def test_what_a_library_says_may_be_longer_than_what_a_peer_may_be_told(start: Start) -> None:
    node, link, task = start("verify", RuntimeError("a compiler's listing " * 1000))
    request(node, "bad", 13)
    told = await ended(link, "bad")
    assert isinstance(told, Error)
    assert told.code == "target_failed"
    assert told.message.startswith("RuntimeError: a compiler's listing")
    request(node, "good", 1)
    assert isinstance(await ended(link, "good"), Done)
    assert not task.done()


async def test_c047_a_drafter_whose_frames_cannot_be_read_is_refused_once_and_the_answer_goes_on(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    node, link, _ = start("", ValueError())
    request(node, "s", 1, max_tokens=40)
    node.on_frame(encode(Paired(session="s", epoch=1, draft="d")), node.now())
    for _ in range(100):
        node.on_frame(b'{"type":"candidates","session":"s","epoch":1,"tokens":[-1]}', node.now())
    assert isinstance(await ended(link, "s"), Error), "the relay pairs the session with another one"
    errors = [message for message in link.sent["s"] if isinstance(message, Error)]
    assert [error.code for error in errors] == ["malformed"]
    assert sum("malformed frame" in record.getMessage() for record in caplog.records) <= MAX_BURST
    node.on_frame(encode(Paired(session="s", epoch=2, draft="d2")), node.now())
    assert node.scheduler.sessions["s"].drafting
    while not isinstance(link.sent["s"][-1], Done):  # noqa: ASYNC110  # its event was set by the Error
        await asyncio.sleep(0.001)
    assert link.num_tokens("s") == 40


async def test_a_request_that_comes_twice_is_served_once(start: Start) -> None:
    node, link, _ = start("", ValueError())
    request(node, "s", 1)
    request(node, "s", 1)
    assert isinstance(await ended(link, "s"), Done)
    assert link.num_tokens("s") == 20
    assert not [message for message in link.sent["s"] if isinstance(message, Error)]


async def test_a_prompt_that_is_still_being_tokenized_is_not_taken_for_its_successors(start: Start) -> None:
    """Cancelled and opened anew under its name, while the tokenizer is at it: the answer is to the new prompt alone."""
    node, link, _ = start("", ValueError(), num_slots=1)
    may_end = {"old": threading.Event(), "another": threading.Event()}

    class Slow(Letters):
        def encode(self, text: str) -> list[int]:
            may_end[text].wait(20)
            return super().encode(text)

    node.tokenizer = Slow()  # type: ignore[assignment]
    node.on_frame(encode(OpenSession(session="s", prompt="old", max_tokens=3)), node.now())
    (old,) = node._opening
    await asyncio.sleep(0)
    node.on_frame(encode(Cancel(session="s")), node.now())
    link.ended["s"].clear()
    node.on_frame(encode(OpenSession(session="s", prompt="another", max_tokens=3)), node.now())
    may_end["old"].set()
    await old
    may_end["another"].set()
    done = await ended(link, "s")
    assert isinstance(done, Done)
    assert done.prompt_tokens == len("another")
    request(node, "next", 1)
    assert isinstance(await ended(link, "next"), Done)


async def test_ids_and_text_that_fit_no_frame_are_the_askers_fault(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    node, link, _ = start("", ValueError())
    node.on_frame(encode(Tokenize(session="t", prompt="x" * 400_000)), node.now())
    error = await ended(link, "t")
    assert isinstance(error, Error)
    assert error.code == "bad_request"
    assert error.message.startswith("too much for one answer: tokenized has ")
    assert not [record for record in caplog.records if record.exc_info]
