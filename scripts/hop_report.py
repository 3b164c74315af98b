"""What request and response times over a hop say: percentiles, latency and bandwidth terms, verdicts, oddities. Pure.

The model is t(size) = latency + size / rate for a request of that size and a short answer. Latency is therefore there
*and back*, rate that of the direction which carried the payload.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speculation.fits import FitRefused, LineFit, fit_line

BOUND_RATIO = 4.0
"""A size is bound by a term that is so many times the other; closer than that it lies between."""
FIT_SHARE = 0.1
ASYMMETRY = 1.25
NOMINAL_SHARE = 0.75
IDLE_RATIO = 1.5
# Linux delays an acknowledgement 40 ms, other systems up to 200: a step of that size over the line is one waited for.
DELAYED_ACK_S = (0.030, 0.250)

Samples = Mapping[int, Sequence[float]]
"""Seconds by payload size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopFit:
    """The two terms; a rate of None means that size costs nothing that stands out of the noise."""

    latency_s: float
    rate_bytes_per_s: float | None
    line: LineFit

    @property
    def crossover_bytes(self) -> float:
        """The size whose bytes take as long as the latency."""
        return self.latency_s * self.rate_bytes_per_s if self.rate_bytes_per_s else math.inf

    @property
    def rate_text(self) -> str:
        """The bandwidth, for people."""
        rate = self.rate_bytes_per_s
        return f"{rate * 8e-6:.1f} Mbit/s" if rate else "too fast to be told from noise"

    def verdict(self, num_bytes: int) -> str:
        """ "latency-bound", "bandwidth-bound" or "between"."""
        if num_bytes * BOUND_RATIO <= self.crossover_bytes:
            return "latency-bound"
        return "bandwidth-bound" if num_bytes >= self.crossover_bytes * BOUND_RATIO else "between"


def fit_hop(samples: Samples) -> HopFit:
    """Fit the quick ones of each size (FIT_SHARE), each with its error in proportion: small sizes fix the latency,
    large ones the rate. Quick ones, because what a machine adds to a link's own time is never negative.

    Raises:
        ValueError: fewer than three sizes.
        FitRefused: the latency cannot be told from nothing.
    """
    if len(samples) < 3:
        raise ValueError(f"a fit needs at least 3 sizes, got {sorted(samples)}")
    line = fit_line([(size, percentile(values, FIT_SHARE)) for size, values in samples.items()], relative=True)
    try:
        slope = line.answer("slope")
    except FitRefused:
        slope = 0.0
    return HopFit(latency_s=line.answer("intercept"), rate_bytes_per_s=1 / slope if slope > 0 else None, line=line)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def hop_rows(samples: Samples, fit: HopFit) -> list[dict[str, Any]]:
    """A row for each size, in milliseconds."""
    return [
        {
            "bytes": size,
            "num_samples": len(values),
            **{f"p{p}_ms": percentile(values, p / 100) * 1e3 for p in (50, 90, 99)},
            "fit_ms": fit.line.at(size) * 1e3,
            "verdict": fit.verdict(size),
        }
        for size, values in sorted(samples.items())
    ]


def delayed_ack_steps(samples: Samples) -> list[str]:
    """Sizes whose requests wait tens of milliseconds more than a smaller and a larger one do."""
    medians = {size: statistics.median(values) for size, values in samples.items()}
    sizes = sorted(medians)
    found = []
    for index, size in enumerate(sizes[:-1]):
        # A cost of bytes stays for larger sizes; a wait for an acknowledgement goes again.
        step = medians[size] - min(medians[larger] for larger in sizes[index + 1 :])
        if DELAYED_ACK_S[0] <= step <= DELAYED_ACK_S[1]:
            found.append(
                f"{size} bytes take {step * 1e3:.0f} ms longer than a larger size: Nagle against a delayed "
                "acknowledgement; set TCP_NODELAY on both ends and write each message at once"
            )
    return found


