"""The streaming client, as a library; `client_cli` is the command and `sync` is for callers without an event loop.

    async with StreamClient("ws://127.0.0.1:8765", secret=secret) as client:
        async for event in client.stream(messages=[("user", "Why is the sky blue?")], max_tokens=100):
            ...

Several streams may run at a time on one client. Close a generator early (`contextlib.aclosing`) to cancel its request.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from relay.errors import RequestFailed
from wire.aio.link import CLOSE_TIMEOUT_S, Link, dial
from wire.codec import decode, encode
from wire.errors import LinkLost, ProtocolError, WireError
from wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ChatMessage,
    Done,
    Error,
    Hello,
    OpenSession,
    TextDelta,
    TokenLogprob,
)
from wire.sampling import Sampling

log = logging.getLogger(__name__)
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
        report: the verify node's figures of the session.
        time_to_first_token_s: from the request to the first delta with text.
        tokens_per_s: tokens over the time from the request to the last of them.
        time_per_output_token_s: from the first delta to the last, for each token but one.
        num_chunks: deltas received.
    """

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    report: dict[str, float]
    time_to_first_token_s: float
    tokens_per_s: float
    time_per_output_token_s: float
    num_chunks: int


Event = Delta | Finished


@dataclass(slots=True)
class _Stream:
    """One request under way. `events` is bounded: see `StreamClient._on_frame`."""

    session: str
    sent_at: float
    events: asyncio.Queue[TextDelta | Done | WireError] = field(
        default_factory=lambda: asyncio.Queue(MAX_QUEUED_EVENTS)
    )
    cancelled: bool = False
    num_tokens: int = 0
    num_chunks: int = 0
    first_at: float | None = None
    first_text_at: float | None = None
    last_at: float = 0.0

    def take(self, delta: TextDelta, now: float) -> Delta | None:
        """Count a delta; None for one that was there already.

        Raises:
            RequestFailed: tokens are missing before it.
        """
        if delta.start + len(delta.tokens) <= self.num_tokens and (delta.tokens or delta.start < self.num_tokens):
            return None
        if delta.start != self.num_tokens:
            text = f"tokens from {delta.start} came when {self.num_tokens} was due"
            raise RequestFailed("gap", text)
        self.num_tokens += len(delta.tokens)
        self.num_chunks += 1
        self.last_at = now
        if self.first_at is None:
            self.first_at = now
        if self.first_text_at is None and delta.text:
            self.first_text_at = now
        return Delta(delta.text, delta.tokens, delta.start, delta.sources, delta.logprobs)

    def finish(self, done: Done, now: float) -> Finished:
        """The closing record."""
        last_at = self.last_at if self.num_tokens else now
        first_at = self.first_at if self.first_at is not None else now
        first_text_at = self.first_text_at if self.first_text_at is not None else first_at
        return Finished(
            finish_reason=done.finish_reason,
            prompt_tokens=done.prompt_tokens,
            completion_tokens=done.completion_tokens,
            report=done.report,
            time_to_first_token_s=first_text_at - self.sent_at,
            tokens_per_s=self.num_tokens / (last_at - self.sent_at) if last_at > self.sent_at else 0.0,
            time_per_output_token_s=(last_at - first_at) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0,
            num_chunks=self.num_chunks,
        )


