"""A wrong spec is refused with the field, the value and the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.errors import SpecError
from infra.spec import Spec, parse
from tests.infra.doubles import a_spec, a_table

EXAMPLE = Path(__file__).parents[2] / "infra" / "examples" / "three-regions.toml"


def changed(path: str, value: Any) -> dict[str, Any]:
    """The table of the tests with one field set, or removed where the value is None."""
    table = a_table()
    *folders, last = path.split(".")
    at: Any = table
    for folder in folders:
        at = at[int(folder)] if isinstance(at, list) else at.setdefault(folder, {})
    if value is None:
        del at[last]
    else:
        at[last] = value
    return table


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("deployment.name", "Demo!", "deployment.name: must be 2 to 30 of a-z, 0-9 and -, a letter first, got 'Demo!'"),
        ("deployment.name", None, "deployment.name: must be 2 to 30 of a-z, 0-9 and -, a letter first, got nothing"),
        ("deployment.ttl_hours", 1000, "deployment.ttl_hours: must be a number in 0.25..168, got 1000"),
        ("deployment.ttl_hours", True, "deployment.ttl_hours: must be a number in 0.25..168, got True"),
        ("deployment.budget_usd", "5", "deployment.budget_usd: must be a number in 0.01..100000, got '5'"),
        ("deployment.network", "mine", "deployment.network: must be one of default, own, got 'mine'"),
        ("deployment.tll_hours", 4, "deployment.tll_hours: unknown; known here: budget_usd, name, network,"),
        ("deployment.tags", {"aws:x": "y"}, "deployment.tags.aws:x: a name of at most 128 characters, not Name,"),
        ("deployment.tags", {"x": "y" * 257}, "deployment.tags.x: must be text of at most 256 characters, got 'yyy"),
        ("relay.regions", [], "relay.regions: must be a list of regions such as us-east-2, 1 or more, got []"),
        ("relay.regions", ["ohio"], "a list of regions such as us-east-2, 1 or more, got ['ohio']"),
        ("relay.port", 0, "relay.port: must be an integer in 1..65535, got 0"),
        ("relay.allow_from", ["10.0.0.1/8"], "relay.allow_from: '10.0.0.1/8' is not an IPv4 network"),
        ("relay.key_parameter", "/k", "relay.certificate_parameter: give it together with key_parameter, or neither"),
        ("relay.model", "x", "relay.model: unknown; known here:"),
        ("node.0.role", "relay", "node[0].role: must be one of draft, verify, got 'relay'"),
        ("node.0.count", 65, "node[0].count: must be an integer in 1..64, got 65"),
        ("node.0.disk_gib", 8, "node[0].disk_gib: must be an integer in 30..16384, got 8"),
        ("node.1.market", "free", "node[1].market: must be one of on-demand, spot, got 'free'"),
        ("node.1.instance_types", [], "node[1].instance_types: must be a list of types such as g6.xlarge,"),
        ("node.1.zones", ["us-east-2a"], "node[1].zones: us-east-2a is not in us-west-2"),
        ("node.1.model", None, "node[1].model: must be a hub id or s3://bucket/prefix, got nothing"),
        ("node.1.arguments", ["--relay=ws://x"], "node[1].arguments: --relay=ws://x is set by the boot script"),
        ("node.1.arguments", ["a\nb"], "node[1].arguments: must be a list of texts in one line each"),
        ("node.1.max_usd_per_hour", 0, "node[1].max_usd_per_hour: must be a number in 0.001..1000, got 0"),
        ("node.1.role", "verify", 'node: there must be one with role = "draft", got none'),
        ("node", [], "node: must be one or more [[node]] tables"),
        ("package.requirement", None, "package: give either requirement or wheel, got neither"),
        ("package.wheel", "s3://b/x.whl", "package: give either requirement or wheel, got both"),
        ("package.index_url", "https://me:secret@x", "package.index_url: must not hold a password"),
        ("predict", {"acceptance": 2}, "predict.acceptance: must be a number in 0..1, got 2"),
        ("prices", {"us-east-2": {"g6.xlarge": -1}}, "prices.us-east-2.g6.xlarge: must be a number in 0..1000, got -1"),
        ("prices", {"us-east-2": 3}, "prices.us-east-2: must be a table, got 3"),
        ("nodes", [], "nodes: unknown; known here: deployment, node, package, predict, prices, relay"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_value_and_limit(path: str, value: Any, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(changed(path, value))
    assert told in str(caught.value)


def test_the_example_is_a_spec() -> None:
    spec = Spec.load(EXAMPLE)
    assert [machine.slot for machine in spec.machines] == ["relay", "verify-0", "draft-0"]
    assert set(spec.regions) == {"us-east-2", "us-west-1", "us-west-2"}


def test_counts_make_slots_and_tables_of_one_role_are_numbered_on() -> None:
    draft = a_table()["node"][1]
    spec = a_spec(node=[a_table()["node"][0], {**draft, "count": 3}, {**draft, "region": "us-west-1"}])
    assert [node.slot for node in spec.nodes] == ["verify-0", "draft-0", "draft-1", "draft-2", "draft-3"]


def test_a_file_that_is_not_there_or_not_toml_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        Spec.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[deployment\n")
    with pytest.raises(SpecError, match="not TOML"):
        Spec.load(tmp_path / "bad.toml")


def test_the_fingerprint_changes_with_what_needs_another_instance() -> None:
    before = a_spec().nodes[0]
    after = parse(changed("node.0.instance_types", ["g5.xlarge"])).nodes[0]
    assert before.fingerprint() == a_spec().nodes[0].fingerprint()
    assert before.fingerprint() != after.fingerprint()


def test_all_machines_change_with_what_they_share() -> None:
    before = a_spec()
    for path, value in (("package.requirement", "foredraft==0.2.0"), ("relay.port", 8443)):
        after = parse(changed(path, value))
        assert all(
            new.fingerprint() != old.fingerprint() for new, old in zip(after.machines, before.machines, strict=True)
        )
    narrow = parse(changed("relay.allow_from", ["203.0.113.0/24"]))
    assert narrow.relay.fingerprint() == before.relay.fingerprint()


def test_a_single_address_is_the_network_that_aws_takes_it_for() -> None:
    assert parse(changed("relay.allow_from", ["203.0.113.7"])).access.allow_from == ("203.0.113.7/32",)
