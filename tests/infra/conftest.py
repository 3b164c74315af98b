"""AWS as moto plays it, over real HTTP on the loopback; dummy credentials; a guard that nothing goes anywhere else."""

from __future__ import annotations

import os
import random
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.httpsession
import pytest

from infra.aws.client import Clients
from infra.aws.provider import AwsProvider
from tests.infra.doubles import Bench, Faults, VirtualClock, a_spec
from tests.infra.moto_server import moto_server, reset

LOOPBACK = ("127.0.0.1", "localhost")
# Service models are read once for all tests; events and credentials belong to the clients made from it.
SHARED_SESSION = boto3.session.Session()


@pytest.fixture(scope="session")
def moto_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A moto server in a process of its own, with the two images that our specs look for."""
    with moto_server(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture(autouse=True)
def nothing_leaves_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummy credentials, no profile, no metadata service; a request to anywhere but the loopback is an error."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    send = botocore.httpsession.URLLib3Session.send

    def guarded(self: Any, request: Any) -> Any:
        assert urllib.parse.urlsplit(request.url).hostname in LOOPBACK, f"a request to {request.url}"
        return send(self, request)

    monkeypatch.setattr(botocore.httpsession.URLLib3Session, "send", guarded)
    # botocore's own retries wait with this; a virtual clock cannot reach it.
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)


@pytest.fixture
def moto(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server's address, with nothing in it; what asks AWS without saying where asks it."""
    reset(moto_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_url)
    return moto_url


@pytest.fixture
def clients(moto: str) -> Clients:
    return Clients(endpoint_url=moto, max_attempts=3, session=SHARED_SESSION)


@pytest.fixture
def faults(clients: Clients) -> Faults:
    return Faults(clients)


@pytest.fixture
def bench(clients: Clients, tmp_path: Path) -> Bench:
    """A deployment of two regions on moto, with a virtual clock and a relay that answers as it is told."""
    spec = a_spec()
    provider = AwsProvider(clients, deployment=spec.name, extra_tags=spec.tags)
    return Bench(spec, provider, clients, VirtualClock(), random.Random(7), tmp_path / "state")
