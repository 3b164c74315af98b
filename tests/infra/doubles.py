"""What the tests of infra put in place of the world: a clock, a relay, and faults inside real HTTP clients."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from botocore.awsrequest import AWSResponse

from infra.apply import Applier, Done
from infra.aws.client import Clients
from infra.aws.provider import AwsProvider
from infra.boot import Place, user_data
from infra.health import Health, RelayAddress
from infra.journal import Journal
from infra.plan import Launch
from infra.readiness import Readiness
from infra.spec import Spec, parse
from infra.state import GLOBAL, Observed
from infra.waiting import Waiter

EXPIRES = "2026-12-01T16:00:00+00:00"
VERIFY_REGION, DRAFT_REGION = "us-east-2", "us-west-2"

_COMMON = {
    "architecture": "x86_64",
    "virtualization_type": "hvm",
    "root_device_name": "/dev/sda1",
    "root_device_type": "ebs",
    "sriov": "simple",
    "state": "available",
    "public": True,
    "image_type": "machine",
    "image_location": "amazon/x",
    "hypervisor": "xen",
    "description": "",
    "platform": "",
}
IMAGES = [
    {
        **_COMMON,
        "ami_id": "ami-00000000000000001",
        "owner_id": "099720109477",
        "name": "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20261101",
        "creation_date": "2026-11-01T00:00:00.000Z",
    },
    {
        **_COMMON,
        "ami_id": "ami-00000000000000002",
        "owner_id": "amazon",
        "name": "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261101",
        "creation_date": "2026-11-01T00:00:00.000Z",
    },
]


def a_table(**changes: Any) -> dict[str, Any]:
    """The spec of the tests as a TOML document; `changes` replace whole tables."""
    table: dict[str, Any] = {
        "deployment": {"name": "demo", "ttl_hours": 4, "budget_usd": 40, "tags": {"project": "test"}},
        "package": {"requirement": "foredraft==0.1.0"},
        "relay": {"regions": ["us-east-2", "us-west-2"]},
        "node": [
            {
                "role": "verify",
                "region": VERIFY_REGION,
                "instance_types": ["g6.xlarge", "g5.xlarge"],
                "model": "Qwen/Qwen2.5-7B-Instruct",
            },
            {
                "role": "draft",
                "region": DRAFT_REGION,
                "instance_types": ["g4dn.xlarge"],
                "model": "Qwen/Qwen2.5-0.5B-Instruct",
                "market": "spot",
            },
        ],
    }
    return {**table, **changes}


def a_spec(**changes: Any) -> Spec:
    return parse(a_table(**changes))


class VirtualClock:
    """Sleeping is instant and counted."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def utc(self) -> datetime.datetime:
        start = datetime.datetime(2026, 12, 1, 12, tzinfo=datetime.UTC)
        return start + datetime.timedelta(seconds=self.time - 1000.0)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def error_body(service: str, code: str) -> bytes:
    """An error as the service writes it."""
    if service == "ec2":
        return (
            f"<Response><Errors><Error><Code>{code}</Code><Message>injected</Message></Error></Errors>"
            "<RequestID>0</RequestID></Response>"
        ).encode()
    if service in ("iam", "sts"):
        return (
            f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>injected</Message></Error>"
            "<RequestId>0</RequestId></ErrorResponse>"
        ).encode()
    return json.dumps({"__type": code, "message": "injected"}).encode()


class _Body:
    """The raw side of a response."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        yield self._content


class Faults:
    """Puts faults where real ones are: between botocore and the wire.

    `answers` gives an error instead of sending, so the service has done nothing; `after` raises when the service has
    done it and the answer is on its way.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def answers(
        self, service: str, region: str, operation: str, codes: Sequence[str | None], *, status: int = 400
    ) -> list[str | None]:
        """The next calls fail with these codes in turn, None lets one through; the list returned shrinks with them."""
        left = list(codes)

        def handler(request: Any, **_: Any) -> AWSResponse | None:
            code = left.pop(0) if left else None
            return None if code is None else AWSResponse(request.url, status, {}, _Body(error_body(service, code)))

        self._clients(service, region).meta.events.register(f"before-send.{service}.{operation}", handler)
        return left

    def always(self, service: str, region: str, operation: str, code: str, *, where: str = "") -> Callable[[], None]:
        """Every call whose body has `where` fails with this code, until the function returned is called."""
        events = self._clients(service, region).meta.events
        name = f"before-send.{service}.{operation}"

        def handler(request: Any, **_: Any) -> AWSResponse | None:
            body = request.body or ""
            if where not in (body if isinstance(body, str) else body.decode()):
                return None
            return AWSResponse(request.url, 400, {}, _Body(error_body(service, code)))

        events.register(name, handler)
        return lambda: events.unregister(name, handler)

    def after(self, service: str, region: str, operation: str, exc: BaseException, *, skip: int = 0) -> None:
        """The call after `skip` others is done, and then this is raised, once."""
        left = [skip]

        def handler(**_: Any) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise exc

        self._clients(service, region).meta.events.register(f"after-call.{service}.{operation}", handler)


