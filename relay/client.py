"""The streaming client, as a library; `client_cli` is the command and `sync` is for callers without an event loop.

    async with StreamClient("ws://127.0.0.1:8765", secret=secret) as client:
        async for event in client.stream(messages=[("user", "Why is the sky blue?")], max_tokens=100):
            ...

Several streams may run at a time on one client. Close a generator early (`contextlib.aclosing`) to cancel its request.

When the link breaks, the client dials again with growing, jittered pauses and each stream goes on where it stopped: by
its position, if the relay still has the session; else, as after a restart of the relay, by opening it anew behind the
tokens that it has, at a verify node with the same target. Every token comes once either way. What cannot be recovered
within `recover_s` ends with an error, and the caller keeps what it has.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType

from relay.errors import RequestFailed
from relay.stream import Delta, Event, Finished, Stream, new_key
from wire.aio.dialer import Backoff
from wire.aio.link import Link, dial
from wire.aio.sockets import CLOSE_TIMEOUT_S
from wire.codec import decode, encode
from wire.errors import LinkLost, ProtocolError, QueueFull, WireError
from wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ChatMessage,
    Done,
    Error,
    Hello,
    Message,
    OpenSession,
    Serving,
    TextDelta,
    Waiting,
)
from wire.sampling import Sampling

__all__ = ["Delta", "Event", "Finished", "StreamClient"]

log = logging.getLogger(__name__)


_REOPEN = ("unknown_session", "resume_gone")
_RETRY = ("no_verify_node", "draining", "overloaded")
"""What a relay or its nodes may say shortly after a restart, and not much later."""


class StreamClient:
    """A link to the relay over which requests are streamed.

    Args:
        url: ws://HOST:PORT or wss://HOST:PORT.
        proxy: none of the environment's proxies is used unless one is named here.
        recover_s: how long to try when the link breaks; 0 to fail at once.
        backoff, rng: the pauses between attempts.
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
        recover_s: float = 30.0,
        backoff: Backoff | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._url = url
        self._secret = secret
        self._hello = Hello(protocol=PROTOCOL_VERSION, role="client", name=name)
        self._open_timeout_s = open_timeout_s
        self._ssl_context = ssl_context
        self._proxy = proxy
        self._recover_s = recover_s
        self._backoff = backoff or Backoff(most_s=5.0)
        self._rng = rng or random.Random()
        self._streams: dict[str, Stream] = {}
        self._link: Link | None = None
        self._linked = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._closing = False
        self._lost: WireError | None = None

    async def __aenter__(self) -> StreamClient:
        """Connect.

        Raises:
            Refused, VersionMismatch: the relay turned us away.
            LinkLost: no relay answers.
        """
        self._link = await self._dial(self._open_timeout_s)
        self._linked.set()
        self._runner = asyncio.create_task(self._run(self._link), name="client link")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None, "entered before"
        self._closing = True
        for stream in list(self._streams.values()):
            self._cancel(stream)
        if self._link is None:
            self._runner.cancel()
        else:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._link.flush()
            except TimeoutError:
                log.debug("the relay does not read our last frames")
            await self._link.close()
        await asyncio.wait([self._runner])

    async def stream(
        self,
        *,
        messages: Sequence[tuple[str, str] | Mapping[str, str] | ChatMessage] | None = None,
        prompt: str | None = None,
        prompt_ids: Sequence[int] | None = None,
        model: str = "",
        max_tokens: int = 0,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        speculate: bool = True,
        ignore_eos: bool = False,
        session: str | None = None,
        on_waiting: Callable[[int], None] | None = None,
    ) -> AsyncIterator[Event]:
        """Send a request; yields `Delta`s and, last, one `Finished`. Give one of messages, prompt and prompt_ids.

        Args:
            messages: turns, as (role, content) or as {"role": ..., "content": ...}.
            stop: one string or several, at which the answer ends.
            session: a name of the caller's for `cancel`, unique among all clients of the relay; one is made up.
            on_waiting: told the place of the request in the line of those that wait for the target, 1 being the next,
                whenever that changes; not at all where it is served at once.

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
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=logprobs,
            speculate=speculate,
            ignore_eos=ignore_eos,
            resume_key=new_key() if self._recover_s > 0 else "",
        )
        frame = encode(request)
        loop = asyncio.get_running_loop()
        stream = Stream(request.session, request, loop.time(), on_waiting=on_waiting)
        while self._link is None:
            if self._lost is not None or self._runner is None:
                raise LinkLost(str(self._lost or "the client is not connected")) from self._lost
            await self._linked.wait()
        if self._find(request.session) is not None:
            raise RequestFailed("bad_session", f"session {request.session} is in use")
        self._link.send(frame)
        self._streams[stream.session] = stream
        ended = False
        try:
            while True:
                match await stream.events.get():
                    case Delta() as delta:
                        yield delta
                    case Done() as done:
                        ended = True
                        yield stream.finish(done, loop.time())
                        return
                    case error:
                        ended = not isinstance(error, RequestFailed) or error.code not in ("slow_reader", "gap")
                        raise error
        finally:
            if not ended:
                self._cancel(stream)
            self._streams.pop(stream.session, None)

    def cancel(self, session: str) -> None:
        """Cancel a request; its stream ends with a `Finished` that says so. Once is enough, twice does no harm."""
        stream = self._find(session)
        if stream is not None:
            self._cancel(stream)

    def _cancel(self, stream: Stream) -> None:
        if not stream.cancelled:
            stream.cancelled = True
            self._send(Cancel(session=stream.session))

    def _find(self, name: str) -> Stream | None:
        return next((stream for stream in self._streams.values() if stream.name == name), None)

    def _send(self, message: Message) -> None:
        """Send, if there is a link; if it breaks, all is said again over the next."""
        if self._link is None:
            return
        try:
            self._link.send(message)
        except WireError as exc:
            log.warning("> %s could not be sent: %s", message.type, exc)

    async def _dial(self, open_timeout_s: float) -> Link:
        return await dial(
            self._url,
            secret=self._secret,
            hello=self._hello,
            open_timeout_s=open_timeout_s,
            ssl_context=self._ssl_context,
            proxy=self._proxy,
        )

    async def _run(self, link: Link) -> None:
        """Carry frames, over one link after the other, until there is none to be had; then tell all streams why."""
        loop = asyncio.get_running_loop()
        while True:
            since = loop.time()
            lost, final = await self._carry(link)
            self._link = None
            self._linked.clear()
            if final or self._closing or self._recover_s <= 0:
                break
            self._backoff.on_link_ended(loop.time() - since)
            for stream in self._streams.values():
                stream.lost_at = loop.time()
            again = await self._dial_again(lost)
            if isinstance(again, WireError):
                lost = again
                break
            self._link = link = again
            for stream in list(self._streams.values()):
                self._send(stream.resume())
                if stream.cancelled:
                    self._send(Cancel(session=stream.session))
            self._linked.set()
        self._lost = lost
        self._linked.set()
        for stream in self._streams.values():
            stream.deliver(lost)

    async def _carry(self, link: Link) -> tuple[WireError, bool]:
        """Run one link; why it ended, and whether another would do no better."""
        lost: WireError = LinkLost("the link ended")
        final = False
        try:
            await link.run(self._on_frame)
        except (LinkLost, QueueFull) as exc:
            lost = LinkLost(str(exc))
        except WireError as exc:
            lost, final = LinkLost(f"the relay broke the protocol: {exc}"), True
        except Exception as exc:
            # A caller's `on_waiting`, or a bug of ours: streams that nobody feeds any more must not wait for ever.
            log.exception("the client's link is given up")
            lost, final = LinkLost(f"given up after {type(exc).__name__}: {exc}"), True
        await link.close()
        return lost, final

    async def _dial_again(self, lost: WireError) -> Link | WireError:
        """The next link, or why there is none."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._recover_s
        while loop.time() < until:
            pause_s = self._backoff.pause_s(self._rng)
            log.warning("< %s; next attempt in %.1f s", lost, pause_s)
            await asyncio.sleep(min(pause_s, until - loop.time()))
            try:
                return await self._dial(max(0.1, min(self._open_timeout_s, until - loop.time())))
            except LinkLost as exc:
                lost = exc
            except WireError as exc:
                return exc
        return LinkLost(f"{lost}; tried for {self._recover_s:g} s")

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
            stream.deliver(RequestFailed("malformed", f"the relay sent what cannot be read: {exc}"))
            return
        match message:
            case TextDelta():
                stream.take(message, now)
            case Done():
                stream.deliver(message)
            case Waiting():
                if stream.on_waiting is not None:
                    stream.on_waiting(message.place)
            case Serving():
                stream.target = message.target
                stream.lost_at = None
            case Error():
                self._on_error(stream, message, now)

    def _on_error(self, stream: Stream, error: Error, now: float) -> None:
        """A stream that was interrupted is opened anew; any other error is the caller's."""
        if stream.lost_at is None or error.code not in (*_REOPEN, *_RETRY):
            stream.deliver(RequestFailed(error.code, error.message))
        elif stream.cancelled:
            num_tokens = len(stream.tokens)
            stream.deliver(
                Done(session=stream.session, finish_reason="cancelled", prompt_tokens=0, completion_tokens=num_tokens)
            )
        elif error.code in _REOPEN:
            self._reopen(stream)
        elif now - stream.lost_at > self._recover_s:
            stream.deliver(RequestFailed(error.code, f"{error.message}; tried for {self._recover_s:g} s"))
        else:
            self._reopen_soon(stream)

    def _reopen(self, stream: Stream) -> None:
        if self._streams.get(stream.session) is not stream or self._link is None:
            return
        del self._streams[stream.session]
        request = stream.reopen()
        self._streams[stream.session] = stream
        try:
            self._link.send(request)
        except QueueFull:
            # Many streams are opened anew at once; what waits now will have gone in a moment.
            self._reopen_soon(stream)
        except WireError as exc:
            stream.deliver(exc)

    def _reopen_soon(self, stream: Stream) -> None:
        asyncio.get_running_loop().call_later(self._rng.uniform(0.2, 0.4), self._reopen, stream)


def _turn(turn: tuple[str, str] | Mapping[str, str] | ChatMessage) -> ChatMessage:
    if isinstance(turn, ChatMessage):
        return turn
    if isinstance(turn, Mapping):
        if turn.keys() != {"role", "content"}:
            raise ProtocolError(f"messages: a turn has a role and a content, got {', '.join(map(repr, turn))}")
        return ChatMessage(**turn)
    return ChatMessage(role=turn[0], content=turn[1])
