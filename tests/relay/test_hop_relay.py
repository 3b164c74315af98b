"""`foredraft-hop` through a relay: payloads of two ends over a real relay, its limits, and links that are emulated."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from relay.credentials import Credentials
from scripts.hop import main, measure
from scripts.hop_exchange import MIN_BYTES, HopError
from scripts.hop_relay import LIMIT_SHARE, RelayAddress, answering, probe_frame, through
from scripts.hop_report import fit_hop, hop_rows
from scripts.link_emulator import emulated_link
from scripts.link_shape import LinkShape
from wire.messages import MAX_FRAME_BYTES, Error, Probe


def address(relay: Any, port: int | None = None, **more: str) -> RelayAddress:
    return RelayAddress(
        **({"url": f"ws://127.0.0.1:{port or relay.server.port}", "secret": relay.secret} | more)  # type: ignore[arg-type]
    )


def limit(relay: Any, text: str) -> None:
    """Give the relay's one credential these limits."""
    relay.server.access.credentials = Credentials.from_toml(
        f'[[credential]]\nname = "all"\nroles = ["client"]\nsecrets = ["{relay.secret}"]\n{text}\n'
    )


async def test_payloads_of_all_sizes_go_both_ways_and_the_relay_gets_each_exchange_as_two_frames(relay: Any) -> None:
    async with answering(address(relay)), through(address(relay)) as exchange:
        sizes, left_out = exchange.admitted((16, 4096, 1 << 18, 1 << 20), MIN_BYTES)
        assert sizes == [16, 4096, 1 << 18]
        assert [line.split(";")[0] for line in left_out] == ["left out: 1048576 bytes"]
        links = list(relay.server.links.values())
        await measure(exchange, (16,), seconds=0)
        before = [(link.num_read, link.bytes_read) for link in links]
        for down in (False, True):
            samples = await measure(exchange, sizes, seconds=0, down=down)
            assert {size: len(values) for size, values in samples.items()} == {16: 5, 4096: 5, 1 << 18: 5}
        read = [link.bytes_read - num for link, (_, num) in zip(links, before, strict=True)]
        # Of each end 8 exchanges of each size, warm-up included, and as many of the other direction's short ones.
        assert all(8 * sum(sizes) < num < 1.1 * 8 * sum(sizes) for num in read)


async def test_the_largest_size_that_is_admitted_fits_a_frame_to_the_byte(relay: Any) -> None:
    async with answering(address(relay)), through(address(relay)) as exchange:
        _, (line,) = exchange.admitted([MAX_FRAME_BYTES], MIN_BYTES)
        most = int(line.rpartition(" ")[2])
        assert exchange.admitted([most], MIN_BYTES) == ([most], [])
        await exchange(most, 16)
        await exchange(16, most)
        with pytest.raises(Exception, match="1048577 bytes"):
            await exchange(most + 1, MAX_FRAME_BYTES)


async def test_what_a_credential_may_not_send_in_a_second_is_left_out_and_said(relay: Any) -> None:
    limit(relay, "bytes_per_s = 100000")
    async with through(address(relay)) as exchange:
        sizes, (line,) = exchange.admitted((16, 65_536, 1 << 18, 1 << 20), MIN_BYTES)
        assert sizes == [16, 65_536]
        assert line.startswith("left out: 262144, 1048576 bytes; the relay reads 100000 bytes/s of this credential, so")


async def test_ends_that_rest_between_exchanges_are_never_held_back(relay: Any) -> None:
    limit(relay, "frames_per_s = 100\nbytes_per_s = 2000000")
    async with answering(address(relay)), through(address(relay)) as exchange:
        await measure(exchange, (16, 300_000), seconds=0, rest=exchange.rest)
        pace = relay.server.paces["all"]
        assert pace.num_delayed == 0
        # Without the rests it would be.
        await measure(exchange, [16] * 20, seconds=0)
        assert pace.num_delayed > 0


@pytest.mark.parametrize(("frames_per_s", "bytes_per_s"), [(10, 0), (0, 10_000)])
async def test_a_rest_is_as_long_as_the_limit_wants_it(
    relay: Any, monkeypatch: pytest.MonkeyPatch, frames_per_s: int, bytes_per_s: int
) -> None:
    limit(relay, f"frames_per_s = {frames_per_s}\nbytes_per_s = {bytes_per_s}")
    async with through(address(relay)) as exchange:
        rests: list[float] = []

        async def sleep(seconds: float) -> None:
            rests.append(seconds)

        monkeypatch.setattr("scripts.hop_relay.asyncio.sleep", sleep)
        cost = exchange.cost_of(1000, 16)
        for _ in range(20):
            await exchange.rest(1000, 16)
        rate, amount = (frames_per_s, cost["frames"]) if frames_per_s else (bytes_per_s, cost["bytes"])
        assert cost["frames"] == 2
        assert rests[0] == 0
        # A second's worth at once, then at the limit; the clock has hardly moved between these.
        assert rests[-1] == pytest.approx(20 * amount / (rate * LIMIT_SHARE) - 1, rel=0.1)


async def test_an_end_that_is_not_there_is_named(relay: Any) -> None:
    async with through(address(relay)) as exchange:
        with pytest.raises(HopError, match=r"no client hop:hop with the credential of hop:\w+ takes probes here"):
            await exchange(16, 16)


async def test_two_pairs_measure_under_different_names(relay: Any) -> None:
    a, b = address(relay, name="a"), address(relay, name="b")
    async with answering(a), answering(b), through(a) as to_a, through(b) as to_b:
        await asyncio.gather(*(to(size, 16) for to in (to_a, to_b) for size in (100,)))
        read = {link.connection.hello.name: link.num_written for link in relay.server.links.values()}
    assert read["hop:a"] == read["hop:b"]


