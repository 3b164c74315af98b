"""What kernel launches cost: passes run one kernel at a time, compiled, and captured as a graph.

A 0.5B-shaped drafter and a 7B-shaped target with random weights, bfloat16; nothing is downloaded. A draft token is one
pass of one row, the choice of its best token on the device, and the number read back. For each way:

    ms          median time of a token (draft) or a pass (verify), results read
    launches    calls that send work to the GPU: kernels one by one, copies, whole graphs
    kernels     what the GPU runs for them
    idle        share of the time in which the GPU runs nothing

    scripts/gpu_check.sh [--results FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import AutoConfig, AutoModelForCausalLM

from engine.capturer import Capturer, CudaCapturer, Uncaptured
from engine.hf import CausalLM
from engine.model import CachedModel
from scripts.results import Goal, write_results

EXIT_NO_GPU = 77
WAYS = ("eager", "compiled", "captured")
CHAINED = "captured, 8 in a replay"
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
VERIFY_ROWS = (1, 8, 32)
CONTEXT = 512
CHAIN = 8

QWEN = {"vocab_size": 151_936, "max_position_embeddings": 4096, "tie_word_embeddings": True}
DRAFTER = QWEN | {
    "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864,
}  # fmt: skip
TARGET = QWEN | {
    "vocab_size": 152_064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18_944, "tie_word_embeddings": False,
}  # fmt: skip
TINY = QWEN | {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a profile; times in microseconds."""

    name: str
    on_gpu: bool
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs. `idle` is a share of the time, None where nothing ran on a GPU."""

    ms: float
    launches: float
    kernels: float
    idle: float | None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: a pass, the way it is run, and its cost or why there is none."""

    what: str
    way: str
    cost: Cost | None
    failure: str = ""


def cost_of(ms: float, events: Iterable[Event], num_calls: int) -> Cost:
    """The cost of a call, from its median time and the profile of `num_calls` others."""
    events = list(events)
    kernels = sorted((e.start_us, e.end_us) for e in events if e.on_gpu)
    launches = sum(not e.on_gpu and e.name.startswith(LAUNCHES) for e in events)
    busy_us, until = 0.0, float("-inf")
    for start, end in kernels:  # kernels may overlap
        busy_us += max(0.0, end - max(start, until))
        until = max(until, end)
    idle = None
    if kernels:
        window_us = max(e.end_us for e in events) - min(e.start_us for e in events)
        idle = 1.0 - busy_us / window_us if window_us > 0 else 0.0
    return Cost(
        ms=round(ms, 4),
        launches=round(launches / num_calls, 1),
        kernels=round(len(kernels) / num_calls, 1),
        idle=None if idle is None else round(idle, 3),
    )


def each(cost: Cost, number: int) -> Cost:
    """The cost of one of `number` tokens."""
    return Cost(
        ms=round(cost.ms / number, 4),
        launches=round(cost.launches / number, 2),
        kernels=round(cost.kernels / number, 1),
        idle=cost.idle,
    )


def table(lines: Sequence[Line]) -> str:
    """The table as text."""
    rows = [("pass", "way", "ms", "launches", "kernels", "GPU idle")]
    for line in lines:
        if line.cost is None:
            rows.append((line.what, line.way, line.failure, "", "", ""))
            continue
        cost = line.cost
        idle = "-" if cost.idle is None else f"{cost.idle:.1%}"
        rows.append((line.what, line.way, f"{cost.ms:.3f}", f"{cost.launches:g}", f"{cost.kernels:g}", idle))
    widths = [max(len(row[i]) for row in rows if i != 2 or len(row[2]) < 20) for i in range(6)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def goals(lines: Sequence[Line]) -> list[Goal]:
    """What capture is for: few launches a token, and a GPU that is not idle."""
    cost = {(line.what, line.way): line.cost for line in lines}
    result = []
    eager, captured = cost.get(("draft token", "eager")), cost.get(("draft token", "captured"))
    if eager and captured:
        result.append(Goal("launches of a captured draft token", "<= 20", captured.launches, captured.launches <= 20))
        chained = cost.get(("draft token", CHAINED))
        if chained:
            result.append(
                Goal("launches of a token of a captured chain", "<= 4", chained.launches, chained.launches <= 4)
            )
        ratio = round(eager.ms / captured.ms, 2)
        result.append(Goal("captured draft token against eager, times as fast", ">= 2", ratio, ratio >= 2))
    return result


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(call: Callable[[], object], device: torch.device, *, repeats: int) -> Cost:
    """Time and profile a call that has been warmed up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    num_calls = min(repeats, 10)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(num_calls):
            call()
        synchronize(device)
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    events = [
        Event(event.name, event.device_type == cuda, event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
    ]
    return cost_of(statistics.median(times) * 1e3, events, num_calls)


def random_model(fields: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """A Qwen2 of the given shape with random weights, made on the device."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen2", **fields), dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval().requires_grad_(False)


