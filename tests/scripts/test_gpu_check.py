"""The GPU check's own parts, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.capturer import TapeCapturer
from scripts.gpu_check import (
    CHAINED,
    EXIT_NO_GPU,
    TINY,
    Cost,
    Event,
    Line,
    cost_of,
    each,
    goals,
    lines_of,
    main,
    report,
    table,
)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, timeout=60, env=environment, check=False)


@without_gpu
def test_without_a_gpu_the_check_says_so_and_exits_with_77(tmp_path: Path) -> None:
    done = run_script("--results", str(tmp_path / "gpu.json"))
    assert done.returncode == EXIT_NO_GPU == 77
    assert done.stderr == "gpu_check: no CUDA device that this torch can use: nothing was run\n"
    assert not (tmp_path / "gpu.json").exists()


@without_gpu
def test_without_a_gpu_the_table_is_not_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny"]) == EXIT_NO_GPU
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "told"), [(("--result",), "unknown argument --result"), (("--results",), "--results needs a file")]
)
def test_wrong_arguments_are_told(args: tuple[str, ...], told: str) -> None:
    done = run_script(*args)
    assert done.returncode == 2
    assert told in done.stderr
    with pytest.raises(SystemExit):
        main(["--repeats", "0"])


def test_help_shows_usage_and_exit_codes() -> None:
    done = run_script("--help")
    assert done.returncode == 0
    assert "--results FILE" in done.stdout
    assert "77 no CUDA device" in done.stdout


def test_launches_kernels_and_idle_time_are_counted_from_a_profile() -> None:
    events = [
        Event("aten::mm", False, 0, 40),
        Event("cudaLaunchKernel", False, 2, 4),
        Event("cudaLaunchKernelExC", False, 10, 12),
        Event("cudaMemcpyAsync", False, 20, 22),
        Event("cudaStreamSynchronize", False, 22, 100),
        Event("gemm", True, 10, 30),
        Event("softmax", True, 20, 40),  # beside the other: ten of its twenty count
        Event("Memcpy DtoH", True, 60, 80),
    ]
    assert cost_of(1.23456, events, 2) == Cost(ms=1.2346, launches=1.5, kernels=1.5, idle=0.5)
    assert cost_of(1.0, events[:1], 1) == Cost(ms=1.0, launches=0.0, kernels=0.0, idle=None)


def test_the_table_names_what_failed_and_goals_compare_eager_with_captured() -> None:
    lines = [
        Line("draft token", "eager", Cost(12.0, 1500.0, 1400.0, 0.85)),
        Line("draft token", "compiled", None, "failed: no compiler"),
        Line("draft token", "captured", Cost(1.5, 6.0, 1400.0, 0.1)),
        Line("draft token", CHAINED, each(Cost(8.0, 12.0, 12_000.0, 0.05), 8)),
    ]
    text = table(lines).splitlines()
    assert text[0].split() == ["pass", "way", "ms", "launches", "kernels", "GPU", "idle"]
    assert text[1].split() == ["draft", "token", "eager", "12.000", "1500", "1400", "85.0%"]
    assert "failed: no compiler" in text[2]
    assert [(goal.measured, goal.met) for goal in goals(lines)] == [(6.0, True), (1.5, True), (8.0, True)]
    assert goals(lines[:2]) == []


def test_every_way_is_measured_with_tiny_shapes_and_written_down(tmp_path: Path) -> None:
    """On the CPU, with the double of a graph and the eager backend of the compiler."""
    lines = lines_of(
        TINY, {"draft token": 0, "verify, 3 rows": 3}, device=torch.device("cpu"), dtype=torch.float32, context=16,
        repeats=2, captured=TapeCapturer(), compile_backend="eager",
    )  # fmt: skip
    assert [(line.what, line.way) for line in lines] == [
        *((what, way) for way in ("eager", "compiled", "captured") for what in ("draft token", "verify, 3 rows")),
        ("draft token", CHAINED),
    ]
    assert [line.failure for line in lines] == [""] * 7
    assert all(line.cost is not None and line.cost.ms > 0 for line in lines)

    class Arguments:
        repeats, tiny = 2, True

    report(tmp_path / "gpu.json", lines, torch.device("cpu"), Arguments())  # type: ignore[arg-type]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert len(written["figures"]["launch overhead"]) == 7
    assert written["figures"]["launch overhead"][0]["cost"]["ms"] > 0
    assert [goal["name"] for goal in written["goals"]] == [
        "launches of a captured draft token",
        "launches of a token of a captured chain",
        "captured draft token against eager, times as fast",
    ]


@pytest.mark.gpu
def test_the_table_on_a_gpu_with_tiny_shapes(tmp_path: Path) -> None:
    assert main(["--tiny", "--repeats", "5", "--results", str(tmp_path / "gpu.json")]) == 0
    lines = json.loads((tmp_path / "gpu.json").read_text())["figures"]["launch overhead"]
    by_way = {line["way"]: line["cost"] for line in lines if line["what"] == "draft token"}
    assert by_way["captured"]["launches"] < by_way["eager"]["launches"] / 2
