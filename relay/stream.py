"""One streamed answer as the client keeps it: which position it has reached, and how it goes on after a break."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from relay.errors import RequestFailed
from wire.errors import WireError
from wire.messages import Done, OpenSession, Resume, TextDelta, TokenLogprob

MAX_QUEUED_EVENTS = 65_536


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly committed tokens; `start` is the position of the first, counted from the start of the answer."""

    text: str
    tokens: tuple[int, ...]
    start: int
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a stream.

    Attributes:
        finish_reason: "stop", "length" or "cancelled".
        report: the verify node's figures of the session (of its last part, where another node took over).
        time_to_first_token_s: from the request to the first delta with text.
        tokens_per_s: tokens over the time from the request to the last of them.
        time_per_output_token_s, chunk_gap_s: see `gaps`.
        num_chunks: deltas received that held something.
    """

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    report: dict[str, float]
    time_to_first_token_s: float
    tokens_per_s: float
    time_per_output_token_s: float
    chunk_gap_s: float
    num_chunks: int


Event = Delta | Finished


@dataclass(slots=True)
class Stream:
    """One request under way.

    Attributes:
        name: how the caller calls it; the session on the wire has another name once it was opened anew.
        request: as it was last sent.
        target: fingerprint of the model that answers, once the relay has told it.
        events: what the caller has not read yet; bounded.
        tokens: all that have arrived.
        on_waiting: told the request's place in a verify node's line.
        lost_at: since when it has been without an answerer; None while all is well.
    """

    name: str
    request: OpenSession
    sent_at: float
    target: str = ""
    events: asyncio.Queue[Delta | Done | WireError] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED_EVENTS))
    tokens: array[int] = field(default_factory=lambda: array("i"))
    on_waiting: Callable[[int], None] | None = None
    cancelled: bool = False
    lost_at: float | None = None
    num_chunks: int = 0
    first_at: float | None = None
    first_text_at: float | None = None
    last_at: float = 0.0

    @property
    def session(self) -> str:
        """Its name on the wire."""
        return self.request.session

    def take(self, delta: TextDelta, now: float) -> None:
        """Queue a delta, unless it was there already."""
        num_tokens = len(self.tokens)
        if delta.start + len(delta.tokens) <= num_tokens and (delta.tokens or delta.start < num_tokens):
            return
        if delta.start != num_tokens:
            self.deliver(RequestFailed("gap", f"tokens from {delta.start} came when {num_tokens} was due"))
            return
        self.tokens.extend(delta.tokens)
        self.lost_at = None
        if delta.tokens or delta.text:
            # An empty delta is no chunk: counted, it would begin the time per token before there is one.
            self.num_chunks += 1
            self.last_at = now
            if self.first_at is None:
                self.first_at = now
        if self.first_text_at is None and delta.text:
            self.first_text_at = now
        self.deliver(Delta(delta.text, delta.tokens, delta.start, delta.sources, delta.logprobs))

    def deliver(self, event: Delta | Done | WireError) -> None:
        """Queue an event. A caller that does not read loses the stream, not single tokens of it."""
        if self.events.full():
            while not self.events.empty():
                self.events.get_nowait()
            event = RequestFailed("slow_reader", f"{MAX_QUEUED_EVENTS} events were waiting to be read")
        self.events.put_nowait(event)

    def resume(self) -> Resume:
        """Ask the relay for what came meanwhile; the position is read anew each time."""
        return Resume(session=self.session, key=self.request.resume_key, position=len(self.tokens))

    def reopen(self) -> OpenSession:
        """The request again, behind the tokens that have arrived; under a name that no node has an opinion about."""
        self.request = replace(
            self.request,
            session=uuid.uuid4().hex,
            committed=tuple(self.tokens),
            target=self.target,
            resume_key=new_key(),
        )
        return self.request

    def finish(self, done: Done, now: float) -> Finished:
        """The closing record."""
        num_tokens = len(self.tokens)
        last_at = self.last_at if num_tokens else now
        first_at = self.first_at if self.first_at is not None else now
        first_text_at = self.first_text_at if self.first_text_at is not None else first_at
        per_token_s, chunk_gap_s = gaps(last_at - first_at, num_tokens, self.num_chunks)
        return Finished(
            finish_reason=done.finish_reason,
            prompt_tokens=done.prompt_tokens,
            completion_tokens=done.completion_tokens,
            report=done.report,
            time_to_first_token_s=first_text_at - self.sent_at,
            tokens_per_s=num_tokens / (last_at - self.sent_at) if last_at > self.sent_at else 0.0,
            time_per_output_token_s=per_token_s,
            chunk_gap_s=chunk_gap_s,
            num_chunks=self.num_chunks,
        )


def gaps(lasted_s: float, num_tokens: int, num_chunks: int) -> tuple[float, float]:
    """Time per output token and the mean gap between chunks, 0 where there is none.

    A chunk may hold several tokens, so they are two figures.

    Args:
        lasted_s: from the first chunk to the last.
    """
    return (
        lasted_s / (num_tokens - 1) if num_tokens > 1 else 0.0,
        lasted_s / (num_chunks - 1) if num_chunks > 1 else 0.0,
    )


def new_key() -> str:
    """A resume key that nobody guesses."""
    return secrets.token_urlsafe(16)
