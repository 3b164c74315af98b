"""`python -m relay`: listen, pair, carry frames until told to stop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relay.config import RelayConfig
from relay.credentials import CredentialsError
from relay.server import RelayServer
from wire.aio.process import EXIT_OK, announce, run_main, stop_on_signals, use_all_descriptors
from wire.aio.trace import TraceWriter
from wire.settings import setup_logging

if TYPE_CHECKING:
    from relay.api import Gateway


async def start_gateway(server: RelayServer) -> Gateway | None:
    """The HTTP side, if it is asked for."""
    config = server.config
    if config.http_port is None:
        return None
    # Here, not above: a relay without an API need not hold aiohttp and pydantic, 40 MB, in memory.
    from relay.api import Gateway

    gateway = Gateway(server)
    await gateway.start(config.http_host, config.http_port)
    return gateway


async def serve(config: RelayConfig) -> int:
    """Serve until SIGTERM; the exit code."""
    stop = stop_on_signals()
    use_all_descriptors()
    trace = TraceWriter(config.trace)
    server = RelayServer(config, trace=trace)
    await server.start()
    gateway = await start_gateway(server)
    announce(port=server.port, http_port=gateway.port if gateway is not None else None)
    try:
        await server.serve(stop)
    finally:
        if gateway is not None:
            await gateway.close()
        trace.close()
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    config = RelayConfig.read(argv)
    setup_logging(config.log_level)
    return run_main("relay", lambda: serve(config), CredentialsError, debug=config.log_level == "debug")


if __name__ == "__main__":
    sys.exit(main())
