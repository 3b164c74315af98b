"""Text from elsewhere, made fit for a terminal or a log.

Control characters move the cursor, fill the clipboard and begin lines that nobody has written: in what a model says, in
names that peers give themselves, in a request's fields. Their pictures (U+2400 and on) are shown instead.
"""

from __future__ import annotations

_PICTURES: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20)},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), 0x2028, 0x2029], 0xFFFD),
}
_IN_TEXT = {code: picture for code, picture in _PICTURES.items() if chr(code) not in "\n\t"} | {ord("\r"): None}


def one_line(text: str) -> str:
    """The text without control characters, line ends among them."""
    return text.translate(_PICTURES)


def for_terminal(text: str) -> str:
    """The text without control characters other than line ends and tabs."""
    return text.translate(_IN_TEXT)
