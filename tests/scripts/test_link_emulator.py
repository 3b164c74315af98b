"""The emulated link between real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from scripts.link_emulator import EmulatedLink, emulated_link, main
from scripts.link_shape import LinkShape

SCRIPT = Path(__file__).parents[2] / "scripts" / "link_emulator.py"
Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(shape: LinkShape) -> AsyncIterator[tuple[EmulatedLink, Peer, Peer]]:
    """A link with one connection through it: the link, the near peer and the far one."""
    accepted: asyncio.Queue[Peer] = asyncio.Queue()

    async def on_accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait((reader, writer))

    server = await asyncio.start_server(on_accept, "127.0.0.1", 0)
    try:
        async with emulated_link(server.sockets[0].getsockname()[:2], shape, seed=1) as link:
            near = await asyncio.open_connection(*link.address)
            far = await asyncio.wait_for(accepted.get(), 5)
            try:
                yield link, near, far
            finally:
                for _, writer in (near, far):
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
    finally:
        server.close()
        await server.wait_closed()


async def within(awaitable: Awaitable[bytes]) -> bytes:
    return await asyncio.wait_for(awaitable, 10)


async def test_bytes_arrive_whole_in_order_in_both_directions() -> None:
    sent = bytes(range(256)) * 4096
    async with connected(LinkShape(delay_s=0.002, jitter_s=0.002)) as (_, near, far):
        near[1].write(sent)
        far[1].write(sent[::-1])
        got = await asyncio.gather(within(far[0].readexactly(len(sent))), within(near[0].readexactly(len(sent))))
    assert got[0] == sent
    assert got[1] == sent[::-1]


async def test_a_round_trip_takes_at_least_twice_the_delay() -> None:
    loop = asyncio.get_running_loop()
    async with connected(LinkShape(delay_s=0.02)) as (_, near, far):
        begun = loop.time()
        near[1].write(b"ping")
        far[1].write(await within(far[0].readexactly(4)))
        await within(near[0].readexactly(4))
        assert 0.04 <= loop.time() - begun < 2


async def test_a_half_close_is_passed_on_and_the_other_half_stays_open() -> None:
    async with connected(LinkShape(delay_s=0.001)) as (_, near, far):
        near[1].write(b"question")
        near[1].write_eof()
        assert await within(far[0].read()) == b"question"
        far[1].write(b"answer")
        far[1].write_eof()
        assert await within(near[0].read()) == b"answer"


async def test_a_cut_resets_both_sides() -> None:
    async with connected(LinkShape(delay_s=0.001)) as (link, near, far):
        near[1].write(b"x")
        await within(far[0].readexactly(1))
        link.cut()
        for reader, _ in (near, far):
            with pytest.raises(ConnectionResetError):
                await within(reader.read())


@pytest.mark.parametrize("shape", [LinkShape(cut_after_s=0.01), LinkShape(cut_after_bytes=3)])
async def test_the_shape_cuts_by_itself(shape: LinkShape) -> None:
    async with connected(shape) as (link, near, far):
        near[1].write(b"abcdef")
        with pytest.raises(ConnectionResetError):
            await within(far[0].read())
        with pytest.raises(ConnectionResetError):
            await within(near[0].read())
    assert link.stats.num_cut == 1
    if shape.cut_after_bytes is not None:
        assert link.stats.up_bytes == 3


async def test_swallowing_loses_bytes_and_closes_nothing() -> None:
    async with connected(LinkShape(swallow_after_bytes=4)) as (link, near, far):
        near[1].write(b"abcdef")
        assert await within(far[0].readexactly(4)) == b"abcd"
        far[1].write(b"lost")
        near[1].write_eof()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(far[0].read(1), 0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(near[0].read(1), 0.05)
    assert link.stats.swallowed_bytes == 6


async def test_a_stall_by_hand_holds_bytes_back() -> None:
    loop = asyncio.get_running_loop()
    async with connected(LinkShape()) as (link, near, far):
        begun = loop.time()
        link.stall(0.15)
        near[1].write(b"x")
        await within(far[0].readexactly(1))
        assert loop.time() - begun >= 0.15


async def test_a_reset_by_one_peer_reaches_the_other_after_its_bytes() -> None:
    async with connected(LinkShape(delay_s=0.02)) as (_, near, far):
        far[1].write(b"last words")
        await far[1].drain()
        near[1].write(b"x")
        await within(far[0].readexactly(1))
        far[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far[1].transport.abort()
        assert await within(near[0].readexactly(10)) == b"last words"
        with pytest.raises(ConnectionResetError):
            await within(near[0].read())


async def test_writing_to_a_peer_that_closed_ends_in_a_reset() -> None:
    async def write_on(writer: asyncio.StreamWriter) -> bytes:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.001)

    async with connected(LinkShape(delay_s=0.001)) as (_, near, far):
        far[1].close()
        assert await within(near[0].read()) == b""
        with pytest.raises(ConnectionError):
            await within(write_on(near[1]))


async def test_a_slow_receiver_stops_the_sender() -> None:
    num_bytes = 64 * 1024 * 1024
    async with connected(LinkShape(delay_s=0.001, buffer_bytes=64 * 1024)) as (_, near, far):
        near[1].transport.set_write_buffer_limits(high=64 * 1024)
        near[1].write(bytes(num_bytes))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(near[1].drain(), 0.2)
        # Kernel buffers hold some megabytes on the way; the rest still waits with the sender.
        assert near[1].transport.get_write_buffer_size() > num_bytes // 2
        assert len(await within(far[0].readexactly(1024))) == 1024
        near[1].transport.abort()


async def test_an_absent_target_closes_the_connection_and_the_link_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with emulated_link(("127.0.0.1", port), LinkShape()) as link:
        for expected in (1, 2):
            reader, writer = await asyncio.open_connection(*link.address)
            assert await within(reader.read()) == b""
            writer.close()
            await writer.wait_closed()
            assert link.stats.num_refused == expected


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def test_the_process_says_its_port_counts_bytes_and_exits_0_on_sigterm() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = await started("--to", f"127.0.0.1:{port}", "--delay-ms", "5")
    assert process.stdout is not None
    ready = json.loads(await within(process.stdout.readline()))
    assert ready["ready"]
    reader, writer = await asyncio.open_connection("127.0.0.1", ready["port"])
    writer.write(b"hello")
    assert await within(reader.readexactly(5)) == b"hello"
    process.send_signal(signal.SIGTERM)
    final = json.loads(await within(process.stdout.readline()))
    assert final["event"] == "exit"
    assert (final["up_bytes"], final["down_bytes"], final["num_connections"]) == (5, 5, 1)
    assert await asyncio.wait_for(process.wait(), 10) == 0
    writer.close()
    server.close()
    await server.wait_closed()


async def test_sighup_takes_a_new_delay_from_the_file_and_tells_the_bytes_so_far(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    delay_file = tmp_path / "delay"
    process = await started("--to", f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "--delay-file", str(delay_file))
    assert process.stdout is not None
    port = json.loads(await process.stdout.readline())["port"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop = asyncio.get_running_loop()
    writer.write(b"abc")
    await reader.readexactly(3)
    delay_file.write_text("60")
    process.send_signal(signal.SIGHUP)
    assert json.loads(await process.stdout.readline()) == {"event": "reload", "up_bytes": 3, "down_bytes": 3}
    before = loop.time()
    writer.write(b"defg")
    await reader.readexactly(4)
    assert loop.time() - before >= 0.120
    writer.close()
    process.terminate()
    await within(process.stdout.readline())
    assert await asyncio.wait_for(process.wait(), 10) == 0
    server.close()
    await server.wait_closed()


async def test_a_port_in_use_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await started("--listen", f"127.0.0.1:{port}", "--to", "127.0.0.1:1")
        _, errors = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 1
    assert errors.decode().splitlines() == [f"link_emulator: cannot listen on 127.0.0.1:{port}: Address already in use"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--to", "nowhere"], "is not HOST:PORT"),
        (["--to", "192.0.2.1:80"], "add --allow-remote"),
        (["--to", "127.0.0.1:80", "--listen", "0.0.0.0:0"], "add --allow-remote"),
        (["--to", "127.0.0.1:80", "--delay-ms", "-1"], "delay_s is -0.001"),
    ],
)
def test_wrong_usage_exits_2_and_names_the_reason(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
