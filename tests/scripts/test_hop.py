"""The hop bench: fitted terms on modelled links under a virtual clock, real exchanges over loopback, oddities."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import AsyncIterator

import pytest

from scripts.hop import find_idle_limit, main, measure
from scripts.hop_exchange import MIN_BYTES, Exchange, HopError, _set_up, answer_to, connected, listening
from scripts.hop_report import delayed_ack_steps, fit_hop, hop_rows, model_payload_bytes, oddities, percentile
from scripts.link_shape import LinkShape, Shaper

SIZES = tuple(4**power for power in range(2, 13))


class VirtualLink:
    """An exchange over two shapers: what goes in comes out by their arithmetic, and the clock moves with it."""

    def __init__(self, shape: LinkShape, *, noise_s: float = 0.0) -> None:
        self.shape, self.noise_s, self.rng, self.now = shape, noise_s, random.Random(1), 0.0
        self.up, self.down = (Shaper(shape, rng=random.Random(n), now=0.0) for n in (1, 2))

    async def __call__(self, request_bytes: int, answer_bytes: int) -> None:
        for direction, size in ((self.up, request_bytes), (self.down, answer_bytes)):
            for start in range(0, size, self.shape.read_bytes):
                direction.push(bytes(min(self.shape.read_bytes, size - start)), self.now)
            while (due := direction.next_due()) is not None:
                self.now = max(self.now, due)
                direction.pop(self.now)
        self.now += self.rng.uniform(0, self.noise_s)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("delay_ms", [0.5, 5, 43])
@pytest.mark.parametrize("rate_mbit", [100, 1000])
async def test_the_terms_of_a_link_are_found_within_a_tenth(delay_ms: float, rate_mbit: float) -> None:
    link = VirtualLink(LinkShape(delay_s=delay_ms / 1e3, rate_bytes_per_s=rate_mbit * 125e3), noise_s=0.0002)
    samples = await measure(link, SIZES, seconds=0.5, clock=link.clock)
    fit = fit_hop(samples)
    assert fit.latency_s == pytest.approx(2 * delay_ms / 1e3, rel=0.1)
    assert fit.rate_bytes_per_s == pytest.approx(rate_mbit * 125e3, rel=0.1)
    verdicts = [row["verdict"] for row in hop_rows(samples, fit)]
    assert verdicts[0] == "latency-bound"
    assert verdicts[-1] == ("between" if rate_mbit == 1000 and delay_ms == 43 else "bandwidth-bound")
    assert fit.crossover_bytes == pytest.approx(2 * delay_ms * rate_mbit * 125, rel=0.2)


@pytest.mark.parametrize("delay_ms", [0.5, 43])
async def test_an_unthrottled_link_has_a_latency_and_no_rate(delay_ms: float) -> None:
    link = VirtualLink(LinkShape(delay_s=delay_ms / 1e3))
    samples = await measure(link, SIZES, seconds=0.5, clock=link.clock)
    fit = fit_hop(samples)
    assert fit.latency_s == pytest.approx(2 * delay_ms / 1e3, rel=0.1)
    assert {row["verdict"] for row in hop_rows(samples, fit)} == {"latency-bound"}


@pytest.mark.parametrize("over", ["tcp", "ws"])
async def test_real_exchanges_carry_both_directions(over: str) -> None:
    async with listening(("127.0.0.1", 0), over) as port, connected(("127.0.0.1", port), over) as exchange:
        for down in (False, True):
            samples = await measure(exchange, (16, 4096, 1 << 20), seconds=0, down=down)
            assert {size: len(values) for size, values in samples.items()} == {16: 5, 4096: 5, 1 << 20: 5}


async def test_c072_both_ends_send_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets: list[socket.socket] = []

    def noted(connection: socket.socket) -> None:
        _set_up(connection)
        sockets.append(connection)

    monkeypatch.setattr("scripts.hop_exchange._set_up", noted)
    async with listening(("127.0.0.1", 0), "tcp") as port, connected(("127.0.0.1", port), "tcp") as exchange:
        await exchange(16, 16)
        assert [bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for one in sockets] == [True, True]


async def test_nobody_there_is_said() -> None:
    with pytest.raises(HopError, match=r"127\.0\.0\.1:1 over tcp"):
        async with connected(("127.0.0.1", 1), "tcp"):
            pass


@pytest.mark.parametrize("header", [b"", b"GET / HTTP/1.1\r\n", bytes(8)])
def test_what_is_no_request_is_refused(header: bytes) -> None:
    with pytest.raises(HopError):
        answer_to(header)


async def test_the_pause_that_a_middlebox_does_not_forgive_is_found() -> None:
    pauses: list[int] = []

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[Exchange]:
        pauses.append(0)
        asked = 0

        async def exchange(request_bytes: int, answer_bytes: int) -> None:
            nonlocal asked
            asked += 1
            if asked == 2 and len(pauses) == 3:
                raise HopError("reset")

        yield exchange

    assert await find_idle_limit(connect, (0.0, 0.001, 0.002, 0.003)) == (0.001, 0.002)
    pauses.clear()
    assert await find_idle_limit(connect, (0.0, 0.001)) is None


def linear(latency_s: float, mbit: float, sizes: tuple[int, ...] = SIZES) -> dict[int, list[float]]:
    return {size: [latency_s + size / (mbit * 125e3)] * 5 for size in sizes}


def test_a_step_of_a_delayed_acknowledgement_is_named() -> None:
    samples = linear(0.001, 1000)
    assert delayed_ack_steps(samples) == []
    samples[4096] = [0.0415] * 5
    (found,) = delayed_ack_steps(samples)
    assert found.startswith("4096 bytes take 40 ms longer")


def test_each_oddity_is_named_with_its_cure_and_a_plain_link_has_none() -> None:
    plain = fit_hop(linear(0.01, 100))
    assert (
        oddities(up=plain, down=plain, nominal_mbit=100, samples=linear(0.01, 100), warm_s=[1], after_idle_s=[1]) == []
    )
    found = oddities(
        up=plain, down=fit_hop(linear(0.01, 20)), nominal_mbit=1000, warm_s=[0.1], after_idle_s=[0.3],
        idle_limit=(60, 350),
    )  # fmt: skip
    assert [text.split(":")[0] for text in found] == [
        "the link carries 100 Mbit/s, not its nominal 1000",
        "asymmetric path",
        "after a pause a large request takes 3.0 times as long",
        "a connection idle for 350 s is dead (60 s is survived)",
    ]
    assert "tcp_slow_start_after_idle=0" in found[2]


def test_the_payload_of_the_second_write_up() -> None:
    layers = [8, 23, 39, 55, 70]
    config = {"hidden_size": 6144, "num_hidden_layers": 78}
    assert model_payload_bytes(config, aux_layers=layers, tokens_per_cycle=1) == 61_440
    assert model_payload_bytes({"text_config": config}, aux_layers=layers, tokens_per_cycle=3) == 184_320
    with pytest.raises(ValueError, match=r"aux_layers must lie within 0\.\.78, got \[90\]"):
        model_payload_bytes(config, aux_layers=[90], tokens_per_cycle=1)
    with pytest.raises(ValueError, match="no hidden_size"):
        model_payload_bytes({}, aux_layers=[1], tokens_per_cycle=1)


def test_percentiles_are_of_the_values_themselves() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1)] == [50, 90, 99, 100]


def test_a_size_beyond_the_limit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--connect", "127.0.0.1:1", "--sizes", f"16,{1 << 25}"])
    assert f"request must have {MIN_BYTES}..16777216 bytes, got {1 << 25}" in capsys.readouterr().err
