"""Who is let in, over what: credentials and certificate, read again when their files change.

A file that cannot be read, or is not good, changes nothing: what was loaded last stays in force, and the log says why.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from relay.config import RelayConfig
from relay.credentials import Credential, Credentials, CredentialsError, Identity
from relay.limits import Pace
from wire.aio.quiet import RateLimited

log = logging.getLogger(__name__)


class Access:
    """The relay's credentials and certificate."""

    def __init__(self, config: RelayConfig) -> None:
        self.credentials = Credentials.shared(config.secret)
        self.paces: dict[str, Pace] = {}
        self.ssl_context: ssl.SSLContext | None = None
        self._newest: ssl.SSLContext | None = None
        self._config = config
        self._files = [path for path in (config.credentials, config.tls_cert, config.tls_key) if path is not None]
        self._seen: list[tuple[float, int]] = []
        self._complaints = RateLimited(log, logging.ERROR)

    async def load(self) -> None:
        """Read the files.

        Raises:
            CredentialsError, OSError: one of them is not good.
        """
        await asyncio.to_thread(self._load)

    def authenticate(self, secret: str) -> Identity | None:
        """Who comes with this secret."""
        return self.credentials.find(secret)

    def pace(self, credential: Credential, now: float) -> Pace | None:
        """The limits of a credential's links and requests; None for none."""
        if credential.frames_per_s is None and credential.bytes_per_s is None:
            return None
        if credential.name not in self.paces:
            self.paces[credential.name] = Pace(credential, now)
        return self.paces[credential.name]

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Look for changes, for ever; `on_change` is called after each that was good."""
        while self._files:
            await asyncio.sleep(self._config.reload_s)
            try:
                if await asyncio.to_thread(self._look) == self._seen:
                    continue
                await self.load()
            except (OSError, CredentialsError) as exc:
                self._complaints("", "credentials and certificate stay as they were: %s", exc)
                continue
            log.info("credentials and certificate were read again")
            self.paces.clear()
            on_change()

    def _look(self) -> list[tuple[float, int]]:
        stats = [path.stat() for path in self._files]
        return [(stat.st_mtime, stat.st_size) for stat in stats]

    def _load(self) -> None:
        # Looked at before the reading: a file that changes meanwhile is read once more.
        seen = self._look()
        try:
            self._read()
        finally:
            self._seen = seen

    def _read(self) -> None:
        config = self._config
        if config.tls_cert is not None:
            # Each reading has a context of its own: one that is loaded twice keeps both certificates where their keys
            # are of different kinds, and might go on serving the old one.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                context.load_cert_chain(config.tls_cert, config.tls_key)
            except ssl.SSLError as exc:
                raise CredentialsError(f"--tls-cert {config.tls_cert}: {exc.reason or exc}") from None
            self._newest = context
            if self.ssl_context is None:
                self.ssl_context = context
                context.sni_callback = self._serve_newest
        if config.credentials is not None:
            self.credentials = read_credentials(config.credentials)

    def _serve_newest(self, tls: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake, whether the peer has named a host or not: the listener keeps its first context."""
        assert self._newest is not None, "the first context was the newest once"
        tls.context = self._newest


def read_credentials(path: Path) -> Credentials:
    """Read a file of credentials.

    Raises:
        CredentialsError, OSError: it is not good.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CredentialsError(f"--credentials {path}: not a text file") from None
    if path.stat().st_mode & 0o007:
        log.warning("--credentials %s can be read by every user of this machine", path)
    try:
        return Credentials.from_toml(text)
    except CredentialsError as exc:
        raise CredentialsError(f"--credentials {path}: {exc}") from None
