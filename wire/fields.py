"""Checks for the fields of a message, and the generic way from JSON to a frozen dataclass.

Every check raises `ProtocolError` naming the field, the value and the limit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from wire.errors import ProtocolError

T = TypeVar("T")
# The plain repr of what a peer sent may be a megabyte long, or nested too deep for the interpreter's stack.
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 3
_NUMBERS = {int, float}


def shown(value: object) -> str:
    """A short form of `value` for an error message, whatever its size and depth."""
    text = _short.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_int(name: str, value: object, low: int, high: int) -> None:
    """`value` must be an integer (no bool) in low..high."""
    if type(value) is not int:
        raise ProtocolError(f"{name} must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise ProtocolError(f"{name} must be in {low}..{high}, got {shown(value)}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """`value` must be a finite number in low..high."""
    if type(value) is not int and not (type(value) is float and math.isfinite(value)):
        raise ProtocolError(f"{name} must be a finite number, got {shown(value)}")
    if not low <= value <= high:
        raise ProtocolError(f"{name} must be in {low:g}..{high:g}, got {shown(value)}")


def check_text(name: str, value: object, max_chars: int, *, empty: bool = True) -> None:
    """`value` must be a string of at most `max_chars` characters."""
    if not isinstance(value, str):
        raise ProtocolError(f"{name} must be a string, got {shown(value)}")
    if len(value) > max_chars:
        raise ProtocolError(f"{name} has {len(value)} characters, the limit is {max_chars}")
    if not empty and not value:
        raise ProtocolError(f"{name} must not be empty")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """`value` must be one of `choices`."""
    if value not in choices:
        raise ProtocolError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")


def check_ints(name: str, values: object, low: int, high: int, max_items: int) -> None:
    """`values` must be a tuple of at most `max_items` integers in low..high."""
    if not isinstance(values, tuple):
        raise ProtocolError(f"{name} must be a list, got {shown(values)}")
    if len(values) > max_items:
        raise ProtocolError(f"{name} has {len(values)} entries, the limit is {max_items}")
    for value in values:
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"{name} must hold integers in {low}..{high}, got {shown(value)}")


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(cls: type[T], data: object, where: str) -> T:
    """Build the dataclass `cls` from decoded JSON; unknown, missing and ill-typed fields raise `ProtocolError`."""
    if not isinstance(data, Mapping):
        raise ProtocolError(f"{where} must be an object, got {shown(data)}")
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable
    values = {}
    for key, value in data.items():
        if key not in hints:
            raise ProtocolError(f"{where} has no field {shown(key)}")
        values[key] = _convert(hints[key], value, f"{where}.{key}")
    try:
        return cls(**values)
    except TypeError:
        missing = [
            f.name
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
            if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        raise ProtocolError(f"{where} lacks {', '.join(missing)}") from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Shape JSON for a field: lists become tuples, objects become dataclasses. Ranges are the dataclass's to check."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        (hint,) = (option for option in options if option is not type(None))
        return _convert(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{where} must be a list, got {shown(value)}")
        item = typing.get_args(hint)[0]
        if item in (int, str, float):
            # Mostly token ids, by the dozen: one look at the set of their types is the cheapest check.
            if not set(map(type, value)) <= (_NUMBERS if item is float else {item}):
                raise ProtocolError(f"{where} must hold items of type {item.__name__}, got {shown(value)}")
            return tuple(value)
        return tuple(_convert(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} must be an object, got {shown(value)}")
        if not set(map(type, value.values())) <= _NUMBERS:
            raise ProtocolError(f"{where} must hold numbers, got {shown(value)}")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, where)
    if hint is float and type(value) is int:
        return float(value)
    if hint in (bool, str, int, float) and type(value) is not hint:
        raise ProtocolError(f"{where} must be of type {hint.__name__}, got {shown(value)}")
    return value
