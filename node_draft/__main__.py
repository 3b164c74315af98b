"""`python -m node_draft`: load the drafter, link to the relay, draft until told to stop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint, CheckpointIdentity, choose_format
from engine.distilled import load_distilled
from engine.drafter import HFDrafter
from engine.errors import EngineError
from engine.executor import ModelExecutor
from engine.ngram import NgramDrafter
from engine.prepare import ready_model
from engine.replay import ReplayDrafter, emulated, from_trace, load_recordings
from engine.runner import DraftRunner
from node_draft.config import DraftConfig
from node_draft.node import DraftNode
from node_draft.scheduler import DraftScheduler
from wire.aio.process import EXIT_OK, run_main, run_node, stop_on_signals, unless_stopped
from wire.aio.trace import TraceWriter
from wire.messages import ModelIdentity
from wire.settings import setup_logging

log = logging.getLogger("node_draft")
MAX_TREE_ROWS = 256


def load(config: DraftConfig) -> tuple[CheckpointIdentity, DraftRunner]:
    """Load the drafter that was asked for, with the identity it shows in the handshake."""
    torch.set_num_threads(config.threads)
    checkpoint = Checkpoint(config.model, max_length=config.max_length, trust_remote_code=config.trust_remote_code)
    vocab_size = checkpoint.tokenizer.vocab_size
    kind, _, which = config.drafter.partition(":")
    if kind == "ngram":
        return checkpoint.identity(), NgramDrafter(num_slots=config.slots, max_length=checkpoint.max_length)
    if kind in ("recorded", "emulated"):
        drafter = ReplayDrafter(
            load_recordings(Path(which)), from_trace if kind == "recorded" else emulated, pace=config.pace,
            num_slots=config.slots, max_length=checkpoint.max_length,
        )  # fmt: skip
        return checkpoint.identity(), drafter
    # No format of the drafter can change the output, so the cheapest one serves.
    dtype, device = choose_format(config.dtype, on_cpu="int8" if kind == "distilled" else "float32")
    log.info("loading %s, %s, as %s on %s", checkpoint.name, config.drafter, dtype, device)
    if kind == "distilled":
        lm = load_distilled(Path(which), checkpoint, dtype=dtype, device=device)
        target = checkpoint.identity()
        identity = replace(target, name=f"{target.name} (distilled)", drafts_for=f"{target.name}@{target.revision}")
    else:
        num_layers = int(which) if kind == "layers" else None
        lm = checkpoint.load(dtype=dtype, device=device, num_layers=num_layers)
        identity = checkpoint.identity(num_layers=num_layers)
    model = ready_model(
        lm,
        num_slots=config.slots,
        max_length=checkpoint.max_length,
        max_tree_rows=MAX_TREE_ROWS,
        capture=config.capture,
        check=config.self_check,
        chain_vocab=vocab_size,
    )
    return identity, HFDrafter(model, vocab_size=vocab_size)


async def serve(config: DraftConfig) -> int:
    """Load, then draft until SIGTERM; the exit code."""
    stop = stop_on_signals()
    executor = ModelExecutor("drafter")
    identity, drafter = await unless_stopped(stop, executor.run(load, config))
    executor.limit_s = config.model_timeout_s
    trace = TraceWriter(config.trace)
    node = DraftNode(
        scheduler=DraftScheduler(
            growth=config.growth,
            num_slots=drafter.num_slots,
            max_length=drafter.max_length,
            max_rows=drafter.max_rows,
            max_ahead=drafter.max_ahead,
        ),
        runner=drafter,
        executor=executor,
        trace=trace,
    )
    try:
        await run_node(node, stop, config=config, role="draft", model=ModelIdentity(**asdict(identity)))
        await executor.close()
    finally:
        # Of a node that failed, the last events are the ones to read.
        trace.close()
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    config = DraftConfig.read(argv)
    setup_logging(config.log_level)
    return run_main("draft", lambda: serve(config), EngineError, debug=config.log_level == "debug")


if __name__ == "__main__":
    sys.exit(main())
