"""What AWS asks, in dollars, as shipped: enough to decide with before an account is asked.

Instances: on demand, Linux. g5 and g6 from SkyPilot's public catalogue (skypilot-org/skypilot-catalog,
catalogs/v7/aws/vms.csv at 001367d), read on 2026-12-01; t3, t3a and g4dn from AWS's list, from memory.
Disk, address and traffic: AWS's published list for us-east-1, which the other regions exceed by up to a quarter. A
`[prices]` table in the spec overrides all of it, and spot prices are asked for when there are credentials.
"""

from __future__ import annotations

from collections.abc import Mapping

CAPTURED = "2026-12-01"
HOURS_PER_MONTH = 730

_REGIONS = {
    "us-east-1": 0,
    "us-east-2": 0,
    "us-west-2": 0,
    "us-west-1": 1,
    "ca-central-1": 2,
    "eu-west-1": 3,
    "eu-west-2": 4,
    "eu-central-1": 5,
    "eu-north-1": 6,
    "ap-northeast-1": 7,
}
_USD_PER_HOUR: dict[str, tuple[float | None, ...]] = {
    "t3.micro": (0.0104, 0.0124, 0.0116, 0.0114, 0.0118, 0.0120, 0.0108, 0.0136),
    "t3a.micro": (0.0094, 0.0112, 0.0104, 0.0102, 0.0106, 0.0108, None, 0.0122),
    "t3.small": (0.0208, 0.0248, 0.0232, 0.0228, 0.0236, 0.0240, 0.0216, 0.0272),
    "g4dn.xlarge": (0.526, 0.631, 0.584, 0.587, 0.615, 0.658, 0.558, 0.71),
    "g5.xlarge": (1.006, None, 1.117, 1.123, 1.277, 1.258, 1.067, 1.459),
    "g5.4xlarge": (1.624, None, 1.80319, 1.81287, 2.06148, 2.03081, 1.72247, 2.35528),
    "g6.xlarge": (0.8048, None, 0.8936, None, 1.0216, 1.0064, 0.8536, 1.1672),
    "g6.4xlarge": (1.3232, None, 1.4692, None, 1.67965, 1.65466, 1.40343, None),
}
DISK_USD_PER_GIB_MONTH = 0.08
ADDRESS_USD_PER_HOUR = 0.005
"""Each public IPv4 address, the relay's fixed one included."""
TRAFFIC_USD_PER_GB = 0.02
"""Between regions; to the internet it is 0.09, from the first hundred GB of a month on."""


def on_demand_usd_per_hour(
    region: str, instance_type: str, overrides: Mapping[tuple[str, str], float] | None = None
) -> float | None:
    """The price, or None when nobody here knows it."""
    if overrides and (region, instance_type) in overrides:
        return overrides[region, instance_type]
    prices = _USD_PER_HOUR.get(instance_type)
    index = _REGIONS.get(region)
    return None if prices is None or index is None else prices[index]
