"""The parameter store (secrets, the relay's certificate), commands without an open port, and logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError

from infra.aws import tags
from infra.aws.errors import error_kind, response_code
from infra.aws.names import SECRET, log_group, parameter_path
from infra.errors import AlreadyExists
from infra.provider import LogLine
from infra.state import Kind, Resource

RETENTION_DAYS = 14
RUNNING = ("Pending", "InProgress", "Delayed", "Cancelling")


def list_parameters(ssm: Any, *, deployment: str, region: str) -> list[Resource]:
    """All parameters under the deployment's path: the secret, and what the relay has published."""
    filters = [{"Key": "Path", "Option": "Recursive", "Values": [parameter_path(deployment, "").rstrip("/")]}]
    return [
        Resource(kind=Kind.SECRET, region=region, id=p["Name"], slot=p["Name"].rpartition("/")[2])
        for page in ssm.get_paginator("describe_parameters").paginate(ParameterFilters=filters)
        for p in page["Parameters"]
    ]


def ensure_secret(ssm: Any, *, deployment: str, extra_tags: Mapping[str, str], value: str) -> None:
    """Encrypted; one that is there stays, for nodes have it already."""
    try:
        ssm.put_parameter(
            Name=parameter_path(deployment, SECRET),
            Description=f"foredraft {deployment}: shared by relay, nodes and clients",
            Value=value,
            Type="SecureString",
            Overwrite=False,
            Tags=tags.tag_list(deployment, extra_tags),
        )
    except ClientError as exc:
        if error_kind(response_code(exc)) is not AlreadyExists:
            raise


def get_parameter(ssm: Any, *, name: str) -> str:
    return str(ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"])


def list_log_groups(logs: Any, *, deployment: str, region: str) -> list[Resource]:
    name = log_group(deployment)
    return [
        Resource(kind=Kind.LOGS, region=region, id=name, complete="retentionInDays" in g)
        for page in logs.get_paginator("describe_log_groups").paginate(logGroupNamePrefix=name)
        for g in page["logGroups"]
        if g["logGroupName"] == name
    ]


def ensure_logs(logs: Any, *, deployment: str, extra_tags: Mapping[str, str]) -> None:
    name = log_group(deployment)
    marks = {tag["Key"]: tag["Value"] for tag in tags.tag_list(deployment, extra_tags)}
    try:
        logs.create_log_group(logGroupName=name, tags=marks)
    except ClientError as exc:
        if error_kind(response_code(exc)) is not AlreadyExists:
            raise
    logs.put_retention_policy(logGroupName=name, retentionInDays=RETENTION_DAYS)


def log_lines(logs: Any, *, deployment: str, slot: str, since_ms: int) -> Iterator[LogLine]:
    """All pages, oldest first."""
    pages = logs.get_paginator("filter_log_events").paginate(
        logGroupName=log_group(deployment), logStreamNamePrefix=slot, startTime=since_ms
    )
    for page in pages:
        for event in page["events"]:
            # The prefix verify-1 also matches verify-10.
            if event["logStreamName"].split("/")[0] == slot:
                yield LogLine(at_ms=event["timestamp"], slot=slot, text=event["message"].rstrip("\n"))


def send_command(ssm: Any, *, instance_id: str, command: str) -> str:
    answer = ssm.send_command(
        InstanceIds=[instance_id], DocumentName="AWS-RunShellScript", Parameters={"commands": [command]}
    )
    return str(answer["Command"]["CommandId"])


def command_output(ssm: Any, *, instance_id: str, command_id: str) -> tuple[str, str, int] | None:
    answer = ssm.get_command_invocation(InstanceId=instance_id, CommandId=command_id)
    if answer["Status"] in RUNNING:
        return None
    return answer["StandardOutputContent"], answer["StandardErrorContent"], int(answer["ResponseCode"])
