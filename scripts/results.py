"""The file that every benchmark leaves behind: what was run, where, and which goals were met."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal of an issue, met or not."""

    name: str
    goal: object
    measured: object
    met: bool


def write_results(
    path: Path,
    *,
    command: str,
    packages: Sequence[str],
    models: dict[str, str],
    parameters: dict[str, Any],
    figures: dict[str, Any],
    goals: Sequence[Goal],
) -> None:
    """Write `docs/results/NAME.json`. `packages` are those whose versions matter."""
    result = {
        "command": command,
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in packages},
        "models": models,
        "parameters": parameters,
        "figures": figures,
        "goals": [asdict(goal) for goal in goals],
    }
    # A run of an hour is not lost for want of a folder.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
