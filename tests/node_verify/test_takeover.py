"""A session that another verify node began goes on where it was, in tokens and in text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.bytes import EOS, ByteStream
from engine.scripted import ScriptedTarget
from engine.scripted_logits import text_logits
from node_verify.requests import RequestRefused, make_request
from node_verify.scheduler import VerifyScheduler
from node_verify.session import CloseSlot, OpenSlot, Prefill, Send, Verify
from node_verify.text import answer_text
from speculation.selection import BestFirst
from wire.messages import Done, OpenSession, TextDelta

PROMPT = (72, 105)
ANSWER = tuple("naïve 🙂, STO or ST. STOP it".encode())


def serve(committed: Sequence[int], **request: Any) -> tuple[list[int], str, Done, list[OpenSlot]]:
    """Run a session behind `committed` to its end: its tokens, its text, its end, and the slots that it opened."""
    target = ScriptedTarget(text_logits([*PROMPT, *ANSWER], EOS), max_length=64, vocab_size=257)
    verify = VerifyScheduler(
        selection=BestFirst(8), patience_s=0.0, num_slots=1, max_rows=8, vocab_size=257, prefill_chunk=3
    )
    message = OpenSession(session="s", prompt_ids=PROMPT, committed=tuple(committed), **request)
    verify.on_opening("s", 0.0)
    made = make_request(message, prompt_ids=PROMPT, context_length=64, vocab_size=257, stop_ids=(EOS,))
    waiting = list(verify.on_request("s", made, answer_text(made, ByteStream()), 0.0))
    tokens, text, slots = list(committed), "", []
    while True:
        for action in waiting:
            match action:
                case OpenSlot(slot, sampling, ids, num_prompt, stop_ids):
                    slots.append(action)
                    target.open(slot, sampling=sampling, tokens=ids, num_prompt=num_prompt, stop_ids=stop_ids)
                case CloseSlot(slot):
                    target.close(slot)
                case Send(TextDelta() as delta):
                    assert delta.start == len(tokens)
                    tokens += delta.tokens
                    text += delta.text
                case Send(Done() as done):
                    return tokens, text, done, slots
        match verify.next_work(0.0):
            case [Prefill(_, slot, start, end)]:
                target.prefill(slot, start, end)
                waiting = list(verify.on_work_done([None], 0.0))
            case [Verify(_, request_pass)]:
                waiting = list(verify.on_work_done(target.verify([request_pass]), 0.0))


@pytest.mark.parametrize(
    "request_fields", [{}, {"stop": ("STOP",)}, {"max_tokens": 20}], ids=["to its end", "stop string", "budget"]
)
def test_c040_wherever_an_answer_is_taken_over_nothing_is_lost_or_shown_twice(request_fields: dict[str, Any]) -> None:
    whole, text, done, _ = serve((), **request_fields)
    shown_before = {0: ""}
    for cut in range(1, len(whole) + 1):
        tokens, rest, again, slots = serve(whole[:cut], **request_fields)
        assert tokens == whole
        assert (again.finish_reason, again.prompt_tokens, again.completion_tokens) == (
            done.finish_reason,
            len(PROMPT),
            len(whole),
        )
        assert text.endswith(rest)
        shown_before[cut] = text.removesuffix(rest)
        assert len(slots) == (cut < len(whole)), "a complete answer needs no slot"
    assert all(shown_before[cut + 1].startswith(shown_before[cut]) for cut in range(len(whole)))
    assert shown_before[len(whole)] == text


def test_committed_tokens_are_held_to_the_requests_limits() -> None:
    def made(committed: tuple[int, ...]) -> None:
        message = OpenSession(session="s", prompt_ids=PROMPT, committed=committed, max_tokens=2)
        make_request(message, prompt_ids=PROMPT, context_length=64, vocab_size=257, stop_ids=())

    with pytest.raises(RequestRefused, match=r"committed\[1\] must be in 0\.\.256, got 300"):
        made((1, 300))
    with pytest.raises(RequestRefused, match="committed has 3 tokens, the answer may have 2"):
        made((1, 2, 3))
