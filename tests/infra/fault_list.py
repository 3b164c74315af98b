"""Every fault that is injected into `up` or `down`, by name: what is broken, and how. Run by test_faults.py and
bench_infra.py.

An `up` fault is armed, `up` is run (it may fail or succeed), then `down`; after that nothing may be left. A `down`
fault is armed after an undisturbed `up`; the first `down` may fail, the fault is lifted, and the second must leave
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from botocore.exceptions import EndpointConnectionError

from infra.errors import InfraError
from tests.infra.doubles import DRAFT_REGION, NOT_UP, VERIFY_REGION, Bench, FakeRelay, Faults

Arm = Callable[[Bench, Faults], Callable[[], None] | None]
"""Arms a fault; what it returns lifts it."""


class Killed(BaseException):
    """The process ends here: nothing of ours runs any more."""


@dataclass(frozen=True, slots=True)
class UpFault:
    """A fault during `up`. `killed`: no roll-back runs and the state folder is lost."""

    name: str
    arm: Arm
    killed: bool = False
    succeeds: bool = False


@dataclass(frozen=True, slots=True)
class DownFault:
    """A fault during `down`."""

    name: str
    arm: Arm
    succeeds: bool = False


def interrupted_after(service: str, region: str, operation: str, skip: int = 0) -> Arm:
    def arm(bench: Bench, faults: Faults) -> None:
        faults.after(service, region, operation, KeyboardInterrupt(), skip=skip)

    return arm


def answered(service: str, region: str, operation: str, *codes: str | None, status: int = 400) -> Arm:
    def arm(bench: Bench, faults: Faults) -> None:
        faults.answers(service, region, operation, codes, status=status)

    return arm


def always(service: str, region: str, operation: str, code: str) -> Arm:
    return lambda bench, faults: faults.always(service, region, operation, code)


def answer_lost(service: str, region: str, operation: str) -> Arm:
    def arm(bench: Bench, faults: Faults) -> None:
        faults.after(service, region, operation, EndpointConnectionError(endpoint_url="http://lost"))

    return arm


def never_ready(bench: Bench, faults: Faults) -> None:
    bench.relay = FakeRelay(NOT_UP)


def all_capacity_gone(bench: Bench, faults: Faults) -> None:
    faults.always("ec2", DRAFT_REGION, "RunInstances", "InsufficientInstanceCapacity")


def never_visible(bench: Bench, faults: Faults) -> Callable[[], None]:
    return faults.always("ec2", VERIFY_REGION, "DescribeInstances", "InvalidInstanceID.NotFound", where="InstanceId.1")


STEPS = [
    ("ssm", VERIFY_REGION, "PutParameter", 0),
    ("iam", "us-east-1", "CreateRole", 0),
    ("iam", "us-east-1", "CreateRole", 1),
    ("iam", "us-east-1", "PutRolePolicy", 0),
    ("iam", "us-east-1", "CreateInstanceProfile", 0),
    ("iam", "us-east-1", "AddRoleToInstanceProfile", 1),
    ("logs", VERIFY_REGION, "CreateLogGroup", 0),
    ("logs", DRAFT_REGION, "CreateLogGroup", 0),
    ("ec2", VERIFY_REGION, "CreateSecurityGroup", 0),
    ("ec2", VERIFY_REGION, "AuthorizeSecurityGroupIngress", 0),
    ("ec2", VERIFY_REGION, "CreateSecurityGroup", 1),
    ("ec2", DRAFT_REGION, "CreateSecurityGroup", 0),
    ("ec2", VERIFY_REGION, "AllocateAddress", 0),
    ("ec2", VERIFY_REGION, "RunInstances", 0),
    ("ec2", VERIFY_REGION, "RunInstances", 1),
    ("ec2", DRAFT_REGION, "RunInstances", 0),
    ("ec2", VERIFY_REGION, "AssociateAddress", 0),
]


def killed_after(service: str, region: str, operation: str, skip: int) -> Arm:
    def arm(bench: Bench, faults: Faults) -> None:
        faults.after(service, region, operation, Killed(), skip=skip)

    return arm


UP_FAULTS = [
    *(UpFault(f"interrupt after {o} #{n + 1} in {r}", interrupted_after(s, r, o, n)) for s, r, o, n in STEPS[::2]),
    *(UpFault(f"killed after {o} #{n + 1} in {r}", killed_after(s, r, o, n), killed=True) for s, r, o, n in STEPS),
    UpFault("no capacity for any type in any zone of one region", all_capacity_gone),
    UpFault(
        "no capacity in one zone, unsupported in the next",
        answered("ec2", VERIFY_REGION, "RunInstances", None, "InsufficientInstanceCapacity", "Unsupported"),
        succeeds=True,
    ),
    UpFault("vCPU quota", answered("ec2", DRAFT_REGION, "RunInstances", "VcpuLimitExceeded")),
    UpFault("spot quota", answered("ec2", DRAFT_REGION, "RunInstances", "MaxSpotInstanceCountExceeded")),
    UpFault("address quota", answered("ec2", VERIFY_REGION, "AllocateAddress", "AddressLimitExceeded")),
    UpFault("not allowed to launch", answered("ec2", VERIFY_REGION, "RunInstances", "UnauthorizedOperation")),
    UpFault("not allowed to make roles", answered("iam", "us-east-1", "CreateRole", "AccessDenied", status=403)),
    UpFault("not allowed to pass the role", answered("ec2", DRAFT_REGION, "RunInstances", "UnauthorizedOperation")),
    UpFault("no image", answered("ec2", DRAFT_REGION, "DescribeImages", "InvalidAMIID.NotFound")),
    UpFault("throttled for ever", always("ec2", DRAFT_REGION, "RunInstances", "RequestLimitExceeded")),
    UpFault(
        "throttled twice", answered("ec2", DRAFT_REGION, "RunInstances", *["RequestLimitExceeded"] * 2), succeeds=True
    ),
    UpFault(
        "internal error four times",
        answered("ec2", DRAFT_REGION, "RunInstances", *["InternalError"] * 4, status=500),
        succeeds=True,
    ),
    UpFault(
        "profile not known yet",
        answered("ec2", VERIFY_REGION, "RunInstances", "InvalidIamInstanceProfile.NotFound"),
        succeeds=True,
    ),
    UpFault(
        "instance not visible three times",
        answered("ec2", VERIFY_REGION, "DescribeInstances", None, *["InvalidInstanceID.NotFound"] * 3),
        succeeds=True,
    ),
    UpFault("instance never visible by its id", never_visible),
    UpFault("answer of the launch lost", answer_lost("ec2", DRAFT_REGION, "RunInstances"), succeeds=True),
    UpFault(
        "a group of that name that is not ours",
        always("ec2", DRAFT_REGION, "CreateSecurityGroup", "InvalidGroup.Duplicate"),
    ),
    UpFault(
        "rule exists already",
        answered("ec2", VERIFY_REGION, "AuthorizeSecurityGroupIngress", "InvalidPermission.Duplicate"),
        succeeds=True,
    ),
    UpFault("the address cannot be attached", always("ec2", VERIFY_REGION, "AssociateAddress", "InvalidInstanceID")),
    UpFault("the relay never answers", never_ready),
]

DOWN_FAULTS = [
    DownFault("terminate fails in region 1", always("ec2", VERIFY_REGION, "TerminateInstances", "InternalError")),
    DownFault("terminate not allowed in region 2", always("ec2", DRAFT_REGION, "TerminateInstances", "AuthFailure")),
    DownFault(
        "an instance is gone already",
        answered("ec2", VERIFY_REGION, "TerminateInstances", "InvalidInstanceID.NotFound"),
    ),
    DownFault(
        "group in use four times",
        answered("ec2", VERIFY_REGION, "DeleteSecurityGroup", *["DependencyViolation"] * 4),
        succeeds=True,
    ),
    DownFault("group in use for ever", always("ec2", DRAFT_REGION, "DeleteSecurityGroup", "DependencyViolation")),
    DownFault(
        "address in use twice",
        answered("ec2", VERIFY_REGION, "ReleaseAddress", *["InvalidIPAddress.InUse"] * 2),
        succeeds=True,
    ),
    DownFault("address cannot be released", always("ec2", VERIFY_REGION, "ReleaseAddress", "AuthFailure")),
    DownFault("role in conflict for ever", always("iam", "us-east-1", "DeleteRole", "DeleteConflict")),
    DownFault(
        "profile's role is gone",
        answered("iam", "us-east-1", "RemoveRoleFromInstanceProfile", "NoSuchEntity"),
        succeeds=True,
    ),
    DownFault("region 2 cannot be looked into", always("ec2", DRAFT_REGION, "DescribeInstances", "AuthFailure")),
    DownFault("IAM cannot be looked into", always("iam", "us-east-1", "ListRoles", "AccessDenied")),
    DownFault("secret cannot be deleted", always("ssm", VERIFY_REGION, "DeleteParameter", "AccessDeniedException")),
    DownFault("log group cannot be deleted", always("logs", DRAFT_REGION, "DeleteLogGroup", "AccessDeniedException")),
    DownFault(
        "throttled twice",
        answered("ec2", VERIFY_REGION, "TerminateInstances", *["RequestLimitExceeded"] * 2),
        succeeds=True,
    ),
    DownFault("interrupt after the first end", interrupted_after("ec2", VERIFY_REGION, "TerminateInstances")),
    DownFault("interrupt after a group is deleted", interrupted_after("ec2", VERIFY_REGION, "DeleteSecurityGroup")),
    DownFault("interrupt after a profile is deleted", interrupted_after("iam", "us-east-1", "DeleteInstanceProfile")),
]


def run_up_fault(fault: UpFault, bench: Bench, faults: Faults) -> bool:
    """Arm it, run `up`; did it succeed?"""
    lift = fault.arm(bench, faults)
    try:
        bench.up(keep=fault.killed)
        return True
    except (InfraError, KeyboardInterrupt, Killed):
        return False
    finally:
        if lift is not None:
            lift()
        if fault.killed:
            for path in bench.state.glob("*"):
                path.unlink()


def run_down_fault(fault: DownFault, bench: Bench, faults: Faults) -> bool:
    """Up, arm it, run `down`; did it succeed?"""
    bench.up()
    lift = fault.arm(bench, faults)
    try:
        bench.down()
        return True
    except (InfraError, KeyboardInterrupt):
        return False
    finally:
        if lift is not None:
            lift()
