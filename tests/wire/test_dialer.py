from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.aio import dialer as dialer_module
from wire.aio.dialer import Backoff, keep_linked
from wire.aio.link import Link
from wire.codec import encode
from wire.errors import LinkLost, PeerMismatch, Refused
from wire.messages import Error, Hello, Release

if TYPE_CHECKING:
    from tests.wire.conftest import RelayDouble
else:
    RelayDouble = Any

RELEASE = encode(Release(session="s1"))


@given(st.integers(0, 2**32), st.integers(0, 3000))
def test_pauses_grow_to_a_bound_and_are_spread(seed: int, num_failures: int) -> None:
    rng = random.Random(seed)
    backoff = Backoff(first_s=0.5, most_s=30.0, num_failures=num_failures)
    longest = min(30.0, 0.5 * 2.0 ** min(num_failures, 10))
    assert longest / 2 <= backoff.pause_s(rng) <= longest
    assert backoff.num_failures == num_failures + 1


def test_c080_a_relay_that_is_away_for_ten_minutes_costs_a_few_attempts_and_lines_of_log() -> None:
    backoff, rng, away_s, num_attempts = Backoff(), random.Random(1), 0.0, 0
    while away_s < 600:
        away_s += backoff.pause_s(rng)
        num_attempts += 1
    assert num_attempts <= 40


def test_only_a_link_that_stood_resets_the_growth() -> None:
    backoff = Backoff(stable_s=30.0, num_failures=5)
    backoff.on_link_ended(29.0)
    assert backoff.num_failures == 5
    backoff.on_link_ended(30.0)
    assert backoff.num_failures == 0


@dataclass
class User:
    """Notes what happens to its link."""

    happened: asyncio.Queue[str | bytes] = field(default_factory=asyncio.Queue)
    link: Link | None = None

    def on_link(self, link: Link) -> None:
        self.link = link
        self.happened.put_nowait("up")

    def on_link_lost(self) -> None:
        self.link = None
        self.happened.put_nowait("lost")

    def on_frame(self, frame: bytes, now: float) -> None:
        self.happened.put_nowait(frame)


async def test_a_lost_link_is_dialled_again_and_frames_flow_on(
    relay: RelayDouble, secret: str, hello: Hello, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dialer_module, "Backoff", lambda: Backoff(first_s=0.01))
    user = User()
    kept = asyncio.create_task(keep_linked(user, url=relay.url, secret=secret, hello=hello, ssl_context=None))
    for i in range(3):
        assert await user.happened.get() == "up"
        while len(relay.links) <= i:  # noqa: ASYNC110  # the relay's side opens a moment later or earlier
            await asyncio.sleep(0)
        relay.links[i].send(RELEASE)
        assert await user.happened.get() == RELEASE
        await relay.links[i].close(1012, "restart")
        assert await user.happened.get() == "lost"
    kept.cancel()
    await asyncio.gather(kept, return_exceptions=True)
    assert caplog.text.count("closed by the peer with code 1012 (restart)") == 3


async def test_the_relay_reads_why_it_was_given_up(
    relay: RelayDouble, secret: str, hello: Hello, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User()
    kept = asyncio.create_task(keep_linked(user, url=relay.url, secret=secret, hello=hello, ssl_context=None))
    assert await user.happened.get() == "up"
    assert user.link is not None
    user.link.connection.next_timer = lambda: 0.0  # type: ignore[method-assign]

    def silent(now: float) -> None:
        raise LinkLost("peer silent for 9.0 s")

    user.link.connection.on_timer = silent  # type: ignore[method-assign]
    assert "closed by the peer with code 1011 (peer silent for 9.0 s)" in str(await relay.ended.get())
    kept.cancel()
    await asyncio.gather(kept, return_exceptions=True)


async def test_the_first_attempt_tells_at_once_that_nobody_is_there(secret: str, hello: Hello) -> None:
    with pytest.raises(LinkLost, match="no relay answers"):
        await keep_linked(User(), url="ws://127.0.0.1:1", secret=secret, hello=hello, ssl_context=None)


async def test_a_refusal_is_final(relay: RelayDouble, secret: str, hello: Hello) -> None:
    relay.refuse_code = "duplicate"
    with pytest.raises(Refused, match="not today"):
        await keep_linked(User(), url=relay.url, secret=secret, hello=hello, ssl_context=None)


@pytest.mark.parametrize("stood", [True, False])
async def test_a_mismatch_is_final_unless_a_link_has_stood(
    relay: RelayDouble, secret: str, hello: Hello, monkeypatch: pytest.MonkeyPatch, stood: bool
) -> None:
    """After a restart of the relay another model's verify node may be back before the one that the node fits."""
    monkeypatch.setattr(dialer_module, "Backoff", lambda: Backoff(first_s=0.01, stable_s=0.0 if stood else 30.0))
    user = User()
    kept = asyncio.create_task(keep_linked(user, url=relay.url, secret=secret, hello=hello, ssl_context=None))
    assert await user.happened.get() == "up"
    while not relay.links:  # noqa: ASYNC110  # the relay's side opens a moment later or earlier
        await asyncio.sleep(0)
    relay.refuse_code = "mismatch"
    relay.links[0].send(Error(code="mismatch", message="it fits no verify node"))
    assert await user.happened.get() == "lost"
    if not stood:
        with pytest.raises(PeerMismatch, match="fits no verify node"):
            await asyncio.wait_for(kept, 5.0)
        return
    while relay.num_refused < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    relay.refuse_code = ""
    assert await asyncio.wait_for(user.happened.get(), 5.0) == "up"
    kept.cancel()
    await asyncio.gather(kept, return_exceptions=True)
