"""Reads a TOML table so that every complaint names the field, the value and the limit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from infra.errors import SpecError


class Table:
    """One table of the spec; `close` complains about what nobody asked for."""

    def __init__(self, values: object, path: str) -> None:
        if not isinstance(values, Mapping):
            raise SpecError(f"{path}: must be a table, got {values!r}")
        self._values: Mapping[str, Any] = values
        self._known: list[str] = []
        self.path = path

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, wanted: str) -> SpecError:
        """The error for a field; raise it."""
        got = repr(self._values[key]) if key in self._values else "nothing"
        return SpecError(f"{self.name(key)}: must be {wanted}, got {got}")

    def _get(self, key: str, default: Any, wanted: str) -> Any:
        self._known.append(key)
        value = self._values.get(key, default)
        if value is None:
            raise self.fail(key, wanted)
        return value

    def text(self, key: str, default: str | None = None, *, pattern: str = r".+", wanted: str = "text") -> str:
        value = self._get(key, default, wanted)
        if not isinstance(value, str) or (key in self._values and not re.fullmatch(pattern, value)):
            raise self.fail(key, wanted)
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        wanted = f"one of {', '.join(choices)}"
        value = self._get(key, default, wanted)
        if value not in choices:
            raise self.fail(key, wanted)
        return str(value)

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        wanted = f"an integer in {low}..{high}"
        value = self._get(key, default, wanted)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, wanted)
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        wanted = f"a number in {low:g}..{high:g}"
        value = self._get(key, default, wanted)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.fail(key, wanted)
        return float(value)

    def texts(
        self, key: str, default: Sequence[str] | None = None, *, least: int = 0, pattern: str = r".+", wanted: str
    ) -> tuple[str, ...]:
        """A list of texts without repetitions."""
        told = f"a list of {wanted}" + (f", {least} or more" if least else "")
        values = self._get(key, None if default is None else list(default), told)
        good = isinstance(values, list) and all(isinstance(v, str) and re.fullmatch(pattern, v) for v in values)
        if not good or len(values) < least or len(set(values)) != len(values):
            raise self.fail(key, told)
        return tuple(values)

    def raw(self, key: str, default: object = None) -> Any:
        """An unchecked value, for the caller to read further."""
        self._known.append(key)
        return self._values.get(key, default)

    def close(self) -> None:
        """Raises:
        SpecError: a key is there that nobody asked for; a typing error, most likely.
        """
        for key in self._values:
            if key not in self._known:
                raise SpecError(f"{self.name(key)}: unknown; known here: {', '.join(sorted(set(self._known)))}")
