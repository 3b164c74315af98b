"""`foredraft-plan`: the second write-up through the command, the simulated projection, and wrong input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.plan import main

SECOND = ["--cycle-ms", "89.34", "--draft-ms", "15.88", "--tokens-per-s", "24.05"]
CASE = [
    "--cycle-ms", "58", "--draft-ms", "24", "--tokens-per-cycle", "4.33", "--gamma", "8", "--acceptance", "0.8",
    "--seeds", "3", "--tokens", "120",
]  # fmt: skip


def figures(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    assert main([*flags, "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize(("hop_ms", "gain", "within"), [(0.198, 0.21, 0.005), (1.713, 0.19, 0.005), (16.02, 0, 0.01)])
def test_the_second_write_up_comes_out_of_the_command(
    capsys: pytest.CaptureFixture[str], hop_ms: float, gain: float, within: float
) -> None:
    found = figures(capsys, *SECOND, "--hop-ms", str(hop_ms))
    assert found["freed_share"] == pytest.approx(0.178, abs=0.0005)
    assert found["relocated_gain"] == pytest.approx(gain, abs=within)


def test_the_text_names_each_assumption(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SECOND, "--hop-ms", "1.713"]) == 0
    text = capsys.readouterr().out
    assert "if drafting is entirely overlapped" in text
    assert "needs --acceptance" in text
    assert "28.58" in text


def test_the_asynchronous_projection_has_an_interval_and_beats_the_synchronous_far_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = figures(capsys, *CASE, "--latency-ms", "86")
    chain = found["asynchronous_tokens_per_s"]["asynchronous chain"]  # type: ignore[index]
    assert chain["low"] <= chain["mean"] <= chain["high"]
    assert chain["mean"] > found["tokens_per_s"]["synchronous remote"]  # type: ignore[index]
    tree = found["asynchronous_tokens_per_s"]["asynchronous tree"]  # type: ignore[index]
    assert tree["mean"] > chain["mean"]
    change = found["asynchronous_change_at_plus_10_percent"]
    assert change["rejections"] < 0  # type: ignore[index]
    assert change["verify time"] < 0  # type: ignore[index]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_written(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plan.{ending}"
    pytest.importorskip("matplotlib")
    assert main([*SECOND, "--hop-ms", "1.713", "--picture", str(path)]) == 0
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--hop-ms", "-1"], "--hop-ms must be at least 0, got -1"),
        (["--rate-mbit", "0"], "--rate-mbit must be positive, got 0"),
        (["--gamma", "0"], "--gamma must be at least 1, got 0"),
        (["--seeds", "1"], "--seeds must be 0 or at least 2, got 1"),
        (["--acceptance", "1.2"], "--acceptance must lie within 0..1, got 1.2"),
        (["--verify-costs", "1=3"], "'1=3' is not ROWS:MS"),
    ],
)
def test_wrong_input_is_named(capsys: pytest.CaptureFixture[str], flags: list[str], named: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SECOND, *flags])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_a_measured_link_and_measured_passes_take_the_place_of_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, trace = tmp_path / "hop.json", tmp_path / "verify.jsonl"
    link.write_text(json.dumps({"latency_ms": 4.0, "rate_mbit": 100.0}))
    passes = [(1, 0.030), (1, 0.031), (1, 0.900), (9, 0.040), (9, 0.042), (9, 0.041), (5, 9.0)]
    trace.write_text(
        "".join(
            json.dumps({"event": "verify", "pass_rows": rows, "compute_s": s, "overhead_s": 0.001}) + "\n"
            for rows, s in passes
        )
    )
    flags = ["--link", str(link), "--payload-bytes", "50000", "--verify-trace", str(trace), "--seeds", "0"]
    found = figures(capsys, *SECOND, *flags)
    assert found["hop_ms"] == pytest.approx(4 + 4)
    # A median: neither the pause of 900 ms nor the lone pass over five rows counts.
    assert found["tokens_per_s"]["target only"] == pytest.approx(1 / 0.032)  # type: ignore[index]


@pytest.mark.parametrize(
    ("flag", "text", "named"),
    [
        ("--link", "{}", "is not what foredraft-hop --json prints: 'latency_ms'"),
        ("--link", '{"latency_ms": 0, "rate_mbit": null}', "latency_ms 0, rate_mbit None"),
        ("--verify-trace", '{"event": "verify"}', "is not a verify node's trace: KeyError('pass_rows')"),
        ("--verify-trace", "{}", "has fewer than 3 passes over one row"),
    ],
)
def test_a_file_that_is_no_measurement_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, text: str, named: str
) -> None:
    path = tmp_path / "given"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main([*SECOND, flag, str(path)])
    assert f"{flag}: {path}" in (error := capsys.readouterr().err)
    assert named in error


def test_the_trace_of_a_verify_node_that_was_killed_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "verify.jsonl"
    line = json.dumps({"event": "verify", "pass_rows": 1, "compute_s": 0.03, "overhead_s": 0.002}) + "\n"
    trace.write_text(3 * line + line[:20])
    found = figures(capsys, *SECOND, "--verify-trace", str(trace), "--seeds", "0")
    assert found["tokens_per_s"]["target only"] == pytest.approx(1 / 0.032)  # type: ignore[index]


def test_a_picture_in_a_folder_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        main([*SECOND, "--seeds", "0", "--picture", str(tmp_path / "none" / "plan.svg")])
    assert ended.value.code == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_without_torch_the_closed_forms_are_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after `pip install .`, which is all that a relay needs."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("engine", "scripts")]:
        if name in ("scripts.simulate", "scripts.simulation") or name.startswith("engine"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit):
        main([*SECOND, "--acceptance", "0.8"])
    assert "the simulator needs torch: pip install 'foredraft[node]', or --seeds 0" in capsys.readouterr().err
    assert main([*SECOND, "--acceptance", "0.8", "--seeds", "0"]) == 0
