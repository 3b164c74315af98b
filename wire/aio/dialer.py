"""Keeping a node linked to its relay: dial, run, and dial again with growing, jittered pauses."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from wire.aio.causes import without_secrets
from wire.aio.link import Link, dial
from wire.errors import LinkLost, PeerMismatch, QueueFull
from wire.messages import Hello
from wire.settings import read_secret_file

log = logging.getLogger(__name__)


@dataclass
class Backoff:
    """Pauses between attempts: `first_s`, doubling up to `most_s`, each cut by up to half at random.

    A link that stood for `stable_s` resets it; one that fell at once does not, or a refusing relay would be hammered.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    stable_s: float = 30.0
    num_failures: int = 0
    has_stood: bool = False

    def pause_s(self, rng: random.Random) -> float:
        """The pause before the next attempt."""
        # The exponent is bounded too: 2.0**1024, after a night's outage, is an OverflowError.
        longest = min(self.most_s, self.first_s * 2.0 ** min(self.num_failures, 32))
        self.num_failures += 1
        return longest * rng.uniform(0.5, 1.0)

    def on_link_ended(self, up_s: float) -> None:
        """A link stood for `up_s`."""
        if up_s >= self.stable_s:
            self.num_failures = 0
            self.has_stood = True


class LinkUser(Protocol):
    """What a node does with its link."""

    def on_link(self, link: Link) -> None: ...

    def on_link_lost(self) -> None: ...

    def on_frame(self, frame: bytes, now: float) -> None: ...


async def keep_linked(
    user: LinkUser,
    *,
    url: str,
    secret: str,
    hello: Hello,
    ssl_context: ssl.SSLContext | None,
    secret_file: Path | None = None,
    ca_file: Path | None = None,
    on_first_link: Callable[[], None] = lambda: None,
    rng: random.Random | None = None,
) -> None:
    """Run for ever; raises when the relay turns us away for good.

    Once a link has stood, a mismatch is not for good: the node fits one that is only not back yet, as after a restart
    of the relay.

    Args:
        secret_file: read again before each link but the first, so that the secret can be changed without a restart.
        ca_file: read again too: what stands in it by then is trusted as well.

    Raises:
        Refused, PeerMismatch, VersionMismatch: trying again as we are would not help.
        LinkLost: of the very first attempt, so that a wrong address is told at once.
    """
    loop = asyncio.get_running_loop()
    backoff = Backoff()
    rng = rng or random.Random()
    was_up = False
    while True:
        if secret_file is not None and was_up:
            try:
                secret = await asyncio.to_thread(read_secret_file, secret_file)
            except (OSError, UnicodeDecodeError) as exc:
                log.warning("the secret file cannot be read, the last secret is used: %s", type(exc).__name__)
        if ssl_context is not None and ca_file is not None and was_up:
            try:
                await asyncio.to_thread(ssl_context.load_verify_locations, ca_file)
            except OSError as exc:
                log.warning("the file of the private authority cannot be read: %s", exc)
        try:
            link = await dial(url, secret=secret, hello=hello, ssl_context=ssl_context)
        except (LinkLost, PeerMismatch) as exc:
            if not (was_up if isinstance(exc, LinkLost) else backoff.has_stood):
                raise
            pause_s = backoff.pause_s(rng)
            log.warning("%s; next attempt in %.1f s", exc, pause_s)
            await asyncio.sleep(pause_s)
            continue
        since = loop.time()
        log.info("> linked to the relay at %s", without_secrets(url))
        user.on_link(link)
        if not was_up:
            was_up = True
            on_first_link()
        code, reason = 1001, "going away"
        try:
            await link.run(lambda kind, session, frame, now: user.on_frame(frame, now))
        except (LinkLost, QueueFull, PeerMismatch) as exc:
            backoff.on_link_ended(loop.time() - since)
            if isinstance(exc, PeerMismatch) and not backoff.has_stood:
                raise
            log.warning("< link to the relay lost: %s", exc)
            # Should the relay still be there, it reads why we gave it up.
            code, reason = 1011, str(exc)
        finally:
            user.on_link_lost()
            await link.close(code, reason)
        await asyncio.sleep(backoff.pause_s(rng))
