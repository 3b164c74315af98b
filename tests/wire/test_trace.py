"""A trace is bounded, rotates, keeps order and says what it dropped."""

from __future__ import annotations

import threading
from pathlib import Path

import orjson
import pytest

from wire.aio import trace
from wire.aio.trace import TraceWriter, trace_files


def read(path: Path) -> list[int]:
    return [orjson.loads(line)["n"] for file in trace_files(path) for line in file.read_bytes().splitlines()]


def write(path: Path, count: int, **limits: int) -> TraceWriter:
    writer = TraceWriter(path, **limits)
    for n in range(count):
        writer.write("step", 0.5, n=n)
    writer.close()
    return writer


def test_events_come_back_in_order(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 1000)
    assert read(tmp_path / "a.jsonl") == list(range(1000))


def test_the_newest_events_are_kept_within_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, 1000, max_file_bytes=1000, num_files=3)
    kept = read(path)
    assert len(trace_files(path)) == 3
    assert kept == list(range(1000 - len(kept), 1000))
    assert sum(file.stat().st_size for file in trace_files(path)) <= 3 * 1100


def test_one_file_is_a_bound_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, 100, max_file_bytes=1000, num_files=1)
    assert trace_files(path) == [path]
    assert read(path)[-1] == 99


def test_files_of_an_earlier_run_are_not_read_as_this_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, 1000, max_file_bytes=1000, num_files=3)
    (tmp_path / "a.jsonl.note").write_text("mine")
    write(path, 3)
    assert read(path) == [0, 1, 2]
    assert (tmp_path / "a.jsonl.note").exists()


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a writer's thread rests; the test's writers rest until they are closed."""
    rests = threading.Event()

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:  # a thread waits without one until it has started
                assert timeout == trace.WRITE_EVERY_S
                rests.set()
            return super().wait()

    monkeypatch.setattr(trace.threading, "Event", Closing)
    return rests


def test_what_does_not_fit_the_queue_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resting: threading.Event
) -> None:
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(trace, "MAX_QUEUED_EVENTS", 3)
    writer = TraceWriter(path)
    assert resting.wait(30)
    for n in range(5):
        writer.write("step", 0.0, n=n)
    writer.close()
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["n"] for line in lines[:-1]] == [0, 1, 2]
    assert lines[-1] == {"event": "dropped", "num_events": 2}


def test_the_thread_is_not_woken_for_an_event(tmp_path: Path, resting: threading.Event) -> None:
    path = tmp_path / "a.jsonl"
    writer = TraceWriter(path)
    assert resting.wait(30)
    for n in range(1000):
        writer.write("step", 0.5, n=n)
    assert path.stat().st_size == 0
    writer.close()
    assert read(path) == list(range(1000))


def test_without_a_path_nothing_is_done() -> None:
    writer = TraceWriter(None)
    writer.write("step", 0.0)
    writer.close()
    assert not writer.enabled


def test_a_bound_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_files must be at least 1, got 512 and 0"):
        TraceWriter(tmp_path / "a", max_file_bytes=512, num_files=0)


def test_the_folder_is_made_and_one_that_cannot_be_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run" / "draft.jsonl"
    TraceWriter(path).close()
    assert path.read_bytes() == b""
    with pytest.raises(FileExistsError):
        TraceWriter(path / "under-a-file.jsonl")
