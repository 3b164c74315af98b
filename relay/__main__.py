"""`python -m relay`: listen, pair, carry frames until told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence

from relay.config import RelayConfig
from relay.server import RelayServer
from wire.aio.trace import TraceWriter
from wire.settings import EXIT_OK, run_main, setup_logging, stop_on_signals

log = logging.getLogger("relay")


async def serve(config: RelayConfig) -> int:
    """Serve until SIGTERM; the exit code."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: shutting down", number.name)
        stop.set()

    stop_on_signals(on_signal)
    trace = TraceWriter(config.trace)
    server = RelayServer(config, trace=trace)
    await server.start()
    sys.stdout.write(json.dumps({"ready": True, "port": server.port}) + "\n")
    sys.stdout.flush()
    try:
        await server.serve(stop)
    finally:
        trace.close()
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    config = RelayConfig.read(argv)
    setup_logging(config.log_level)
    return run_main("relay", lambda: serve(config), debug=config.log_level == "debug")


if __name__ == "__main__":
    sys.exit(main())
