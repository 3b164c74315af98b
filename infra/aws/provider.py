"""AWS as a `Provider`: which client each method needs, and botocore's errors as ours."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence

from botocore.exceptions import ClientError

from infra.aws import compute, identity, network, parameters
from infra.aws.client import Clients
from infra.aws.errors import error_kind, response_code, translated
from infra.aws.names import CERTIFICATE, SECRET, parameter_path, profile_name
from infra.errors import CapacityError, NotFound, ProviderError
from infra.plan import NODE_ROLE
from infra.provider import LaunchRequest, LogLine
from infra.spec import Spec
from infra.state import GLOBAL, Kind, Life, Observed, Resource

HOME = "us-east-1"
"""Where services without a region are asked."""
MAX_USER_DATA_BYTES = 16_384


class AwsProvider:
    """One deployment in one account.

    Args:
        deployment: its name; everything is found by it.
        extra_tags: the user's own.
    """

    def __init__(self, clients: Clients, *, deployment: str, extra_tags: Mapping[str, str] | None = None) -> None:
        self.clients = clients
        self.deployment = deployment
        self.extra_tags = dict(extra_tags or {})
        self._images: dict[tuple[str, str, str], tuple[str, str]] = {}

    @translated
    def check_access(self, spec: Spec) -> None:
        self.clients("sts", HOME).get_caller_identity()
        closed = [region for region in spec.regions if region not in self.all_regions()]
        if closed:
            raise ProviderError(
                f"regions not open to this account: {', '.join(closed)}", hint="enable them, or edit the spec"
            )

    @translated
    def all_regions(self) -> list[str]:
        answer = self.clients("ec2", HOME).describe_regions()
        return sorted(region["RegionName"] for region in answer["Regions"])

    @translated
    def observe(self, regions: Sequence[str]) -> Observed:
        found: list[Resource] = []
        for region in dict.fromkeys(regions):
            if region == GLOBAL:
                found += identity.list_profiles(self.clients("iam", HOME), deployment=self.deployment)
            else:
                found += self._observe(region)
        return Observed(tuple(found))

    def _observe(self, region: str) -> list[Resource]:
        ec2 = self.clients("ec2", region)
        found = []
        for look in (
            compute.list_instances,
            compute.list_volumes,
            network.list_addresses,
            network.list_firewalls,
            network.list_network,
        ):
            found += look(ec2, deployment=self.deployment, region=region)
        found += parameters.list_parameters(self.clients("ssm", region), deployment=self.deployment, region=region)
        found += parameters.list_log_groups(self.clients("logs", region), deployment=self.deployment, region=region)
        return found

    @translated
    def zones(self, region: str, instance_type: str) -> list[str]:
        return compute.offered_zones(self.clients("ec2", region), instance_type=instance_type)

    @translated
    def spot_usd_per_hour(self, region: str, instance_types: Sequence[str]) -> Mapping[str, float]:
        now = datetime.datetime.now(datetime.UTC)
        return compute.spot_prices(self.clients("ec2", region), instance_types=instance_types, now=now)

    @translated
    def ensure_secret(self, region: str, value: str) -> None:
        parameters.ensure_secret(
            self.clients("ssm", region), deployment=self.deployment, extra_tags=self.extra_tags, value=value
        )

    @translated
    def ensure_profile(self, role: str, spec: Spec, relay_region: str) -> None:
        identity.ensure_profile(
            self.clients("iam", HOME),
            deployment=self.deployment,
            extra_tags=self.extra_tags,
            role=role,
            document=identity.policy(spec, role=role, relay_region=relay_region),
        )

    @translated
    def ensure_logs(self, region: str) -> None:
        parameters.ensure_logs(self.clients("logs", region), deployment=self.deployment, extra_tags=self.extra_tags)

    @translated
    def ensure_network(self, region: str) -> None:
        network.ensure_network(
            self.clients("ec2", region), deployment=self.deployment, extra_tags=self.extra_tags, region=region
        )

    @translated
    def ensure_firewall(
        self, region: str, role: str, *, own_network: bool, port: int | None, allow_from: Sequence[str]
    ) -> None:
        network_id, _ = self._subnets(region, own_network=own_network)
        network.ensure_firewall(
            self.clients("ec2", region),
            deployment=self.deployment,
            extra_tags=self.extra_tags,
            region=region,
            role=role,
            network_id=network_id,
            port=port,
            allow_from=allow_from,
        )

    @translated
    def ensure_address(self, region: str) -> str:
        return network.ensure_address(
            self.clients("ec2", region), deployment=self.deployment, extra_tags=self.extra_tags, region=region
        )

    @translated
    def attach_address(self, region: str, address: str, instance_id: str) -> None:
        ec2 = self.clients("ec2", region)
        known = network.list_addresses(ec2, deployment=self.deployment, region=region)
        ids = [a.id for a in known if a.detail == address]
        if not ids:
            raise NotFound(f"the relay's address {address} in {region} is not there")
        ec2.associate_address(AllocationId=ids[0], InstanceId=instance_id)

    @translated
    def launch(self, request: LaunchRequest, *, own_network: bool, dry_run: bool = False) -> str:
        if len(request.user_data.encode()) > MAX_USER_DATA_BYTES:
            size = len(request.user_data.encode())
            raise ProviderError(
                f"{request.machine.slot}: {size} bytes of user data, at most {MAX_USER_DATA_BYTES}",
                hint="shorten the arguments in the spec",
            )
        ec2 = self.clients("ec2", request.region)
        if own_network and dry_run:
            network_id, subnets = self._subnets_to_ask(request.region)
        else:
            network_id, subnets = self._subnets(request.region, own_network=own_network)
        image_id, root_device = self._image(request)
        role = "relay" if request.machine.role == "relay" else NODE_ROLE
        groups = network.list_firewalls(ec2, deployment=self.deployment, region=request.region)
        group_ids = [g.id for g in groups if g.slot == role and g.detail == network_id]
        if not group_ids and not dry_run:
            # Without it the instance would get the default group, which may be open.
            raise NotFound(f"the firewall of {role} in {request.region} is not there")
        if request.zone not in subnets:
            raise CapacityError(f"{request.region} has no subnet in {request.zone}")
        try:
            return compute.run_instance(
                ec2,
                request=request,
                deployment=self.deployment,
                extra_tags=self.extra_tags,
                image_id=image_id,
                root_device=root_device,
                subnet_id=subnets[request.zone],
                group_ids=group_ids,
                profile="" if dry_run else profile_name(self.deployment, role),
                dry_run=dry_run,
            )
        except ClientError as exc:
            if dry_run and response_code(exc) == "DryRunOperation":
                return ""
            raise

    @translated
    def lives(self, region: str, ids: Sequence[str]) -> Mapping[str, Life]:
        return compute.instance_lives(self.clients("ec2", region), ids=ids)

    @translated
    def terminate(self, region: str, instance_id: str) -> None:
        self._gone_is_fine(self.clients("ec2", region).terminate_instances, InstanceIds=[instance_id])

    @translated
    def delete(self, resource: Resource) -> None:
        region = HOME if resource.region == GLOBAL else resource.region
        ec2 = self.clients("ec2", region)
        removers: dict[Kind, Callable[[], object]] = {
            Kind.ADDRESS: lambda: self._release(resource),
            Kind.VOLUME: lambda: ec2.delete_volume(VolumeId=resource.id),
            Kind.FIREWALL: lambda: network.delete_firewall(ec2, deployment=self.deployment, group_id=resource.id),
            Kind.ROUTES: lambda: network.delete_routes(ec2, routes=resource),
            Kind.SUBNET: lambda: ec2.delete_subnet(SubnetId=resource.id),
            Kind.GATEWAY: lambda: network.delete_gateway(ec2, gateway=resource),
            Kind.NETWORK: lambda: ec2.delete_vpc(VpcId=resource.id),
            Kind.PROFILE: lambda: identity.delete_profile(self.clients("iam", HOME), name=resource.id),
            Kind.SECRET: lambda: self.clients("ssm", region).delete_parameter(Name=resource.id),
            Kind.LOGS: lambda: self.clients("logs", region).delete_log_group(logGroupName=resource.id),
        }
        self._gone_is_fine(removers[resource.kind])

    @translated
    def fetch_secret(self, region: str) -> str:
        return parameters.get_parameter(self.clients("ssm", region), name=parameter_path(self.deployment, SECRET))

    @translated
    def fetch_certificate(self, region: str, spec: Spec) -> str:
        name = spec.access.certificate_parameter or parameter_path(self.deployment, CERTIFICATE)
        return parameters.get_parameter(self.clients("ssm", region), name=name)

    @translated
    def boot_log(self, region: str, instance_id: str) -> str:
        return compute.console_output(self.clients("ec2", region), instance_id=instance_id)

    def log_lines(self, region: str, slot: str, *, since_ms: int) -> Iterator[LogLine]:
        lines = translated(
            lambda: list(
                parameters.log_lines(
                    self.clients("logs", region), deployment=self.deployment, slot=slot, since_ms=since_ms
                )
            )
        )
        yield from lines()

    @translated
    def run_command(self, region: str, instance_id: str, command: str) -> str:
        return parameters.send_command(self.clients("ssm", region), instance_id=instance_id, command=command)

    @translated
    def command_output(self, region: str, instance_id: str, command_id: str) -> tuple[str, str, int] | None:
        ssm = self.clients("ssm", region)
        return parameters.command_output(ssm, instance_id=instance_id, command_id=command_id)

    def shell_command(self, region: str, instance_id: str) -> list[str]:
        return ["aws", "ssm", "start-session", "--region", region, "--target", instance_id]

    def _subnets(self, region: str, *, own_network: bool) -> tuple[str, dict[str, str]]:
        ec2 = self.clients("ec2", region)
        if own_network:
            return network.own_subnets(ec2, deployment=self.deployment, region=region)
        return network.default_subnets(ec2, region=region)

    def _subnets_to_ask(self, region: str) -> tuple[str, dict[str, str]]:
        """A dry run may come before there is a network of our own: what is asked is whether we may launch at all."""
        try:
            return self._subnets(region, own_network=True)
        except NotFound as exc:
            try:
                return self._subnets(region, own_network=False)
            except ProviderError:
                raise exc from None

    def _image(self, request: LaunchRequest) -> tuple[str, str]:
        ec2 = self.clients("ec2", request.region)
        architecture = compute.architecture_of(ec2, instance_type=request.instance_type)
        image = request.machine.image
        key = (request.region, image.owner + image.name, architecture)
        if key not in self._images:
            # With the architecture's own word for itself in the name, for Ubuntu has it there.
            named = type(image)(owner=image.owner, name=image.name.replace("{arch}", _ubuntu_word(architecture)))
            self._images[key] = compute.find_image(ec2, image=named, architecture=architecture, region=request.region)
        return self._images[key]

    def _release(self, address: Resource) -> None:
        """An address that is attached to something cannot be released."""
        ec2 = self.clients("ec2", address.region)
        answer = ec2.describe_addresses(AllocationIds=[address.id])
        for found in answer["Addresses"]:
            if found.get("AssociationId"):
                self._gone_is_fine(ec2.disassociate_address, AssociationId=found["AssociationId"])
        ec2.release_address(AllocationId=address.id)

    @staticmethod
    def _gone_is_fine(call: Callable[..., object], **arguments: object) -> None:
        try:
            call(**arguments)
        except ClientError as exc:
            if error_kind(response_code(exc)) is not NotFound:
                raise


def _ubuntu_word(architecture: str) -> str:
    return {"x86_64": "amd64"}.get(architecture, architecture)
