"""Clients for each service and region, and a count of the calls they make."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import boto3
from botocore.config import Config

MAX_ATTEMPTS = 5


class Clients:
    """Makes clients once each.

    Args:
        endpoint_url: where all services are asked instead of at AWS; for tests.
        max_attempts: tries of one call; botocore waits between them, with jitter.
        session: used instead of a new one of `profile`, which is made, and looked for, at the first question.
    """

    def __init__(
        self,
        *,
        profile: str | None = None,
        endpoint_url: str | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        session: boto3.session.Session | None = None,
    ) -> None:
        self._profile = profile
        self._session = session
        self._endpoint_url = endpoint_url
        self._config = Config(
            retries={"mode": "standard", "total_max_attempts": max_attempts},
            connect_timeout=10,
            read_timeout=60,
            user_agent_extra="foredraft-infra",
        )
        self._clients: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()

    def __call__(self, service: str, region: str) -> Any:
        """The client of a service in a region."""
        with self._lock:
            if (service, region) not in self._clients:
                self._session = self._session or boto3.session.Session(profile_name=self._profile)
                client = self._session.client(
                    service, region_name=region, endpoint_url=self._endpoint_url, config=self._config
                )
                client.meta.events.register("before-call.*.*", self._count)
                self._clients[service, region] = client
            return self._clients[service, region]

    def _count(self, model: Any, **_: Any) -> None:
        self.calls[model.name] += 1