class StreamClient:
    """A link to the relay over which requests are streamed.

    Args:
        url: ws://HOST:PORT or wss://HOST:PORT.
        proxy: none of the environment's proxies is used unless one is named here.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: str,
        name: str = "client",
        open_timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        self._url = url
        self._secret = secret
        self._hello = Hello(protocol=PROTOCOL_VERSION, role="client", name=name)
        self._open_timeout_s = open_timeout_s
        self._ssl_context = ssl_context
        self._proxy = proxy
        self._streams: dict[str, _Stream] = {}
        self._link: Link | None = None
        self._runner: asyncio.Task[None] | None = None
        self._lost: WireError | None = None

    async def __aenter__(self) -> StreamClient:
        """Connect.

        Raises:
            Refused, VersionMismatch: the relay turned us away.
            LinkLost: no relay answers.
        """
        self._link = await dial(
            self._url,
            secret=self._secret,
            hello=self._hello,
            open_timeout_s=self._open_timeout_s,
            ssl_context=self._ssl_context,
            proxy=self._proxy,
        )
        self._runner = asyncio.create_task(self._run(self._link), name="client link")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._link is not None, "entered before"
        assert self._runner is not None
        for session in list(self._streams):
            self.cancel(session)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._link.flush()
        except TimeoutError:
            log.debug("the relay does not read our last frames")
        await self._link.close()
        await self._runner

    async def stream(
        self,
        *,
        messages: Sequence[tuple[str, str] | ChatMessage] | None = None,
        prompt: str | None = None,
        prompt_ids: Sequence[int] | None = None,
        model: str = "",
        max_tokens: int = 0,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        speculate: bool = True,
        ignore_eos: bool = False,
        session: str | None = None,
    ) -> AsyncIterator[Event]:
        """Send a request; yields `Delta`s and, last, one `Finished`. Give one of messages, prompt and prompt_ids.

        Args:
            messages: (role, content) turns.
            session: a name of the caller's for `cancel`, unique among all clients of the relay; one is made up.

        Raises:
            FrameTooLarge, ProtocolError: the request is not one that can be sent; nothing was.
            RequestFailed: it failed; other requests go on.
            LinkLost: the link is gone, and all requests with it.
        """
        request = OpenSession(
            session=session or uuid.uuid4().hex,
            model=model,
            messages=tuple(map(_turn, messages)) if messages is not None else None,
            prompt=prompt,
            prompt_ids=tuple(prompt_ids) if prompt_ids is not None else None,
            sampling=sampling or Sampling(),
            max_tokens=max_tokens,
            stop=tuple(stop),
            logprobs=logprobs,
            speculate=speculate,
            ignore_eos=ignore_eos,
        )
        frame = encode(request)
        if self._link is None or self._lost is not None:
            raise LinkLost(str(self._lost or "the client is not connected")) from self._lost
        if request.session in self._streams:
            raise RequestFailed("bad_session", f"session {request.session} is in use")
        loop = asyncio.get_running_loop()
        stream = _Stream(request.session, loop.time())
        self._link.send(frame)
        self._streams[stream.session] = stream
        ended = False
        try:
            while True:
                event = await stream.events.get()
                now = loop.time()
                match event:
                    case TextDelta():
                        delta = stream.take(event, now)
                        if delta is not None:
                            yield delta
                    case Done():
                        ended = True
                        yield stream.finish(event, now)
                        return
                    case _:
                        ended = not isinstance(event, RequestFailed) or event.code != "slow_reader"
                        raise event
        finally:
            if not ended:
                self.cancel(stream.session)
            self._streams.pop(stream.session, None)

    def cancel(self, session: str) -> None:
        """Cancel a request; its stream ends with a `Finished` that says so. Once is enough, twice does no harm."""
        stream = self._streams.get(session)
        if stream is None or stream.cancelled or self._lost is not None or self._link is None:
            return
        stream.cancelled = True
        try:
            self._link.send(Cancel(session=session))
        except WireError as exc:
            log.warning("session %s: the cancel could not be sent: %s", session, exc)

    async def _run(self, link: Link) -> None:
        """Carry frames until the link ends, then tell all streams why."""
        try:
            await link.run(self._on_frame)
        except LinkLost as exc:
            self._lost = exc
        except WireError as exc:
            self._lost = LinkLost(f"the relay broke the protocol: {exc}")
        for stream in self._streams.values():
            self._deliver(stream, self._lost or LinkLost("the link ended"))

    def _on_frame(self, kind: str, session: str | None, frame: bytes, now: float) -> None:
        stream = self._streams.get(session or "")
        if stream is None:
            # Late frames of a cancelled request, or an Error about our own frames: nobody waits for either.
            if kind == Error.type:
                log.warning("< %s", frame[:500])
            return
        try:
            message = decode(frame)
        except ProtocolError as exc:
            self._deliver(stream, RequestFailed("malformed", f"the relay sent what cannot be read: {exc}"))
            return
        match message:
            case TextDelta() | Done():
                self._deliver(stream, message)
            case Error():
                self._deliver(stream, RequestFailed(message.code, message.message))

    @staticmethod
    def _deliver(stream: _Stream, event: TextDelta | Done | WireError) -> None:
        """Queue an event. A caller that does not read loses the stream, not single tokens of it."""
        if stream.events.full():
            while not stream.events.empty():
                stream.events.get_nowait()
            event = RequestFailed("slow_reader", f"{MAX_QUEUED_EVENTS} events were waiting to be read")
        stream.events.put_nowait(event)


def _turn(turn: tuple[str, str] | ChatMessage) -> ChatMessage:
    return turn if isinstance(turn, ChatMessage) else ChatMessage(role=turn[0], content=turn[1])
