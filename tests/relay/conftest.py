"""A relay on a loopback socket, and small doubles of nodes and clients that speak the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from relay.config import RelayConfig
from relay.credentials import Credentials
from relay.server import RelayServer
from wire.aio.link import Link, dial
from wire.codec import decode
from wire.errors import WireError
from wire.messages import PROTOCOL_VERSION, Hello, Message, ModelIdentity

SECRET = "a-secret-of-the-tests"
TARGET = ModelIdentity(name="target", revision="1", tokenizer="ab" * 32, vocab_size=256, context_length=4096)
DRAFTER = replace(TARGET, name="drafter")
M = TypeVar("M", bound=Message)


class Double:
    """A peer of the relay: what it receives waits in `inbox`, in order."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.inbox: asyncio.Queue[tuple[bytes, Message]] = asyncio.Queue()
        self.lost: WireError | None = None
        self.gone = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    @property
    def id(self) -> str:
        """Its name in the relay."""
        assert self.link.connection.welcome is not None
        return self.link.connection.welcome.peer

    async def _run(self) -> None:
        try:
            await self.link.run(lambda kind, session, frame, now: self.inbox.put_nowait((frame, decode(frame))))
        except WireError as exc:
            self.lost = exc
        finally:
            self.gone.set()

    def send(self, message: Message | bytes) -> None:
        self.link.send(message)

    async def expect(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        _, message = await asyncio.wait_for(self.inbox.get(), 10)
        assert isinstance(message, kind), message
        return message

    async def frame(self) -> bytes:
        """The next frame as it came."""
        return (await asyncio.wait_for(self.inbox.get(), 10))[0]

    async def close(self) -> None:
        await self.link.close()
        with suppress(asyncio.CancelledError):
            await self.task


class Loopback:
    """A relay under test, and its peers."""

    def __init__(self, server: RelayServer, stack: AsyncExitStack) -> None:
        self.server = server
        self.url = f"ws://127.0.0.1:{server.port}"
        self.secret = SECRET
        self._stack = stack

    def add_admin(self, secret: str) -> None:
        """From now on the shared secret is for nodes and clients, and this one for administrators."""
        self.server.access.credentials = Credentials.from_toml(
            f'[[credential]]\nname = "all"\nroles = ["node", "client"]\nsecrets = ["{self.secret}"]\n'
            f'[[credential]]\nname = "admin"\nroles = ["admin"]\nsecrets = ["{secret}"]\n'
        )

    async def join(
        self,
        role: str,
        *,
        name: str = "",
        model: ModelIdentity | None = None,
        capacity: int = 4,
        secret: str = SECRET,
    ) -> Double:
        default = {"verify": TARGET, "draft": DRAFTER, "client": None}[role]
        hello = Hello(
            protocol=PROTOCOL_VERSION, role=role, name=name or role, capacity=capacity, model=model or default
        )
        double = Double(await dial(self.url, secret=secret, hello=hello))
        self._stack.push_async_callback(double.close)
        return double


StartRelay = Callable[..., Awaitable[Loopback]]


@pytest.fixture
async def start_relay() -> AsyncIterator[StartRelay]:
    """Starts a relay with the given settings; it is drained at the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> Loopback:
            server = RelayServer(RelayConfig(**({"secret": SECRET, "port": 0, "grace_s": 0.2} | settings)))
            await server.start()
            stop = asyncio.Event()
            serving = asyncio.create_task(server.serve(stop))

            async def end() -> None:
                stop.set()
                await serving

            stack.push_async_callback(end)
            return Loopback(server, stack)

        yield start


@pytest.fixture
async def relay(start_relay: StartRelay) -> Loopback:
    """A relay with the default settings."""
    return await start_relay()


@pytest.fixture
def target() -> ModelIdentity:
    """What verify doubles serve unless told otherwise."""
    return TARGET


@pytest.fixture
def drafter() -> ModelIdentity:
    """What draft doubles serve unless told otherwise."""
    return DRAFTER
