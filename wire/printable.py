"""Text from elsewhere, made fit for a terminal.

Control characters move the cursor, fill the clipboard and set titles, in what a model says and in what a relay reports.
Here they are spelled out, as in our logs.
"""

from __future__ import annotations

from wire.settings import CONTROLS

_IN_TEXT: dict[int, str | None] = {
    **{code: spelled for code, spelled in CONTROLS.items() if chr(code) not in "\n\t"},
    ord("\r"): None,
}


def one_line(text: str) -> str:
    """The text without control characters, line ends among them."""
    return text.translate(CONTROLS)


def for_terminal(text: str) -> str:
    """The text without control characters other than line ends and tabs."""
    return text.translate(_IN_TEXT)
