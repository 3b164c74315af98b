"""Where the relay goes, what it costs, and what the budget says."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import prices, round_trips
from infra.errors import BudgetError, InfraError, SpecError
from infra.placement import candidates, check_budget, costs, round_trip_ms, total_usd_per_hour
from infra.predict import closed_form, forecast
from infra.spec import Prediction
from tests.infra.doubles import a_spec, a_table

PREDICTION = Prediction(verify_ms=34, draft_ms=3, acceptance=0.8, growth="chain:2+46")


def test_the_relay_goes_where_the_way_from_draft_to_verify_is_shortest() -> None:
    spec = a_spec(relay={"regions": ["us-west-1", "us-east-1", "us-east-2"]})
    found = candidates(spec)
    assert [c.region for c in found] == ["us-east-2", "us-west-1", "us-east-1"]
    assert found[0].path_ms == pytest.approx(50.9 + round_trips.SAME_REGION_MS)
    assert found[0].direct_ms == pytest.approx(50.9)


def test_what_was_measured_overrides_the_table() -> None:
    measured = {frozenset(("us-west-2", "us-east-2")): 80.0, frozenset(("us-west-1", "us-east-2")): 20.0}
    spec = a_spec(relay={"regions": ["us-east-2", "us-west-1"]})
    assert candidates(spec, measured)[0].region == "us-west-1"
    assert candidates(spec, measured)[0].path_ms == pytest.approx(41.9)


def test_with_several_nodes_the_mean_over_all_pairs_decides() -> None:
    verify, draft = a_table()["node"]
    spec = a_spec(
        relay={"regions": ["us-east-2", "eu-west-1"]},
        node=[verify, draft, {**draft, "region": "eu-west-1", "count": 3, "market": "on-demand"}],
    )
    pairs = [50.9 + 1.0] + 3 * [80.3 + 1.0]
    assert candidates(spec)[0].path_ms == pytest.approx(sum(pairs) / 4, abs=0.01)


def test_a_pair_that_nobody_knows_is_asked_for() -> None:
    with pytest.raises(SpecError, match="give --round-trip us-east-2:ap-south-9=MS"):
        round_trip_ms("us-east-2", "ap-south-9")


def test_the_table_is_whole_and_in_the_range_of_the_earth() -> None:
    regions = {region for pair in round_trips.ROUND_TRIPS_MS for region in pair}
    assert len(round_trips.ROUND_TRIPS_MS) == len(regions) * (len(regions) - 1) // 2
    assert all(5 < value < 400 for value in round_trips.ROUND_TRIPS_MS.values())


def test_costs_take_the_dearest_type_and_the_spot_price() -> None:
    spec = a_spec()
    lines = costs(spec, "us-east-2", {("us-west-2", "g4dn.xlarge"): 0.2})
    assert [line.usd_per_hour for line in lines[:3]] == [0.0104, 1.006, 0.2]
    disks = 208 * prices.DISK_USD_PER_GIB_MONTH / prices.HOURS_PER_MONTH
    assert total_usd_per_hour(lines) == pytest.approx(0.0104 + 1.006 + 0.2 + disks + 3 * prices.ADDRESS_USD_PER_HOUR)


def test_a_spot_machine_without_a_known_price_counts_as_its_limit_else_as_on_demand() -> None:
    verify, draft = a_table()["node"]
    assert costs(a_spec(), "us-east-2")[2].usd_per_hour == 0.526
    limited = a_spec(node=[verify, {**draft, "max_usd_per_hour": 0.3}])
    assert costs(limited, "us-east-2")[2].usd_per_hour == 0.3


def test_the_budget_is_checked_over_the_whole_time_to_live() -> None:
    spec = a_spec(deployment={**a_table()["deployment"], "budget_usd": 5, "ttl_hours": 4})
    with pytest.raises(BudgetError, match=r"deployment.budget_usd: 5.00 is less than the 6.32 that 4 h at 1.580"):
        check_budget(spec, costs(spec, "us-east-2"))
    assert check_budget(a_spec(), costs(a_spec(), "us-east-2")) == pytest.approx(6.32, abs=0.01)


def test_a_price_that_is_not_known_stops_the_budget_and_can_be_given() -> None:
    verify, draft = a_table()["node"]
    nodes = [{**verify, "instance_types": ["p9.huge"]}, draft]
    with pytest.raises(BudgetError, match=r"price not known.*verify-0: p9.huge"):
        check_budget(a_spec(node=nodes), costs(a_spec(node=nodes), "us-east-2"))
    spec = a_spec(node=nodes, prices={"us-east-2": {"p9.huge": 2.0}})
    assert check_budget(spec, costs(spec, "us-east-2")) == pytest.approx(10.30, abs=0.01)


def test_the_closed_form_is_the_best_synchronous_chain() -> None:
    """The design has 30.6 at 86 ms, from a simulation; where the link is too long, the target alone."""
    found = closed_form(PREDICTION, 86)
    assert found.tokens_per_s == pytest.approx(30.5, abs=0.1)
    assert found.target_only_tokens_per_s == pytest.approx(29.4, abs=0.1)
    assert closed_form(PREDICTION, 400).tokens_per_s == found.target_only_tokens_per_s


def test_the_forecast_asks_the_simulator_where_it_is() -> None:
    with_simulator = forecast(PREDICTION, 86)
    assert with_simulator.method == "scripts/simulate.py"
    assert with_simulator.tokens_per_s > with_simulator.target_only_tokens_per_s
    without = forecast(PREDICTION, 86, simulator=Path("/nowhere/simulate.py"))
    assert without.method.startswith("closed form")


def test_a_growth_policy_that_the_simulator_does_not_know_is_an_error() -> None:
    wrong = Prediction(verify_ms=34, draft_ms=3, acceptance=0.8, growth="forest:9")
    with pytest.raises(InfraError, match="the simulator failed"):
        forecast(wrong, 86)


def test_a_machine_without_torch_gets_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator is in the wheel, torch is not among what `pip install 'foredraft[infra]'` brings."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert forecast(a_spec().prediction, 51.9) == closed_form(a_spec().prediction, 51.9)


def test_a_simulator_that_takes_too_long_does_not_stop_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.predict.SIMULATOR_S", 0.01)
    assert forecast(a_spec().prediction, 51.9) == closed_form(a_spec().prediction, 51.9)
