"""Answers in OpenAI's forms, from messages alone."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from relay.api_answers import ChatForm, Collected, CompletionForm
from relay.api_sessions import Pairing
from relay.api_stream import event
from wire.messages import Done, OpenSession, TextDelta, TokenLogprob
from wire.sampling import Sampling

PAIRED = Pairing(verify="v", model="m", draft="d", epoch=1)
ALONE = Pairing(verify="v", model="m")
HEAD: dict[str, Any] = {"answer_id": "x", "model": "m", "created": 1}


def collected(*deltas: TextDelta, request: OpenSession | None = None, **report: float) -> Collected:
    answer = Collected(request or OpenSession(session="s", prompt="p", sampling=Sampling(seed=4)), opened_at=10.0)
    for place, delta in enumerate(deltas, 1):
        answer.add(delta, 10.0 + place)
    answer.done = Done(
        session="s", finish_reason="stop", prompt_tokens=3, completion_tokens=answer.num_tokens, report=report
    )
    return answer


def delta(text: str, *tokens: int, sources: tuple[str, ...] = (), logprobs: Any = None) -> TextDelta:
    return TextDelta(session="s", start=0, tokens=tokens, text=text, sources=sources, logprobs=logprobs)


def spelled(*texts: bytes) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(logprob=-0.5, token_hex=text.hex(), top_ids=(1,), top_logprobs=(-0.5,), top_hex=(text.hex(),))
        for text in texts
    )


@pytest.mark.parametrize(
    ("pairing", "speculate", "report", "reason"),
    [
        (PAIRED, True, {"rounds": 2.0}, None),
        (ALONE, False, {}, "the request asked for the target alone"),
        (ALONE, True, {}, "no draft node that fits the target had room"),
        (PAIRED, True, {"frames_malformed": 1.0, "candidates_received": 3.0}, "the draft node broke the protocol"),
        (PAIRED, True, {}, "the answer ended before the first candidates came"),
        (PAIRED, True, {"candidates_received": 3.0}, "no candidate came in time to be verified"),
    ],
)
def test_it_is_said_whether_speculation_was_on_and_if_not_why(
    pairing: Pairing, speculate: bool, report: dict[str, float], reason: str | None
) -> None:
    request = OpenSession(session="s", prompt="p", speculate=speculate)
    figures = collected(delta("a", 1), request=request, **report).figures(pairing)
    assert figures["speculation"] == (reason is None)
    assert figures["no_speculation_because"] == reason


def test_times_are_taken_at_the_first_text_and_the_last_token() -> None:
    answer = collected(delta("", 1), delta("ab", 2, 3), delta("", 4))
    figures = answer.figures(ALONE)
    assert figures["time_to_first_token_s"] == 2.0
    assert figures["tokens_per_s"] == pytest.approx(4 / 3)
    empty = collected().figures(ALONE)
    assert (empty["time_to_first_token_s"], empty["tokens_per_s"]) == (0.0, None)


def test_c078_the_gateway_tells_time_per_token_and_gap_between_chunks_apart() -> None:
    answer = Collected(OpenSession(session="s", prompt="p"), opened_at=50.0)
    answer.add(delta(""), 50.05)
    for number in range(10):
        answer.add(delta("abcd", 1, 2, 3, 4), 50.3 + number / 10)
    answer.done = Done(session="s", finish_reason="stop", prompt_tokens=3, completion_tokens=40)
    figures = answer.figures(ALONE)
    assert figures["time_to_first_token_s"] == pytest.approx(0.3)
    assert figures["time_per_output_token_s"] == pytest.approx(0.9 / 39, abs=1e-6)
    assert figures["chunk_gap_s"] == pytest.approx(0.1)


def test_a_prompt_counts_once_however_many_answers_it_got() -> None:
    answers = [collected(delta("a", 1, 2)) for _ in range(4)]
    figures = [answer.figures(ALONE) for answer in answers]
    for num_per_prompt, num_prompt in ((1, 12), (2, 6), (4, 3)):
        usage = ChatForm(**HEAD, num_per_prompt=num_per_prompt).response(answers, figures)["usage"]
        assert usage == {"prompt_tokens": num_prompt, "completion_tokens": 8, "total_tokens": num_prompt + 8}


def test_tokens_inside_a_character_are_told_by_their_bytes() -> None:
    smile = "🙂".encode()
    pieces = [delta("", 1, logprobs=spelled(smile[:2])), delta("🙂", 2, logprobs=spelled(smile[2:]))]
    answer = Collected(OpenSession(session="s", prompt="p", logprobs=1), opened_at=0.0)
    chunks = []
    for piece in pieces:
        answer.add(piece, 1.0)
        chunks.append(ChatForm(**HEAD).piece(0, piece, answer, with_sources=False))
    entries = [entry for chunk in chunks if chunk for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == smile
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk] == ["", "🙂"]


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    pieces = [delta("ab", 1, 2, logprobs=spelled(b"a", b"b")), delta("cde", 3, logprobs=spelled(b"cde"))]
    answer = collected(request=OpenSession(session="s", prompt="p", logprobs=1))
    form, offsets = CompletionForm(**HEAD), []
    for piece in pieces:
        answer.add(piece, 1.0)
        chunk = form.piece(0, piece, answer, with_sources=False)
        assert chunk is not None
        offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 2]
    whole = form.response([answer], [{}])["choices"][0]["logprobs"]
    assert whole["text_offset"] == offsets
    assert whole["tokens"] == ["a", "b", "cde"]


def test_of_a_streamed_answer_only_the_figures_are_kept() -> None:
    piece = delta("ab", 1, 2, sources=("draft", "plain"), logprobs=spelled(b"a", b"b"))
    answers = [Collected(OpenSession(session="s", prompt="p", logprobs=1), 10.0, kept=kept) for kept in (True, False)]
    for answer in answers:
        answer.add(piece, 11.0)
        answer.done = Done(session="s", finish_reason="stop", prompt_tokens=3, completion_tokens=2)
    whole, streamed = answers
    assert (len(whole.text), len(whole.logprobs)) == (1, 2)
    assert (streamed.text, streamed.logprobs) == ([], [])
    assert whole.figures(ALONE) == streamed.figures(ALONE)


def test_a_piece_without_text_is_told_only_if_there_is_something_to_tell() -> None:
    silent = delta("", 1, sources=("draft",))
    answer = collected(silent)
    assert ChatForm(**HEAD).piece(0, silent, answer, with_sources=False) is None
    chunk = ChatForm(**HEAD).piece(0, silent, answer, with_sources=True)
    assert chunk is not None
    assert chunk["foredraft"]["sources"] == ("draft",)


def test_an_event_is_one_line_for_every_reader() -> None:
    text = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0)))) + "a\u2028b\u2029c\u2027 🙂"
    line, *rest = event({"text": text}).decode().splitlines()
    assert rest == [""]
    assert orjson.loads(line.removeprefix("data: ")) == {"text": text}