def oddities(
    *, up: HopFit, down: HopFit | None = None, nominal_mbit: float | None = None, samples: Samples | None = None,
    warm_s: Sequence[float] = (), after_idle_s: Sequence[float] = (), idle_limit: tuple[float, float] | None = None,
) -> list[str]:  # fmt: skip
    """What is unlike a plain link, with its cure where there is one.

    Args:
        up, down: fits of large requests with short answers, and of short requests with large answers.
        nominal_mbit: what the link is said to carry.
        samples: of the way up.
        warm_s, after_idle_s: the same large request back to back, and after a pause.
        idle_limit: longest pause that the connection survived and the first that it did not, in seconds.
    """
    found = delayed_ack_steps(samples) if samples else []
    rate = up.rate_bytes_per_s
    if nominal_mbit is not None and rate is not None and not NOMINAL_SHARE <= rate * 8e-6 / nominal_mbit <= 1.25:
        found.append(
            f"the link carries {rate * 8e-6:.0f} Mbit/s, not its nominal {nominal_mbit:g}: look at the negotiated "
            "speed of both network cards, the cable and the switch port"
        )
    if rate is not None and down is not None and down.rate_bytes_per_s is not None:
        ratio = rate / down.rate_bytes_per_s
        if not 1 / ASYMMETRY <= ratio <= ASYMMETRY:
            found.append(
                f"asymmetric path: {rate * 8e-6:.0f} Mbit/s up, {down.rate_bytes_per_s * 8e-6:.0f} Mbit/s down"
            )
    if warm_s and after_idle_s:
        ratio = statistics.median(after_idle_s) / statistics.median(warm_s)
        if ratio >= IDLE_RATIO:
            found.append(
                f"after a pause a large request takes {ratio:.1f} times as long: slow start after idle; "
                "on both ends: sysctl net.ipv4.tcp_slow_start_after_idle=0"
            )
    if idle_limit is not None:
        survived, died = idle_limit
        found.append(
            f"a connection idle for {died:g} s is dead ({survived:g} s is survived): a middlebox forgets it; "
            f"send a keepalive more often than every {max(survived, died / 2):g} s"
        )
    return found


def model_payload_bytes(config: Mapping[str, Any], *, aux_layers: Sequence[int], tokens_per_cycle: float) -> int:
    """Hidden states of the named layers in two bytes a value: layers × hidden × 2 × tokens.

    Raises:
        ValueError: the configuration has no `hidden_size`, or has no such layer.
    """
    text = config.get("text_config", config)
    hidden, num_layers = text.get("hidden_size"), text.get("num_hidden_layers")
    if not isinstance(hidden, int) or hidden < 1:
        raise ValueError(f"the model's configuration has no hidden_size, only {sorted(text)[:8]}")
    if not aux_layers:
        raise ValueError("aux_layers names no layer")
    if isinstance(num_layers, int) and not 0 <= min(aux_layers) <= max(aux_layers) <= num_layers:
        raise ValueError(f"aux_layers must lie within 0..{num_layers}, got {list(aux_layers)}")
    if tokens_per_cycle <= 0:
        raise ValueError(f"tokens_per_cycle must be positive, got {tokens_per_cycle:g}")
    return math.ceil(len(aux_layers) * hidden * 2 * tokens_per_cycle)


def hop_text(rows: Sequence[Mapping[str, Any]], fit: HopFit, down: HopFit, odd: Sequence[str]) -> str:
    """For people; the rows are of requests, `down` is the fit of large answers."""
    cross = f"{fit.crossover_bytes:.0f} bytes" if fit.rate_bytes_per_s else "none"
    lines = [f"{'bytes':>10}{'samples':>9}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{'fit ms':>10}  verdict"]
    lines += [
        f"{row['bytes']:10}{row['num_samples']:9}{row['p50_ms']:10.3f}{row['p90_ms']:10.3f}{row['p99_ms']:10.3f}"
        f"{row['fit_ms']:10.3f}  {row['verdict']}"
        for row in rows
    ]
    lines.append(
        f"latency there and back {fit.latency_s * 1e3:.3f} ms, bandwidth {fit.rate_text} (of answers "
        f"{down.rate_text}), crossover {cross}"
    )
    return "\n".join([*lines, *(f"odd: {what}" for what in odd)])
