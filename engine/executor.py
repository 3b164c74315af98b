"""The thread that owns a model, so that no forward pass runs on the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from engine.errors import EngineDead

P = ParamSpec("P")
T = TypeVar("T")
_Job = Callable[[], None]


class ModelExecutor:
    """One named thread, one call at a time, in the order of the calls.

    Works with one event loop at a time. A call whose caller was cancelled before it began is skipped; one that has
    begun runs to its end and its result is dropped.

    Attributes:
        limit_s: from when on `answer` takes a thread that is still at a call for one that hangs; None: never.
    """

    limit_s: float | None = None

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[Callable[[BaseException], None]] = set()
        self._closed = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether calls are still answered."""
        return not self._closed and self._death is None and self._thread.is_alive()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `fn` in the model's thread.

        Raises:
            EngineDead: the thread has died, or dies before it answers; or the executor is closed.
            Exception: whatever `fn` raises.
        """
        return await self.submit(fn, *args, **kwargs)

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Have `fn` called in the model's thread, which may begin at once; see `run` for what the future raises.

        Raises:
            EngineDead: the thread has died, or the executor is closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, exc: BaseException | None) -> None:
            if future.done():
                return
            if exc is not None:
                future.set_exception(exc)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def post(result: T | None, exc: BaseException | None) -> None:
            with self._lock:
                self._waiting.discard(fail)
            try:
                loop.call_soon_threadsafe(settle, result, exc)
            except RuntimeError:  # the loop is closed, nobody waits
                return

        def fail(exc: BaseException) -> None:
            post(None, exc)

        def job() -> None:
            if future.cancelled():
                with self._lock:
                    self._waiting.discard(fail)
                return
            try:
                result = fn(*args, **kwargs)
            except Exception as exc:
                # A future cannot carry StopIteration.
                carried = RuntimeError(repr(exc)) if isinstance(exc, StopIteration) else exc
                post(None, carried)
            else:
                post(result, None)

        with self._lock:
            if self._closed or self._death is not None or not self._thread.is_alive():
                raise self._dead()
            self._waiting.add(fail)
            self._jobs.put(job)
        return future

    async def answer(self, call: asyncio.Future[T]) -> T:
        """What a submitted call returns.

        Raises:
            EngineDead: as `run` does; or the call takes longer than `limit_s`.
        """
        if self.limit_s is None:
            return await call
        try:
            # In two halves: to a process that was stopped for long the first seems over before the thread has gone on.
            for _ in range(2):
                if (await asyncio.wait([call], timeout=self.limit_s / 2))[0]:
                    return call.result()
        except asyncio.CancelledError:
            call.cancel()
            raise
        raise EngineDead(f"the model has not answered for {self.limit_s:g} s")

    async def close(self) -> None:
        """Finish the calls already made, then end the thread. A second close only waits."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        # On a thread of its own: joining here would block the loop for as long as a forward pass takes.
        await asyncio.to_thread(self._thread.join)

    def _dead(self) -> EngineDead:
        if self._death is not None:
            return EngineDead(f"the model's thread has died: {self._death!r}")
        return EngineDead("the executor is closed" if self._closed else "the model's thread has died")

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as exc:  # SystemExit and the like: nobody would ever be answered again
            self._death = exc
        finally:
            with self._lock:
                waiting = list(self._waiting)
            for fail in waiting:
                fail(self._dead())
