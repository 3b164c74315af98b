"""`python -m node_verify`: load the target, link to the relay, serve until told to stop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from engine.checkpoint import Checkpoint, choose_format
from engine.errors import EngineError
from engine.executor import ModelExecutor
from engine.prepare import ready_model
from engine.replay import ReplayTarget, load_recordings
from engine.runner import TargetRunner
from engine.target import HFTarget
from engine.timing import measure_pass_costs
from node_verify.config import VerifyConfig
from node_verify.node import VerifyNode
from node_verify.scheduler import VerifyScheduler
from speculation.costs import PassCosts
from speculation.selection import BestFirst
from wire.aio.process import EXIT_OK, run_main, run_node, stop_on_signals, unless_stopped
from wire.aio.trace import TraceWriter
from wire.messages import ModelIdentity
from wire.settings import setup_logging

log = logging.getLogger("node_verify")


def load(config: VerifyConfig) -> tuple[Checkpoint, TargetRunner, PassCosts]:
    """Load the model, make it ready, and time its passes."""
    torch.set_num_threads(config.threads)
    checkpoint = Checkpoint(config.model, max_length=config.max_length, trust_remote_code=config.trust_remote_code)
    target = replay(config, checkpoint) if config.replay else load_target(config, checkpoint)
    costs = PassCosts(measure_pass_costs(target))
    log.info("a pass takes %.1f ms for one row, %.1f for %d", costs.seconds(1) * 1e3,
             costs.seconds(target.max_rows) * 1e3, target.max_rows)  # fmt: skip
    return checkpoint, target, costs


def replay(config: VerifyConfig, checkpoint: Checkpoint) -> TargetRunner:
    """The runner that plays recorded answers back."""
    assert config.replay is not None
    return ReplayTarget(
        load_recordings(config.replay), pace=config.pace, num_slots=config.slots, max_length=checkpoint.max_length,
        max_rows=config.max_rows,
    )  # fmt: skip


def load_target(config: VerifyConfig, checkpoint: Checkpoint) -> TargetRunner:
    """The model itself: warmed up, captured, checked."""
    dtype, device = choose_format(config.dtype, on_cpu="float32")
    log.info("loading %s as %s on %s", checkpoint.name, dtype, device)
    lm = checkpoint.load(dtype=dtype, device=device, device_map=config.device_map)
    model = ready_model(
        lm,
        num_slots=config.slots,
        max_length=checkpoint.max_length,
        max_tree_rows=config.max_rows,
        capture=config.capture,
        check=config.self_check,
    )
    return HFTarget(model, vocab_size=checkpoint.tokenizer.vocab_size)


async def serve(config: VerifyConfig) -> int:
    """Load, then serve until SIGTERM; the exit code."""
    stop = stop_on_signals()
    executor = ModelExecutor("target")
    checkpoint, target, costs = await unless_stopped(stop, executor.run(load, config))
    executor.limit_s = config.model_timeout_s
    identity = await executor.run(checkpoint.identity)
    trace = TraceWriter(config.trace)
    node = VerifyNode(
        scheduler=VerifyScheduler(
            selection=BestFirst(config.max_rows),
            patience_s=config.patience_s,
            num_slots=target.num_slots,
            max_rows=target.max_rows,
            max_waiting=config.max_waiting,
            vocab_size=identity.vocab_size,
            local=config.local,
            costs=costs if config.priced else None,
            calibrate=config.calibrate,
            gated=config.gated,
        ),
        runner=target,
        executor=executor,
        tokenizer=checkpoint.tokenizer,
        context_length=identity.context_length,
        vocab_size=identity.vocab_size,
        stop_ids=identity.stop_ids,
        trace=trace,
    )
    try:
        await run_node(node, stop, config=config, role="verify", model=ModelIdentity(**asdict(identity)))
        await executor.close()
    finally:
        # Of a node that failed, the last events are the ones to read.
        trace.close()
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    config = VerifyConfig.read(argv)
    setup_logging(config.log_level)
    return run_main("verify", lambda: serve(config), EngineError, debug=config.log_level == "debug")


if __name__ == "__main__":
    sys.exit(main())
