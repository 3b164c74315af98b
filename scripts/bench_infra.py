"""What provisioning costs in API calls, how long the plan takes, and what every injected fault leaves behind.

    python scripts/bench_infra.py --results docs/results/infra.json

AWS is moto's server, over HTTP on the loopback; waits are on a virtual clock. The faults are those of the tests.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import boto3

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infra.aws.client import Clients
from infra.aws.provider import AwsProvider
from infra.plan import Launch, plan_up
from infra.state import Observed
from scripts.results import Goal, write_results
from tests.infra.doubles import Bench, Faults, VirtualClock, a_spec, a_table
from tests.infra.fault_list import DOWN_FAULTS, UP_FAULTS, run_down_fault, run_up_fault
from tests.infra.moto_server import moto_server, reset

LOOKING = ("Describe", "Get", "List")
NUM_NODES, NUM_PLANS = 50, 200


def fresh(url: str, folder: Path, session: boto3.session.Session) -> tuple[Bench, Faults]:
    """An empty account, and one deployment's command on it."""
    reset(url)
    clients = Clients(endpoint_url=url, max_attempts=3, session=session)
    spec = a_spec()
    provider = AwsProvider(clients, deployment=spec.name, extra_tags=spec.tags)
    state = folder / "state"
    for path in state.glob("*"):
        path.unlink()
    return Bench(spec, provider, clients, VirtualClock(), random.Random(7), state), Faults(clients)


def changes(calls: dict[str, int]) -> int:
    """How many calls may have changed something."""
    return sum(count for name, count in calls.items() if not name.startswith(LOOKING))


def count_calls(bench: Bench) -> dict[str, dict[str, int]]:
    """API calls by operation, of each command in turn."""
    return {
        "up": bench.calls_of(bench.up),
        "second up": bench.calls_of(bench.up),
        "down": bench.calls_of(bench.down),
        "second down": bench.calls_of(bench.down),
    }


def plan_ms() -> tuple[float, float, int]:
    """Median times of the pure plan for 50 nodes, with nothing there and with all actions, and its launches."""
    verify, draft = a_table()["node"]
    spec = a_spec(node=[{**verify, "count": NUM_NODES // 2}, {**draft, "count": NUM_NODES - NUM_NODES // 2}])
    times = []
    for _ in range(NUM_PLANS):
        began = time.perf_counter()
        plan = plan_up(spec, "us-east-2", Observed())
        times.append(time.perf_counter() - began)
    launches = sum(isinstance(action, Launch) for action in plan.actions)
    return statistics.median(times) * 1e3, max(times) * 1e3, launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="write the figures here")
    args = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    session = boto3.session.Session()
    left: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="foredraft-infra-") as name, moto_server(Path(name)) as url:
        folder = Path(name)
        calls = count_calls(fresh(url, folder, session)[0])
        for up_fault in UP_FAULTS:
            bench, faults = fresh(url, folder, session)
            run_up_fault(up_fault, bench, faults)
            bench.down()
            left[f"up: {up_fault.name}"] = len(bench.everything_in_moto())
        for down_fault in DOWN_FAULTS:
            bench, faults = fresh(url, folder, session)
            run_down_fault(down_fault, bench, faults)
            bench.down()
            left[f"down: {down_fault.name}"] = len(bench.everything_in_moto())
    median_ms, worst_ms, launches = plan_ms()
    again = {command: changes(calls[command]) for command in ("second up", "second down")}
    num_left = sum(left.values())
    goals = [
        *(Goal(f"{command}: calls that change something", 0, count, count == 0) for command, count in again.items()),
        Goal(f"resources left after down, from each of {len(left)} faults", 0, num_left, num_left == 0),
    ]
    for command, by_name in calls.items():
        print(f"{command:12} {sum(by_name.values()):4} calls, {changes(by_name)} of them change something")
    print(f"plan of {NUM_NODES} nodes: {median_ms:.2f} ms (worst of {NUM_PLANS}: {worst_ms:.2f}), {launches} launches")
    print(f"{len(left)} faults, {num_left} resources left")
    if args.results is not None:
        write_results(
            args.results,
            command="python scripts/bench_infra.py --results docs/results/infra.json",
            packages=("boto3", "moto"),
            models={},
            parameters={"deployment": "a relay, a verify node and a draft node in two regions", "AWS": "moto server"},
            figures={
                "calls": {command: sum(by_name.values()) for command, by_name in calls.items()},
                "calls that change something": {command: changes(by_name) for command, by_name in calls.items()},
                "calls by operation": calls,
                f"plan of {NUM_NODES} nodes, ms": {"median": round(median_ms, 3), "worst": round(worst_ms, 3)},
                "resources left after each fault and a down": left,
            },
            goals=goals,
        )
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
