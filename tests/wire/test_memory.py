from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from wire.aio.memory import LinkModel, memory_link


def model(seed: int, **terms: float) -> LinkModel:
    return LinkModel(rng=random.Random(seed), **terms)  # type: ignore[arg-type]


@given(st.integers(0, 2**32), st.lists(st.floats(0.0, 1.0), max_size=50), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_without_reordering_frames_arrive_in_order_and_not_early(
    seed: int, pauses: list[float], delay_s: float, jitter_s: float
) -> None:
    link = model(seed, delay_s=delay_s, jitter_s=jitter_s, duplicate=0.2, drop=0.2)
    now, last_at = 0.0, 0.0
    for pause_s in pauses:
        now += pause_s
        for at in link.arrivals(now):
            assert at >= now + delay_s
            assert at >= last_at
            last_at = at


def test_a_seed_decides_everything() -> None:
    terms = {"delay_s": 0.1, "jitter_s": 0.1, "drop": 0.3, "duplicate": 0.3, "reorder": 0.3}
    runs = [[model(seed, **terms).arrivals(float(i)) for i in range(50)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_losses_copies_and_overtaking_come_as_often_as_asked() -> None:
    link = model(3, drop=0.25)
    assert 400 < sum(not link.arrivals(0.0) for _ in range(2000)) < 600
    link = model(3, duplicate=0.25)
    assert 400 < sum(len(link.arrivals(0.0)) == 2 for _ in range(2000)) < 600
    link = model(3, jitter_s=1.0, reorder=0.5)
    times = [link.arrivals(0.0)[0] for _ in range(2000)]
    assert times != sorted(times)


async def test_endpoints_carry_frames_both_ways_through_their_models() -> None:
    near, far = memory_link(model(1, delay_s=0.01), model(2, drop=1.0))
    arrived = asyncio.Queue[bytes]()
    far.on_frame = near.on_frame = arrived.put_nowait
    for i in range(3):
        near.send(bytes([i]))
        far.send(b"lost")
    assert [await arrived.get() for _ in range(3)] == [b"\0", b"\1", b"\2"]
    assert arrived.empty()
