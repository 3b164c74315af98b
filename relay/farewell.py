"""How the relay ends links, with these codes:

1001   the relay shuts down
1002   the handshake was malformed
1011   the relay failed at this peer; its log says how
4001   the protocol versions differ
4002   no connected node fits the model served
4003   too many malformed frames
4004   the peer's credential is not for its role
4005   the peer's secret is not good any more
4008   the peer reads too slowly: its queue was full
"""

from __future__ import annotations

import asyncio
import logging

from relay.local import LocalLink
from wire.aio.link import Link
from wire.aio.sockets import CLOSE_TIMEOUT_S
from wire.errors import WireError
from wire.messages import Error

log = logging.getLogger(__name__)

CLOSE_CODES = {
    "draining": 1001,
    "version": 4001,
    "mismatch": 4002,
    "malformed": 4003,
    "not_allowed": 4003,
    "forbidden": 4004,
    "revoked": 4005,
    "slow_consumer": 4008,
}


async def say_goodbye(link: Link | LocalLink, code: str, reason: str) -> None:
    """Tell a peer why it has to go, if it reads, and close its link."""
    try:
        if code != "slow_consumer":
            link.send(Error(code=code, message=reason))
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await link.flush()
    except (WireError, TimeoutError):
        log.debug("the peer does not read its last frames")
    await close_link(link, CLOSE_CODES.get(code, 4000), reason)


async def close_link(link: Link | LocalLink, code: int, reason: str) -> None:
    """Close a link; one that does not close in time is cut. Raises nothing: the link is over either way."""
    try:
        async with asyncio.timeout(2 * CLOSE_TIMEOUT_S):
            await link.close(code, reason.encode("ascii", "replace").decode())
    except Exception as exc:
        log.debug("cut off instead of closed: %r", exc)
        link.abort()
