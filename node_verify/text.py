"""The text of one answer as it grows: incremental decoding, stop strings, and what may be shown already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from node_verify.requests import Request
from wire.messages import TextDelta, TokenLogprob


class DecodeStream(Protocol):
    """Turns tokens into text one by one; `engine/tokenizer.py` supplies it."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Push:
    """What a block of tokens did to the answer.

    Attributes:
        text: to be shown now.
        num_tokens: how many of the block count: all, or up to and including the one that completed a stop string.
        stopped: whether a stop string was completed.
    """

    text: str
    num_tokens: int
    stopped: bool


class AnswerText:
    """Feeds tokens through a decode stream and holds back what could still become a stop string.

    Of several matches of stop strings the one that ends first wins; of those that end together, the longest. So the
    text depends on the decoded text alone, not on where tokens end or how they come in blocks. The stop string is not
    part of the text.
    """

    def __init__(self, stream: DecodeStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed."""
        return self._stopped

    def push(self, tokens: Sequence[int]) -> Push:
        """Add a block of tokens. After a stop nothing is added any more."""
        shown: list[str] = []
        for i, token in enumerate(tokens):
            if self._stopped:
                return Push("".join(shown), i, True)
            self._held += self._stream.push(token)
            shown.append(self._release())
        return Push("".join(shown), len(tokens), self._stopped)

    def finish(self) -> str:
        """The end of the answer: whatever was held back and is no stop string after all. Empty the second time."""
        if self._stopped:
            return ""
        self._held += self._stream.flush()
        shown = self._release()
        rest, self._held = ("" if self._stopped else self._held), ""
        return shown + rest

    def _release(self) -> str:
        """Cut `_held` at a stop string, or at the longest suffix that could still become one."""
        found = [(start + len(stop), start) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if found:
            _, start = min(found)
            shown, self._held, self._stopped = self._held[:start], "", True
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


def spelled(delta: TextDelta, token_bytes: Callable[[int], bytes]) -> tuple[TokenLogprob, ...]:
    """The delta's log-probabilities with the bytes of their tokens."""
    return tuple(
        replace(
            entry,
            token_hex=token_bytes(token).hex(),
            top_hex=tuple(token_bytes(top).hex() for top in entry.top_ids),
        )
        for token, entry in zip(delta.tokens, delta.logprobs or (), strict=True)
    )


def answer_text(request: Request, stream: DecodeStream) -> AnswerText:
    """The text of a request's answer, behind the tokens that were committed elsewhere.

    The client has the text of those: what tokens show depends on the tokens before them, not on the blocks they are in.
    """
    text = AnswerText(stream, request.stop)
    text.push(request.committed)
    return text


def ended_by(request: Request, text: AnswerText) -> str:
    """The finish reason of an answer whose committed tokens were its last already; "" if it goes on."""
    if request.committed and (text.stopped or request.committed[-1] in request.stop_ids):
        return "stop"
    return "length" if request.committed and len(request.known_ids) >= request.limit else ""


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