def cached(lm: CausalLM, capturer: Capturer, *, max_rows: int, context: int, chains: bool = False) -> CachedModel:
    """The model with `context` tokens in slot 0."""
    model = CachedModel(
        lm, num_slots=1, max_length=2 * context, max_tree_rows=max_rows, capturer=capturer,
        chain_vocab=lm.width if chains else 0,
    )  # fmt: skip
    if chains:
        model.warm_up()
    for start in range(0, context, 128):
        num = min(128, context - start)
        model.forward(0, [7 + i % 90 for i in range(num)], num_committed=num, num_logits=1)
    return model


def draft_token(model: CachedModel) -> Callable[[], int]:
    """One token behind the context: run its row, read the best next token, forget the row."""

    def call() -> int:
        row = model.rows[0].length
        logits = model.forward(0, [5], parents=[row - 1])
        model.rewind(0, 1)
        return int(logits[0].argmax())

    return call


def draft_chain(model: CachedModel) -> Callable[[], list[int]]:
    """A chain of tokens behind the context, sampled, in one replay; its rows are forgotten."""

    def call() -> list[int]:
        row = model.rows[0].length
        tokens, _ = model.chain(0, 5, parent=row - 1, keys=list(range(CHAIN)), temperature=0.8)
        model.rewind(0, CHAIN)
        return tokens

    return call


def verify_pass(model: CachedModel, num_rows: int) -> Callable[[], object]:
    """One pass over a chain of rows, the best token of each read."""

    def call() -> object:
        row = model.rows[0].length
        logits = model.forward(0, [5] * num_rows, parents=list(range(row - 1, row - 1 + num_rows)))
        model.rewind(0, num_rows)
        return logits.argmax(-1).tolist()

    return call


def lines_of(
    fields: dict[str, Any],
    passes: dict[str, int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    repeats: int,
    captured: Capturer,
    compile_backend: str,
) -> list[Line]:
    """Every pass of one model by every way. `passes`: name and number of rows, 0 for a draft token."""
    weights = random_model(fields, device, dtype)
    plain_forward = weights.forward
    lines: list[Line] = []
    for way in WAYS:
        weights.forward = plain_forward
        lm = CausalLM(weights, lean=False)
        if way == "compiled":
            torch._dynamo.reset()
            weights.forward = torch.compile(plain_forward, backend=compile_backend, dynamic=False)
        for what, num_rows in passes.items():
            capturer = captured if way == "captured" else Uncaptured()

            def one_pass(num_rows: int = num_rows, lm: CausalLM = lm, capturer: Capturer = capturer) -> Cost:
                model = cached(lm, capturer, max_rows=max(1, num_rows), context=context)
                call = verify_pass(model, num_rows) if num_rows else draft_token(model)
                return measure(call, device, repeats=repeats)

            lines.append(line_of(what, way, one_pass))
        if way == "captured" and 0 in passes.values():

            def chain(lm: CausalLM = lm) -> Cost:
                model = cached(lm, captured, max_rows=CHAIN, context=context, chains=True)
                return each(measure(draft_chain(model), device, repeats=repeats), CHAIN)

            lines.append(line_of("draft token", CHAINED, chain))
    weights.forward = plain_forward
    return lines


def line_of(what: str, way: str, measured: Callable[[], Cost]) -> Line:
    """A line of the table. One way that fails must not hide the others."""
    try:
        line = Line(what, way, measured())
    except Exception as exc:
        line = Line(what, way, None, f"failed: {str(exc).splitlines()[0][:120]}")
    print(table([line]).splitlines()[-1], flush=True)
    return line


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="write the figures to this file")
    parser.add_argument("--tiny", action="store_true", help="shapes of a few kilobytes: to try the script itself")
    parser.add_argument("--repeats", type=int, default=50, help="calls that are timed")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device that this torch can use: nothing was measured", file=sys.stderr)
        return EXIT_NO_GPU
    device = torch.device("cuda", torch.cuda.current_device())
    options: dict[str, Any] = {
        "device": device, "dtype": torch.bfloat16, "context": CONTEXT, "repeats": args.repeats,
        "captured": CudaCapturer(device), "compile_backend": "inductor",
    }  # fmt: skip
    drafter, target = (TINY, TINY) if args.tiny else (DRAFTER, TARGET)
    with torch.inference_mode():
        lines = lines_of(drafter, {"draft token": 0}, **options)
        lines += lines_of(target, {f"verify, {n} rows": n for n in VERIFY_ROWS}, **options)
    print(table(lines))
    if args.results:
        report(args.results, lines, device, args)
    return 0 if all(line.cost or line.way == "compiled" for line in lines) else 1


def report(path: Path, lines: Sequence[Line], device: torch.device, args: argparse.Namespace) -> None:
    """Write the figures with the goals."""
    held = goals(lines)
    write_results(
        path,
        command="scripts/gpu_check.sh",
        packages=("torch", "transformers"),
        models={"drafter": "random, shape of Qwen2.5-0.5B", "target": "random, shape of Qwen2.5-7B"},
        parameters={
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
            "cuda": torch.version.cuda,
            "dtype": "bfloat16",
            "context": CONTEXT,
            "median of": args.repeats,
            "tiny": args.tiny,
        },
        figures={"launch overhead": [asdict(line) for line in lines]},
        goals=held,
    )
    for goal in held:
        print(goal)


if __name__ == "__main__":
    sys.exit(main())
