"""A request that has been found good, and why others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speculation.passes import Sampling
from wire.messages import OpenSession


class RequestRefused(Exception):
    """The request cannot be served; `code` is for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one session asks for.

    Attributes:
        limit: most tokens of prompt + answer; the answer ends with reason `length` when it is reached.
        stop_ids: end the answer: the model's, unless the client wants to go on after them, and those it asked for.
        stop: strings that end the answer.
        committed: tokens of the answer that another verify node has committed already.
    """

    prompt_ids: tuple[int, ...]
    limit: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    num_logprobs: int | None = None
    speculate: bool = True
    committed: tuple[int, ...] = ()

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Prompt and what is committed of the answer: all that the target has to read before it goes on."""
        return self.prompt_ids + self.committed


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """All ids must be in the vocabulary.

    Raises:
        RequestRefused: `bad_request`.
    """
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestRefused("bad_request", f"{name}[{i}] must be in 0..{vocab_size - 1}, got {token}")


def make_request(
    message: OpenSession,
    *,
    prompt_ids: Sequence[int],
    context_length: int,
    vocab_size: int,
    stop_ids: Sequence[int],
    asked_stop_ids: Sequence[int] = (),
) -> Request:
    """Check a request against the model that would serve it.

    `max_tokens` of 0 means up to the context limit, and a larger one than fits is clamped to it: prompt + answer never
    exceed `context_length`.

    Args:
        prompt_ids: of the message's prompt, whichever form it has.
        context_length: most tokens of prompt + answer: the model's, or a cache slot's where that is less.
        vocab_size: number of real token ids.
        stop_ids: the model's end tokens.
        asked_stop_ids: further ones that the request names.

    Raises:
        RequestRefused: `empty_prompt` (there is no row to take the first token from), `prompt_too_long` (no room for
            a single token), `bad_request` (an id outside the vocabulary).
    """
    if not prompt_ids:
        raise RequestRefused("empty_prompt", "prompt has 0 tokens, at least 1 is needed")
    if len(prompt_ids) >= context_length:
        raise RequestRefused(
            "prompt_too_long",
            f"prompt has {len(prompt_ids)} tokens, the limit is {context_length - 1}: the context holds "
            f"{context_length} tokens of prompt and answer",
        )
    check_ids("prompt_ids", prompt_ids, vocab_size)
    check_ids("committed", message.committed, vocab_size)
    for key in message.sampling.logit_bias:
        if int(key) >= vocab_size:
            raise RequestRefused("bad_request", f"logit_bias must be keyed by ids in 0..{vocab_size - 1}, got {key}")
    room = context_length - len(prompt_ids)
    budget = min(message.max_tokens or room, room)
    if len(message.committed) > budget:
        text = f"committed has {len(message.committed)} tokens, the answer may have {budget}"
        raise RequestRefused("bad_request", text)
    return Request(
        prompt_ids=tuple(prompt_ids),
        limit=len(prompt_ids) + budget,
        sampling=message.sampling,
        stop_ids=(*(() if message.ignore_eos else stop_ids), *asked_stop_ids),
        stop=message.stop,
        num_logprobs=message.logprobs,
        speculate=message.speculate,
        committed=message.committed,
    )
