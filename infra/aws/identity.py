"""Instance profiles with the least that an instance needs: its own parameters, its own log group, its own wheel and
model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from infra.aws import tags
from infra.aws.errors import error_kind, response_code
from infra.aws.names import parameter_path, profile_name
from infra.errors import AlreadyExists, NotFound
from infra.spec import Spec
from infra.state import GLOBAL, Kind, Resource

TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}
POLICY_NAME = "foredraft"
# What Systems Manager's agent needs for sessions and commands; narrower than AmazonSSMManagedInstanceCore, which may
# read every parameter of the account.
SESSIONS = [
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
    "ec2messages:AcknowledgeMessage",
    "ec2messages:DeleteMessage",
    "ec2messages:FailMessage",
    "ec2messages:GetEndpoint",
    "ec2messages:GetMessages",
    "ec2messages:SendReply",
]


def path(deployment: str) -> str:
    """The IAM path under which everything of a deployment is found again."""
    return f"/foredraft/{deployment}/"


def policy(spec: Spec, *, role: str, relay_region: str) -> dict[str, Any]:
    """What instances of `role` may do."""
    own = f"arn:aws:ssm:{relay_region}:*:parameter{parameter_path(spec.name, '')}"
    readable = [own + "*"]
    if role == "relay" and spec.access.certificate_parameter:
        names = (spec.access.certificate_parameter, spec.access.key_parameter)
        readable += [f"arn:aws:ssm:{relay_region}:*:parameter{name}" for name in names]
    if role != "relay":
        tokens = {node.hub_token_parameter for node in spec.nodes if node.hub_token_parameter}
        readable += [f"arn:aws:ssm:{relay_region}:*:parameter{name}" for name in sorted(tokens)]
    statements: list[dict[str, Any]] = [
        {"Effect": "Allow", "Action": SESSIONS, "Resource": "*"},
        {"Effect": "Allow", "Action": ["ssm:GetParameter"], "Resource": readable},
        {
            "Effect": "Allow",
            "Action": ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"],
            "Resource": f"arn:aws:logs:*:*:log-group:/foredraft/{spec.name}:*",
        },
    ]
    if role == "relay":
        statements.append({"Effect": "Allow", "Action": ["ssm:PutParameter"], "Resource": own + "relay-certificate"})
    buckets = [spec.package.wheel] if spec.package.wheel else []
    if role != "relay":
        buckets += [node.model.rstrip("/") + "/*" for node in spec.nodes if node.model.startswith("s3://")]
    if buckets:
        objects = sorted({"arn:aws:s3:::" + name.removeprefix("s3://") for name in buckets})
        statements.append({"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": objects})
        whole = sorted(
            {"arn:aws:s3:::" + name.removeprefix("s3://").split("/")[0] for name in buckets if name.endswith("*")}
        )
        if whole:
            statements.append({"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": whole})
    return {"Version": "2012-10-17", "Statement": statements}


def list_profiles(iam: Any, *, deployment: str) -> list[Resource]:
    """Roles and profiles; a role without policy or profile, or the reverse, is not complete."""
    prefix = path(deployment)
    roles = {
        role["RoleName"]
        for page in iam.get_paginator("list_roles").paginate(PathPrefix=prefix)
        for role in page["Roles"]
    }
    profiles = {
        profile["InstanceProfileName"]: {role["RoleName"] for role in profile["Roles"]}
        for page in iam.get_paginator("list_instance_profiles").paginate(PathPrefix=prefix)
        for profile in page["InstanceProfiles"]
    }
    found = []
    for name in sorted(roles | set(profiles)):
        whole = name in roles and name in profiles.get(name, set()) and _has_policy(iam, name)
        slot = name.removeprefix(profile_name(deployment, ""))
        found.append(Resource(kind=Kind.PROFILE, region=GLOBAL, id=name, slot=slot, complete=whole))
    return found


def ensure_profile(
    iam: Any, *, deployment: str, extra_tags: Mapping[str, str], role: str, document: Mapping[str, Any]
) -> None:
    """Role, policy and profile of one name."""
    name = profile_name(deployment, role)
    marks = tags.tag_list(deployment, extra_tags, slot=role)
    _existing_is_fine(
        iam.create_role,
        RoleName=name,
        Path=path(deployment),
        AssumeRolePolicyDocument=json.dumps(TRUST),
        Description=f"foredraft {deployment}: {role}",
        Tags=marks,
    )
    iam.put_role_policy(RoleName=name, PolicyName=POLICY_NAME, PolicyDocument=json.dumps(document))
    _existing_is_fine(iam.create_instance_profile, InstanceProfileName=name, Path=path(deployment), Tags=marks)
    members = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]
    if name not in [member["RoleName"] for member in members]:
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)


def delete_profile(iam: Any, *, name: str) -> None:
    """Role, policies and profile; what is gone of them is skipped."""
    try:
        members = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]
        for member in members:
            _absence_is_fine(
                iam.remove_role_from_instance_profile, InstanceProfileName=name, RoleName=member["RoleName"]
            )
        _absence_is_fine(iam.delete_instance_profile, InstanceProfileName=name)
    except ClientError as exc:
        if error_kind(response_code(exc)) is not NotFound:
            raise
    _absence_is_fine(iam.delete_role_policy, RoleName=name, PolicyName=POLICY_NAME)
    _absence_is_fine(iam.delete_role, RoleName=name)


def _has_policy(iam: Any, name: str) -> bool:
    return POLICY_NAME in _names(iam.get_paginator("list_role_policies").paginate(RoleName=name))


def _names(pages: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for page in pages for name in page["PolicyNames"]}


def _existing_is_fine(call: Any, **arguments: Any) -> None:
    try:
        call(**arguments)
    except ClientError as exc:
        if error_kind(response_code(exc)) is not AlreadyExists:
            raise


def _absence_is_fine(call: Any, **arguments: Any) -> None:
    try:
        call(**arguments)
    except ClientError as exc:
        if error_kind(response_code(exc)) is not NotFound:
            raise
