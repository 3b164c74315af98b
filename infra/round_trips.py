"""Round trips between regions, in milliseconds, as shipped.

Median over a year (p50, 1Y) of cloudping.co, which times a TCP connection from a function in one region to a service
endpoint in the other; captured on 2025-05-29 (published as aws-ping-p50-1y.json in oaustegard.github.io). The mean of
both directions, rounded. A pair that is not here has to be measured: `--round-trip A:B=MS`.
"""

from __future__ import annotations

SOURCE = "cloudping.co, p50 over a year, both directions' mean"
CAPTURED = "2025-05-29"
SAME_REGION_MS = 1.0
"""Between two zones of a region; the table's own diagonal is mostly the endpoint's doing."""

_ORDER = (
    "us-east-1",
    "us-east-2",
    "us-west-1",
    "us-west-2",
    "ca-central-1",
    "eu-west-1",
    "eu-west-2",
    "eu-central-1",
    "eu-north-1",
    "ap-northeast-1",
)
# Row i holds the pairs of region i with the regions after it.
_ROWS: tuple[tuple[float, ...], ...] = (
    (15.4, 63.9, 64.1, 16.3, 69.6, 77.6, 92.8, 112.3, 149.3),  # us-east-1
    (52.7, 50.9, 27.2, 80.3, 88.3, 103.6, 123.1, 135.0),  # us-east-2
    (21.9, 79.8, 129.9, 147.8, 153.1, 172.6, 108.4),  # us-west-1
    (60.6, 118.3, 128.8, 142.5, 155.4, 98.3),  # us-west-2
    (69.1, 79.1, 92.9, 105.8, 145.2),  # ca-central-1
    (13.7, 27.1, 40.5, 201.0),  # eu-west-1
    (17.8, 31.6, 211.7),  # eu-west-2
    (22.8, 227.4),  # eu-central-1
    (247.1,),  # eu-north-1
)
ROUND_TRIPS_MS: dict[frozenset[str], float] = {
    frozenset((_ORDER[i], _ORDER[i + 1 + j])): value for i, row in enumerate(_ROWS) for j, value in enumerate(row)
}
