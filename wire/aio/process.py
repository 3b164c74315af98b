"""The life of a process: exit codes, signals, and the run of a node from its first link to its last answer."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from wire.aio.dialer import LinkUser, keep_linked
from wire.aio.health import StatusServer
from wire.aio.quiet import RateLimited
from wire.aio.spot import spot_notice
from wire.errors import WireError
from wire.messages import PROTOCOL_VERSION, Hello, ModelIdentity
from wire.metrics import Family
from wire.printable import one_line
from wire.settings import NodeConfig, ssl_context

log = logging.getLogger(__name__)
T = TypeVar("T")

LEAVE_BEFORE_S = 10.0
"""A spot instance's node is gone so long before its machine is."""
EXIT_OK, EXIT_FAILURE, EXIT_INTERRUPTED = 0, 1, 130
"""A usage error exits with 2, by the argument parser."""


class Node(LinkUser, Protocol):
    """What draft and verify node have in common."""

    async def feed_model(self) -> None: ...

    async def drain(self, grace_s: float, reason: str) -> None: ...

    def unready(self) -> list[str]: ...

    def families(self) -> list[Family]: ...


SWITCH_INTERVAL_S = 0.0005


def run_main(
    program: str, main: Callable[[], Coroutine[Any, Any, int]], *expected: type[Exception], debug: bool = False
) -> int:
    """Run `main` in an event loop and turn its outcome into an exit code.

    Args:
        expected: errors that are told in one line, besides wire and operating-system errors.
        debug: show tracebacks.
    """

    async def watched() -> int:
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        return await main()

    try:
        return asyncio.run(watched())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as exc:
        cause: BaseException = exc
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if debug or not isinstance(cause, (WireError, OSError, *expected)):
            raise
        told = one_line(" ".join(str(cause).split())) or type(cause).__name__
        sys.stderr.write(f"foredraft-{program}: {told}\n")
        return EXIT_FAILURE


class LoopErrors:
    """What asyncio has nobody to tell but the log. While there are no descriptors left it tries to accept a hundred
    times a second, and tells each time with a traceback."""

    def __init__(self) -> None:
        self._not_accepted = RateLimited(log, logging.ERROR)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler."""
        text, exc = str(context.get("message", "")), context.get("exception")
        if text.startswith("socket.accept()"):
            self._not_accepted("", "nobody can be let in, open files are at their limit: %s", exc)
        elif "._start_serving" in text and isinstance(exc, ValueError):
            # The next attempts, for a port that was closed meanwhile.
            log.debug("not listening any more: %s", exc)
        else:
            loop.default_exception_handler(context)


def use_all_descriptors() -> None:
    """Raise the limit of open files as far as we may: each peer is one, and the usual 1,024 are few for a relay."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a process to end; that its terminal is gone is none for one that runs under nohup."""
    ending = [signal.SIGTERM, signal.SIGINT]
    return ending if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*ending, signal.SIGHUP]


def stop_on_signals() -> asyncio.Event:
    """An event that the signals to end set, in the running event loop."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: draining", number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """Wait for what is done before there is a link, such as the loading of a model; when told to stop, end at once.

    The thread that works cannot be interrupted, and may be at it for minutes; no session depends on it yet.
    """
    working, told = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, told], return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        os._exit(EXIT_OK)
    told.cancel()
    return await working


def announce(**fields: object) -> None:
    """Tell whoever started this process, in one JSON line on standard output, that it is ready."""
    sys.stdout.write(json.dumps({"ready": True, **fields}) + "\n")
    sys.stdout.flush()


async def run_node(node: Node, stop: asyncio.Event, *, config: NodeConfig, role: str, model: ModelIdentity) -> None:
    """Keep the node linked and its model fed until `stop`, then let its sessions finish.

    Raises:
        ExceptionGroup: of whatever ended it before: the relay turned it away, the model's thread died.
    """
    # Else the event loop waits up to 5 ms for a model's thread that is busy in Python, with a frame in hand.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What loading has made stays: walking through it again and again would hold up every session.
    gc.collect()
    gc.freeze()
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        role=role,
        name=config.name,
        region=config.region,
        capacity=config.slots,
        model=model,
    )
    status = StatusServer(unhealthy=list, unready=node.unready, families=node.families)
    status_port: dict[str, int] = {}
    if config.status_port >= 0:
        status_port["status_port"] = await status.listen(config.status_host, config.status_port)
    async with asyncio.TaskGroup() as tasks:
        link = keep_linked(
            node,
            url=config.relay,
            secret=config.secret,
            secret_file=config.secret_file,
            hello=hello,
            ssl_context=ssl_context(config.relay, config.ca_file),
            ca_file=config.ca_file,
            on_first_link=lambda: announce(model=model.name, **status_port),
        )
        running = [
            tasks.create_task(node.feed_model(), name="feed model"),
            tasks.create_task(link, name="relay link"),
            tasks.create_task(status.serve(), name="status"),
        ]
        grace_s, reason = await told_to_stop(stop, config)
        await node.drain(grace_s, reason)
        for task in running:
            task.cancel()


async def told_to_stop(stop: asyncio.Event, config: NodeConfig) -> tuple[float, str]:
    """Wait until the node must go; how long its sessions have, and why."""
    if not config.spot_metadata:
        await stop.wait()
        return config.grace_s, "the node was told to stop"
    async with asyncio.TaskGroup() as tasks:
        stopped = tasks.create_task(stop.wait(), name="wait for a signal")
        notice = tasks.create_task(spot_notice(config.spot_metadata, poll_s=config.spot_poll_s), name="spot notice")
        await asyncio.wait([stopped, notice], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, notice):
            task.cancel()
    if not notice.done() or notice.cancelled():
        return config.grace_s, "the node was told to stop"
    left_s = notice.result()
    log.warning("this spot instance goes in %.0f s: draining", left_s)
    return max(0.0, left_s - LEAVE_BEFORE_S), f"its spot instance goes in {left_s:.0f} s"
