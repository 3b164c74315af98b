"""C071: how long a long prompt may hold up the stream of somebody else, counted in passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from engine.scripted import ScriptedTarget
from engine.scripted_logits import hash_logits
from node_verify.requests import make_request
from node_verify.scheduler import VerifyScheduler
from node_verify.session import Action, CloseSlot, OpenSlot, Prefill, Send, Verify
from node_verify.text import AnswerText
from speculation.passes import VerifyResult
from speculation.selection import BestFirst
from wire.messages import OpenSession

VOCAB = 64
CHUNK = 128


class Letters:
    def push(self, token: int) -> str:
        return chr(0x100 + token)

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("num_long", [1, 3])
def test_c071_between_two_passes_of_a_stream_lies_one_chunk_of_all_prompts_together(num_long: int) -> None:
    """A streams; others send prompts of 16,000 tokens. A's gaps are counted in pieces of work, and all get through."""
    verify = VerifyScheduler(
        selection=BestFirst(8), patience_s=0.0, num_slots=8, max_rows=8, vocab_size=VOCAB, prefill_chunk=CHUNK
    )
    target = ScriptedTarget(hash_logits(VOCAB, 1), num_slots=8, max_length=17_000, max_rows=8, vocab_size=VOCAB)

    def open_session(session: str, num_prompt: int, max_tokens: int) -> None:
        message = OpenSession(session=session, prompt_ids=(1,) * num_prompt, max_tokens=max_tokens)
        assert verify.on_opening(session, 0.0) == []
        made = make_request(
            message, prompt_ids=[1] * num_prompt, context_length=17_000, vocab_size=VOCAB, stop_ids=()
        )  # fmt: skip
        perform(verify.on_request(session, made, AnswerText(Letters(), ()), 0.0))

    def perform(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case OpenSlot(slot, sampling, tokens, num, stop_ids):
                    target.open(slot, sampling=sampling, tokens=tokens, num_prompt=num, stop_ids=stop_ids)
                case CloseSlot(slot):
                    target.close(slot)
                case Send():
                    sent.append(action.message)

    sent: list[Any] = []
    work_done: list[tuple[tuple[str, ...], int]] = []  # sessions, prompt tokens of a piece of prefill (0 for a pass)
    open_session("A", 4, 400)
    while len(work_done) < 5:
        _one(verify, target, work_done, perform)
    for number in range(num_long):
        open_session(f"long {number}", 16_000, 3)
    while verify.sessions:
        _one(verify, target, work_done, perform)

    chunks = [size for _, size in work_done]
    assert max(chunks) == CHUNK
    passes = [i for i, (session, size) in enumerate(work_done) if "A" in session and not size]
    gaps = [b - a - 1 for a, b in itertools.pairwise(passes)]
    assert max(gaps) == 1
    # And A does not hold up the others either: a chunk lies between any two of its passes until all are through.
    last = max(i for i, (_, size) in enumerate(work_done) if size)
    num_chunks = sum(1 for _, size in work_done[5:] if size)
    assert num_chunks <= num_long * -(-15_999 // CHUNK)
    assert sum(1 for i in passes if 5 <= i <= last) <= num_chunks + 1
    # They get through side by side, not one after the other.
    ends = [
        max(i for i, (names, size) in enumerate(work_done) if f"long {n}" in names and size) for n in range(num_long)
    ]
    assert max(ends) - min(ends) <= 2 * num_long + 2


def _one(
    verify: VerifyScheduler,
    target: ScriptedTarget,
    work_done: list[tuple[tuple[str, ...], int]],
    perform: Callable[[list[Action]], None],
) -> None:
    works = verify.next_work(0.0)
    assert works
    results: list[VerifyResult | Exception | None] = []
    chunks = [work for work in works if isinstance(work, Prefill)]
    for chunk in chunks:
        target.prefill(chunk.slot, chunk.start, chunk.end)
        results.append(None)
    passes = [work.request for work in works if isinstance(work, Verify)]
    assert not (chunks and passes)
    results += target.verify(passes) if passes else []
    work_done.append((tuple(work.session for work in works), sum(chunk.end - chunk.start for chunk in chunks)))
    perform(verify.on_work_done(results, 0.0))
