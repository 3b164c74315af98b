"""Networks, firewalls (security groups) and the relay's address (an Elastic IP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from infra.aws import tags
from infra.aws.errors import error_kind, response_code
from infra.errors import AlreadyExists, NotFound, ProviderError
from infra.state import Kind, Resource, firewall_rules

CIDR = "10.86.0.0/16"


def list_addresses(ec2: Any, *, deployment: str, region: str) -> list[Resource]:
    answer = ec2.describe_addresses(Filters=tags.by_deployment(deployment))
    return [
        Resource(
            kind=Kind.ADDRESS,
            region=region,
            id=a["AllocationId"],
            slot="relay",
            detail=a["PublicIp"],
            attached_to=a.get("InstanceId", ""),
        )
        for a in answer["Addresses"]
    ]


def list_firewalls(ec2: Any, *, deployment: str, region: str) -> list[Resource]:
    """Groups; one of the relay's without a rule is not complete: the run that made it died in between."""
    found = []
    for page in ec2.get_paginator("describe_security_groups").paginate(Filters=tags.by_deployment(deployment)):
        for group in page["SecurityGroups"]:
            slot = tags.read(group.get("Tags")).get(tags.SLOT, "")
            found.append(
                Resource(
                    kind=Kind.FIREWALL,
                    region=region,
                    id=group["GroupId"],
                    slot=slot,
                    detail=group.get("VpcId", ""),
                    complete=slot != "relay" or bool(group["IpPermissions"]),
                    fingerprint=firewall_rules(_open(group)),
                )
            )
    return found


def list_network(ec2: Any, *, deployment: str, region: str) -> list[Resource]:
    """The parts of a network of our own. The network is made first and removed last: without it there are none."""
    filters = tags.by_deployment(deployment)
    found = [
        Resource(kind=Kind.NETWORK, region=region, id=v["VpcId"])
        for page in ec2.get_paginator("describe_vpcs").paginate(Filters=filters)
        for v in page["Vpcs"]
    ]
    if not found:
        return []
    for page in ec2.get_paginator("describe_subnets").paginate(Filters=filters):
        found += [
            Resource(kind=Kind.SUBNET, region=region, id=s["SubnetId"], zone=s["AvailabilityZone"], detail=s["VpcId"])
            for s in page["Subnets"]
        ]
    for page in ec2.get_paginator("describe_internet_gateways").paginate(Filters=filters):
        for gateway in page["InternetGateways"]:
            networks = [a["VpcId"] for a in gateway["Attachments"]]
            found.append(
                Resource(
                    kind=Kind.GATEWAY,
                    region=region,
                    id=gateway["InternetGatewayId"],
                    attached_to=networks[0] if networks else "",
                    complete=bool(networks),
                )
            )
    for page in ec2.get_paginator("describe_route_tables").paginate(Filters=filters):
        for table in page["RouteTables"]:
            routed = any(r.get("DestinationCidrBlock") == "0.0.0.0/0" for r in table["Routes"])
            joined = [a["RouteTableAssociationId"] for a in table["Associations"] if a.get("SubnetId")]
            found.append(
                Resource(
                    kind=Kind.ROUTES,
                    region=region,
                    id=table["RouteTableId"],
                    detail=" ".join(joined),
                    complete=routed and bool(joined),
                )
            )
    return found


def default_subnets(ec2: Any, *, region: str) -> tuple[str, dict[str, str]]:
    """(network id, subnet of each zone) of the region's default network.

    Raises:
        ProviderError: there is none.
    """
    networks = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    if not networks:
        raise ProviderError(f"{region} has no default network", hint='set deployment.network = "own"')
    network = str(networks[0]["VpcId"])
    # A subnet that somebody has added may have no way out: nothing could be installed there.
    filters = [{"Name": "vpc-id", "Values": [network]}, {"Name": "default-for-az", "Values": ["true"]}]
    pages = ec2.get_paginator("describe_subnets").paginate(Filters=filters)
    return network, {s["AvailabilityZone"]: s["SubnetId"] for page in pages for s in page["Subnets"]}


def own_subnets(ec2: Any, *, deployment: str, region: str) -> tuple[str, dict[str, str]]:
    """(network id, subnet of each zone) of the network that `ensure_network` made."""
    found = list_network(ec2, deployment=deployment, region=region)
    networks = [r.id for r in found if r.kind is Kind.NETWORK]
    if not networks:
        raise NotFound(f"the network of {deployment} in {region} is not there")
    return networks[0], {r.zone: r.id for r in found if r.kind is Kind.SUBNET and r.detail == networks[0]}


