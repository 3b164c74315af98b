"""An event loop whose clock jumps to the next timer, with processes that can be killed and wires that can break.

asyncio programs run in it unchanged: relay, nodes and clients with their real links over the real WebSocket library.
Only the sockets are in memory (`virtual_net.py`), and what would run in a thread runs on the loop, in virtual time. So
ten minutes of pings, back-offs and time-outs take seconds, and the same seed gives the same run.

A *process* is whatever is started under a name (`VirtualLoop.process`): its tasks, its callbacks and its sockets carry
the name along, as context variables do. `kill` resets its sockets and ends its tasks, and nothing it still tries in
their `finally` gets out.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from engine.errors import EngineDead
from engine.executor import ModelExecutor
from scripts.virtual_net import Network

T = TypeVar("T")
PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("process", default="")
"""The name of the process that the running code belongs to."""
THREAD_S = 0.0005
"""What a call in a thread takes."""


class Deadlock(Exception):
    """Nothing is ready and no timer is set: whoever still waits waits for ever."""


class _Clock:
    """Stands where the loop has its selector: instead of waiting, it moves the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise Deadlock("nothing is left to happen, and tasks wait")
        self.now += max(0.0, timeout_s)
        return []

    def close(self) -> None:
        """There is nothing to close."""


class _Task(asyncio.Task[Any]):
    """A task with a number for a hash: sets of tasks, a task group's say, have the same order in each run."""

    def __init__(self, coroutine: Any, *, number: int, **options: Any) -> None:
        self.number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.number


class _Timer(asyncio.TimerHandle):
    """One of equal times comes in the order of its making; asyncio leaves that to how its heap happens to lie."""

    _when: float
    _scheduled: bool

    def __init__(self, number: int, *args: Any) -> None:
        super().__init__(*args)
        self.number = number

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Timer)
        return (self._when, self.number) < (other._when, other.number)


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module's docstring. `network` makes its connections."""

    _scheduled: list[_Timer]

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._clock = self._selector = _Clock()
        self._clock_resolution = 1e-9
        self.network = network
        self._mains: set[asyncio.Task[Any]] = set()
        self._num_tasks = self._num_timers = 0
        self._tasks: dict[str, list[weakref.ref[asyncio.Task[Any]]]] = {}
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._clock.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        self._num_timers += 1
        timer = _Timer(self._num_timers, when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # as the base class does
        timer._scheduled = True
        return timer

    def process(self, name: str, main: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Start a process: `main()` and all that it starts."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, name)
        task = context.run(lambda: self.create_task(main(), name=name))
        # Who waits for what nothing refers to would be collected as garbage.
        self._mains.add(task)
        task.add_done_callback(self._mains.discard)
        return task

    async def kill(self, name: str) -> None:
        """End a process as SIGKILL does."""
        self.network.kill(name)
        tasks = self.tasks_of(name)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def tasks_of(self, name: str) -> list[asyncio.Task[Any]]:
        """Tasks of a process that have not ended, the oldest first."""
        running = [task for ref in self._tasks.get(name, ()) if (task := ref()) is not None and not task.done()]
        self._tasks[name] = list(map(weakref.ref, running))
        return running

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call it here, a moment later."""
        return call_later(self, THREAD_S, lambda: func(*args))

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """A connection in memory."""
        protocol = protocol_factory()
        return await self.network.connect(protocol, int(port), process=PROCESS.get()), protocol

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Listen, in memory."""
        return self.network.listen(protocol_factory, int(port or 0), process=PROCESS.get())

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        self._num_tasks += 1
        task = _Task(coroutine, loop=loop, number=self._num_tasks, **options)
        tasks = self._tasks.setdefault(PROCESS.get(), [])
        tasks.append(weakref.ref(task))
        if len(tasks) % 256 == 0:
            self.tasks_of(PROCESS.get())
        return task

    def _process_events(self, events: list[Any]) -> None:
        """There are no files to watch."""

    def _write_to_self(self) -> None:
        """There is no other thread to be woken from."""


def call_later(loop: asyncio.AbstractEventLoop, delay_s: float, call: Callable[[], T]) -> asyncio.Future[T]:
    """Make a call after `delay_s`; the future has its result, or what it raises."""
    future: asyncio.Future[T] = loop.create_future()

    def settle() -> None:
        if future.cancelled():
            return
        try:
            future.set_result(call())
        except Exception as exc:
            future.set_exception(exc)

    loop.call_later(delay_s, settle)
    return future


class VirtualExecutor(ModelExecutor):
    """A `ModelExecutor` without a thread: calls take `call_s()` of virtual time each, one after the other."""

    def __init__(self, call_s: Callable[[], float]) -> None:
        self._call_s = call_s
        self._free_at = 0.0
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether calls are still answered."""
        return not self._closed

    def submit(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        """See `ModelExecutor.submit`."""
        if self._closed:
            raise EngineDead("the executor is closed")
        loop = asyncio.get_running_loop()
        self._free_at = max(loop.time(), self._free_at) + self._call_s()
        return call_later(loop, self._free_at - loop.time(), lambda: fn(*args, **kwargs))

    async def close(self) -> None:
        """Take no more calls."""
        self._closed = True
