"""Starting the parts of Foredraft as operating-system processes, waiting until they are ready, and ending them."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PR_SET_PDEATHSIG = 1


class StartFailed(Exception):
    """A process did not become ready; the message has the end of its log."""


@dataclass
class Part:
    """One running process."""

    name: str
    process: asyncio.subprocess.Process
    ready: dict[str, Any]
    log: Path

    @property
    def port(self) -> int:
        """The port it listens on, for those that do."""
        return int(self.ready["port"])

    def resident_mb(self) -> float:
        """Resident memory of the process, in MB (10^6 bytes)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024 / 1e6


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Parts:
    """Processes of one run, ended together, in the reverse order of their start.

    Args:
        folder: their logs and traces go there.
        secret: handed to each in the environment, never on a command line.
    """

    folder: Path
    secret: str
    running: list[Part] = field(default_factory=list)

    async def start(
        self, name: str, command: Sequence[str], *, core: int | None = None, timeout_s: float = 120.0
    ) -> Part:
        """Start `python COMMAND...` and wait for the JSON line on its standard output that says it is ready.

        Args:
            core: pin it to this core, if the machine has it.

        Raises:
            StartFailed: it ended, or was not ready in time.
        """
        log = self.folder / f"{name}.log"
        environment = os.environ | {
            "FOREDRAFT_SECRET": self.secret,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=environment,
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C reaches us alone, and we end them in order
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        part = Part(name, process, {}, log)
        self.running.append(part)
        if core is not None and core in os.sched_getaffinity(0):
            os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await process.stdout.readline()
                part.ready = json.loads(line) if line else {}
        except (TimeoutError, json.JSONDecodeError):
            part.ready = {}
        if not part.ready.get("ready"):
            await asyncio.sleep(0.1)
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise StartFailed(f"{name} did not start: {tail or f'not ready within {timeout_s:g} s'}")
        return part

    async def stop(self, timeout_s: float = 10.0) -> dict[str, int]:
        """End all processes with SIGTERM, and with SIGKILL those that do not listen; exit codes by name."""
        codes = {}
        for part in reversed(self.running):
            if part.process.returncode is None:
                part.process.terminate()
        for part in reversed(self.running):
            try:
                async with asyncio.timeout(timeout_s):
                    codes[part.name] = await part.process.wait()
            except TimeoutError:
                part.process.kill()
                codes[part.name] = await part.process.wait()
        self.running.clear()
        return codes
