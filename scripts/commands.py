"""Console commands that need more than the base installation: each says which extra it lacks."""

from __future__ import annotations

import importlib
import sys


def _run(program: str, module: str, extra: str) -> int:
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as exc:
        sys.stderr.write(f"foredraft-{program}: {exc.name} is not installed: pip install 'foredraft[{extra}]'\n")
        return 1
    return int(main())


def draft() -> int:
    return _run("draft", "node_draft.__main__", "node")


def verify() -> int:
    return _run("verify", "node_verify.__main__", "node")


def profile() -> int:
    return _run("profile", "scripts.profile_passes", "node")


def infra() -> int:
    return _run("infra", "infra.__main__", "infra")
