"""What the user reads: plans, states, costs, as lines of text. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from infra import placement, prices, round_trips
from infra.placement import Candidate, CostLine, SpotPrices
from infra.plan import Plan, describe
from infra.predict import Forecast
from infra.spec import Spec
from infra.state import Kind, Observed


def usd(value: float | None, digits: int = 4) -> str:
    return "not known" if value is None else f"{value:.{digits}f}"


def placement_lines(found: Sequence[Candidate], *, measured: bool) -> list[str]:
    """Each candidate region of the relay, the best first."""
    source = f"{round_trips.SOURCE}, captured {round_trips.CAPTURED}" + (
        ", but for what was measured" if measured else ""
    )
    lines = [f"relay region (round trips: {source}):"]
    for index, candidate in enumerate(found):
        chosen = "*" if index == 0 else " "
        lines.append(
            f"  {chosen} {candidate.region:<16} draft -> relay -> verify {candidate.path_ms:6.1f} ms round trip "
            f"(without a relay {candidate.direct_ms:.1f}), relay {usd(candidate.relay_usd_per_hour)} USD/h"
        )
    return lines


def cost_lines(lines: Sequence[CostLine]) -> list[str]:
    told = [f"cost per hour in USD (prices of {prices.CAPTURED}, unless the spec or the spot market says otherwise):"]
    told += [f"    {line.what:<60} {usd(line.usd_per_hour)}" for line in lines]
    told.append(f"    {'in all':<60} {usd(placement.total_usd_per_hour(lines))}")
    told.append(
        f"    traffic between regions comes on top: {prices.TRAFFIC_USD_PER_GB:.2f} per GB; tokens are a few bytes"
    )
    return told


def forecast_lines(spec: Spec, relay_region: str, forecast: Forecast, lines: Sequence[CostLine]) -> list[str]:
    """Is drafting from there worth it? One session; several share the machines and the price."""
    p = spec.prediction
    told = [
        f"forecast by {forecast.method} (verify {p.verify_ms:g} ms, draft {p.draft_ms:g} ms a token, acceptance "
        f"{p.acceptance:g}), one session:",
        f"    with drafting     {forecast.tokens_per_s:7.1f} tokens/s",
        f"    target alone      {forecast.target_only_tokens_per_s:7.1f} tokens/s",
    ]
    total = placement.total_usd_per_hour(lines)
    alone = verify_only_usd_per_hour(spec, relay_region, lines)
    if total is not None and alone is not None:
        with_drafts = forecast.usd_per_million_tokens(total)
        without = alone / (forecast.target_only_tokens_per_s * 3600) * 1e6
        told[1] += f"   {with_drafts:8.2f} USD per million tokens"
        told[2] += f"   {without:8.2f} USD per million tokens (verify nodes and relay only)"
        faster = forecast.tokens_per_s / forecast.target_only_tokens_per_s
        verdict = "cheaper" if with_drafts < without else "dearer"
        told.append(
            f"    drafting from there: {faster:.2f} x the speed, {with_drafts / without:.2f} x the cost: {verdict}"
        )
    return told


def verify_only_usd_per_hour(spec: Spec, relay_region: str, lines: Sequence[CostLine]) -> float | None:
    """What it would cost without the draft nodes, their disks and addresses."""
    total = placement.total_usd_per_hour(lines)
    if total is None:
        return None
    for machine, line in zip(spec.machines, lines, strict=False):
        if machine.role == "draft" and line.usd_per_hour is not None:
            disk = machine.disk_gib * prices.DISK_USD_PER_GIB_MONTH / prices.HOURS_PER_MONTH
            total -= line.usd_per_hour + disk + prices.ADDRESS_USD_PER_HOUR
    return total


def plan_lines(plan: Plan) -> list[str]:
    told = [f"note: {note}" for note in plan.notes]
    if not plan.actions:
        return [*told, "nothing to do: everything exists"]
    return [*told, f"{len(plan.actions)} actions:", *(f"    {describe(action)}" for action in plan.actions)]


def status_lines(observed: Observed, ready: set[str] | None, relay: str) -> list[str]:
    """Every instance, and what else exists. `ready` is None when nobody could be asked."""
    if not observed.remaining():
        return ["nothing exists"]
    told = []
    for instance in sorted(observed.of(Kind.INSTANCE), key=lambda r: (r.slot != "relay", r.slot, r.id)):
        health = "" if ready is None else ", ready" if instance.slot in ready else ", not ready"
        life = instance.life.value if instance.life else "unknown"
        told.append(
            f"{instance.slot or '(no slot)':<12} {instance.id} {instance.instance_type} {instance.market} "
            f"in {instance.zone}: "
            f"{life}{health}, ends {instance.expires_at or 'never'}"
        )
    others = [r for r in observed.resources if r.kind is not Kind.INSTANCE]
    told.append("besides: " + (", ".join(str(r) for r in others) or "nothing"))
    if relay:
        told.append(f"relay: {relay}")
    return told


def spent_lines(spec: Spec, observed: Observed, now: datetime.datetime, spot: SpotPrices) -> list[str]:
    """What runs, what it has cost since it was launched, and what it will have cost at its end."""
    machines = {machine.slot: machine for machine in spec.machines}
    told, rate, spent, ahead = [], 0.0, 0.0, 0.0
    for instance in observed.alive():
        machine = machines.get(instance.slot)
        price = (
            placement.machine_usd_per_hour(spec, machine, instance.region, instance.instance_type, spot)
            if machine
            else prices.on_demand_usd_per_hour(instance.region, instance.instance_type, spec.prices)
        )
        disk_gib = machine.disk_gib if machine else 0
        since = datetime.datetime.fromisoformat(instance.since) if instance.since else now
        hours = max(0.0, (now - since).total_seconds() / 3600)
        if price is None:
            told.append(f"{instance.slot}: {instance.instance_type} in {instance.region}: price not known")
            continue
        whole = price + prices.ADDRESS_USD_PER_HOUR + disk_gib * prices.DISK_USD_PER_GIB_MONTH / prices.HOURS_PER_MONTH
        rate += whole
        spent += whole * hours
        if instance.expires_at:
            left = datetime.datetime.fromisoformat(instance.expires_at) - now
            ahead += whole * max(0.0, left.total_seconds() / 3600)
        told.append(f"{instance.slot}: {whole:.4f} USD/h for {hours:.2f} h: {whole * hours:.2f} USD")
    idle = [a for a in observed.of(Kind.ADDRESS) if not a.attached_to]
    if idle:
        rate += prices.ADDRESS_USD_PER_HOUR * len(idle)
        told.append(
            f"{len(idle)} address without an instance: {prices.ADDRESS_USD_PER_HOUR * len(idle):.4f} USD/h until `down`"
        )
    told.append(
        f"in all {rate:.4f} USD/h, {spent:.2f} USD so far, {spent + ahead:.2f} USD at the end of the time to live; "
        f"budget {spec.budget_usd:.2f} USD"
    )
    return told
