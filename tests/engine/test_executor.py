import asyncio
import threading

import pytest

from engine.errors import EngineDead
from engine.executor import ModelExecutor


async def test_calls_run_in_order_on_one_named_thread() -> None:
    executor = ModelExecutor("target model")
    seen: list[tuple[int, str]] = []

    def call(i: int, *, factor: int) -> int:
        seen.append((i, threading.current_thread().name))
        return i * factor

    results = await asyncio.gather(*(executor.run(call, i, factor=2) for i in range(20)))
    assert results == [2 * i for i in range(20)]
    assert seen == [(i, "target model") for i in range(20)]
    await executor.close()


async def test_the_loop_goes_on_while_a_call_runs() -> None:
    executor = ModelExecutor("model")
    release = threading.Event()
    call = asyncio.create_task(executor.run(release.wait, 30))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not call.done()
    release.set()
    assert await call
    await executor.close()


async def test_exceptions_reach_the_caller_and_the_thread_goes_on() -> None:
    executor = ModelExecutor("model")

    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await executor.run(fail)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await executor.run(next, iter(()))
    assert await executor.run(int, "3") == 3
    assert executor.alive
    await executor.close()


async def test_when_the_thread_dies_all_callers_are_told() -> None:
    executor = ModelExecutor("model")
    release = threading.Event()

    def die() -> None:
        release.wait(30)
        raise SystemExit(1)

    calls = [asyncio.create_task(executor.run(die)), asyncio.create_task(executor.run(int))]
    await asyncio.sleep(0)
    release.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead, EngineDead]
    assert "SystemExit" in str(results[0])
    assert not executor.alive
    with pytest.raises(EngineDead, match="SystemExit"):
        await executor.run(int)
    await executor.close()


async def test_close_finishes_what_was_asked_and_refuses_more() -> None:
    executor = ModelExecutor("model")
    release = threading.Event()
    call = asyncio.create_task(executor.run(release.wait, 30))
    await asyncio.sleep(0)
    closing = asyncio.create_task(executor.close())
    await asyncio.sleep(0)
    with pytest.raises(EngineDead, match="closed"):
        await executor.run(int)
    release.set()
    assert await call
    await closing
    await executor.close()
    assert not executor.alive


async def test_a_cancelled_call_that_has_not_begun_is_skipped() -> None:
    executor = ModelExecutor("model")
    release, ran = threading.Event(), threading.Event()
    first = asyncio.create_task(executor.run(release.wait, 30))
    second = asyncio.create_task(executor.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    release.set()
    await first
    assert await executor.run(int) == 0
    assert not ran.is_set()
    await executor.close()


async def test_c079_a_thread_that_hangs_is_as_good_as_dead() -> None:
    executor = ModelExecutor("model")
    executor.limit_s = 0.02
    release = threading.Event()
    with pytest.raises(EngineDead, match=r"not answered for 0\.02 s"):
        await executor.answer(executor.submit(release.wait, 30))
    release.set()
    executor.limit_s = 30
    assert await executor.answer(executor.submit(int, "3")) == 3
    await executor.close()


async def test_a_process_that_was_stopped_for_long_does_not_take_its_thread_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = ModelExecutor("model")
    executor.limit_s = 20
    call: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def over_at_once(calls: list[asyncio.Future[int]], *, timeout: float) -> tuple[set[object], set[object]]:
        assert timeout == 10
        was_done = {one for one in calls if one.done()}
        if not call.done():
            call.set_result(3)
        return was_done, set()

    monkeypatch.setattr(asyncio, "wait", over_at_once)
    assert await executor.answer(call) == 3
    monkeypatch.undo()
    await executor.close()


async def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    executor = ModelExecutor("model")
    executor.limit_s = 30
    release, begun = threading.Event(), threading.Event()
    blocking = executor.submit(release.wait, 30)
    waiting = asyncio.create_task(executor.answer(executor.submit(begun.set)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    release.set()
    await blocking
    await executor.close()
    assert not begun.is_set()
