"""The memory contract, checked on the loaded model before it serves.

A library upgrade that concatenates where we write in place, builds a mask anew or keeps a length of its own does not
crash: the text repeats itself, or drifts. So each start runs a few small passes and compares. It takes under a second;
`--no-self-check` leaves it out.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import Tensor

from engine.errors import CacheError, CheckpointError
from engine.model import CachedModel, NewRows

PROMPT = (1, 5, 9, 4, 7)
TREE = ((2, 3, 8, 6, 9), (4, 5, 5, 7, 4))
"""Tokens and parent rows behind PROMPT: two children of the root's child, one below the second of them, and another
child of the root. Neither has a power of two of rows, so that captured passes of them are padded."""
PATH_ROWS = (5, 7, 8)
PATH_TOKENS = (2, 8, 6)
NEXT = 3
POISONED_ROWS = 64
"""More than the check uses. Not all: on a CPU, rows that were never touched take no memory."""


def self_check(model: CachedModel) -> None:
    """Hold the model to the contract, on its empty slots 0 and 1, which are empty again afterwards.

    Raises:
        CheckpointError: naming what is broken and the version of transformers it was found with.
    """
    try:
        broken = _broken(model)
    except CacheError as exc:
        broken = f"the cache's own books do not add up: {exc}"
    finally:
        for slot in range(min(2, model.num_slots)):
            model.clear(slot)
            model.cache.fill(slot, 0, POISONED_ROWS, 0.0)
    if broken:
        raise CheckpointError(
            f"self-check: {broken}. This model cannot be served with transformers {version('transformers')} "
            "(--no-self-check serves it nevertheless, at your risk)"
        )


def _broken(model: CachedModel) -> str:
    """What is broken, or nothing."""
    alone = _plain(model, (*PROMPT, *PATH_TOKENS))
    addresses = model.addresses()
    theirs = model.without_cache((*PROMPT, *PATH_TOKENS))
    if theirs is not None and not _alike(model, alone, theirs):
        return "over our cache the model scores a text differently than without it"
    model.forward(0, PROMPT, num_committed=len(PROMPT), num_logits=1)
    tree = model.forward(0, TREE[0], parents=TREE[1], num_logits=2)
    if not _alike(model, tree[:1], alone):
        return "a path within a tree of candidates is not scored as the path alone is"

    # After a single further pass: what is allocated anew each time may come back to its old place every other time.
    if model.addresses() != addresses:
        return "the cache or an input buffer has moved to another address"

    held = tree.clone()
    model.keep(0, PATH_ROWS)
    after = model.forward(0, (NEXT,), num_committed=1)
    if model.addresses() != addresses:
        return "the cache or an input buffer has moved to another address"
    if not torch.equal(tree, held):
        return "the logits of one pass are overwritten by the next"

    plain = _plain(model, (*PROMPT, *PATH_TOKENS, NEXT))
    if not _alike(model, after, plain):
        return "after the accepted rows were moved together, the next token is scored differently"

    # What was kept, once more, with wrong rows in between that are then rewound.
    model.forward(0, (*PROMPT, *PATH_TOKENS), num_committed=len(PROMPT) + len(PATH_TOKENS), num_logits=1)
    model.forward(0, (11, 12), parents=(7, 8))
    model.rewind(0, 2)
    model.cache.fill(0, model.rows[0].used, POISONED_ROWS, float("nan"))
    again = model.forward(0, (NEXT,), num_committed=1)
    if not torch.isfinite(again[torch.isfinite(plain)]).all():
        return "rows of the cache that are not in use are read"
    if not _alike(model, again, plain):
        return "after a rewind the next token is scored differently"
    model.clear(0)
    return _broken_together(model, alone) if model.num_slots > 1 else ""


def _broken_together(model: CachedModel, alone: Tensor) -> str:
    """What is broken where two slots share a pass, or nothing. `alone` is behind PROMPT and PATH_TOKENS."""
    other = _plain(model, (*PROMPT[::-1], *TREE[0][:2]))
    model.forward(0, PROMPT, num_committed=len(PROMPT), num_logits=1)
    model.forward(1, PROMPT[::-1], num_committed=len(PROMPT), num_logits=1)
    addresses = model.addresses()
    batch = [
        NewRows(slot=0, tokens=TREE[0], parents=TREE[1], num_logits=2),
        NewRows(slot=1, tokens=TREE[0][:2], num_committed=2, num_logits=1),
    ]
    tree, chain = model.forward_batch(batch)
    if isinstance(tree, CacheError) or isinstance(chain, CacheError):
        return f"two slots cannot share a pass: {tree if isinstance(tree, CacheError) else chain}"
    if not (_alike(model, tree[:1], alone) and _alike(model, chain, other)):
        return "sessions that share a pass are scored differently than each by itself"
    # What shared passes need may have come with the first of them, but nothing has moved.
    if not set(addresses) <= set(model.addresses()):
        return "the cache or an input buffer has moved to another address"
    return ""


def _plain(model: CachedModel, tokens: tuple[int, ...]) -> Tensor:
    """Logits [1, width] behind `tokens`, in an empty slot."""
    model.clear(0)
    logits = model.forward(0, tokens, num_committed=len(tokens), num_logits=1)
    model.clear(0)
    return logits


def _alike(model: CachedModel, one: Tensor, other: Tensor) -> bool:
    """Whether two rows of logits differ by rounding only. A reduced head has -inf where it knows no id."""
    known = torch.isfinite(other)
    if not torch.equal(torch.isfinite(one), known):
        return False
    scale = other[known].abs().max().item()
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05
    return (one[known] - other[known]).abs().max().item() <= tolerance * scale
