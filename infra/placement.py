"""Where the relay belongs, and what the whole costs. Pure.

The relay's region is the candidate with the shortest way from draft to relay to verify node, on average over all
pairs; the cheaper of two equal ones, then the first in the spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra import prices, round_trips
from infra.errors import BudgetError, SpecError
from infra.spec import Machine, Spec

Measured = Mapping[frozenset[str], float]
SpotPrices = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One region for the relay.

    Attributes:
        path_ms: draft to relay to verify and back, the mean over all pairs of a draft and a verify node.
        direct_ms: the same without a relay between them.
    """

    region: str
    path_ms: float
    direct_ms: float
    relay_usd_per_hour: float | None


@dataclass(frozen=True, slots=True)
class CostLine:
    """One part of the cost; `usd_per_hour` is None when the price is not known."""

    what: str
    usd_per_hour: float | None
    is_node: bool = False


def round_trip_ms(a: str, b: str, measured: Measured | None = None) -> float:
    """Measured, else shipped.

    Raises:
        SpecError: neither; says how to give it.
    """
    pair = frozenset((a, b))
    if measured and pair in measured:
        return measured[pair]
    if a == b:
        return round_trips.SAME_REGION_MS
    if pair not in round_trips.ROUND_TRIPS_MS:
        raise SpecError(
            f"round trip {a} - {b}: not in the table of {round_trips.CAPTURED}; "
            f"measure it and give --round-trip {a}:{b}=MS"
        )
    return round_trips.ROUND_TRIPS_MS[pair]


def candidates(spec: Spec, measured: Measured | None = None) -> list[Candidate]:
    """All candidate regions of the relay, the best first."""
    drafts = [node.regions[0] for node in spec.nodes if node.role == "draft"]
    verifies = [node.regions[0] for node in spec.nodes if node.role == "verify"]
    pairs = [(d, v) for d in drafts for v in verifies]
    direct = sum(round_trip_ms(d, v, measured) for d, v in pairs) / len(pairs)
    found = []
    for region in spec.relay.regions:
        path = sum(round_trip_ms(d, region, measured) + round_trip_ms(region, v, measured) for d, v in pairs) / len(
            pairs
        )
        price = prices.on_demand_usd_per_hour(region, spec.relay.instance_types[0], spec.prices)
        found.append(Candidate(region, round(path, 2), round(direct, 2), price))
    return sorted(found, key=lambda c: (c.path_ms, c.relay_usd_per_hour or 0.0, spec.relay.regions.index(c.region)))


def machine_usd_per_hour(
    spec: Spec, machine: Machine, region: str, instance_type: str, spot: SpotPrices | None = None
) -> float | None:
    """What one machine costs. A spot machine whose price is not known counts as its limit, else as on demand."""
    full = prices.on_demand_usd_per_hour(region, instance_type, spec.prices)
    if machine.market != "spot":
        return full
    if spot and (region, instance_type) in spot:
        return spot[region, instance_type]
    return machine.max_usd_per_hour if machine.max_usd_per_hour is not None else full


def costs(spec: Spec, relay_region: str, spot: SpotPrices | None = None) -> list[CostLine]:
    """The parts of the cost per hour; each machine at the dearest of its types, for that is what `up` may get."""
    lines = []
    for machine in spec.machines:
        region = relay_region if machine.role == "relay" else machine.regions[0]
        known = [machine_usd_per_hour(spec, machine, region, kind, spot) for kind in machine.instance_types]
        price = None if None in known else max(p for p in known if p is not None)
        kinds = " or ".join(machine.instance_types)
        lines.append(CostLine(f"{machine.slot}: {kinds}, {machine.market}, {region}", price, machine.role != "relay"))
    disk_gib = sum(machine.disk_gib for machine in spec.machines)
    lines.append(CostLine(f"disks, {disk_gib} GiB", disk_gib * prices.DISK_USD_PER_GIB_MONTH / prices.HOURS_PER_MONTH))
    count = len(spec.machines)
    lines.append(CostLine(f"{count} public IPv4 addresses", count * prices.ADDRESS_USD_PER_HOUR))
    return lines


def total_usd_per_hour(lines: Sequence[CostLine]) -> float | None:
    """The sum, or None when a part is not known."""
    known = [line.usd_per_hour for line in lines]
    return None if None in known else sum(p for p in known if p is not None)


def check_budget(spec: Spec, lines: Sequence[CostLine]) -> float:
    """Dollars that the deployment costs until its time to live is over.

    Raises:
        BudgetError: more than the budget, or a price that is not known.
    """
    unknown = [line.what for line in lines if line.usd_per_hour is None]
    if unknown:
        raise BudgetError(
            f"price not known, so deployment.budget_usd cannot be checked: {'; '.join(unknown)}. "
            'Give it: [prices.REGION] "TYPE" = USD_PER_HOUR'
        )
    total = total_usd_per_hour(lines)
    assert total is not None
    cost = total * spec.ttl_hours
    if cost > spec.budget_usd:
        raise BudgetError(
            f"deployment.budget_usd: {spec.budget_usd:.2f} is less than the {cost:.2f} that {spec.ttl_hours:g} h at "
            f"{total:.3f} per hour cost; shorten ttl_hours, choose cheaper types or raise the budget"
        )
    return cost
