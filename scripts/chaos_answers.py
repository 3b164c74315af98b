"""Answers asked for while everything goes wrong, and the verdict on each: the same for a virtual and a real world."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field

from relay.client import Delta, Finished, StreamClient
from relay.errors import RequestFailed
from wire.errors import WireError
from wire.sampling import Sampling

LENGTHS = (1, 20, 60, 200)
EXPLAINED = {"no_verify_node", "verify_lost", "draining", "overloaded", "LinkLost"}
"""Errors that say a part was missing. Any other (a gap in the tokens, say) is a fault of the program."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The undisturbed answer: its tokens, its text, and how it ends ("stop" or "length")."""

    tokens: tuple[int, ...]
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    Attributes:
        cancel_after: tokens after which its client cancels it; None to listen to the end.
    """

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling
    num_tokens: int
    cancel_after: int | None = None

    @classmethod
    def draw(cls, name: str, rng: random.Random, *, vocab_size: int, max_prompt: int) -> Question:
        """Any: short and long prompts and answers, greedy and sampled, one in ten cancelled."""
        num_tokens = rng.choice(LENGTHS)
        return cls(
            name=name,
            prompt=tuple(rng.choices(range(vocab_size), k=rng.randint(1, max_prompt))),
            sampling=Sampling(temperature=rng.choice([0.0, 0.0, 0.9]), seed=rng.randrange(1000)),
            num_tokens=num_tokens,
            cancel_after=rng.randrange(num_tokens) if rng.random() < 0.1 else None,
        )


@dataclass
class Tally:
    """What came of all questions.

    Attributes:
        outcomes: how answers ended: "finished", "cancelled", or "error: CODE".
        faults: questions whose answer is not what it must be, and how.
        num_asked, num_ended: the difference has neither come to an end nor failed.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_asked: int = 0
    num_ended: int = 0
    num_tokens: int = 0

    async def ask(self, client: StreamClient, question: Question, expected: Expected) -> None:
        """Ask it and judge what comes: the beginning of the reference, all of it where the answer says it is over."""
        self.num_asked += 1
        got = Got()
        try:
            await got.listen(client, question)
        except RequestFailed as exc:
            got.ended = f"error: {exc.code}"
        except WireError as exc:
            got.ended = f"error: {type(exc).__name__}"
        except asyncio.CancelledError:
            got.ended = "client killed"
            raise
        finally:
            self.num_ended += 1
            self.outcomes[got.ended] += 1
            self.num_tokens += len(got.tokens)
            wrong = got.judge(question, expected)
            if wrong:
                self.faults.append(f"{question}: {got.ended}, {wrong}; tokens {got.tokens}")


@dataclass
class Got:
    """What has come of one answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    ended: str = ""

    async def listen(self, client: StreamClient, question: Question) -> None:
        """Send the question and take what comes."""
        stream = client.stream(
            prompt_ids=question.prompt, sampling=question.sampling, max_tokens=question.num_tokens,
            session=question.name,
        )  # fmt: skip
        async with aclosing(stream) as events:  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Delta():
                        self.tokens += event.tokens
                        self.text += event.text
                        if question.cancel_after is not None and len(self.tokens) > question.cancel_after:
                            client.cancel(question.name)
                    case Finished():
                        self.reason = event.finish_reason
                        self.ended = "cancelled" if self.reason == "cancelled" else "finished"

    def judge(self, question: Question, expected: Expected) -> str:
        """What is wrong with it; empty if nothing is."""
        kind, _, code = self.ended.partition(": ")
        if not self.ended:
            return "no end"
        if kind == "error" and code not in EXPLAINED:
            return "not an error that a missing part explains"
        if tuple(self.tokens) != expected.tokens[: len(self.tokens)]:
            return "other tokens"
        if not expected.text.startswith(self.text):
            return f"text {self.text!r} instead of {expected.text!r}"
        if self.ended == "cancelled" and question.cancel_after is None:
            return "cancelled by nobody"
        if self.ended == "finished" and (self.tokens, self.text) != (list(expected.tokens), expected.text):
            return f"only {len(self.tokens)} of {len(expected.tokens)} tokens, text {self.text!r}"
        if self.ended == "finished" and self.reason != expected.reason:
            return f"ended by {self.reason!r} instead of {expected.reason!r}"
        return ""
