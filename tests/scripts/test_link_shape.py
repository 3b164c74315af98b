"""The arithmetic of the emulated link, under a virtual clock."""

from __future__ import annotations

import random

import pytest

from scripts.link_shape import Ending, LinkShape, Shaper


def shaper(**shape: float | int | None) -> Shaper:
    return Shaper(LinkShape(**shape), rng=random.Random(7), now=0.0)  # type: ignore[arg-type]


def arrivals(link: Shaper) -> list[tuple[float, bytes | Ending]]:
    out: list[tuple[float, bytes | Ending]] = []
    while (due := link.next_due()) is not None:
        item = link.pop(due)
        assert item is not None
        out.append((due, item))
    return out


def test_nothing_comes_out_before_the_delay() -> None:
    link = shaper(delay_s=0.043)
    link.push(b"a", 1.0)
    assert link.next_due() == pytest.approx(1.043)
    assert link.pop(1.0429) is None
    assert link.pop(1.0431) == b"a"
    assert link.next_due() is None


def test_bandwidth_serialises_one_chunk_after_another() -> None:
    link = shaper(delay_s=0.1, rate_bytes_per_s=1000.0)
    link.push(b"x" * 100, 0.0)
    link.push(b"y" * 50, 0.0)
    link.push(b"z" * 100, 10.0)
    assert [due for due, _ in arrivals(link)] == pytest.approx([0.2, 0.25, 10.2])


def test_jitter_stays_within_its_spread_and_keeps_order() -> None:
    link = shaper(delay_s=0.03, jitter_s=0.01)
    for index in range(200):
        link.push(bytes([index]), index * 0.05)
    spread = [due - index * 0.05 for index, (due, _) in enumerate(arrivals(link))]
    assert 0.02 <= min(spread) < 0.022
    assert 0.038 < max(spread) <= 0.04
    for index in range(200):
        link.push(bytes([index]), 20.0)
    out = arrivals(link)
    assert [item for _, item in out] == [bytes([index]) for index in range(200)]
    assert [due for due, _ in out] == sorted(due for due, _ in out)


def test_the_same_seed_gives_the_same_delays() -> None:
    links = [shaper(delay_s=0.03, jitter_s=0.01) for _ in range(2)]
    for link in links:
        link.push(b"a", 0.0)
        link.push(b"b", 0.1)
    assert arrivals(links[0]) == arrivals(links[1])


def test_a_periodic_stall_holds_back_and_then_releases_at_once() -> None:
    link = shaper(delay_s=0.01, stall_every_s=1.0, stall_s=0.2)
    for now in (0.0, 0.98, 0.995, 1.1, 1.25, 2.0):
        link.push(b"x", now)
    assert [due for due, _ in arrivals(link)] == pytest.approx([0.01, 0.99, 1.2, 1.2, 1.26, 2.2])


def test_a_stall_by_hand_holds_what_is_under_way() -> None:
    link = shaper(delay_s=0.01)
    link.push(b"x", 0.0)
    link.stall(0.5)
    assert link.pop(0.4) is None
    assert link.pop(0.5) == b"x"


def test_reading_pauses_at_the_buffer_limit_and_goes_on_after_delivery() -> None:
    link = shaper(delay_s=0.01, buffer_bytes=10)
    link.push(b"x" * 9, 0.0)
    assert not link.is_full
    link.push(b"x", 0.0)
    assert link.is_full
    link.pop(0.01)
    assert not link.is_full


def test_the_default_buffer_holds_twice_the_bandwidth_delay_product() -> None:
    shape = LinkShape(delay_s=0.1, rate_bytes_per_s=12.5e6)
    assert shape.buffer_limit_bytes == 2_500_000
    assert LinkShape(delay_s=0.001, rate_bytes_per_s=1e6).buffer_limit_bytes == 256 * 1024


def test_a_cut_comes_right_after_the_last_allowed_byte() -> None:
    link = shaper(delay_s=0.01, cut_after_bytes=5)
    link.push(b"abc", 0.0)
    link.push(b"defg", 0.0)
    link.push(b"never", 0.0)
    link.end(Ending.FIN, 0.0)
    assert [item for _, item in arrivals(link)] == [b"abc", b"de", Ending.CUT]
    assert link.is_finished
    assert link.num_delivered_bytes == 5


def test_swallowed_bytes_vanish_and_so_does_the_end() -> None:
    link = shaper(delay_s=0.01, swallow_after_bytes=4)
    link.push(b"abc", 0.0)
    link.push(b"def", 0.0)
    link.push(b"ghi", 0.0)
    link.end(Ending.FIN, 0.0)
    assert [item for _, item in arrivals(link)] == [b"abc", b"d"]
    assert link.num_swallowed_bytes == 5
    assert link.is_finished


def test_an_end_arrives_after_the_bytes_before_it_and_a_reset_may_follow_a_close() -> None:
    link = shaper(delay_s=0.01)
    link.push(b"abc", 0.0)
    link.end(Ending.FIN, 0.0)
    assert not link.is_finished
    link.end(Ending.CUT, 0.1)
    link.end(Ending.CUT, 0.2)
    assert arrivals(link) == [(0.01, b"abc"), (0.01, Ending.FIN), (pytest.approx(0.11), Ending.CUT)]


def test_a_small_rate_reads_small_chunks() -> None:
    assert LinkShape(rate_bytes_per_s=2.5e6).read_bytes == 5000
    assert LinkShape(rate_bytes_per_s=1e3).read_bytes == 1448
    assert LinkShape().read_bytes == 64 * 1024


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay_s": -1.0},
        {"jitter_s": float("nan")},
        {"rate_bytes_per_s": 0.0},
        {"stall_s": 1.0},
        {"stall_every_s": 1.0, "stall_s": 1.0},
        {"buffer_bytes": 0},
    ],
)
def test_an_impossible_shape_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        shaper(**wrong)