def ensure_network(ec2: Any, *, deployment: str, extra_tags: Mapping[str, str], region: str) -> None:
    """Whatever is missing of a network with a public subnet in every zone."""
    found = list_network(ec2, deployment=deployment, region=region)
    marks = tags.tag_list(deployment, extra_tags)

    def first(kind: Kind) -> Resource | None:
        return next((r for r in found if r.kind is kind), None)

    network = first(Kind.NETWORK)
    if network is None:
        made = ec2.create_vpc(CidrBlock=CIDR, TagSpecifications=tags.specification(["vpc"], marks))
        network_id = made["Vpc"]["VpcId"]
        ec2.get_waiter("vpc_available").wait(VpcIds=[network_id])
    else:
        network_id = network.id
    gateway = first(Kind.GATEWAY)
    if gateway is None:
        made = ec2.create_internet_gateway(TagSpecifications=tags.specification(["internet-gateway"], marks))
        gateway_id = made["InternetGateway"]["InternetGatewayId"]
    else:
        gateway_id = gateway.id
    if gateway is None or not gateway.attached_to:
        ec2.attach_internet_gateway(InternetGatewayId=gateway_id, VpcId=network_id)
    routes = first(Kind.ROUTES)
    if routes is None:
        made = ec2.create_route_table(VpcId=network_id, TagSpecifications=tags.specification(["route-table"], marks))
        table_id = made["RouteTable"]["RouteTableId"]
    else:
        table_id = routes.id
    if routes is None or not routes.complete:
        _existing_is_fine(
            ec2.create_route, RouteTableId=table_id, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway_id
        )
    zones = ec2.describe_availability_zones(Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}])
    have = {r.zone: r.id for r in found if r.kind is Kind.SUBNET}
    for index, zone in enumerate(sorted(z["ZoneName"] for z in zones["AvailabilityZones"])):
        if zone not in have:
            made = ec2.create_subnet(
                VpcId=network_id,
                AvailabilityZone=zone,
                CidrBlock=f"10.86.{index}.0/24",
                TagSpecifications=tags.specification(["subnet"], marks),
            )
            have[zone] = made["Subnet"]["SubnetId"]
        _existing_is_fine(ec2.associate_route_table, RouteTableId=table_id, SubnetId=have[zone])


def ensure_firewall(
    ec2: Any,
    *,
    deployment: str,
    extra_tags: Mapping[str, str],
    region: str,
    role: str,
    network_id: str,
    port: int | None,
    allow_from: Sequence[str],
) -> None:
    """A group without rules for incoming traffic, but for one port: others of the same kind are revoked."""
    known = [r for r in list_firewalls(ec2, deployment=deployment, region=region) if r.slot == role]
    wanted = set() if port is None else {(port, network) for network in allow_from}
    present: set[tuple[int, str]] = set()
    if known:
        group_id = known[0].id
        present = _open(ec2.describe_security_groups(GroupIds=[group_id])["SecurityGroups"][0])
    else:
        group_id = ec2.create_security_group(
            GroupName=f"foredraft-{deployment}-{role}",
            Description=f"foredraft {deployment}: {role}",
            VpcId=network_id,
            TagSpecifications=tags.specification(["security-group"], tags.tag_list(deployment, extra_tags, slot=role)),
        )["GroupId"]
    # First what is missing: who is let in before and after is never shut out.
    for port_and_network in sorted(wanted - present):
        _existing_is_fine(
            ec2.authorize_security_group_ingress, GroupId=group_id, IpPermissions=[_permission(*port_and_network)]
        )
    if present - wanted:
        surplus = [_permission(*port_and_network) for port_and_network in sorted(present - wanted)]
        ec2.revoke_security_group_ingress(GroupId=group_id, IpPermissions=surplus)


def _permission(port: int, network: str) -> dict[str, object]:
    ranges = [{"CidrIp": network, "Description": "clients and nodes"}]
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": ranges}


def _open(group: Mapping[str, Any]) -> set[tuple[int, str]]:
    """Port and network of each rule of the kind that we make."""
    return {
        (rule["FromPort"], network["CidrIp"])
        for rule in group["IpPermissions"]
        if rule["IpProtocol"] == "tcp" and rule["FromPort"] == rule["ToPort"]
        for network in rule["IpRanges"]
    }


def ensure_address(
    ec2: Any, *, deployment: str, extra_tags: Mapping[str, str], region: str, dry_run: bool = False
) -> str:
    known = [] if dry_run else list_addresses(ec2, deployment=deployment, region=region)
    if known:
        return known[0].detail
    answer = ec2.allocate_address(
        Domain="vpc",
        TagSpecifications=tags.specification(["elastic-ip"], tags.tag_list(deployment, extra_tags, slot="relay")),
        DryRun=dry_run,
    )
    return str(answer["PublicIp"])


def delete_firewall(ec2: Any, *, deployment: str, group_id: str) -> None:
    """Delete a group, and first the rules by which our groups refer to each other: two such could never go."""
    pages = ec2.get_paginator("describe_security_groups").paginate(Filters=tags.by_deployment(deployment))
    for group in (g for page in pages for g in page["SecurityGroups"]):
        for rules, revoke in (
            (group["IpPermissions"], ec2.revoke_security_group_ingress),
            (group["IpPermissionsEgress"], ec2.revoke_security_group_egress),
        ):
            kept = ("IpProtocol", "FromPort", "ToPort", "UserIdGroupPairs")
            mutual = [{k: v for k, v in rule.items() if k in kept} for rule in rules if rule.get("UserIdGroupPairs")]
            if mutual:
                revoke(GroupId=group["GroupId"], IpPermissions=mutual)
    ec2.delete_security_group(GroupId=group_id)


def delete_gateway(ec2: Any, *, gateway: Resource) -> None:
    if gateway.attached_to:
        try:
            ec2.detach_internet_gateway(InternetGatewayId=gateway.id, VpcId=gateway.attached_to)
        except ClientError as exc:
            if error_kind(response_code(exc)) is not NotFound:
                raise
    ec2.delete_internet_gateway(InternetGatewayId=gateway.id)


def delete_routes(ec2: Any, *, routes: Resource) -> None:
    for association in routes.detail.split():
        try:
            ec2.disassociate_route_table(AssociationId=association)
        except ClientError as exc:
            if error_kind(response_code(exc)) is not NotFound:
                raise
    ec2.delete_route_table(RouteTableId=routes.id)


def _existing_is_fine(call: Any, **arguments: Any) -> None:
    try:
        call(**arguments)
    except ClientError as exc:
        if error_kind(response_code(exc)) is not AlreadyExists:
            raise
