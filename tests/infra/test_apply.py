"""Up and down against moto, over HTTP, in two regions."""

from __future__ import annotations

from tests.infra.doubles import Bench


def test_up_makes_all_and_down_leaves_nothing(bench: Bench) -> None:
    done = bench.up()
    assert set(done.instance_ids) == {"relay", "verify-0", "draft-0"}
    assert bench.down() == 13
    assert bench.everything_in_moto() == []
