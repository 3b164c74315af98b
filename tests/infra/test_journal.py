"""What runs write down: damage, two runs at once, and regions that the spec has forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.errors import InfraError
from infra.journal import Journal
from infra.provider import LaunchRequest
from infra.spec import parse
from tests.infra.doubles import DRAFT_REGION, Bench, a_table


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "expires_at": "", "launches": []}', "\x00\x00"]
)
def test_a_damaged_file_stops_up_before_anything_is_made_and_down_not_at_all(bench: Bench, text: str) -> None:
    bench.up()
    path = bench.state / "demo.json"
    path.write_text(text)
    calls = dict(bench.clients.calls)
    with pytest.raises(InfraError, match=r"demo.json: cannot be read .* remove it, everything is found by its tags"):
        bench.up()
    assert dict(bench.clients.calls) == calls
    assert bench.down() == 13
    assert list(bench.state.iterdir()) == []


def test_a_second_run_at_the_same_time_is_turned_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would make the instances that the other has not told of yet."""
    launch, refused = bench.provider.launch, []

    def during(request: LaunchRequest, **more: Any) -> str:
        for other in (bench.up, bench.down):
            with pytest.raises(InfraError, match="demo: another `up` or `down` is at work") as caught:
                other()
            refused.append(caught.value)
        return launch(request, **more)

    monkeypatch.setattr(bench.provider, "launch", during)
    bench.up()
    assert len(refused) == 2 * 3
    assert bench.clients.calls["RunInstances"] == 3
    monkeypatch.undo()
    bench.down()


def test_what_another_run_wrote_meanwhile_is_known(bench: Bench) -> None:
    early = bench.applier()
    bench.up()
    early.down(bench.spec.regions)
    assert bench.everything_in_moto() == []
    assert early.journal.regions == []


def test_a_region_that_the_spec_has_forgotten_is_cleaned_up(bench: Bench) -> None:
    before = bench.spec.regions
    bench.up()
    verify, draft = a_table()["node"]
    moved = a_table(relay={"regions": ["us-east-2"]}, node=[verify, {**draft, "region": "us-west-1"}])
    bench.spec = parse(moved)
    assert DRAFT_REGION not in bench.spec.regions
    bench.up()
    assert [r.region for r in bench.provider.observe(before).alive("draft-0")] == []
    assert [r.region for r in bench.observe().alive("draft-0")] == ["us-west-1"]
    bench.down()
    assert bench.provider.observe(before).remaining() == []
    assert bench.everything_in_moto() == []


def test_a_file_of_an_older_version_has_no_regions(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    path.write_text(json.dumps({"version": 1, "expires_at": "x", "launches": {}}))
    journal = Journal(path)
    assert (journal.damage, journal.regions, journal.expires_at) == ("", [], "x")
