"""A JSONL trace of what a process did, written off the event loop.

Events are small objects with an `event` name and `now`, the process's own monotonic clock. The queue is bounded:
when the disk cannot keep up, events are dropped and counted, and the count is the last line of the file. The files are
bounded too: a full one becomes PATH.1, that one PATH.2, and the oldest goes.

The thread looks at the queue every WRITE_EVERY_S and is not woken for an event: waking it costs the process several
times what writing the event does. A process that is killed loses what was queued since.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import orjson

MAX_QUEUED_EVENTS = 65_536
WRITE_EVERY_S = 0.1
MAX_FILE_BYTES = 512 << 20
NUM_FILES = 4


class TraceWriter:
    """Appends events to `path` from a thread of its own; with no path it does nothing.

    Args:
        max_file_bytes, num_files: a trace is never larger than their product, and by one event at most.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, path: Path | None, *, max_file_bytes: int = MAX_FILE_BYTES, num_files: int = NUM_FILES) -> None:
        if max_file_bytes < 1 or num_files < 1:
            raise ValueError(f"max_file_bytes and num_files must be at least 1, got {max_file_bytes} and {num_files}")
        self.num_dropped = 0
        self._max_file_bytes = max_file_bytes
        self._num_files = num_files
        self._events: deque[dict[str, Any]] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None:
            # What an earlier run has rotated away would be read as the beginning of this one.
            for old in trace_files(path):
                old.unlink()
            # Here, not in the thread, where nobody would hear of a folder that cannot be written.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
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
        if len(self._events) >= MAX_QUEUED_EVENTS:
            self.num_dropped += 1
            return
        self._events.append({"event": event, "now": now, **fields})

    def close(self) -> None:
        """Write what is queued and close the file."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join(timeout=10)
        self._thread = None

    def _write(self, path: Path) -> None:
        while self._write_file(path):
            for number in range(self._num_files - 1, 0, -1):
                source = path if number == 1 else rotated(path, number - 1)
                if source.exists():
                    source.replace(rotated(path, number))

    def _write_file(self, path: Path) -> bool:
        """Fill one file; whether there may be more to come."""
        with path.open("wb", buffering=1 << 16) as file:
            num_bytes = 0
            while num_bytes < self._max_file_bytes:
                # In this order: what was queued before the end is there when the end is seen.
                closing = self._closing.is_set()
                if self._events:
                    event = self._events.popleft()
                    num_bytes += file.write(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))
                elif closing:
                    if self.num_dropped:
                        file.write(orjson.dumps({"event": "dropped", "num_events": self.num_dropped}))
                    return False
                else:
                    file.flush()
                    self._closing.wait(WRITE_EVERY_S)
        return True


def rotated(path: Path, number: int) -> Path:
    """The file that was full `number` files ago."""
    return path.with_name(f"{path.name}.{number}")


def trace_files(path: Path) -> list[Path]:
    """The files of a trace that are there, oldest first."""
    older = [one for one in path.parent.glob(f"{path.name}.*") if one.name[len(path.name) + 1 :].isdecimal()]
    older.sort(key=lambda one: -int(one.name[len(path.name) + 1 :]))
    return [*older, path] if path.exists() else older
