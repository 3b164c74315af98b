"""A loaded model made ready to serve: captured where that is possible, warmed up, held to the memory contract."""

from __future__ import annotations

import logging

from engine.capturer import Capturer, CudaCapturer, Uncaptured
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.selfcheck import self_check

log = logging.getLogger(__name__)


def ready_model(
    lm: CausalLM,
    *,
    num_slots: int,
    max_length: int,
    max_tree_rows: int,
    capture: bool,
    check: bool,
    chain_vocab: int = 0,
) -> CachedModel:
    """The model with its cache, such that the first request finds all that the hundredth does (cases.md, C079).

    Args:
        capture: capture passes as graphs, if the model is on one GPU.
        check: run the self-check.
        chain_vocab: see `CachedModel`; for drafters.

    Raises:
        CheckpointError: the self-check found the memory contract broken.
        CacheError: there is no memory for cache and graphs.
    """
    model = CachedModel(
        lm,
        num_slots=num_slots,
        max_length=max_length,
        max_tree_rows=max_tree_rows,
        capturer=choose_capturer(lm, capture=capture),
        chain_vocab=chain_vocab,
    )
    model.warm_up()
    if check:
        self_check(model)
    log.info(
        "ready: %d passes captured, %.0f MB of cache, grows up to %d positions",
        model.num_captures, model.cache.num_bytes / 1e6, max_length,
    )  # fmt: skip
    return model


def choose_capturer(lm: CausalLM, *, capture: bool) -> Capturer | None:
    """Graphs on one GPU; on a CPU passes run as they come, over plain views of the cache."""
    devices = {layer.device for layer in lm.layers}
    if {device.type for device in devices} == {"cpu"}:
        return None
    if not capture:
        return Uncaptured()
    if len(devices) > 1:
        log.warning("layers lie on %d devices, a graph holds those of one: passes are not captured", len(devices))
        return Uncaptured()
    return CudaCapturer(lm.device)
