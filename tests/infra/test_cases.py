"""The users' cases of provisioning (C058 to C067), each under its number."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from botocore.stub import Stubber

from infra.aws import compute, network
from infra.aws.client import Clients
from infra.aws.provider import AwsProvider
from infra.boot import FAILED
from infra.errors import CapacityError, Leftovers, NotReady, ProviderError
from infra.health import Health
from infra.journal import Journal, LaunchEntry
from infra.plan import plan_up
from infra.spec import Image
from infra.state import Kind
from tests.infra.doubles import ALL_READY, DRAFT_REGION, NOT_UP, VERIFY_REGION, Bench, FakeRelay, Faults


def launches_in(bench: Bench) -> int:
    """RunInstances calls so far."""
    return bench.clients.calls["RunInstances"]


# C058: an instance that cannot be seen right after it was made


def test_c058_an_instance_not_visible_three_times_is_waited_for_and_made_once(bench: Bench, faults: Faults) -> None:
    left = faults.answers("ec2", DRAFT_REGION, "DescribeInstances", [None, *["InvalidInstanceID.NotFound"] * 3])
    done = bench.up()
    assert left == []
    assert launches_in(bench) == 3
    assert len(bench.observe().alive("draft-0")) == 1
    assert done.instance_ids["draft-0"] == bench.observe().alive("draft-0")[0].id


def test_c058_the_id_is_written_down_before_the_first_describe(
    bench: Bench, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    lives = AwsProvider.lives

    def looking(self: AwsProvider, region: str, ids: Any) -> Any:
        entries = Journal(bench.state / "demo.json").launches
        told.extend(entry.instance_id for entry in entries.values())
        assert set(ids) <= {entry.instance_id for entry in entries.values()}
        return lives(self, region, ids)

    monkeypatch.setattr(AwsProvider, "lives", looking)
    bench.up()
    assert told


def test_c058_waits_grow_with_jitter_and_are_bounded(bench: Bench, faults: Faults) -> None:
    faults.always("ec2", DRAFT_REGION, "DescribeInstances", "InvalidInstanceID.NotFound", where="InstanceId.1")
    with pytest.raises(ProviderError, match="not running after 300 s in us-west-2: draft-0"):
        bench.up()
    assert launches_in(bench) == 3
    assert all(0 < pause <= 15 for pause in bench.clock.slept)
    assert len(set(bench.clock.slept)) > 3


# C059: tags are part of the create call


@pytest.mark.parametrize(("region", "skip", "slot"), [(VERIFY_REGION, 0, "relay"), (DRAFT_REGION, 0, "draft-0")])
def test_c059_an_interrupt_right_after_the_create_call_leaves_nothing_that_down_cannot_find(
    bench: Bench, faults: Faults, region: str, skip: int, slot: str
) -> None:
    faults.after("ec2", region, "RunInstances", KeyboardInterrupt(), skip=skip)
    with pytest.raises(KeyboardInterrupt):
        bench.up(keep=True)
    for path in bench.state.glob("*"):
        path.unlink()
    assert [r.slot for r in bench.observe().alive(slot)] == [slot]
    bench.down()
    assert bench.everything_in_moto() == []


def test_c059_there_is_no_second_call_for_tags_that_could_fail(bench: Bench, faults: Faults) -> None:
    for region in (VERIFY_REGION, DRAFT_REGION):
        faults.always("ec2", region, "CreateTags", "UnauthorizedOperation")
    bench.up()
    assert bench.clients.calls["CreateTags"] == 0
    for region in bench.spec.regions:
        ec2 = bench.clients("ec2", region)
        for reservation in ec2.describe_instances()["Reservations"]:
            for instance in reservation["Instances"]:
                tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
                assert tags["foredraft:deployment"] == "demo"
                assert tags["project"] == "test"
        for volume in ec2.describe_volumes()["Volumes"]:
            assert {"Key": "foredraft:deployment", "Value": "demo"} in volume["Tags"]
            assert volume["Encrypted"]


# C061: no capacity in one zone, the type unknown in the next


def test_c061_the_third_zone_is_used_when_two_cannot(bench: Bench, faults: Faults) -> None:
    faults.answers("ec2", DRAFT_REGION, "RunInstances", ["InsufficientInstanceCapacity", "Unsupported"])
    bench.up()
    assert bench.observe().alive("draft-0")[0].zone == "us-west-2c"
    assert len(bench.observe().of(Kind.INSTANCE, slot="draft-0")) == 1


def test_c061_the_next_type_is_tried_when_no_zone_has_the_first(bench: Bench, faults: Faults) -> None:
    faults.answers("ec2", VERIFY_REGION, "RunInstances", [None, *["InsufficientInstanceCapacity"] * 3])
    bench.up()
    assert bench.observe().alive("verify-0")[0].instance_type == "g5.xlarge"


@pytest.mark.parametrize("keep", [False, True])
def test_c061_a_region_without_capacity_rolls_the_other_back_or_keeps_it_and_lists_what_was_tried(
    bench: Bench, faults: Faults, keep: bool
) -> None:
    lift = faults.always("ec2", DRAFT_REGION, "RunInstances", "InsufficientInstanceCapacity")
    with pytest.raises(CapacityError) as caught:
        bench.up(keep=keep)
    for zone in "abc":
        assert f"g4dn.xlarge in us-west-2{zone}: InsufficientInstanceCapacity" in str(caught.value)
    if keep:
        assert sorted(r.slot for r in bench.observe().alive()) == ["relay", "verify-0"]
        lift()
        bench.up()
        assert sorted(r.slot for r in bench.observe().alive()) == ["draft-0", "relay", "verify-0"]
        assert launches_in(bench) == 3 + 3
    else:
        assert bench.everything_in_moto() == []


@pytest.mark.parametrize("code", ["VcpuLimitExceeded", "UnauthorizedOperation"])
def test_c061_quotas_and_permissions_stop_at_once_with_a_hint(bench: Bench, faults: Faults, code: str) -> None:
    faults.answers("ec2", DRAFT_REGION, "RunInstances", [code])
    with pytest.raises(ProviderError, match=r"Service Quotas|policy\.json"):
        bench.up()
    assert launches_in(bench) == 3


# C063: the group is in use while instances end; groups that refer to each other


def test_c063_a_group_in_use_is_tried_again_until_it_is_free(bench: Bench, faults: Faults) -> None:
    bench.up()
    left = faults.answers("ec2", VERIFY_REGION, "DeleteSecurityGroup", ["DependencyViolation"] * 4)
    bench.down()
    assert left == []
    assert bench.everything_in_moto() == []


def test_c063_groups_go_only_when_instances_have_ended(bench: Bench) -> None:
    bench.up()
    order: list[str] = []
    for region in (VERIFY_REGION, DRAFT_REGION):
        events = bench.clients("ec2", region).meta.events
        events.register("before-call.ec2.*", lambda model, **_: order.append(model.name))
    bench.down()
    first_delete = order.index("DeleteSecurityGroup")
    assert "TerminateInstances" in order[:first_delete]
    assert "TerminateInstances" not in order[first_delete:]
    # It was asked whether they have ended, between the two.
    assert order[order.index("TerminateInstances") : first_delete].count("DescribeInstances") >= 3


def test_c063_rules_by_which_two_groups_refer_to_each_other_are_revoked_first(bench: Bench) -> None:
    bench.up()
    ec2 = bench.clients("ec2", VERIFY_REGION)
    relay, node = (
        r.id for r in sorted(bench.observe().of(Kind.FIREWALL, region=VERIFY_REGION), key=lambda r: r.slot != "relay")
    )
    for group, other in ((relay, node), (node, relay)):
        rule = [{"IpProtocol": "tcp", "FromPort": 1, "ToPort": 2, "UserIdGroupPairs": [{"GroupId": other}]}]
        ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=rule)
    revoked = bench.clients.calls["RevokeSecurityGroupIngress"]
    bench.down()
    assert bench.clients.calls["RevokeSecurityGroupIngress"] - revoked == 2
    assert bench.everything_in_moto() == []


def test_c063_a_group_that_stays_in_use_is_named_and_down_fails(bench: Bench, faults: Faults) -> None:
    bench.up()
    lift = faults.always("ec2", DRAFT_REGION, "DeleteSecurityGroup", "DependencyViolation")
    group = bench.observe().of(Kind.FIREWALL, region=DRAFT_REGION)[0].id
    with pytest.raises(Leftovers, match=group):
        bench.down()
    assert bench.everything_in_moto() == [group]
    lift()
    assert bench.down() == 1


# C064: a second run finds things there already


def test_c064_a_second_up_changes_nothing(bench: Bench) -> None:
    first = bench.up()
    before = bench.observe()
    calls = bench.calls_of(bench.up)
    assert bench.observe() == before
    assert plan_up(bench.spec, "us-east-2", before).actions == ()
    changing = [name for name in calls if not name.startswith(("Describe", "Get", "List"))]
    # What the stand-in of the relay publishes is not the command's call.
    assert changing == []
    assert first.instance_ids == {r.slot: r.id for r in before.alive()}


def test_c064_there_is_no_key_pair_so_no_private_key_can_be_lost(bench: Bench) -> None:
    """Nobody logs in with a key: shells go through Systems Manager; no instance has one, nor a port open for it."""
    bench.up()
    for region in bench.spec.regions:
        ec2 = bench.clients("ec2", region)
        assert ec2.describe_key_pairs()["KeyPairs"] == []
        for reservation in ec2.describe_instances()["Reservations"]:
            assert all(not instance.get("KeyName") for instance in reservation["Instances"])
        for group in ec2.describe_security_groups()["SecurityGroups"]:
            if group["GroupName"] != "default":
                assert all(rule["FromPort"] == 443 for rule in group["IpPermissions"])
    assert AwsProvider(bench.clients, deployment="demo").shell_command("us-east-2", "i-1")[:3] == [
        "aws",
        "ssm",
        "start-session",
    ]


def test_c064_a_rule_that_is_there_counts_as_made(bench: Bench, faults: Faults) -> None:
    faults.answers("ec2", VERIFY_REGION, "AuthorizeSecurityGroupIngress", ["InvalidPermission.Duplicate"])
    bench.up()


def test_c064_a_group_of_a_failed_run_is_used_and_completed(bench: Bench, faults: Faults) -> None:
    faults.after("ec2", VERIFY_REGION, "CreateSecurityGroup", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        bench.up(keep=True)
    (group,) = bench.observe().of(Kind.FIREWALL)
    assert not group.complete
    bench.up()
    whole = bench.observe().of(Kind.FIREWALL, region=VERIFY_REGION, slot="relay")
    assert [(g.id, g.complete) for g in whole] == [(group.id, True)]


def test_c064_up_after_down_makes_all_again(bench: Bench) -> None:
    first = bench.up()
    bench.down()
    second = bench.up()
    assert not set(first.instance_ids.values()) & set(second.instance_ids.values())
    bench.down()
    assert bench.everything_in_moto() == []


# C065: image ids differ between regions


def image(image_id: str, architecture: str, created: str) -> dict[str, Any]:
    return {
        "ImageId": image_id,
        "Architecture": architecture,
        "CreationDate": created,
        "RootDeviceName": "/dev/sda1",
        "State": "available",
    }


@pytest.mark.parametrize(
    ("region", "images", "expected"),
    [
        (
            "us-east-2",
            [
                image("ami-old", "x86_64", "2025-01-01T00:00:00.000Z"),
                image("ami-new", "x86_64", "2026-11-01T00:00:00.000Z"),
                image("ami-arm", "arm64", "2026-11-20T00:00:00.000Z"),
                image("ami-mid", "x86_64", "2026-03-01T00:00:00.000Z"),
            ],
            "ami-new",
        ),
        ("us-west-2", [image("ami-west", "x86_64", "2026-10-01T00:00:00.000Z")], "ami-west"),
    ],
)
def test_c065_the_newest_image_of_the_right_architecture_is_looked_up_in_each_region(
    clients: Clients, region: str, images: list[dict[str, Any]], expected: str
) -> None:
    ec2 = clients("ec2", region)
    with Stubber(ec2) as stub:
        filters = [
            {"Name": "name", "Values": ["ubuntu-*"]},
            {"Name": "architecture", "Values": ["x86_64"]},
            {"Name": "state", "Values": ["available"]},
        ]
        stub.add_response("describe_images", {"Images": images}, {"Owners": ["0997"], "Filters": filters})
        wanted = Image(owner="0997", name="ubuntu-*")
        assert compute.find_image(ec2, image=wanted, architecture="x86_64", region=region)[0] == expected


def test_c065_a_region_without_the_image_is_named_with_a_way_out(clients: Clients) -> None:
    ec2 = clients("ec2", "us-west-2")
    with Stubber(ec2) as stub:
        stub.add_response("describe_images", {"Images": [image("ami-arm", "arm64", "2026-11-20T00:00:00.000Z")]})
        with pytest.raises(
            ProviderError, match=r"no x86_64 image named 'u-\*' of owner 0997 in us-west-2; set image_owner"
        ):
            compute.find_image(ec2, image=Image(owner="0997", name="u-*"), architecture="x86_64", region="us-west-2")


# C066: an instance that runs is not ready for that


def test_c066_up_waits_for_the_nodes_own_word_through_the_relay(bench: Bench) -> None:
    """Instances run at once; relay and nodes answer one after the other, four minutes later."""
    partly = Health(True, frozenset({"verify-0"}), "/healthz: 200")
    bench.relay = FakeRelay(*[NOT_UP] * 14, *[partly] * 4, ALL_READY)
    start = bench.clock.time
    bench.up()
    assert bench.clock.time - start > 120
    assert len(bench.relay.asked) == 19
    assert "waiting for draft-0: /healthz: 200" in bench.said


def test_c066_a_boot_script_that_fails_ends_the_wait_with_the_end_of_its_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "\n".join(["first line", *["..."] * 60, f"{FAILED} in line 12 (exit 1)"])
    monkeypatch.setattr(AwsProvider, "boot_log", lambda self, region, instance_id: log)
    bench.relay = FakeRelay(Health(True, frozenset({"verify-0"}), "/healthz: 200"))
    with pytest.raises(NotReady, match="the boot script of draft-0 failed") as caught:
        bench.up()
    assert caught.value.boot_logs["draft-0"].endswith("(exit 1)")
    assert "first line" not in caught.value.boot_logs["draft-0"]
    assert bench.clock.time < 1000 + bench.spec.ready_timeout_s / 2
    assert bench.everything_in_moto() == []


def test_c066_at_the_deadline_the_boot_logs_are_shown_and_what_is_missing_is_named(bench: Bench) -> None:
    bench.relay = FakeRelay(NOT_UP)
    with pytest.raises(NotReady, match="not ready after 20 minutes: relay, verify-0, draft-0") as caught:
        bench.up(keep=True)
    assert set(caught.value.boot_logs) == {"relay", "verify-0", "draft-0"}
    # moto's idea of a console: a real answer of GetConsoleOutput, decoded.
    assert "Linux version" in caught.value.boot_logs["verify-0"]
    assert any("`up` goes on from here, `down` removes it" in line for line in bench.said)


def test_c066_a_relay_that_cannot_speak_for_its_nodes_leaves_it_to_their_logs(bench: Bench) -> None:
    bench.relay = FakeRelay(Health(True, None, "WebSocket upgrade: 101"))
    for region, slot in ((VERIFY_REGION, "verify-0"), (DRAFT_REGION, "draft-0")):
        logs = bench.clients("logs", region)
        logs.create_log_group(logGroupName="/foredraft/demo")
        logs.create_log_stream(logGroupName="/foredraft/demo", logStreamName=slot)
        now = int(datetime.datetime.now(datetime.UTC).timestamp() * 1000)
        event = {"timestamp": now, "message": '{"ready": true, "model": "m"}'}
        logs.put_log_events(logGroupName="/foredraft/demo", logStreamName=slot, logEvents=[event])
    bench.up()


def test_c066_an_instance_that_ends_while_it_is_waited_for_is_told_at_once(bench: Bench) -> None:
    asked = 0

    def relay(address: object) -> Health:
        nonlocal asked
        asked += 1
        if asked == 2:
            bench.clients("ec2", DRAFT_REGION).terminate_instances(InstanceIds=[bench.observe().alive("draft-0")[0].id])
        return Health(True, frozenset({"verify-0"}), "/healthz: 200")

    bench.relay = relay  # type: ignore[assignment]
    with pytest.raises(NotReady, match="draft-0 ended"):
        bench.up()


# C067: teardown goes on past errors, in all regions, on all pages


def test_c067_an_error_in_one_region_does_not_save_the_other(bench: Bench, faults: Faults) -> None:
    bench.up()
    lift = faults.always("ec2", VERIFY_REGION, "TerminateInstances", "AuthFailure")
    with pytest.raises(Leftovers) as caught:
        bench.down()
    assert not [r for r in bench.observe().remaining() if r.region == DRAFT_REGION]
    for instance in bench.observe().alive():
        assert instance.id in str(caught.value)
    lift()
    bench.down()
    assert bench.everything_in_moto() == []


def test_c067_what_is_gone_already_counts_as_done(bench: Bench, faults: Faults) -> None:
    bench.up()
    for instance in bench.observe().alive():
        bench.clients("ec2", instance.region).terminate_instances(InstanceIds=[instance.id])
    faults.answers("logs", DRAFT_REGION, "DeleteLogGroup", ["ResourceNotFoundException"])
    bench.clients("iam", "us-east-1").remove_role_from_instance_profile(
        InstanceProfileName="foredraft-demo-node", RoleName="foredraft-demo-node"
    )
    with pytest.raises(Leftovers, match="/foredraft/demo"):
        # The lie about the log group comes out when it is looked for again.
        bench.down()
    bench.down()
    assert bench.everything_in_moto() == []


def test_c067_all_pages_are_read(clients: Clients) -> None:
    ec2 = clients("ec2", "us-west-2")
    filters = [{"Name": "tag:foredraft:deployment", "Values": ["demo"]}]

    def page(instance_id: str) -> dict[str, Any]:
        described = {"InstanceId": instance_id, "State": {"Name": "running"}, "InstanceType": "g6.xlarge"}
        return {"Reservations": [{"Instances": [described]}]}

    with Stubber(ec2) as stub:
        stub.add_response("describe_instances", {**page("i-1"), "NextToken": "more"}, {"Filters": filters})
        stub.add_response("describe_instances", page("i-2"), {"Filters": filters, "NextToken": "more"})
        found = compute.list_instances(ec2, deployment="demo", region="us-west-2")
    assert [r.id for r in found] == ["i-1", "i-2"]
    with Stubber(ec2) as stub:
        groups = {"SecurityGroups": [{"GroupId": "sg-1", "IpPermissions": []}], "NextToken": "more"}
        stub.add_response("describe_security_groups", groups, {"Filters": filters})
        stub.add_response(
            "describe_security_groups",
            {"SecurityGroups": [{"GroupId": "sg-2", "IpPermissions": []}]},
            {"Filters": filters, "NextToken": "more"},
        )
        assert [r.id for r in network.list_firewalls(ec2, deployment="demo", region="us-west-2")] == ["sg-1", "sg-2"]


def test_c067_instances_of_a_region_end_together_although_one_cannot(bench: Bench, faults: Faults) -> None:
    bench.up()
    faults.answers("ec2", VERIFY_REGION, "TerminateInstances", ["OperationNotPermitted"])
    with pytest.raises(Leftovers, match="OperationNotPermitted"):
        bench.down()
    assert len([r for r in bench.observe().alive() if r.region == VERIFY_REGION]) == 1


# Resuming with the journal


def test_a_create_call_whose_answer_was_lost_is_repeated_with_the_same_token(bench: Bench, faults: Faults) -> None:
    """moto does not know tokens; so what is checked is what AWS would go by: the same token, the same values."""
    sent: list[tuple[str, str]] = []

    def note(params: dict[str, Any], **_: Any) -> None:
        body = params["body"]
        sent.append((body["ClientToken"], body["UserData"]))

    bench.clients("ec2", DRAFT_REGION).meta.events.register("before-call.ec2.RunInstances", note)
    faults.answers("ec2", DRAFT_REGION, "RunInstances", ["InternalError"] * 4, status=500)
    bench.up()
    assert len(sent) == 2
    assert len(set(sent)) == 1


def test_an_up_goes_on_with_the_token_that_was_written_down(bench: Bench) -> None:
    journal = Journal(bench.state / "demo.json")
    journal.set_expiry("2026-12-01T16:00:00+00:00")
    journal.about_to_launch(
        "draft-0",
        LaunchEntry(token="written-down", region=DRAFT_REGION, zone="us-west-2b", instance_type="g4dn.xlarge"),
    )
    sent: list[str] = []
    bench.clients("ec2", DRAFT_REGION).meta.events.register(
        "before-call.ec2.RunInstances", lambda params, **_: sent.append(params["body"]["ClientToken"])
    )
    bench.up()
    assert sent == ["written-down"]
    assert bench.observe().alive("draft-0")[0].zone == "us-west-2b"
