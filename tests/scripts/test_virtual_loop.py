"""The virtual clock and its network behave as asyncio and TCP do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.virtual_loop import Deadlock, VirtualExecutor, VirtualLoop
from scripts.virtual_net import WINDOW_BYTES, Network, Transport

PORT = 9


class Recorder(asyncio.Protocol):
    """Notes what a transport tells it, and when."""

    def __init__(self) -> None:
        self.data = b""
        self.arrivals: list[float] = []
        self.events: list[object] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.arrivals.append(asyncio.get_running_loop().time())

    def eof_received(self) -> bool:
        self.events.append("eof")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append(type(exc))

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")


def run(main: Callable[[VirtualLoop], Awaitable[Any]], *, delay_s: float = 0.1, jitter_s: float = 0.0) -> Any:
    loop = VirtualLoop(Network(random.Random(1), delay_s=lambda process: delay_s, jitter_s=jitter_s))
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.close()


async def connect(loop: VirtualLoop) -> tuple[Recorder, Recorder]:
    """The protocols of the near and the far end."""
    far = Recorder()
    await loop.create_server(lambda: far, port=PORT)
    _, near = await loop.create_connection(Recorder, port=PORT)
    return near, far


def test_a_day_passes_at_once_and_timers_keep_their_order() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        async def wait(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return loop.time()

        return await asyncio.gather(wait(86_400.0), wait(0.5), asyncio.to_thread(lambda: 3.0))

    assert run(main) == [86_400.0, 0.5, 3.0]


def test_what_waits_for_ever_is_found() -> None:
    async def main(loop: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main)


@settings(max_examples=50, deadline=None)
@given(
    writes=st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.sampled_from([0.0, 0.01, 0.2])), max_size=20),
    stalls=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), max_size=3),
)
def test_bytes_arrive_once_in_order_and_not_before_the_delay(
    writes: list[tuple[bytes, float]], stalls: list[tuple[float, float]]
) -> None:
    async def main(loop: VirtualLoop) -> None:
        near, far = await connect(loop)
        for at, seconds in stalls:
            loop.call_later(at, lambda s=seconds: near.transport.wire.stall(loop.time() + s))
        written_at = []
        for data, pause_s in writes:
            near.transport.write(data)
            written_at.append(loop.time())
            await asyncio.sleep(pause_s)
        near.transport.close()
        await asyncio.sleep(10.0)
        assert far.data == b"".join(data for data, _ in writes)
        assert all(arrived >= sent + 0.1 for arrived, sent in zip(far.arrivals, written_at, strict=True))
        assert far.arrivals == sorted(far.arrivals)
        assert far.events == ["eof", type(None)]

    run(main, jitter_s=0.05)


def test_a_stalled_wire_delivers_when_the_stall_is_over() -> None:
    async def main(loop: VirtualLoop) -> None:
        near, far = await connect(loop)
        near.transport.write(b"a")
        near.transport.wire.stall(5.0)
        await asyncio.sleep(10.0)
        assert far.arrivals == [5.0]

    run(main)


def test_a_cut_resets_both_ends_and_silence_tells_neither() -> None:
    async def main(loop: VirtualLoop) -> None:
        near, far = await connect(loop)
        near.transport.write(b"lost")
        near.transport.wire.cut()
        await asyncio.sleep(1.0)
        assert near.events == far.events == [ConnectionResetError]
        assert far.data == b""

        _, near = await loop.create_connection(Recorder, port=PORT)
        near.transport.wire.die()
        near.transport.write(b"lost")
        await asyncio.sleep(1000.0)
        assert near.events == []
        assert far.data == b""

    run(main)


def test_a_reader_that_pauses_holds_up_the_writer() -> None:
    async def main(loop: VirtualLoop) -> None:
        near, far = await connect(loop)
        near.transport.set_write_buffer_limits(high=1000)
        far.transport.pause_reading()
        near.transport.write(bytes(WINDOW_BYTES))
        await asyncio.sleep(1.0)
        assert near.events == []
        near.transport.write(bytes(1001))
        assert near.events == ["pause"]
        assert near.transport.get_write_buffer_size() == 1001
        far.transport.resume_reading()
        await asyncio.sleep(1.0)
        assert near.events == ["pause", "resume"]
        assert len(far.data) == WINDOW_BYTES + 1001

    run(main)


def test_a_killed_process_says_nothing_more_and_listens_no_more() -> None:
    async def main(loop: VirtualLoop) -> None:
        far = Recorder()
        ended = []

        async def server() -> None:
            await loop.create_server(lambda: far, port=PORT)
            task = asyncio.create_task(asyncio.sleep(1e6), name="child")
            try:
                await task
            finally:
                far.transport.write(b"last words")
                with pytest.raises(OSError, match="in use"):
                    await loop.create_server(Recorder, port=PORT + 1)
                with pytest.raises(ConnectionRefusedError):
                    await loop.create_connection(Recorder, port=PORT + 2)
                ended.append("server")

        loop.process("server", server)
        await asyncio.sleep(1.0)
        assert [task.get_name() for task in loop.tasks_of("server")] == ["server", "child"]
        transport, near = await loop.create_connection(Recorder, port=PORT)
        assert isinstance(transport, Transport)
        await loop.kill("server")
        await asyncio.sleep(1.0)
        assert ended == ["server"]
        assert near.data == b""
        assert near.events == [ConnectionResetError]
        assert loop.tasks_of("server") == []
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Recorder, port=PORT)

    run(main)


def test_calls_of_the_virtual_executor_follow_each_other() -> None:
    async def main(loop: VirtualLoop) -> None:
        executor = VirtualExecutor(lambda: 0.5)
        done = [executor.submit(loop.time) for _ in range(3)]
        assert await asyncio.gather(*done) == [0.5, 1.0, 1.5]

        def fail() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await executor.run(fail)

    run(main)
