"""Logits as functions of the prefix: deterministic stand-ins for a target and for drafters of any quality."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.noise import mix64
from engine.sampler import Sampler
from speculation.passes import Sampling

Prefix = tuple[int, ...]
LogitsFn = Callable[[Prefix], Tensor | Sequence[float]]
"""Logits [width] of the token after a prefix. A returned tensor is not written to."""
NextTokensFn = Callable[[Prefix], Sequence[int]]
"""Candidates after a prefix, best first."""

CONTEXT_TOKENS = 3
NEXT_SHARES = (0.4, 0.2, 0.1)
"""Of the misses of a drafter's best token: in a 0.5B drafter of a 7B 0.735 were right, 0.924 of the first four."""
CACHED_ROWS = 4096


def hash_logits(vocab_size: int, seed: int = 0, sharpness: float = 8.0) -> LogitsFn:
    """Logits spread evenly over 0..sharpness, by a hash of the prefix's length and last tokens."""

    @functools.lru_cache(CACHED_ROWS)
    def row(key: int) -> Tensor:
        rng = random.Random(key)
        return torch.tensor([sharpness * rng.random() for _ in range(vocab_size)])

    return lambda prefix: row(_prefix_key(prefix, seed))


def text_logits(ids: Sequence[int], eos: int, *, num_prompt: int = 0, sharpness: float = 30.0) -> LogitsFn:
    """Logits that say `ids` after a prompt of `num_prompt` tokens, then `eos`, whatever has been said before."""
    width = max(*ids, eos) + 1

    def logits(prefix: Prefix) -> Tensor:
        index = len(prefix) - num_prompt
        row = torch.zeros(width)
        row[ids[index] if 0 <= index < len(ids) else eos] = sharpness
        return row

    return logits


def agreeing(logits_fn: LogitsFn, probability: float, seed: int = 0) -> LogitsFn:
    """A drafter that has the target's logits after a share `probability` of prefixes, and else another token's.

    Where it disagrees the row is rotated by one id, so its best token is wrong. Which prefixes those are is a function
    of the prefix alone. (When sampling at a high temperature it may be right by luck.)
    """

    def logits(prefix: Prefix) -> Tensor:
        row = as_row(logits_fn(prefix))
        agrees = mix64(_prefix_key(prefix, seed)) < probability * 2.0**64
        return row if agrees else row.roll(1)

    return logits


def ranking(logits_fn: LogitsFn, probability: float, seed: int = 0) -> LogitsFn:
    """A drafter whose best token is the target's after a share `probability` of prefixes, and that knows its chances.

    Where it is not, the target's token is its second, third or fourth (`NEXT_SHARES`, no more often than the one
    before), or none of these. The logits are log-probabilities.
    """
    each = [probability]
    for share in NEXT_SHARES:
        each.append(min(each[-1], share * (1.0 - probability)))
    chances = torch.tensor(each, dtype=torch.float64)
    bounds, missed = chances.cumsum(0), 1.0 - sum(each)

    def logits(prefix: Prefix) -> Tensor:
        row = as_row(logits_fn(prefix))
        best, *others = row.topk(len(chances) + 1).indices.tolist()
        place = int((bounds <= mix64(_prefix_key(prefix, seed)) / 2.0**64).sum())
        others.insert(place, best)
        spread = torch.full(row.shape, max(missed, 1e-9) / len(row), dtype=torch.float64)
        spread[others[: len(chances)]] = chances.clamp(min=1e-9)
        return spread.log()

    return logits


def hopeless(logits_fn: LogitsFn) -> LogitsFn:
    """A drafter that always proposes the target's least likely token."""

    def logits(prefix: Prefix) -> Tensor:
        row = as_row(logits_fn(prefix))
        wrong = torch.full_like(row, float("-inf"))
        wrong[row.argmin()] = 0.0
        return wrong

    return logits


def reference(
    logits_fn: LogitsFn,
    sampling: Sampling,
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    *,
    vocab_size: int | None = None,
) -> tuple[int, ...]:
    """The answer of the target decoded alone, one token at a time; a stop id is its last token.

    Raises:
        NumericalError: as `Sampler.choose`.
    """
    sampler = Sampler(sampling, num_prompt=len(prompt), stop_ids=stop_ids, vocab_size=vocab_size)
    sampler.commit(prompt)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        token = sampler.choose(as_row(logits_fn(tuple(tokens))), len(tokens))
        sampler.commit((token,))
        tokens.append(token)
        if token in stop_ids:
            break
    return tuple(tokens[len(prompt) :])


def as_row(logits: Tensor | Sequence[float]) -> Tensor:
    """Logits as a tensor, float64 if they came as numbers."""
    return logits if isinstance(logits, Tensor) else torch.tensor(logits, dtype=torch.float64)


def _prefix_key(prefix: Prefix, seed: int) -> int:
    key = mix64(seed)
    for token in (len(prefix), *prefix[-CONTEXT_TOKENS:]):
        key = mix64(key + token + 1)
    return key
