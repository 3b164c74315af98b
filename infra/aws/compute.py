"""EC2 instances: images, launching, states, ending."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from infra.aws import tags
from infra.aws.errors import response_code
from infra.errors import ProviderError
from infra.provider import LaunchRequest
from infra.spec import Image
from infra.state import Kind, Life, Resource

LIVES = {
    "pending": Life.STARTING,
    "running": Life.RUNNING,
    "stopping": Life.STOPPED,
    "stopped": Life.STOPPED,
    "shutting-down": Life.ENDING,
    "terminated": Life.ENDED,
}


def list_instances(ec2: Any, *, deployment: str, region: str) -> list[Resource]:
    """All pages, ended ones included."""
    found = []
    for page in ec2.get_paginator("describe_instances").paginate(Filters=tags.by_deployment(deployment)):
        for reservation in page["Reservations"]:
            found += [_resource(instance, region) for instance in reservation["Instances"]]
    return found


def list_volumes(ec2: Any, *, deployment: str, region: str) -> list[Resource]:
    """Disks that no instance takes with it when it ends."""
    filters = [*tags.by_deployment(deployment), {"Name": "status", "Values": ["available", "error"]}]
    pages = ec2.get_paginator("describe_volumes").paginate(Filters=filters)
    return [Resource(kind=Kind.VOLUME, region=region, id=v["VolumeId"]) for page in pages for v in page["Volumes"]]


def find_image(ec2: Any, *, image: Image, architecture: str, region: str) -> tuple[str, str]:
    """(id, root device) of the newest image of that owner and name.

    Raises:
        ProviderError: the region has none.
    """
    answer = ec2.describe_images(
        Owners=[image.owner],
        Filters=[
            {"Name": "name", "Values": [image.name]},
            {"Name": "architecture", "Values": [architecture]},
            {"Name": "state", "Values": ["available"]},
        ],
    )
    # The answer is in no order, and what the filter promises is cheap to check.
    images = [i for i in answer["Images"] if i["Architecture"] == architecture]
    if not images:
        raise ProviderError(
            f"no {architecture} image named {image.name!r} of owner {image.owner} in {region}",
            hint="set image_owner and image_name in the spec",
        )
    newest = max(images, key=lambda i: (i["CreationDate"], i["ImageId"]))
    return newest["ImageId"], newest.get("RootDeviceName", "/dev/sda1")


def architecture_of(ec2: Any, *, instance_type: str) -> str:
    """The processor architecture of a type."""
    answer = ec2.describe_instance_types(InstanceTypes=[instance_type])
    known = answer["InstanceTypes"][0]["ProcessorInfo"]["SupportedArchitectures"]
    return "x86_64" if "x86_64" in known else str(known[0])


def run_instance(
    ec2: Any,
    *,
    request: LaunchRequest,
    deployment: str,
    extra_tags: Mapping[str, str],
    image_id: str,
    root_device: str,
    subnet_id: str,
    group_ids: Sequence[str],
    profile: str,
    dry_run: bool,
) -> str:
    """One instance, tagged in the create call like its disk and its network interface; its id."""
    machine = request.machine
    marks = tags.tag_list(
        deployment,
        extra_tags,
        slot=machine.slot,
        **{
            tags.FINGERPRINT: machine.fingerprint(),
            tags.EXPIRES_AT: request.expires_at,
            tags.MARKET: machine.market,
        },
    )
    kinds = ["instance", "volume", "network-interface"] + (
        ["spot-instances-request"] if machine.market == "spot" else []
    )
    interface = {
        "DeviceIndex": 0,
        "SubnetId": subnet_id,
        "AssociatePublicIpAddress": True,
        **({"Groups": list(group_ids)} if group_ids else {}),
    }
    arguments: dict[str, Any] = {
        "ImageId": image_id,
        "InstanceType": request.instance_type,
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": request.token,
        "UserData": request.user_data,
        "NetworkInterfaces": [interface],
        "BlockDeviceMappings": [
            {
                "DeviceName": root_device,
                "Ebs": {
                    "VolumeSize": machine.disk_gib,
                    "VolumeType": "gp3",
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
        # The time to live ends in a power-off; that must end the bill as well.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": tags.specification(kinds, marks),
        "DryRun": dry_run,
    }
    if profile:
        arguments["IamInstanceProfile"] = {"Name": profile}
    if re.match(r"t\d", request.instance_type):
        # Unlimited credits would be billed beyond what the plan has shown.
        arguments["CreditSpecification"] = {"CpuCredits": "standard"}
    if machine.market == "spot":
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        if machine.max_usd_per_hour is not None:
            options["MaxPrice"] = f"{machine.max_usd_per_hour:g}"
        arguments["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    return str(ec2.run_instances(**arguments)["Instances"][0]["InstanceId"])


def instance_lives(ec2: Any, *, ids: Sequence[str]) -> dict[str, Life]:
    """States by id."""
    lives = {}
    for page in ec2.get_paginator("describe_instances").paginate(InstanceIds=list(ids)):
        for reservation in page["Reservations"]:
            for instance in reservation["Instances"]:
                lives[instance["InstanceId"]] = LIVES[instance["State"]["Name"]]
    return lives


def console_output(ec2: Any, *, instance_id: str) -> str:
    """What the instance has written to its console."""
    try:
        answer = ec2.get_console_output(InstanceId=instance_id, Latest=True)
    except ClientError as exc:
        if response_code(exc) != "UnsupportedOperation":
            raise
        # Older types only have what AWS has kept of their start.
        answer = ec2.get_console_output(InstanceId=instance_id)
    text = answer.get("Output", "")
    try:
        # botocore decodes it; what it leaves undecoded is base64 still.
        return base64.b64decode(text, validate=True).decode("utf-8", "replace")
    except ValueError:
        return str(text)


def offered_zones(ec2: Any, *, instance_type: str) -> list[str]:
    """Zones that have the type at all."""
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
    )
    return sorted(offer["Location"] for page in pages for offer in page["InstanceTypeOfferings"])


def spot_prices(ec2: Any, *, instance_types: Sequence[str], now: Any) -> dict[str, float]:
    """The dearest zone's current price of each type."""
    found: dict[str, float] = {}
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=list(instance_types), ProductDescriptions=["Linux/UNIX"], StartTime=now
    )
    for page in pages:
        for price in page["SpotPriceHistory"]:
            kind = price["InstanceType"]
            found[kind] = max(found.get(kind, 0.0), float(price["SpotPrice"]))
    return found


def _resource(instance: Mapping[str, Any], region: str) -> Resource:
    marks = tags.read(instance.get("Tags"))
    return Resource(
        kind=Kind.INSTANCE,
        region=region,
        id=instance["InstanceId"],
        slot=marks.get(tags.SLOT, ""),
        life=LIVES[instance["State"]["Name"]],
        instance_type=instance["InstanceType"],
        zone=instance.get("Placement", {}).get("AvailabilityZone", ""),
        market=marks.get(tags.MARKET, ""),
        fingerprint=marks.get(tags.FINGERPRINT, ""),
        expires_at=marks.get(tags.EXPIRES_AT, ""),
        since=instance["LaunchTime"].isoformat() if "LaunchTime" in instance else "",
        reason=instance.get("StateReason", {}).get("Message", ""),
        detail=instance.get("PublicIpAddress", ""),
    )
