"""The hop bench through a relay: two of its clients, one that answers probes and one that measures.

The way is the one of candidates and acceptances: a WebSocket link of each end, frames as JSON, forwarded unread. A size
is that of a frame's padding; its envelope of some 80 bytes comes on top. The relay hands a frame on once it has
the whole of it, so of a large one the bytes are paid for on both hops.

What a relay refuses is not asked of it: sizes above its largest frame, or above what it reads of a credential in one
second, are left out, and the ends rest between exchanges as long as the credential's limits want it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from relay.limits import TokenBucket
from scripts.hop_exchange import HopError
from wire.aio.link import Link, dial
from wire.codec import decode, encode
from wire.errors import QueueFull, WireError
from wire.messages import PROBE_PREFIX, PROTOCOL_VERSION, Error, Hello, Probe, Welcome
from wire.settings import ssl_context

LIMIT_SHARE = 0.9
"""Of a credential's limits; the rest is for the links' own pings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayAddress:
    """Where both ends meet.

    Attributes:
        name: of the end that answers; several pairs may measure at a time under different ones.
    """

    url: str
    secret: str
    name: str = "hop"
    ca_file: Path | None = None

    @property
    def listener(self) -> str:
        """Name of the answering end in its Hello."""
        return f"{PROBE_PREFIX}{self.name}"


@functools.lru_cache(maxsize=4)
def probe_frame(to: str, sender: str, answer_bytes: int, num_bytes: int) -> bytes:
    """A probe with so much padding; kept, since making it is not the link's time."""
    return encode(Probe(session=to, sender=sender, answer_bytes=answer_bytes, pad="x" * num_bytes))


@contextlib.asynccontextmanager
async def _joined(at: RelayAddress, name: str) -> AsyncIterator[Link]:
    """A link of a client with this name. Raises `HopError` when the relay does not let us in."""
    try:
        link = await dial(
            at.url,
            secret=at.secret,
            hello=Hello(protocol=PROTOCOL_VERSION, role="client", name=name),
            ssl_context=ssl_context(at.url, at.ca_file),
        )
    except (WireError, OSError) as exc:
        raise HopError(str(exc)) from exc
    try:
        yield link
    finally:
        await link.close()


@contextlib.asynccontextmanager
async def answering(at: RelayAddress) -> AsyncIterator[asyncio.Task[None]]:
    """Answer probes while the block lasts; gives the task, which ends with `HopError` when the link does."""
    async with _joined(at, at.listener) as link:

        def on_frame(kind: str, session: str | None, frame: bytes, now: float) -> None:
            probe = decode(frame) if kind == Probe.type else None
            if isinstance(probe, Probe) and probe.sender:
                link.send(probe_frame(probe.sender, "", 0, probe.answer_bytes), now=now)

        async def run() -> None:
            try:
                await link.run(on_frame)
            except (WireError, QueueFull) as exc:
                raise HopError(f"the link to the relay ended: {exc}") from exc

        running = asyncio.create_task(run(), name="hop answer")
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class RelayExchange:
    """Exchanges with the answering end, through the relay; `Exchange` of `hop_exchange`.

    Attributes:
        welcome: the relay's terms.
    """

    def __init__(self, link: Link, name: str, to: str) -> None:
        assert link.connection.welcome is not None, "linked"
        self.welcome: Welcome = link.connection.welcome
        self._link, self._name, self._to = link, name, to
        self._answer: asyncio.Future[int] | None = None
        self._failed: HopError | None = None
        now = asyncio.get_running_loop().time()
        limits = ((self.welcome.frames_per_s, "frames"), (self.welcome.bytes_per_s, "bytes"))
        self._buckets = {what: TokenBucket(rate * LIMIT_SHARE, now) for rate, what in limits if rate}

    async def __call__(self, request_bytes: int, answer_bytes: int) -> None:
        """Raises `HopError`: nobody answers to that name, or the link is gone."""
        if self._failed is not None:
            raise self._failed
        self._answer = asyncio.get_running_loop().create_future()
        self._link.send(probe_frame(self._to, self._name, answer_bytes, request_bytes))
        got, wanted = await self._answer, len(probe_frame(self._name, "", 0, answer_bytes))
        if got != wanted:
            raise HopError(f"an answer of {wanted} bytes was asked for, one of {got} came")

    def cost_of(self, request_bytes: int, answer_bytes: int) -> dict[str, int]:
        """Frames and bytes that the relay reads for an exchange."""
        request = probe_frame(self._to, self._name, answer_bytes, request_bytes)
        return {"frames": 2, "bytes": len(request) + len(probe_frame(self._name, "", 0, answer_bytes))}

    async def rest(self, request_bytes: int, answer_bytes: int) -> None:
        """Wait until the relay will read the next exchange at once."""
        cost, now = self.cost_of(request_bytes, answer_bytes), asyncio.get_running_loop().time()
        await asyncio.sleep(max((bucket.take(cost[what], now) for what, bucket in self._buckets.items()), default=0))

    def admitted(self, sizes: Sequence[int], least_bytes: int) -> tuple[list[int], list[str]]:
        """The sizes that the relay carries without holding them back, and a line for those that it does not."""
        envelope = len(probe_frame(self._to, self._name, self.welcome.max_frame_bytes, 0)) + len(',"pad":""')
        most, why = (
            self.welcome.max_frame_bytes - envelope,
            f"a frame of this relay has at most {{}} bytes, {envelope} of them ours",
        )
        why = why.format(self.welcome.max_frame_bytes)
        in_time = int(self.welcome.bytes_per_s * LIMIT_SHARE) - 2 * envelope - least_bytes
        if self.welcome.bytes_per_s and in_time < most:
            most, why = in_time, f"the relay reads {self.welcome.bytes_per_s:g} bytes/s of this credential"
        kept = [size for size in sizes if size <= most]
        left = [str(size) for size in sizes if size > most]
        return kept, [f"left out: {', '.join(left)} bytes; {why}, so the largest size is {most}"] if left else []

    def on_frame(self, kind: str, session: str | None, frame: bytes, now: float) -> None:
        """Take a frame of the link."""
        if kind == Probe.type:
            self._settle(len(frame))
        elif kind == Error.type:
            error = decode(frame)
            assert isinstance(error, Error), "peek and decode agree on the type"
            self._settle(HopError(f"{error.message}; run foredraft-hop --listen with the relay's URL at the other end"))

    def fail(self, failure: HopError) -> None:
        """The link is gone."""
        self._failed = failure
        self._settle(failure)

    def _settle(self, result: int | HopError) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if isinstance(result, HopError):
            answer.set_exception(result)
        else:
            answer.set_result(result)


@contextlib.asynccontextmanager
async def through(at: RelayAddress) -> AsyncIterator[RelayExchange]:
    """A way through the relay to the end that answers. Raises `HopError` when there is none."""
    name = f"{PROBE_PREFIX}{secrets.token_hex(8)}"
    async with _joined(at, name) as link:
        exchange = RelayExchange(link, name, at.listener)

        async def run() -> None:
            try:
                await link.run(exchange.on_frame)
            except (WireError, QueueFull) as exc:
                exchange.fail(HopError(f"the link to the relay ended: {exc}"))

        running = asyncio.create_task(run(), name="hop measure")
        try:
            yield exchange
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
