"""The figures of a stream, as its reader gets them."""

from __future__ import annotations

import pytest

from relay.stream import Finished, Stream
from wire.messages import Done, OpenSession, TextDelta


class Reader:
    """A stream asked for at 50 s, whose deltas hold so many tokens and such text."""

    def __init__(self) -> None:
        self.stream = Stream("a", OpenSession(session="a", prompt="hi"), 50.0)

    def get(self, num_tokens: int, text: str, now: float) -> None:
        start = len(self.stream.tokens)
        tokens = tuple(range(num_tokens))
        self.stream.take(TextDelta(session="a", start=start, tokens=tokens, text=text), now)

    def finish(self, now: float) -> Finished:
        num_tokens = len(self.stream.tokens)
        return self.stream.finish(
            Done(session="a", finish_reason="stop", prompt_tokens=3, completion_tokens=num_tokens, report={}), now
        )


def test_c078_time_per_token_is_not_the_gap_between_chunks() -> None:
    reader = Reader()
    reader.get(0, "", 50.05)  # the empty role chunk
    for number in range(10):
        reader.get(4, "abcd", 50.3 + number / 10)
    finished = reader.finish(60.0)
    assert finished.time_to_first_token_s == pytest.approx(0.3)
    assert finished.time_per_output_token_s == pytest.approx(0.9 / 39)
    assert finished.chunk_gap_s == pytest.approx(0.1)
    assert finished.tokens_per_s == pytest.approx(40 / 1.2)
    assert finished.num_chunks == 10


def test_c078_tokens_without_text_do_not_end_the_wait_but_count() -> None:
    reader = Reader()
    reader.get(1, "", 51.0)  # half a character
    reader.get(1, "é", 52.0)
    reader.get(1, "", 53.0)
    finished = reader.finish(59.0)
    assert finished.time_to_first_token_s == 2.0
    assert finished.time_per_output_token_s == 1.0
    assert finished.tokens_per_s == 1.0


def test_c078_one_token_has_no_time_per_token() -> None:
    reader = Reader()
    reader.get(1, "a", 52.0)
    finished = reader.finish(59.0)
    assert (finished.time_per_output_token_s, finished.chunk_gap_s, finished.tokens_per_s) == (0.0, 0.0, 0.5)
