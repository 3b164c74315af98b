"""C045: no wall clock takes part in anything that is measured, timed out or sent."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("wire", "relay", "speculation", "engine", "node_draft", "node_verify")
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime"}
MAY_ASK = {"wire/aio/spot.py", "relay/api.py"}
"""The spot notice is a wall clock's time, and what follows from it is bounded (tests/wire/test_spot.py); the HTTP API
says when an answer was created, which nothing goes by."""


def test_c045_a_clock_that_is_wrong_or_steps_changes_nothing() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.relative_to(ROOT).as_posix() not in MAY_ASK
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS
    ]
    assert not found, found
