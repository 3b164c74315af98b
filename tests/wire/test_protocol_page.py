"""docs/protocol.md says what wire/messages.py says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from wire import messages
from wire.codec import decode
from wire.messages import MESSAGES, AppliedRound, ChatMessage, ModelIdentity, OpenSession, RoundTiming, TokenLogprob
from wire.sampling import Sampling

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("` "): cells
    for line in PAGE.splitlines()
    if line.startswith("| `") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) >= 2
}


def fields(kind: Any) -> str:
    return ", ".join(f"`{each.name}`" for each in dataclasses.fields(kind))


@pytest.mark.parametrize("name", MESSAGES)
def test_each_message_stands_there_with_its_fields(name: str) -> None:
    assert name in ROWS, f"add to docs/protocol.md: | `{name}` | FROM → TO | {fields(MESSAGES[name])} |"
    assert ROWS[name][2] == fields(MESSAGES[name])
    assert ROWS[name][1]


OBJECTS = (ModelIdentity, ChatMessage, Sampling, TokenLogprob, RoundTiming, AppliedRound)


@pytest.mark.parametrize("kind", OBJECTS)
def test_each_object_stands_there_with_its_fields(kind: Any) -> None:
    assert ROWS[kind.__name__][1] == fields(kind)


def test_nothing_stands_there_that_does_not_exist() -> None:
    objects = {kind.__name__ for kind in OBJECTS}
    limits = {name for name in ROWS if name.isupper()}
    assert set(ROWS) == set(MESSAGES) | objects | limits
    for name in limits:
        assert int(ROWS[name][1]) == getattr(messages, name)
    assert f"Protocol version {messages.PROTOCOL_VERSION}." in PAGE
    assert f"at most {messages.MAX_FRAME_BYTES:,} bytes" in PAGE


def test_the_example_is_a_frame() -> None:
    (example,) = re.findall(r"```json\n(.*?)\n```", PAGE)
    assert isinstance(decode(example), OpenSession)
