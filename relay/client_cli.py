"""The commands `foredraft chat` and `foredraft stream`.

Exit codes: 0 the answer is complete, 1 it failed (one line on standard error says why), 2 usage, 130 interrupted, 141
nobody reads the output any more.
Ctrl-C cancels the request, on the nodes too; what had come stays on the screen. A second one does not wait for the
relay's word. In a conversation it ends the answer; at the prompt, the conversation, which goes on after an answer that
failed.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Protocol

from relay.client import Delta, Event, Finished, StreamClient
from relay.client_config import ClientConfig
from wire.aio.process import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, ending_signals, run_main
from wire.printable import for_terminal
from wire.settings import setup_logging, ssl_context

EXIT_USAGE = 2
EXIT_PIPE = 141
CANCEL_S = 2.0
"""How long a cancelled request may take to end with its figures."""
USAGE = "usage: foredraft {chat,stream} [--help] ...\n"
Turns = list[tuple[str, str]]


class Display(Protocol):
    """Shows events."""

    def show(self, event: Event) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """The text as it comes, for a terminal without control characters; the figures at the end, on standard error
    unless it is all for a terminal."""

    def __init__(self) -> None:
        self._in_terminal = sys.stdout.isatty()
        self._in_line = False

    def show(self, event: Event) -> None:
        """Print one event."""
        if isinstance(event, Delta):
            print(for_terminal(event.text) if self._in_terminal else event.text, end="", flush=True)
            self._in_line = not event.text.endswith("\n") if event.text else self._in_line
        else:
            print(f"\n{summary(event)}", file=sys.stdout if self._in_terminal else sys.stderr, flush=True)
            self._in_line = False

    def close(self) -> None:
        """What is told next, why it failed or the next question, begins a line of its own."""
        if self._in_terminal and self._in_line:
            print(flush=True)


class JsonDisplay:
    """A line of JSON for each event, for programs."""

    def show(self, event: Event) -> None:
        """Print one event."""
        line = {"event": type(event).__name__.lower(), **asdict(event)}
        print(json.dumps(line, ensure_ascii=False), flush=True)

    def close(self) -> None:
        """Nothing is held open."""


def summary(finished: Finished) -> str:
    """The figures of one answer, in a line."""
    report = finished.report
    parts = [
        f"{finished.completion_tokens} tokens ({finished.finish_reason})",
        f"first after {finished.time_to_first_token_s * 1e3:.0f} ms",
        f"{finished.tokens_per_s:.2f} tokens/s",
    ]
    if report.get("rounds"):
        parts += [
            f"{report['rounds']:.0f} rounds",
            f"acceptance rate {report.get('acceptance_rate', 0.0):.3f}",
            f"mean acceptance length {report.get('mean_acceptance_length', 0.0):.2f}",
        ]
    return ", ".join(parts)


def told_place(place: int) -> None:
    """Say where in the line the question is."""
    print(f"all slots of the target are taken; place {place} in line", file=sys.stderr, flush=True)


async def answer(config: ClientConfig, turns: Turns | None, text: str, display: Display) -> tuple[str, Finished]:
    """Stream one answer to the display; its text and closing record.

    Args:
        turns: the conversation so far, the question last; None to continue `text`.
    """
    context = ssl_context(config.relay, config.ca_file)
    session = uuid.uuid4().hex
    said: list[str] = []
    async with StreamClient(
        config.relay, secret=config.secret, open_timeout_s=config.open_timeout_s, ssl_context=context
    ) as client:
        with cancelled_by_ctrl_c(client, session):
            async for event in client.stream(
                messages=turns,
                prompt=text if turns is None else None,
                model=config.model,
                max_tokens=config.max_tokens,
                sampling=config.sampling,
                stop=config.stop,
                speculate=not config.target_only,
                ignore_eos=config.ignore_eos,
                session=session,
                on_waiting=told_place,
            ):
                display.show(event)
                if isinstance(event, Finished):
                    return "".join(said), event
                said.append(event.text)
    raise AssertionError("a stream ends with Finished or an exception")


@contextmanager
def cancelled_by_ctrl_c(client: StreamClient, session: str) -> Iterator[None]:
    """Ctrl-C cancels the request, which then ends with its record. Where that does not come within CANCEL_S, or when
    Ctrl-C is pressed again, this task is cancelled. The same goes for the other signals to end: a command that is just
    gone would leave its answer running, for a client may come back."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    timers: list[asyncio.TimerHandle] = []

    def on_press() -> None:
        if timers:
            task.cancel()
            return
        client.cancel(session)
        timers.append(loop.call_later(CANCEL_S, task.cancel))

    signals = ending_signals()
    for number in signals:
        loop.add_signal_handler(number, on_press)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        for timer in timers:
            timer.cancel()


