"""The policy that docs/aws.md hands out allows what the command asks of AWS, and nothing else."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import botocore.session
import pytest
from botocore import xform_name

from infra.aws import identity
from infra.aws.tags import DEPLOYMENT
from tests.infra.doubles import Bench

INFRA = Path(identity.__file__).parents[1]
POLICY = json.loads((INFRA / "policy.json").read_text())
BY_THE_AWS_COMMAND = {"ssm:StartSession", "ssm:TerminateSession"}
ON_CREATION = {
    "ec2:CreateTags", "iam:PassRole", "iam:TagInstanceProfile", "iam:TagRole", "logs:TagResource",
    "ssm:AddTagsToResource",
}  # fmt: skip
ON_INSTANCES = {"agent.py", "boot.py"}
"""What runs there has the instance's own role."""


def actions_of(statement: dict[str, object]) -> list[str]:
    action = statement["Action"]
    return [action] if isinstance(action, str) else list(action)  # type: ignore[call-overload]


def allowed() -> set[str]:
    return {action for statement in POLICY["Statement"] for action in actions_of(statement)}


def called() -> set[str]:
    """Operations whose method, or paginator, the sources name."""
    session = botocore.session.get_session()
    operations = {
        (service, xform_name(name)): f"{service}:{name}"
        for service in ("ec2", "iam", "logs", "ssm", "sts")
        for name in session.get_service_model(service).operation_names
    }
    found = set()
    for path in INFRA.rglob("*.py"):
        if path.name in ON_INSTANCES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[tuple[str, str]] = []
            if isinstance(node, ast.Attribute):
                names = services_of(node.value, node.attr)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "get_paginator"
                and isinstance(node.args[0], ast.Constant)
            ):
                names = services_of(node.func.value, str(node.args[0].value))
            found |= {operations[name] for name in names if name in operations}
    return found


def services_of(receiver: ast.expr, method: str) -> list[tuple[str, str]]:
    """The service that a client stands for: by its variable's name, or by the call that makes it."""
    if isinstance(receiver, ast.Name):
        return [(receiver.id, method)]
    if isinstance(receiver, ast.Call) and receiver.args and isinstance(receiver.args[0], ast.Constant):
        return [(str(receiver.args[0].value), method)]
    return []


def test_everything_that_is_called_is_allowed_and_nothing_else() -> None:
    assert allowed() == called() | ON_CREATION | BY_THE_AWS_COMMAND
    assert not any("*" in action for action in allowed())


def test_what_a_deployment_really_asks_for_is_among_it(bench: Bench) -> None:
    bench.up()
    bench.down()
    names = {action.partition(":")[2] for action in allowed()}
    assert set(bench.clients.calls) <= names
    assert len(bench.clients.calls) > 30


@pytest.mark.parametrize("statement", POLICY["Statement"], ids=lambda statement: statement["Sid"])
def test_only_looking_is_not_bound_to_what_is_ours(statement: dict[str, object]) -> None:
    resources = statement["Resource"]
    listed = [resources] if isinstance(resources, str) else list(resources)  # type: ignore[call-overload]
    if statement["Sid"] == "Look":
        kinds = ("Describe", "List", "Get")
        assert all(action.partition(":")[2].startswith(kinds) for action in actions_of(statement))
        return
    assert "*" not in listed
    ours = all("foredraft" in resource for resource in listed)
    assert ours or DEPLOYMENT in json.dumps(statement.get("Condition", {})) or statement["Sid"] in {
        "MakeInWhatIsThere", "LaunchFromWhatIsThere", "TagWhatIsBeingMade", "CommandsAreShellScripts", "EndOwnShells",
    }  # fmt: skip
