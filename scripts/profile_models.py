"""The models that `foredraft-profile` times: checkpoints as the nodes load them, and stand-ins that sleep."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.checkpoint import Checkpoint, choose_format
from engine.drafter import HFDrafter
from engine.model import CachedModel
from engine.prepare import ready_model
from engine.replay import Pace
from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import hash_logits
from engine.target import HFTarget

VOCAB_SIZE = 32
LOGITS = hash_logits(VOCAB_SIZE)


def paced_target(pace: Pace, *, max_rows: int, max_length: int) -> ScriptedTarget:
    """A target whose passes take what the pace says."""
    return ScriptedTarget(
        LOGITS, max_rows=max_rows, max_length=max_length, vocab_size=VOCAB_SIZE, delay_s=pace.seconds
    )  # fmt: skip


def paced_drafter(pace: Pace, *, max_rows: int, max_length: int) -> ScriptedDrafter:
    """A drafter whose steps take what the pace says."""
    return ScriptedDrafter(
        LOGITS, max_rows=max(max_rows, max_length), max_length=max_length, vocab_size=VOCAB_SIZE, delay_s=pace.seconds
    )  # fmt: skip


def load_target(name: str, *, max_rows: int, max_length: int, dtype: str, threads: int) -> HFTarget:
    """A checkpoint as a verify node has it."""
    if threads:
        torch.set_num_threads(threads)
    checkpoint, model = _load(name, max_rows=max_rows, max_length=max_length, dtype=dtype, is_drafter=False)
    return HFTarget(model, vocab_size=checkpoint.tokenizer.vocab_size)


def load_drafter(name: str, *, max_rows: int, max_length: int, dtype: str) -> HFDrafter:
    """A checkpoint as a draft node has it."""
    checkpoint, model = _load(name, max_rows=max_rows, max_length=max_length, dtype=dtype, is_drafter=True)
    return HFDrafter(model, vocab_size=checkpoint.tokenizer.vocab_size)


def _load(name: str, *, max_rows: int, max_length: int, dtype: str, is_drafter: bool) -> tuple[Checkpoint, CachedModel]:
    checkpoint = Checkpoint(name, max_length=max_length)
    kind, device = choose_format(dtype, on_cpu="float32")
    lm = checkpoint.load(dtype=kind, device=device)
    vocab = checkpoint.tokenizer.vocab_size if is_drafter else 0
    return checkpoint, ready_model(
        lm, num_slots=1, max_length=max_length, max_tree_rows=max_rows, capture=True, check=False, chain_vocab=vocab
    )


def synchronizer() -> Callable[[], None]:
    """Returns when the device's queue is empty; a processor has none."""
    return torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