async def test_a_lost_relay_ends_both_ends(relay: Any) -> None:
    async with answering(address(relay)) as running, through(address(relay)) as exchange:
        await exchange(16, 16)
        for link in relay.server.links.values():
            link.abort()
        with pytest.raises(HopError, match="the link to the relay ended"):
            await asyncio.wait_for(running, 10)
        with pytest.raises(HopError, match="the link to the relay ended"):
            await exchange(16, 16)


async def test_probes_reach_only_clients_that_take_them_and_only_of_the_same_credential(relay: Any) -> None:
    relay.server.access.credentials = Credentials.from_toml(
        "".join(
            f'[[credential]]\nname = "{name}"\nroles = ["client"]\nsecrets = ["a-secret-of-the-{name}-ones"]\n'
            for name in ("first", "other")
        )
    )
    first, other = "a-secret-of-the-first-ones", "a-secret-of-the-other-ones"
    plain = await relay.join("client", name="plain", secret=first)
    there = await relay.join("client", name="hop:there", secret=other)
    sender = await relay.join("client", name="hop:me", secret=first)
    for name in ("plain", "hop:there", "hop:nobody"):
        sender.send(Probe(session=name, sender="hop:me", pad="x"))
        error = await sender.expect(Error)
        assert (error.session, error.code) == (name, "no_probe_peer")
    assert plain.inbox.empty()
    assert there.inbox.empty()
    assert relay.server.router.drops.total() == 3
    assert sender.lost is None


async def test_a_node_may_not_send_probes(relay: Any) -> None:
    verify = await relay.join("verify")
    verify.send(Probe(session="hop:hop", sender="x"))
    assert (await verify.expect(Error)).code == "not_allowed"


async def test_both_hops_are_in_the_terms(relay: Any) -> None:
    """Through emulated legs of 5 and 15 ms: what is set is below what is measured, whatever the machine adds."""
    near, far = (LinkShape(delay_s=delay_s, rate_bytes_per_s=5e6) for delay_s in (0.005, 0.015))
    to = ("127.0.0.1", relay.server.port)
    async with emulated_link(to, near) as a, emulated_link(to, far) as b:
        async with answering(address(relay, b.port)), through(address(relay, a.port)) as exchange:
            samples = await measure(exchange, (16, 4096, 65_536, 1 << 18), seconds=0)
        delivered = a.delivered_bytes(), b.delivered_bytes()
    # 8 of each size went over both legs, and came neither way round.
    for leg, big, small in ((delivered[0], "up_bytes", "down_bytes"), (delivered[1], "down_bytes", "up_bytes")):
        assert leg[big] > 8 * (65_536 + (1 << 18)) > 100 * leg[small] / 8
    assert min(samples[16]) >= 2 * (0.005 + 0.015)
    # The relay hands on whole frames: the bytes are paid for on each hop.
    assert min(samples[1 << 18]) - min(samples[16]) >= 2 * (1 << 18) / 5e6 - 0.02
    fit = fit_hop(samples)
    assert next(row["verdict"] for row in hop_rows(samples, fit)) == "latency-bound"


def test_the_frames_of_an_exchange_are_kept() -> None:
    assert probe_frame("hop:a", "hop:b", 16, 1000) is probe_frame("hop:a", "hop:b", 16, 1000)


@pytest.fixture
def secret(relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_SECRET", relay.secret)


async def test_the_command_says_what_it_left_out(
    relay: Any, secret: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("scripts.hop.MIN_SAMPLES", 3)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 6144, "num_hidden_layers": 78}))
    url = f"ws://127.0.0.1:{relay.server.port}"
    words = ["--connect", url, "--seconds", "0", "--idle-s", "0", "--sizes", f"16,1024,65536,{1 << 24}"]
    model = ["--model", str(tmp_path / "config.json"), "--aux-layers", "8,23,39,55,70", "--tokens-per-cycle", "3"]
    async with answering(address(relay)):
        assert await asyncio.to_thread(main, words) == 0
        text = capsys.readouterr().out
        assert "\nlatency there and back" in text
        assert "\nleft out: 16777216 bytes; a frame of this relay has at most 1048576 bytes" in text
        assert await asyncio.to_thread(main, [*words, *model, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert found["over"] == "relay"
    assert [row["bytes"] for row in found["sizes"]] == [16, 1024, 65_536, 184_320]
    assert len(found["left_out"]) == 1
    assert {"p50_ms", "p90_ms", "p99_ms", "verdict"} < set(found["sizes"][0])
    assert {"latency_ms", "rate_mbit", "crossover_bytes", "odd", "latency_down_ms", "rate_down_mbit"} < set(found)


async def test_the_command_names_what_is_wrong(
    relay: Any, secret: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"ws://127.0.0.1:{relay.server.port}"
    assert await asyncio.to_thread(main, ["--connect", url]) == 1
    assert "no client hop:hop" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        await asyncio.to_thread(main, ["--connect", url, "--idle-limit-s", "30"])
    assert "--idle-limit-s measures no relay" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        await asyncio.to_thread(main, ["--connect", url, "--nominal-mbit", "100"])
    assert "--nominal-mbit is one link's" in capsys.readouterr().err
    monkeypatch.setitem(os.environ, "FOREDRAFT_SECRET", "another-secret-of-the-tests")
    assert await asyncio.to_thread(main, ["--listen", url]) == 1
    assert "refused our secret (401)" in capsys.readouterr().err
