"""Where a forward's time goes: ms per pass by rows and context, against a floor and what users would pick instead.

The floor of a pass over n rows is the larger of two times: the weights' bytes at the measured memory bandwidth (a copy
of touched memory larger than the caches, bytes read plus bytes written), and its floating-point operations at the rate
of our products alone for n rows, over weights of the model's own shapes. The dispatch floor
is the same number of layers and operations with rows so short that arithmetic is free: what Python and the library's
dispatch cost.

    taskset -c 0 python scripts/bench_engine.py --target DIR --drafter DIR [--llama-bench PATH --gguf PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.checkpoint import Checkpoint
from engine.distilled import load_distilled
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.products import Dense, Int8
from engine.tiny import tiny_checkpoint
from scripts.results import Goal, write_results

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 1024, 4096)
MAX_LENGTH = 4224


def median_ms(what: Callable[[], object], *, repeats: int, least_s: float = 0.0) -> float:
    """Median time of a call, in ms."""
    times: list[float] = []
    while len(times) < repeats or sum(times) < least_s:
        began = time.perf_counter()
        what()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


@torch.inference_mode()
def copy_bandwidth() -> float:
    """Bytes read plus bytes written in a second, of a copy far larger than the caches."""
    source, target = torch.ones(1 << 28, dtype=torch.float32), torch.zeros(1 << 28, dtype=torch.float32)
    ms = median_ms(lambda: target.copy_(source), repeats=5)
    return 2 * source.nbytes / (ms / 1e3)


@torch.inference_mode()
def product_rate(num_rows: int, form: type[Dense] | type[Int8], dtype: torch.dtype) -> float:
    """Floating-point operations a second of our products alone, over weights of SmolLM2's shapes, cold."""
    weights = [
        torch.randn(out, inner).to(dtype) for _ in range(20) for out, inner in ((960, 576), (3072, 576), (576, 1536))
    ]
    products = [form(weight) for weight in weights]
    rows = {inner: torch.randn(num_rows, inner).to(dtype) for inner in (576, 1536)}
    ms = median_ms(lambda: [p(rows[p.weight.shape[1]]) for p in products], repeats=9)
    return 2 * num_rows * sum(w.numel() for w in weights) / (ms / 1e3)


def weight_bytes(lm: CausalLM) -> int:
    """Bytes of weights that a one-row pass reads: layers and head, of the embeddings only a row."""
    size = 1 if lm.int8 else lm.dtype.itemsize
    layers = sum(p.numel() for p in lm.model.base_model.layers.parameters())
    return int(size * (layers + lm.model.get_output_embeddings().weight.numel()))


def pass_times(lm: CausalLM, contexts: tuple[int, ...], repeats: int = 15) -> dict[str, dict[str, float]]:
    """ms per pass by context and rows."""
    model = CachedModel(lm, num_slots=1, max_length=MAX_LENGTH, max_tree_rows=max(ROWS))
    table: dict[str, dict[str, float]] = {}
    for context in contexts:
        model.clear(0)
        for start in range(0, context, 128):
            model.forward(0, [7 + i % 90 for i in range(start, start + 128)], num_committed=128, num_logits=1)
        row: dict[str, float] = {}
        for n in ROWS:

            def one(n: int = n) -> None:
                model.forward(0, [5] * n, parents=[context - 1] * n)  # noqa: B023
                model.rewind(0, n)

            row[str(n)] = round(median_ms(one, repeats=repeats), 2)
        table[str(context)] = row
    return table


def dispatch_ms(num_layers: int, dtype: str) -> dict[str, float]:
    """ms per pass of a model of as many layers whose arithmetic is negligible."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_checkpoint(
            Path(folder) / "narrow", seed=1, layers=num_layers, hidden=64, vocab=320, max_length=MAX_LENGTH,
            num_attention_heads=8, num_key_value_heads=4, intermediate_size=96,
        )  # fmt: skip
        return pass_times(Checkpoint(str(path), max_length=MAX_LENGTH).load(dtype=dtype), (128,))["128"]


def with_floors(
    times: dict[str, dict[str, float]],
    num_bytes: int,
    num_weights: int,
    bandwidth: float,
    rates: dict[str, float],
    dispatch: dict[str, float],
) -> dict[str, Any]:
    """Floors and ratios at the shortest context."""  # fmt: skip
    shortest = times[str(CONTEXTS[0])]
    floors = {n: max(num_bytes / bandwidth, 2 * int(n) * num_weights / rates[n]) * 1e3 for n in shortest}
    return {
        "ms per pass, by context and rows": times,
        "floor, ms": {n: round(floor, 2) for n, floor in floors.items()},
        "ratio to floor": {n: round(shortest[n] / floors[n], 3) for n in shortest},
        "weights, MB": round(num_bytes / 1e6, 1),
        "dispatch floor, ms": dispatch,
        "dispatch share": {n: round(dispatch[n] / shortest[n], 3) for n in shortest},
    }


@torch.inference_mode()
def generate_ms(target: Any, assistant: Any, repeats: int = 3) -> dict[str, float]:
    """ms per token of transformers' generate(), greedy, 128 tokens of prompt."""
    ids = torch.tensor([[7 + i % 90 for i in range(128)]])
    num = 32
    ways: dict[str, dict[str, Any]] = {
        "dynamic cache": {},
        "static cache": {"cache_implementation": "static"},
        "assistant_model (the target's first two layers)": {"assistant_model": assistant},
    }
    result = {}
    for name, way in ways.items():

        def run(new: int, way: dict[str, Any] = way) -> None:
            target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **way
            )  # fmt: skip

        try:
            run(4)
            long, short = (median_ms(lambda new=new: run(new), repeats=repeats) for new in (num, 4))  # type: ignore[misc]
            result[name] = round((long - short) / (num - 4), 2)
        except Exception as exc:
            print(f"generate with {name}: {exc!r}", file=sys.stderr)
    return result


