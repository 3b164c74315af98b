"""`foredraft-hop --matrix` against a relay's real status events, and its arithmetic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from relay import api_page
from relay.api import Gateway
from scripts.hop import main
from scripts.hop_matrix import MatrixRefused, NodeHop, matrix_figures, matrix_text, node_hops, read_snapshots

ADMIN = "an-admin-secret-of-the-tests"


@pytest.fixture
async def gateway(relay: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    relay.add_admin(ADMIN)
    monkeypatch.setattr(api_page, "UPDATE_S", 0.01)
    gateway = Gateway(relay.server)
    await gateway.start("127.0.0.1", 0)
    yield gateway
    await gateway.close()


async def test_the_nodes_of_a_relay_are_paired(
    gateway: Gateway, relay: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await relay.join("verify")
    await relay.join("draft")
    # In place of what the links' own pings find, which go on meanwhile.
    links = list(relay.server.links.values())
    rtts = {id(link.connection): rtt_s for link, rtt_s in zip(links, (0.0524, 0.0311), strict=True)}
    monkeypatch.setattr(type(links[0].connection), "rtt_s", property(lambda connection: rtts.get(id(connection))))
    monkeypatch.setenv("FOREDRAFT_SECRET", ADMIN)
    url = f"http://127.0.0.1:{gateway.port}"
    assert await asyncio.to_thread(main, ["--matrix", url, "--snapshots", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(node["role"], node["rtt_ms"]) for node in found["nodes"]] == [("verify", 52.4), ("draft", 31.1)]
    assert [pair["rtt_ms"] for pair in found["pairs"]] == [83.5]


async def test_another_secret_sees_nothing(gateway: Gateway, relay: Any) -> None:
    with pytest.raises(MatrixRefused, match=r"403 .*; it needs a secret with the role admin"):
        await asyncio.to_thread(read_snapshots, f"http://127.0.0.1:{gateway.port}", relay.secret, 1)


def test_an_address_of_another_kind_is_named() -> None:
    with pytest.raises(MatrixRefused, match="got ws://a:1"):
        read_snapshots("ws://a:1", "", 1)


def snapshot(**rtts_ms: float | None) -> dict[str, Any]:
    return {
        "nodes": [
            {"id": f"{name}-1", "name": name, "role": name.rstrip("0123456789"), "region": "", "rtt_ms": rtt_ms}
            for name, rtt_ms in rtts_ms.items()
        ]
    }


def test_pairs_come_nearest_first_and_an_unmeasured_node_is_left_out() -> None:
    hops = node_hops([snapshot(draft1=40.0, draft2=2.0, verify1=10.0, verify2=None)] * 3)
    found = matrix_figures(hops)
    assert [(pair["draft"], pair["rtt_ms"]) for pair in found["pairs"]] == [("draft2", 12.0), ("draft1", 50.0)]
    assert found["odd"] == []
    lines = matrix_text(found).splitlines()
    assert lines[2].split() == ["draft1", "40.00", "50.00"]


def test_a_hop_that_moves_is_odd_and_a_missing_role_is_said() -> None:
    found = matrix_figures([NodeHop("far", "verify", "", [10.0, 10.0, 30.0])])
    assert found["odd"] == ["verify node far: its round trip moves between 10 and 30 ms"]
    assert "there is no draft node" in matrix_text(found)
