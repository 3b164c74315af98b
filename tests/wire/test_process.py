from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import sys

import pytest

from wire.aio.process import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    announce,
    ending_signals,
    run_main,
    stop_on_signals,
    unless_stopped,
)
from wire.aio.quiet import MAX_BURST
from wire.errors import LinkLost


class ModelTrouble(Exception):
    """Stands for an error of a layer that `wire` does not know."""


def failing(exc: BaseException, *expected: type[Exception], debug: bool = False) -> int:
    async def main() -> int:
        raise exc

    return run_main("relay", main, *expected, debug=debug)


async def succeeding() -> int:
    return EXIT_OK


def test_the_exit_code_is_that_of_the_program() -> None:
    assert run_main("relay", succeeding) == EXIT_OK


@pytest.mark.parametrize(
    ("exc", "line"),
    [
        (LinkLost("no relay answers at ws://r:1"), "foredraft-relay: no relay answers at ws://r:1\n"),
        (OSError(98, "address in use"), "foredraft-relay: [Errno 98] address in use\n"),
        (ModelTrouble("two\n  lines"), "foredraft-relay: two lines\n"),
        (TimeoutError(), "foredraft-relay: TimeoutError\n"),
        (ExceptionGroup("tasks", [ExceptionGroup("", [LinkLost("gone")])]), "foredraft-relay: gone\n"),
    ],
)
def test_an_expected_error_is_one_line_and_exit_code_one(
    exc: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(exc, ModelTrouble) == EXIT_FAILURE
    assert capsys.readouterr() == ("", line)


def test_an_unexpected_error_and_debugging_show_the_traceback() -> None:
    with pytest.raises(ModelTrouble):
        failing(ModelTrouble("a bug"))
    with pytest.raises(LinkLost):
        failing(LinkLost("gone"), debug=True)


def test_an_interrupt_exits_with_130() -> None:
    assert failing(KeyboardInterrupt()) == EXIT_INTERRUPTED


@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signals_ask_to_stop(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stop = stop_on_signals()
    try:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 5.0)
    finally:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(each)
    assert f"{number.name}: draining" in caplog.text


def test_readiness_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    announce(port=8700)
    assert json.loads(capsys.readouterr().out) == {"ready": True, "port": 8700}


@pytest.mark.usefixtures("at_a_terminal")
def test_a_process_under_nohup_outlives_its_terminal() -> None:
    assert signal.SIGHUP in ending_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ending_signals() == [signal.SIGTERM, signal.SIGINT]


def test_c080_no_descriptor_left_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio tells of each of a hundred attempts a second, with a traceback."""

    async def main() -> int:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            exc = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": exc})
            late = "Exception in callback BaseSelectorEventLoop._start_serving()"
            loop.call_exception_handler({"message": late, "exception": ValueError("Invalid file descriptor: -1")})
        loop.call_exception_handler({"message": "something else", "exception": ValueError("a bug")})
        return EXIT_OK

    assert run_main("relay", main) == EXIT_OK
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "nobody can be let in, open files are at their limit: [Errno 24] Too many open files"
    ] * MAX_BURST + ["something else"]


async def test_a_process_that_loads_a_model_need_not_be_waited_for() -> None:
    """Its thread is busy for minutes, and nobody depends on it yet."""
    loading = (
        "import asyncio, threading; from wire.aio.process import run_main, stop_on_signals, unless_stopped\n"
        "async def main():\n"
        "    stop = stop_on_signals()\n"
        "    print('loading', flush=True)\n"
        "    await unless_stopped(stop, asyncio.to_thread(threading.Event().wait))\n"
        "run_main('verify', main)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", loading, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 20.0) == EXIT_OK


async def test_what_is_loaded_in_time_is_used() -> None:
    async def load() -> str:
        return "a model"

    assert await unless_stopped(asyncio.Event(), load()) == "a model"
