"""What users of other provisioners have run into, beyond the listed cases; against moto and botocore's stubs."""

from __future__ import annotations

import time
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from infra.aws import compute, network
from infra.aws.client import Clients
from infra.aws.errors import translate
from infra.errors import CapacityError, Leftovers, NotReady, ProviderError
from infra.health import Health
from infra.plan import plan_up
from infra.spec import parse
from infra.state import Kind
from tests.infra.doubles import ALL_READY, DRAFT_REGION, NOT_UP, VERIFY_REGION, Bench, FakeRelay, Faults, a_table

OWN = {**a_table()["deployment"], "network": "own"}
RELAY = a_table()["relay"]


def open_to(bench: Bench) -> list[tuple[int, list[str]]]:
    (group,) = bench.observe().of(Kind.FIREWALL, region=VERIFY_REGION, slot="relay")
    found = bench.clients("ec2", VERIFY_REGION).describe_security_groups(GroupIds=[group.id])
    rules = found["SecurityGroups"][0]["IpPermissions"]
    return sorted((rule["FromPort"], sorted(r["CidrIp"] for r in rule["IpRanges"])) for rule in rules)


def test_another_up_opens_and_shuts_the_relay_as_the_spec_says_by_then(bench: Bench) -> None:
    bench.up()
    assert open_to(bench) == [(443, ["0.0.0.0/0"])]
    networks = ["198.51.100.0/24", "203.0.113.7/32"]
    bench.spec = parse(a_table(relay={**RELAY, "allow_from": networks}))
    bench.up()
    assert open_to(bench) == [(443, networks)]
    assert plan_up(bench.spec, "us-east-2", bench.observe()).actions == ()


def test_a_gateway_that_stays_is_not_lost_with_its_network(bench: Bench, faults: Faults) -> None:
    bench.spec = parse(a_table(deployment=OWN))
    bench.up()
    (gateway,) = bench.observe().of(Kind.GATEWAY, region=DRAFT_REGION)
    lift = faults.always("ec2", DRAFT_REGION, "DeleteInternetGateway", "UnauthorizedOperation")
    with pytest.raises(Leftovers, match=gateway.id):
        bench.down()
    lift()
    bench.down()
    assert bench.everything_in_moto() == []


def without_default_network(clients: Clients, region: str) -> None:
    ec2 = clients("ec2", region)
    (default,) = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    for subnet in ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [default["VpcId"]]}])["Subnets"]:
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    ec2.delete_vpc(VpcId=default["VpcId"])


def test_a_dry_run_of_a_network_of_ones_own_needs_no_default_one(bench: Bench) -> None:
    for region in (VERIFY_REGION, DRAFT_REGION):
        without_default_network(bench.clients, region)
    bench.spec = parse(a_table(deployment=OWN))
    bench.applier().dry_run(bench.spec, "us-east-2")
    asked = [line for line in bench.said if "launch" in line]
    assert len(asked) == 3
    assert all("not asked: the network of demo in us-" in line for line in asked)
    bench.up()
    bench.said.clear()
    bench.down()
    bench.spec = parse(a_table())
    with pytest.raises(ProviderError, match=r"no default network; set deployment\.network"):
        bench.up()