def llama_bench(binary: Path, gguf: Path) -> dict[str, float]:
    """ms per pass of llama.cpp for n rows at once, one thread."""
    result = {}
    for n in ROWS:
        command = [
            str(binary),
            "-m",
            str(gguf),
            "-t",
            "1",
            "-p",
            str(n),
            "-n",
            "0",
            "-ub",
            str(n),
            "-b",
            str(n),
            "-r",
            "8",
            "-o",
            "json",
        ]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rate = json.loads(out)[0]["avg_ts"]
        result[str(n)] = round(n / rate * 1e3, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True, help="folder of a distilled drafter")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench")
    parser.add_argument("--gguf", type=Path, help="the target in F32 for llama.cpp")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = Checkpoint(args.target, max_length=MAX_LENGTH)
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s", flush=True)
    rates = {
        name: {str(n): product_rate(n, form, dtype) for n in ROWS}
        for name, form, dtype in (
            ("float32", Dense, torch.float32),
            ("bfloat16", Dense, torch.bfloat16),
            ("int8", Int8, torch.bfloat16),
        )
    }
    print("GFLOP/s", {k: {n: round(r / 1e9) for n, r in v.items()} for k, v in rates.items()}, flush=True)
    figures: dict[str, Any] = {
        "copy bandwidth, GB/s": round(bandwidth / 1e9, 1),
        "product rate, GFLOP/s": {k: {n: round(r / 1e9, 1) for n, r in v.items()} for k, v in rates.items()},
    }
    for label, load in (
        ("verify, float32", lambda: checkpoint.load()),
        ("verify, float32, transformers' forward", lambda: CausalLM(checkpoint.load().model, lean=False)),
        ("verify, bfloat16", lambda: checkpoint.load(dtype="bfloat16")),
        ("draft, int8", lambda: load_distilled(Path(args.drafter), checkpoint, dtype="int8", device="cpu")),
        ("draft, bfloat16", lambda: load_distilled(Path(args.drafter), checkpoint, dtype="bfloat16", device="cpu")),
        ("draft, float32", lambda: load_distilled(Path(args.drafter), checkpoint, dtype="float32", device="cpu")),
    ):
        lm: CausalLM = load()  # type: ignore[no-untyped-call]
        num_bytes = weight_bytes(lm)
        num_weights = num_bytes // (1 if lm.int8 else lm.dtype.itemsize)
        dtype = "int8" if lm.int8 else "bfloat16" if lm.dtype == torch.bfloat16 else "float32"
        times = pass_times(lm, CONTEXTS if "verify" in label else CONTEXTS[:2])
        num_layers = len(lm.model.base_model.layers)
        dispatch = dispatch_ms(num_layers, dtype)
        figures[label] = with_floors(times, num_bytes, num_weights, bandwidth, rates[dtype], dispatch)
        print(label, json.dumps(figures[label]), flush=True)
        del lm
    plain = CausalLM(checkpoint.load().model, lean=False).model
    figures["generate(), ms per token"] = generate_ms(plain, checkpoint.load(num_layers=2).model)
    print(figures["generate(), ms per token"], flush=True)
    if args.llama_bench:
        figures["llama.cpp F32, ms per pass"] = llama_bench(args.llama_bench, args.gguf)
        print(figures["llama.cpp F32, ms per pass"], flush=True)
    if args.results:
        report(args, figures)


def report(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write the figures with the goals."""
    verify, draft = figures["verify, float32"], figures["draft, int8"]
    one_row = verify["ms per pass, by context and rows"]["128"]["1"]
    generated = min(figures["generate(), ms per token"][name] for name in ("dynamic cache", "static cache"))
    goals = [
        ("verify pass over its floor, 1 row", "<= 1.25", verify["ratio to floor"]["1"], 1.25),
        ("verify pass over its floor, 8 rows", "<= 1.3", verify["ratio to floor"]["8"], 1.3),
        ("draft step over its floor", "<= 1.5", draft["ratio to floor"]["1"], 1.5),
        (
            "one-row verify pass over generate()'s best time per token",
            "<= 0.769 (1.3 x as fast)",
            round(one_row / generated, 3),
            1 / 1.3,
        ),
    ]
    if "llama.cpp F32, ms per pass" in figures:
        ratio = round(one_row / figures["llama.cpp F32, ms per pass"]["1"], 3)
        goals.append(("one-row verify pass over llama.cpp, F32", "<= 1.3", ratio, 1.3))
    held = [Goal(name, goal, measured, measured <= limit) for name, goal, measured, limit in goals]
    write_results(
        args.results,
        command="taskset -c 0 python scripts/bench_engine.py --target DIR --drafter DIR --results FILE",
        packages=("torch", "transformers"),
        models={"target": Path(args.target).name, "drafter": Path(args.drafter).name},
        parameters={"rows": ROWS, "contexts": CONTEXTS, "median of": 15, "threads": 1},
        figures=figures,
        goals=held,
    )
    for goal in held:
        print(goal)


if __name__ == "__main__":
    main()
