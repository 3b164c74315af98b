"""A JSONL trace of what a process did, written off the event loop.

Events are small objects with an `event` name and `now`, the process's own monotonic clock. The queue is bounded:
when the disk cannot keep up, events are dropped and counted, and the count is the last line of the file.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import orjson

MAX_QUEUED_EVENTS = 65_536


class TraceWriter:
    """Appends events to `path` from a thread of its own; with no path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self.num_dropped = 0
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED_EVENTS)
        self._thread: threading.Thread | None = None
        if path is not None:
            self._thread = threading.Thread(target=self._write, args=(path,), name="trace", daemon=True)
            self._thread.start()

    @property
    def enabled(self) -> bool:
        """Whether events are kept; callers skip building them when not."""
        return self._thread is not None

    def write(self, event: str, now: float, **fields: Any) -> None:
        """Queue one event."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait({"event": event, "now": now, **fields})
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what is queued and close the file."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(timeout=10)
        self._thread = None

    def _write(self, path: Path) -> None:
        with path.open("wb", buffering=1 << 16) as file:
            while (event := self._queue.get()) is not None:
                file.write(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))
                if self._queue.empty():
                    file.flush()
            if self.num_dropped:
                file.write(orjson.dumps({"event": "dropped", "num_events": self.num_dropped}))
