"""Metrics in Prometheus' text format: families made at each scrape from what the cores count.

The format is a page long, and the relay is meant for a machine with little memory, which is why no library is used:
importing prometheus_client takes 12 MB.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Bounds of buckets for durations."""
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its samples.

    Attributes:
        kind: "counter", "gauge" or "histogram".
        samples: suffix of the name, labels, value.
    """

    name: str
    kind: str
    text: str
    samples: Sequence[tuple[str, Mapping[str, str], float]]


@dataclass(slots=True)
class Histogram:
    """Counts of observed values, by upper bounds."""

    bounds: Sequence[float] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def samples(self, labels: Mapping[str, str]) -> list[tuple[str, Mapping[str, str], float]]:
        """Its samples, under these labels."""
        found: list[tuple[str, Mapping[str, str], float]] = []
        so_far = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            so_far += count
            found.append(("_bucket", {**labels, "le": bound}, so_far))
        return [*found, ("_sum", labels, self.total), ("_count", labels, so_far)]


def gauge(name: str, text: str, value: float) -> Family:
    """A gauge without labels."""
    return Family(name, "gauge", text, [("", {}, value)])


def counter(name: str, text: str, value: float) -> Family:
    """A counter without labels; its name ends in `_total`."""
    return Family(name, "counter", text, [("", {}, value)])


def labelled(kind: str, name: str, text: str, label: str, values: Mapping[str, float]) -> Family:
    """A metric with one label."""
    return Family(name, kind, text, [("", {label: key}, value) for key, value in values.items()])


def histograms(name: str, text: str, label: str, by_label: Mapping[str, Histogram]) -> Family:
    """Histograms with one label between them."""
    samples = [sample for key, histogram in by_label.items() for sample in histogram.samples({label: key})]
    return Family(name, "histogram", text, samples)


def render(families: Iterable[Family]) -> str:
    """The page that Prometheus reads."""
    lines: list[str] = []
    for family in families:
        assert _NAME.fullmatch(family.name), family.name
        lines += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
        for suffix, labels, value in family.samples:
            inside = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
            lines.append(f"{family.name}{suffix}{'{' + inside + '}' if inside else ''} {value:.12g}")
    return "\n".join(lines) + "\n"
