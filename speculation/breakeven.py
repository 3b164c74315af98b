"""When a drafter pays from afar: closed forms, each with what it assumes. Pure arithmetic; times in seconds.

Words: a *cycle* is one draft-and-verify round of co-located speculation. The *hop* is what the link adds to a cycle:
there and back, payload included. *Freed* is what leaves the verifier's device when the drafter does: draft forward,
sampling and context update.

- Relocation (`Relocation`): cycle' = cycle − freed + hop, at the same tokens per cycle. It assumes that the remote
  drafter works entirely while the target verifies, so that only the hop remains on the path, and that it drafts
  equally well. It is what the second write-up measured: a payload of hidden states over three links.
- Synchronous remote drafting (`synchronous_rtt_limit_s`): beats target-only iff RTT < (τ−1)·t_target − γ·t_draft. It
  assumes one round in flight, a pass that costs the same for γ+1 rows as for one, and independent acceptances.
  From τ / (RTT + γ·t_draft + t_target) > 1 / t_target.
- τ = (1−α^(γ+1))/(1−α): mean tokens of a round (Leviathan et al., 2023, equation 1), for independent acceptances.
- Capacity (`capacity_gain`): 1 + γ·t_d/t_v, the sessions that a verifier's device serves more when drafting leaves it.
  It assumes a saturated device that did the drafting in turn with verification, and a link that is not the limit.

What none of them covers is a verifier that never idles: that is simulated (`scripts/plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace


def mean_tokens(*, acceptance: float, num_drafted: int) -> float:
    """τ: expected tokens of a round with γ = `num_drafted`, the correction or bonus token included."""
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must lie within 0..1, got {acceptance}")
    if num_drafted < 0:
        raise ValueError(f"num_drafted must be at least 0, got {num_drafted}")
    if acceptance == 1:
        return float(num_drafted + 1)
    return float((1 - acceptance ** (num_drafted + 1)) / (1 - acceptance))


def synchronous_rate(
    *, rtt_s: float, acceptance: float, num_drafted: int, draft_token_s: float, verify_s: float
) -> float:
    """Tokens/s with one round in flight; `verify_s` is the pass over γ+1 rows."""
    round_s = rtt_s + num_drafted * draft_token_s + verify_s
    return mean_tokens(acceptance=acceptance, num_drafted=num_drafted) / _positive("round", round_s)


def synchronous_rtt_limit_s(
    *, acceptance: float, num_drafted: int, draft_token_s: float, target_s: float, verify_s: float | None = None
) -> float:
    """The round trip below which synchronous remote drafting beats target-only; negative where none does.

    With `verify_s` (the pass over γ+1 rows) the flat-pass assumption falls: τ·t_target − t_verify − γ·t_draft.
    """
    tau = mean_tokens(acceptance=acceptance, num_drafted=num_drafted)
    return tau * target_s - (target_s if verify_s is None else verify_s) - num_drafted * draft_token_s


def capacity_gain(*, num_drafted: int, draft_token_s: float, verify_s: float) -> float:
    """How many times the sessions a saturated verifier serves once it no longer drafts."""
    return 1 + num_drafted * draft_token_s / _positive("verify_s", verify_s)


def payload_bytes(*, num_layers: int, hidden_size: int, num_tokens: float, value_bytes: int = 2) -> float:
    """Hidden states of `num_layers` layers for so many tokens."""
    return num_layers * hidden_size * value_bytes * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A hop of latency_s + payload / rate; the rate None for a payload that costs nothing."""

    latency_s: float
    rate_bytes_per_s: float | None = None

    def hop_s(self, num_bytes: float) -> float:
        """What a cycle waits for a payload of so many bytes."""
        return self.latency_s + (num_bytes / self.rate_bytes_per_s if self.rate_bytes_per_s else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """Co-located speculation whose drafter may move.

    Attributes:
        cycle_s: one draft-and-verify cycle, drafter beside the target.
        draft_forward_s, sampling_s, context_update_s: the parts of it that would move.
        tokens_per_cycle: mean tokens that a cycle commits, of the same run as cycle_s.
    """

    cycle_s: float
    draft_forward_s: float
    sampling_s: float = 0.0
    context_update_s: float = 0.0
    tokens_per_cycle: float

    def __post_init__(self) -> None:
        for name in ("cycle_s", "tokens_per_cycle"):
            _positive(name, getattr(self, name))
        for name in ("draft_forward_s", "sampling_s", "context_update_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.freed_s >= self.cycle_s:
            raise ValueError(f"freed time must be below the cycle of {self.cycle_s:g} s, got {self.freed_s:g} s")

    @property
    def freed_s(self) -> float:
        """What leaves the verifier's device; also the hop at which relocation neither gains nor loses."""
        return self.draft_forward_s + self.sampling_s + self.context_update_s

    @property
    def freed_share(self) -> float:
        """Of the cycle."""
        return self.freed_s / self.cycle_s

    @property
    def rate(self) -> float:
        """Tokens/s with the drafter where it is."""
        return self.tokens_per_cycle / self.cycle_s

    def rate_at(self, hop_s: float) -> float:
        """Tokens/s with the drafter behind a hop, drafting entirely overlapped."""
        return self.tokens_per_cycle / _positive("relocated cycle", self.cycle_s - self.freed_s + hop_s)

    def gain_at(self, hop_s: float) -> float:
        """Relative gain: 0 at break-even."""
        return self.rate_at(hop_s) / self.rate - 1

    def break_even_rate_bytes_per_s(self, *, payload_bytes: float, latency_s: float) -> float | None:
        """The bandwidth at which a link of this latency breaks even; None if none does."""
        room_s = self.freed_s - latency_s
        return payload_bytes / room_s if room_s > 0 else None

    def break_even_latency_s(self, *, payload_bytes: float, rate_bytes_per_s: float) -> float | None:
        """The latency at which a link of this bandwidth breaks even; None if the payload alone takes longer."""
        room_s = self.freed_s - payload_bytes / _positive("rate_bytes_per_s", rate_bytes_per_s)
        return room_s if room_s > 0 else None


def relocation_sensitivity(plan: Relocation, link: Link, num_bytes: float, *, step: float = 0.1) -> dict[str, float]:
    """Relative change of the relocated tokens/s when one input grows by `step` and nothing else changes.

    A larger draft or sampling time keeps the rest of the cycle, so the cycle grows with it: the relocated rate does
    not move, and what moves is the gain. So each is reported through the gain, in points.
    """

    def gain(plan: Relocation, link: Link, num_bytes: float) -> float:
        return plan.gain_at(link.hop_s(num_bytes))

    def with_part(name: str) -> Relocation:
        grown = getattr(plan, name) * step
        return replace(plan, cycle_s=plan.cycle_s + grown, **{name: getattr(plan, name) + grown})

    base = gain(plan, link, num_bytes)
    rest_s = (plan.cycle_s - plan.freed_s) * step
    changed: Mapping[str, Callable[[], float]] = {
        "draft forward": lambda: gain(with_part("draft_forward_s"), link, num_bytes),
        "sampling": lambda: gain(with_part("sampling_s"), link, num_bytes),
        "context update": lambda: gain(with_part("context_update_s"), link, num_bytes),
        "rest of the cycle": lambda: gain(replace(plan, cycle_s=plan.cycle_s + rest_s), link, num_bytes),
        "latency": lambda: gain(plan, replace(link, latency_s=link.latency_s * (1 + step)), num_bytes),
        "payload": lambda: gain(plan, link, num_bytes * (1 + step)),
    }
    rate = link.rate_bytes_per_s
    if rate is not None:
        faster = replace(link, rate_bytes_per_s=rate * (1 + step))
        changed = {**changed, "bandwidth": lambda: gain(plan, faster, num_bytes)}
    return {name: compute() - base for name, compute in changed.items()}


def _positive(name: str, value: float) -> float:
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value:g}")
    return value
