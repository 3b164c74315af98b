"""The notice that a spot instance gets before it is taken away, read from the metadata service of its machine.

Only one field of it is a wall clock's: when the instance goes. The machine's own clock may be off, so what follows from
it is held to the two minutes that the notice is given ahead.
"""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from datetime import UTC, datetime

log = logging.getLogger(__name__)

NOTICE_S = 120.0
POLL_S = 5.0
TIMEOUT_S = 2.0
TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"


def seconds_left(body: bytes, now: datetime) -> float:
    """How long the instance has, by a notice; in 0..NOTICE_S, whatever the clocks say.

    Raises:
        ValueError: the body is no notice.
    """
    notice = json.loads(body)
    if not isinstance(notice, dict) or not isinstance(notice.get("time"), str):
        raise ValueError(f"the notice has no time: {body[:80]!r}")
    goes_at = datetime.fromisoformat(notice["time"])
    if goes_at.tzinfo is None:
        goes_at = goes_at.replace(tzinfo=UTC)
    return min(max((goes_at - now).total_seconds(), 0.0), NOTICE_S)


def read_notice(url: str) -> bytes | None:
    """Ask the service once; None while there is no notice. Blocks for a few seconds at most.

    Raises:
        OSError: the service does not answer as it should.
    """
    # Not the environment's proxy: the service is on this machine's own link.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    ask = urllib.request.Request(
        url + TOKEN_PATH, method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    )  # fmt: skip
    with opener.open(ask, timeout=TIMEOUT_S) as answer:
        token = answer.read(1024).decode("ascii", "replace")
    ask = urllib.request.Request(url + ACTION_PATH, headers={"X-aws-ec2-metadata-token": token})
    try:
        with opener.open(ask, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read(4096))
    except urllib.error.HTTPError as exc:
        if exc.code == 404:
            return None
        raise


async def spot_notice(url: str, *, poll_s: float = POLL_S) -> float:
    """Wait for the notice, for ever if need be; how long the instance has then."""
    told = False
    while True:
        try:
            body = await asyncio.to_thread(read_notice, url.rstrip("/"))
            if body is not None:
                return seconds_left(body, datetime.now(UTC))
        except (OSError, ValueError) as exc:
            if not told:
                log.warning("no word about spot interruptions from %s: %s", url, exc)
            told = True
        await asyncio.sleep(poll_s)