def display_of(config: ClientConfig) -> Display:
    """How the events are to be shown."""
    if config.json:
        return JsonDisplay()
    if config.panel:
        # Here, not above: rich takes a tenth of a second to import.
        from relay.panel import PanelDisplay

        return PanelDisplay()
    return PlainDisplay()


def one_answer(config: ClientConfig, turns: Turns | None, text: str) -> tuple[int, str]:
    """Ask once; the exit code and what was said."""
    said = ""

    async def ask() -> int:
        nonlocal said
        display = display_of(config)
        try:
            try:
                said, finished = await answer(config, turns, text, display)
            finally:
                display.close()
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            # What is still buffered would fail once more when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_PIPE
        return EXIT_INTERRUPTED if finished.finish_reason == "cancelled" else EXIT_OK

    code = run_main("client", ask, debug=config.log_level == "debug")
    return code, said


def converse(config: ClientConfig) -> int:
    """Question and answer in turn, until the end of the input or Ctrl-C at the prompt; the exit code."""
    turns: Turns = [("system", config.system)] if config.system else []
    while True:
        try:
            question = input("> ")
            question.encode()
        except UnicodeError as exc:
            print(not_text(exc), file=sys.stderr)
            continue
        except EOFError:
            print()
            return EXIT_OK
        except KeyboardInterrupt:
            print()
            return EXIT_INTERRUPTED
        if not question.strip():
            continue
        turns.append(("user", question))
        code, said = one_answer(config, turns, "")
        if code == EXIT_PIPE:
            return code
        if code == EXIT_FAILURE:
            # It may go well when asked again, and what was said before is not to be lost with it.
            turns.pop()
        else:
            turns.append(("assistant", said))


def not_text(exc: UnicodeError) -> str:
    """What is wrong with bytes that are no characters."""
    assert isinstance(exc, UnicodeDecodeError | UnicodeEncodeError), "what reading and encoding raise"
    return f"the text is not valid {exc.encoding.upper()}, see character {exc.start + 1}"


def prepare_streams(*, json: bool) -> None:
    """Standard streams that are there and take every character, whatever the caller closed and the locale says."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8" if json else None, errors="replace")


def run(config: ClientConfig, prog: str) -> int:
    """One command; its exit code."""
    prepare_streams(json=config.json)
    # What the library logs is for its own process; here the one line on standard error says what is wrong.
    setup_logging(config.log_level if config.log_level != "info" else "error")
    if config.text is None and config.chat and sys.stdin.isatty():
        return converse(config)
    try:
        text = config.text if config.text is not None else sys.stdin.read()
        # Bytes that are no characters come as surrogates, from the command line always.
        text.encode()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except UnicodeError as exc:
        sys.stderr.write(f"{prog}: {not_text(exc)}\n")
        return EXIT_USAGE
    if not text.strip():
        sys.stderr.write(f"{prog}: there is nothing to ask: give a text, or one on standard input\n")
        return EXIT_USAGE
    turns: Turns | None = None
    if config.chat:
        turns = [*([("system", config.system)] if config.system else []), ("user", text)]
    return one_answer(config, turns, text)[0]


def main(argv: Sequence[str] | None = None) -> int:
    """`foredraft COMMAND ...`; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help"):
        print(f"{USAGE}\nchat    ask a question\nstream  continue a text\n\nEach has a --help of its own.")
        return EXIT_OK
    if command not in ("chat", "stream"):
        sys.stderr.write(f"{USAGE}foredraft: the command must be chat or stream, got {command!r}\n")
        return EXIT_USAGE
    return run(ClientConfig.read(command, arguments[1:]), f"foredraft {command}")


def client_main(argv: Sequence[str] | None = None) -> int:
    """`foredraft-client ...`, short for `foredraft chat ...`; returns its exit code."""
    return run(ClientConfig.read("chat", argv, prog="foredraft-client"), "foredraft-client")


if __name__ == "__main__":
    sys.exit(main())
