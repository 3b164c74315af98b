"""`python -m relay`: listen, pair, carry frames until told to stop."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from relay.config import RelayConfig
from relay.credentials import CredentialsError
from relay.server import RelayServer
from wire.aio.process import EXIT_OK, announce, run_main, stop_on_signals
from wire.aio.trace import TraceWriter
from wire.settings import setup_logging


async def serve(config: RelayConfig) -> int:
    """Serve until SIGTERM; the exit code."""
    stop = stop_on_signals()
    trace = TraceWriter(config.trace)
    server = RelayServer(config, trace=trace)
    await server.start()
    announce(port=server.port)
    try:
        await server.serve(stop)
    finally:
        trace.close()
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    config = RelayConfig.read(argv)
    setup_logging(config.log_level)
    return run_main("relay", lambda: serve(config), CredentialsError, debug=config.log_level == "debug")


if __name__ == "__main__":
    sys.exit(main())
