"""Varied user prompts for a drafter's training data: forms x subjects x passages that the target wrote.

Prompts that a small model writes from nothing are unlike what users ask. These are chat, code, how-to, lists, letters
and, over the target's own sentences, summaries, translations and rewrites. None shares `OVERLAP_WORDS` words in a row
with a held-out prompt (`scripts/heldout.py`), nor any of its subjects.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scripts.heldout import heldout_prompts

OVERLAP_WORDS = 8

_WORDS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""Subjects by kind; forms with the kind of their subject; code tasks as (form, first parts, second parts)."""


def words_of(text: str) -> list[str]:
    """The words of a text, lower case."""
    return re.findall(r"[\w'-]+", text.lower())


def overlaps(text: str, seen: set[tuple[str, ...]]) -> bool:
    """Whether some `OVERLAP_WORDS` words in a row of the text are in `seen` (a shorter text: all its words)."""
    return not seen.isdisjoint(_runs(text))


def heldout_runs() -> set[tuple[str, ...]]:
    """All runs of words of the held-out prompts that no training prompt may have."""
    return {run for _, prompt in heldout_prompts() for run in _runs(prompt)}


def _runs(text: str) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(max(1, len(words) - OVERLAP_WORDS + 1))}


class Prompts:
    """A stream of prompts, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._forbidden = heldout_runs()

    def direct(self, count: int) -> list[str]:
        """Chat and code prompts, two to one."""
        return [self._allowed(self._code if self._random.random() < 1 / 3 else self._chat) for _ in range(count)]

    def over(self, texts: Iterable[str], count: int) -> list[str]:
        """Prompts about passages and sentences of these texts, half of each; fewer when the texts do not suffice."""
        passages, sentences = [], []
        for text in texts:
            parts = [s for s in re.findall(r"[A-Z][^.!?\n*`{}]*[.!?](?=\s|$)", text) if 4 <= len(s.split()) <= 30]
            if len(parts) >= 2:
                size = self._random.choice((2, 2, 3))
                start = self._random.randrange(max(1, len(parts) - size + 1))
                passages.append(" ".join(parts[start : start + size]))
            sentences += [s for s in parts if len(s.split()) <= 14]
        made = []
        for kind, forms in ((passages, _WORDS["summary forms"]), (sentences, _WORDS["sentence forms"])):
            for passage in self._random.sample(kind, min(count // 2, len(kind))):
                form = self._random.choice(forms)
                text = form.format(passage, lang=self._random.choice(_WORDS["languages"]))
                if not overlaps(text, self._forbidden):
                    made.append(text)
        return made

    def _allowed(self, make: Callable[[], str]) -> str:
        while overlaps(text := make(), self._forbidden):
            pass
        return text

    def _chat(self) -> str:
        form, kind = self._random.choice(_WORDS["chat forms"])
        return str(form.format(self._random.choice(_WORDS[kind])) + self._random.choice(_WORDS["tails"]))

    def _code(self) -> str:
        form, firsts, seconds = self._random.choice(_WORDS["code tasks"])
        task = form.format(self._random.choice(firsts), self._random.choice(seconds))
        form = self._random.choice(_WORDS["code forms"])
        return str(form.format(task, lang=self._random.choice(_WORDS["code languages"])))
