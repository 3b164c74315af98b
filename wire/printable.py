"""Text from elsewhere, made fit for a terminal and for logs.

Control characters move the cursor, fill the clipboard and set titles, in what a model says and in what a relay reports.
Here they are spelled out.
"""

from __future__ import annotations

_CONTROLS = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_IN_TEXT: dict[int, str | None] = {
    **{code: spelled for code, spelled in _CONTROLS.items() if chr(code) not in "\n\t"},
    ord("\r"): None,
}


def one_line(text: str) -> str:
    """The text without control characters, line ends among them."""
    return text.translate(_CONTROLS)


def for_terminal(text: str) -> str:
    """The text without control characters other than line ends and tabs."""
    return text.translate(_IN_TEXT)