def test_a_dry_run_tries_the_next_place_and_tells_when_there_is_none(
    bench: Bench, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = faults.answers("ec2", DRAFT_REGION, "RunInstances", ["Unsupported"])
    bench.applier().dry_run(bench.spec, "us-east-2")
    assert left == []
    assert sum(": allowed" in line for line in bench.said) == 3
    monkeypatch.setattr(bench.provider, "zones", lambda region, kind: [])
    with pytest.raises(CapacityError, match=r"no capacity in us-east-2; tried no zone offers"):
        bench.applier().dry_run(bench.spec, "us-east-2")


def test_a_subnet_that_somebody_has_added_to_the_default_network_is_not_used(clients: Clients) -> None:
    ec2 = clients("ec2", DRAFT_REGION)
    vpc_id, before = network.default_subnets(ec2, region=DRAFT_REGION)
    for index, zone in enumerate(before):
        ec2.create_subnet(VpcId=vpc_id, AvailabilityZone=zone, CidrBlock=f"172.31.{200 + index}.0/24")
    assert network.default_subnets(ec2, region=DRAFT_REGION) == (vpc_id, before)


def test_an_instance_that_ends_at_once_says_why(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that may not be used, a quota of disks: EC2 answers the create call and then gives up."""
    launch = bench.provider.launch

    def and_end(request: Any, **more: Any) -> str:
        instance_id = launch(request, **more)
        if request.machine.slot == "draft-0":
            bench.clients("ec2", request.region).terminate_instances(InstanceIds=[instance_id])
        return instance_id

    monkeypatch.setattr(bench.provider, "launch", and_end)
    with pytest.raises(ProviderError, match=r"draft-0 .* ended while it started \(.*initiated shutdown\)"):
        bench.up()


def test_a_type_whose_console_cannot_be_read_live_is_read_as_it_was_kept(clients: Clients) -> None:
    ec2 = clients("ec2", DRAFT_REGION)
    with Stubber(ec2) as stub:
        asked = {"InstanceId": "i-1"}
        stub.add_client_error("get_console_output", "UnsupportedOperation", expected_params={**asked, "Latest": True})
        stub.add_response("get_console_output", {"InstanceId": "i-1", "Output": "b2xk"}, asked)
        assert compute.console_output(ec2, instance_id="i-1") == "old"


@pytest.mark.parametrize("code", ["UnsupportedOperation", "UnauthorizedOperation"])
def test_a_boot_log_that_cannot_be_read_does_not_end_the_wait(bench: Bench, faults: Faults, code: str) -> None:
    for region in (VERIFY_REGION, DRAFT_REGION):
        faults.always("ec2", region, "GetConsoleOutput", code)
    bench.relay = FakeRelay(*[NOT_UP] * 9, ALL_READY)
    bench.up()


def test_at_the_deadline_the_service_s_own_last_words_are_shown(bench: Bench) -> None:
    """A wrong argument: the boot script has ended well, and the service is started again and again."""
    bench.relay = FakeRelay(Health(True, frozenset({"draft-0"}), "/healthz: 200"))
    logs = bench.clients("logs", VERIFY_REGION)
    logs.create_log_group(logGroupName="/foredraft/demo")
    logs.create_log_stream(logGroupName="/foredraft/demo", logStreamName="verify-0")
    event = {
        "timestamp": int(time.time() * 1000),
        "message": "foredraft-verify: error: unrecognized arguments: --slotz",
    }
    logs.put_log_events(logGroupName="/foredraft/demo", logStreamName="verify-0", logEvents=[event])
    with pytest.raises(NotReady, match="not ready after 20 minutes: verify-0") as caught:
        bench.up()
    assert caught.value.boot_logs["verify-0"].endswith("unrecognized arguments: --slotz")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("ExpiredToken", "renew the credentials if they have expired, and look at this machine's clock"),
        ("RequestExpired", "renew the credentials if they have expired, and look at this machine's clock"),
        ("InvalidSignatureException", "renew the credentials if they have expired, and look at this machine's clock"),
        ("UnauthorizedOperation", "the permissions needed are in infra/policy.json"),
    ],
)
def test_the_hint_is_for_what_is_wrong(code: str, told: str) -> None:
    error = ClientError({"Error": {"Code": code, "Message": "no"}}, "RunInstances")
    assert str(translate(error, "RunInstances")).endswith(f"{code}: no; {told}")


def test_of_two_addresses_the_one_that_the_machines_are_told_is_attached(bench: Bench) -> None:
    """The answer of a create call was lost and botocore has asked again."""
    ensure = bench.provider.ensure_address

    def twice(region: str) -> str:
        ensure(region)
        ec2 = bench.clients("ec2", region)
        tags = [{"ResourceType": "elastic-ip", "Tags": [{"Key": "foredraft:deployment", "Value": "demo"}]}]
        return str(ec2.allocate_address(Domain="vpc", TagSpecifications=tags)["PublicIp"])

    bench.provider.ensure_address = twice  # type: ignore[method-assign]
    done = bench.up()
    first, second = bench.observe().addresses()
    assert first.detail == done.relay_address
    assert not second.attached_to
    again = bench.up()
    assert again.relay_address == done.relay_address
    assert [a.detail for a in bench.observe().addresses()] == [done.relay_address]


def test_only_burstable_types_are_told_what_to_do_without_credits(bench: Bench) -> None:
    sent: list[dict[str, Any]] = []
    ec2 = bench.clients("ec2", VERIFY_REGION)
    ec2.meta.events.register("provide-client-params.ec2.RunInstances", lambda params, **_: sent.append(params))
    bench.applier().dry_run(bench.spec, "us-east-2")
    assert [("CreditSpecification" in call, call["InstanceType"]) for call in sent] == [
        (True, "t3.micro"),
        (False, "g6.xlarge"),
    ]