class FakeRelay:
    """Answers probes from a list; the last answer stays."""

    def __init__(self, *answers: Health) -> None:
        self.answers = list(answers)
        self.asked: list[RelayAddress] = []

    def __call__(self, address: RelayAddress) -> Health:
        self.asked.append(address)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


ALL_READY = Health(True, frozenset({"verify-0", "draft-0"}), "/healthz: 200")
NOT_UP = Health(False, frozenset(), "connection refused")


class Bench:
    """One deployment under test."""

    def __init__(
        self, spec: Spec, provider: AwsProvider, clients: Clients, clock: VirtualClock, rng: random.Random, state: Path
    ) -> None:
        self.spec = spec
        self.provider = provider
        self.clients = clients
        self.clock = clock
        self.rng = rng
        self.state = state
        self.said: list[str] = []
        self.relay = FakeRelay(ALL_READY)

    def applier(self) -> Applier:
        """As a new process would make it: only the state folder is shared."""

        def data(launch: Launch, relay_region: str, relay_address: str, expires_at: str) -> str:
            place = Place(
                region=launch.region, relay_region=relay_region, relay_address=relay_address, expires_at=expires_at
            )
            return user_data(self.spec, launch.machine, place)

        return Applier(
            self.provider,
            journal=Journal(self.state / f"{self.spec.name}.json"),
            clock=self.clock,
            user_data=data,
            say=self.said.append,
            rng=self.rng,
        )

    def up(self, *, keep: bool = False, relay_region: str = "us-east-2") -> Done:
        """Up, with a relay that publishes its certificate as soon as it has been asked for."""
        ready = Readiness(
            self.provider,
            self.spec,
            waiter=Waiter(self.clock, self.rng),
            probe=self.relay,
            say=self.said.append,
            started_ms=0,
        )

        def wait(done: Done) -> None:
            self.clients("ssm", done.relay_region).put_parameter(
                Name=f"/foredraft/{self.spec.name}/relay-certificate", Value="PEM", Type="String", Overwrite=True
            )
            # The relay's call, not the command's.
            self.clients.calls["PutParameter"] -= 1
            ready.wait(done.plan, done.relay_address, done.instance_ids)

        return self.applier().up(self.spec, relay_region, expires_at=EXPIRES, keep=keep, ready=wait)

    def down(self) -> int:
        return self.applier().down(self.spec.regions)

    def observe(self) -> Observed:
        return self.provider.observe((GLOBAL, *self.spec.regions))

    def calls_of(self, action: Callable[[], object]) -> dict[str, int]:
        """API calls made meanwhile, by operation."""
        before = dict(self.clients.calls)
        action()
        return {
            name: count - before.get(name, 0)
            for name, count in sorted(self.clients.calls.items())
            if count > before.get(name, 0)
        }

    def everything_in_moto(self) -> list[str]:
        """All that is billed or in the way, by asking each service without our filters."""
        found = []
        for region in self.spec.regions:
            ec2 = self.clients("ec2", region)
            for reservation in ec2.describe_instances()["Reservations"]:
                found += [i["InstanceId"] for i in reservation["Instances"] if i["State"]["Name"] != "terminated"]
            found += [a["AllocationId"] for a in ec2.describe_addresses()["Addresses"]]
            found += [v["VolumeId"] for v in ec2.describe_volumes()["Volumes"]]
            found += [
                g["GroupId"] for g in ec2.describe_security_groups()["SecurityGroups"] if g["GroupName"] != "default"
            ]
            found += [v["VpcId"] for v in ec2.describe_vpcs()["Vpcs"] if not v["IsDefault"]]
            found += [g["InternetGatewayId"] for g in ec2.describe_internet_gateways()["InternetGateways"]]
            found += [k["KeyName"] for k in ec2.describe_key_pairs()["KeyPairs"]]
            found += [p["Name"] for p in self.clients("ssm", region).describe_parameters()["Parameters"]]
            found += [g["logGroupName"] for g in self.clients("logs", region).describe_log_groups()["logGroups"]]
        iam = self.clients("iam", "us-east-1")
        found += [r["RoleName"] for r in iam.list_roles()["Roles"]]
        found += [p["InstanceProfileName"] for p in iam.list_instance_profiles()["InstanceProfiles"]]
        return found
