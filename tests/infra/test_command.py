"""The command from end to end against moto: what is printed, the exit code, and what is left."""

from __future__ import annotations

import io
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from infra import __main__ as command
from infra.__main__ import main
from infra.aws.client import Clients
from infra.health import Health
from tests.infra.doubles import ALL_READY, DRAFT_REGION, VERIFY_REGION, FakeRelay

SPEC = """
[deployment]
name = "demo"
ttl_hours = 4
budget_usd = 20
[package]
requirement = "foredraft==0.1.0"
[relay]
regions = ["us-east-2", "us-west-2"]
[[node]]
role = "verify"
region = "us-east-2"
instance_types = ["g6.xlarge"]
model = "Qwen/Qwen2.5-7B-Instruct"
[[node]]
role = "draft"
region = "us-west-2"
instance_types = ["g4dn.xlarge"]
model = "Qwen/Qwen2.5-0.5B-Instruct"
"""


@pytest.fixture
def run(moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; gives exit code, output and errors. Every relay is ready."""
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    monkeypatch.setattr(command, "probe", FakeRelay(ALL_READY))

    def call(*words: str, spec: str | None = None) -> tuple[int, str, str]:
        if spec is not None:
            path.write_text(spec)
        name, *others = words
        code = main(["--state-dir", str(tmp_path / "state"), name, str(path), *others])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


@pytest.fixture
def published(clients: Clients) -> None:
    """The relay's certificate, as if it had booted already."""
    clients("ssm", VERIFY_REGION).put_parameter(
        Name="/foredraft/demo/relay-certificate", Value="PEM", Type="String", Overwrite=True
    )


def test_plan_shows_placement_forecast_cost_and_actions_and_changes_nothing(run: Any, clients: Clients) -> None:
    code, out, _ = run("plan")
    assert code == 0
    assert "* us-east-2        draft -> relay -> verify   51.9 ms round trip (without a relay 50.9)" in out
    assert "captured 2025-05-29" in out
    assert "forecast by scripts/simulate.py" in out
    assert "USD per million tokens" in out
    assert "13 actions:" in out
    assert clients("ec2", VERIFY_REGION).describe_instances()["Reservations"] == []


def test_plan_takes_a_measured_round_trip(run: Any) -> None:
    _, out, _ = run("plan", "--offline", "--round-trip", "us-west-2:us-east-2=200")
    assert "201.0 ms round trip (without a relay 200.0)" in out
    assert "but for what was measured" in out


def test_from_up_to_down(run: Any, published: None, tmp_path: Path) -> None:
    code, out, err = run("up")
    assert code == 0, err
    assert "at most 5.52 USD in 4 h, then the instances end by themselves" in out
    assert "ask: foredraft-client --relay wss://" in out
    secret = tmp_path / "state" / "demo.secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text() not in out

    code, out, _ = run("plan")
    assert "nothing to do: everything exists" in out

    code, out, _ = run("status")
    assert code == 0
    assert out.count(", ready, ends 20") == 3

    code, out, _ = run("cost")
    assert "in all " in out
    assert "budget 20.00 USD" in out

    code, out, _ = run("down")
    assert code == 0
    assert "nothing is left" in out
    assert list((tmp_path / "state").iterdir()) == []
    code, out, _ = run("down")
    assert (code, out) == (0, "nothing to remove\n")
    assert run("status")[:2] == (1, "nothing exists\n")


def test_down_needs_no_file_of_ups_and_can_look_everywhere(run: Any, published: None, tmp_path: Path) -> None:
    run("up")
    for path in (tmp_path / "state").iterdir():
        path.unlink()
    moved = SPEC.replace('region = "us-west-2"', 'region = "us-west-1"').replace(
        '["us-east-2", "us-west-2"]', '["us-east-2"]'
    )
    assert run("down", spec=moved)[0] == 0
    assert "removed 3; nothing is left" in run("down", "--all-regions")[1]
    assert run("down", "--all-regions")[1] == "nothing to remove\n"


def test_a_dry_run_asks_ec2_for_every_launch_and_makes_nothing(run: Any, clients: Clients) -> None:
    code, out, err = run("up", "--dry-run")
    assert code == 0, err
    assert out.count(": allowed") == 3
    for region in (VERIFY_REGION, DRAFT_REGION):
        assert clients("ec2", region).describe_instances()["Reservations"] == []
        groups = clients("ec2", region).describe_security_groups()["SecurityGroups"]
        assert [group["GroupName"] for group in groups] == ["default"]


def test_a_budget_that_is_too_small_stops_up_before_anything_is_made(run: Any, clients: Clients) -> None:
    code, _, err = run("up", spec=SPEC.replace("budget_usd = 20", "budget_usd = 2"))
    assert code == 1
    assert "deployment.budget_usd: 2.00 is less than the 5.52" in err
    assert clients("iam", "us-east-1").list_roles()["Roles"] == []


def test_a_wrong_spec_is_a_usage_error(run: Any) -> None:
    code, _, err = run("plan", spec=SPEC.replace("ttl_hours = 4", "ttl_hours = 0"))
    assert (code, err) == (2, "foredraft-infra: deployment.ttl_hours: must be a number in 0.25..168, got 0\n")


def test_a_boot_that_fails_shows_the_end_of_its_log(run: Any, published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "probe", FakeRelay(Health(False, frozenset(), "refused")))
    monkeypatch.setattr("infra.readiness.LOOK_AT_BOOT_LOG_EVERY", 1)
    monkeypatch.setattr(
        "infra.aws.provider.AwsProvider.boot_log", lambda *_: "pip: no\nforedraft: boot failed in line 9"
    )
    code, out, err = run("up")
    assert code == 1
    assert "the boot script of draft-0 failed" in err
    assert "--- end of the boot log of draft-0\npip: no\nforedraft: boot failed in line 9" in err
    assert "rolling back" in out
    assert run("down")[0] == 0


def test_one_command_runs_through_systems_manager(run: Any, published: None) -> None:
    run("up")
    code, _, err = run("ssh", "verify-0", "--", "nvidia-smi")
    assert code == 0, err
    code, _, err = run("ssh", "verify-7")
    assert code == 1
    assert "verify-7: no such instance runs; the spec has relay, verify-0, draft-0" in err


def test_logs_of_a_node_and_of_its_boot(run: Any, published: None, clients: Clients) -> None:
    run("up")
    logs = clients("logs", VERIFY_REGION)
    for stream, text in (("verify-0", "one"), ("verify-0/boot", "two"), ("verify-01", "not mine")):
        logs.create_log_stream(logGroupName="/foredraft/demo", logStreamName=stream)
        event = {"timestamp": int(time.time() * 1000), "message": text}
        logs.put_log_events(logGroupName="/foredraft/demo", logStreamName=stream, logEvents=[event])
    code, out, err = run("logs", "verify-0", "--minutes", "5")
    assert code == 0, err
    assert sorted(out.split()) == ["one", "two"]
    assert "Linux version" in run("logs", "verify-0", "--boot")[1]


def test_no_credentials_is_one_line_with_a_hint(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    code, _, err = run("up")
    assert code == 1
    assert "run `aws configure`, or set AWS_PROFILE" in err
    assert err.count("\n") == 1


def test_an_interrupt_ends_with_130_after_the_roll_back(
    run: Any, published: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> Health:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "probe", interrupt)
    code, out, err = run("up")
    assert code == 130
    assert "rolling back after KeyboardInterrupt" in out
    assert "interrupted" in err
    # The certificate that was published before stays until then.
    assert "removed 1; nothing is left" in run("down")[1]


def test_a_profile_that_is_not_there_is_one_line_and_offline_nobody_looks(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    code, _, err = run("status")
    assert (code, err.count("\n")) == (1, 1)
    assert "The config profile (nobody) could not be found" in err
    assert run("plan", "--offline")[0] == 0


def test_the_reader_may_go_away_in_the_middle_and_the_roll_back_goes_on(
    run: Any, published: None, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up | tee log`, and Ctrl-C, which ends both."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    def interrupt(*_: object) -> Health:
        sys.stdout = Gone()
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "probe", interrupt)
    before = sys.stdout
    try:
        assert run("up")[0] == 130
    finally:
        sys.stdout = before
    for region in (VERIFY_REGION, DRAFT_REGION):
        for reservation in clients("ec2", region).describe_instances()["Reservations"]:
            assert [i["State"]["Name"] for i in reservation["Instances"]] == ["terminated"]


def test_a_plain_kill_rolls_back_too(run: Any, published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def kill(*_: object) -> Health:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(command, "probe", kill)
    try:
        code, out, _ = run("up")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 130
    assert "rolling back after KeyboardInterrupt" in out


def test_a_state_folder_that_cannot_be_written_is_one_line_before_anything_is_made(
    run: Any, tmp_path: Path, clients: Clients
) -> None:
    (tmp_path / "state").write_text("a file, not a folder")
    code, _, err = run("up")
    assert (code, err.count("\n")) == (1, 1)
    assert "state" in err
    assert clients("iam", "us-east-1").list_roles()["Roles"] == []


def test_a_user_without_a_home_needs_a_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert main(["plan", "--offline", str(tmp_path / "spec.toml")]) == 1
    assert "Could not determine home directory.; give --state-dir" in capsys.readouterr().err


def test_logs_outlive_their_instance(run: Any, published: None, clients: Clients) -> None:
    run("up")
    logs = clients("logs", DRAFT_REGION)
    logs.create_log_stream(logGroupName="/foredraft/demo", logStreamName="draft-0")
    event = {"timestamp": int(time.time() * 1000), "message": "last words"}
    logs.put_log_events(logGroupName="/foredraft/demo", logStreamName="draft-0", logEvents=[event])
    ec2 = clients("ec2", DRAFT_REGION)
    (reservation,) = ec2.describe_instances()["Reservations"]
    ec2.terminate_instances(InstanceIds=[reservation["Instances"][0]["InstanceId"]])
    assert run("logs", "draft-0")[:2] == (0, "last words\n")
    assert "draft-7: no such instance" in run("logs", "draft-7")[2]
