"""How good a drafter is, and what it costs: acceptance by position, hit rates, ms per draft token on one core.

The target answers the held-out prompts (`scripts/heldout.py`) through our own engine, greedily and at temperature 0.8
with the acceptance rule's noise; the answers are kept in a folder. Each drafter is then run over them. Since a chain
of candidates goes on only while it is right, acceptance of a chain of K from a position is the number of
consecutive hits from there, at most K.

    taskset -c 0 python scripts/bench_drafter.py --target DIR --answers DIR NAME=FOLDER [NAME=FOLDER ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.checkpoint import Checkpoint
from engine.distilled import load_distilled
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.sampler import Sampler
from engine.target import HFTarget
from scripts.heldout import heldout_prompts
from scripts.results import Goal, write_results
from speculation.passes import Sampling, VerifyPass

SAMPLINGS = {"greedy": Sampling(), "T=0.8": Sampling(temperature=0.8, seed=1)}
TOPS = (1, 2, 4, 8)
MAX_LENGTH = 512
TARGET = "target"


def answer(
    target: HFTarget, prompt: list[int], sampling: Sampling, num_tokens: int, stop_ids: tuple[int, ...]
) -> list[int]:
    """The target's own answer, token by token."""
    target.open(0, sampling=sampling, tokens=prompt, num_prompt=len(prompt), stop_ids=stop_ids)
    target.prefill(0, 0, len(prompt) - 1)
    tokens = list(prompt)
    for _ in range(num_tokens):
        request = VerifyPass(slot=0, start=len(tokens), tokens=(tokens[-1],), parents=(-1,), max_tokens=1)
        (result,) = target.verify([request])
        if isinstance(result, Exception):
            raise result
        tokens += result.tokens
        if tokens[-1] in stop_ids:
            break
    target.close(0)
    return tokens[len(prompt) :]


def write_answers(checkpoint: Checkpoint, folder: Path, num_tokens: int) -> None:
    """Answers of the target to the held-out prompts, a file for each sampling; what is there is not written again."""
    folder.mkdir(parents=True, exist_ok=True)
    model = CachedModel(checkpoint.load(), num_slots=1, max_length=MAX_LENGTH, max_tree_rows=1)
    target = HFTarget(model, vocab_size=checkpoint.tokenizer.vocab_size)
    for name, sampling in SAMPLINGS.items():
        path = folder / f"{name.replace('=', '')}.json"
        rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        prompts = heldout_prompts()
        for kind, text in prompts[len(rows) :]:
            prompt = checkpoint.tokenizer.encode_chat([{"role": "user", "content": text}])
            rows.append(
                {"kind": kind, "prompt": prompt,
                 "answer": answer(target, prompt, sampling, num_tokens, checkpoint.stop_ids)}
            )  # fmt: skip
            if len(rows) % 8 == 0 or len(rows) == len(prompts):
                path.write_text(json.dumps(rows))
                print(f"{name}: {len(rows)} of {len(prompts)} answers", flush=True)


def hits_of(model: CachedModel, row: dict[str, Any], sampling: Sampling, vocab_size: int) -> list[int]:
    """For each answer token, its rank among the drafter's candidates (0 is the first), or -1 beyond the best 8."""
    prompt, tokens = row["prompt"], row["answer"]
    ids = (prompt + tokens)[:-1]
    logits = []
    for start in range(0, len(ids), 128):
        chunk = ids[start : start + 128]
        logits.append(model.forward(0, chunk, num_committed=len(chunk)))
    model.clear(0)
    table = torch.cat(logits)[len(prompt) - 1 :]
    sampler = Sampler(sampling, num_prompt=len(prompt), vocab_size=vocab_size)
    sampler.commit(prompt)
    ranks = []
    for i, token in enumerate(tokens):
        proposed = [child.token for child in sampler.propose(table[i], len(prompt) + i, (), TOPS[-1])]
        ranks.append(proposed.index(token) if token in proposed else -1)
        sampler.commit((token,))
    return ranks


def chain_lengths(ranks: list[int], size: int) -> list[int]:
    """Accepted length of a chain of `size` candidates from each position that has so many tokens left."""
    runs = []
    for start in range(len(ranks) - size + 1):
        run = 0
        while run < size and ranks[start + run] == 0:
            run += 1
        runs.append(run)
    return runs


def figures(rows: list[tuple[str, list[int]]]) -> dict[str, Any]:
    """Hit rates and chain figures over (kind, ranks) of many answers."""
    ranks = [rank for _, answer_ranks in rows for rank in answer_ranks]
    result: dict[str, Any] = {f"top{k}": round(sum(0 <= r < k for r in ranks) / len(ranks), 4) for k in TOPS}
    for size in (4, 8):
        runs = [run for _, answer_ranks in rows for run in chain_lengths(answer_ranks, size)]
        result[f"mean acceptance length, chain of {size}"] = round(1 + statistics.fmean(runs), 3)
        result[f"acceptance by position, chain of {size}"] = [
            round(sum(run > place for run in runs) / max(1, sum(run >= place for run in runs)), 3)
            for place in range(size)
        ]
    return result


def step_costs(lms: dict[str, CausalLM], rounds: int = 40, burst: int = 6) -> dict[str, float]:
    """Of each model, ms of one pass over one row behind 256 tokens.

    Models take turns, a burst each, for a shared machine is not equally fast all the time; what counts is the fastest
    tenth of the passes, without the first of a burst, which finds the cache full of another model's weights.
    """
    models = {name: CachedModel(lm, num_slots=1, max_length=MAX_LENGTH, max_tree_rows=32) for name, lm in lms.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        model.forward(0, list(range(100, 356)), num_committed=256, num_logits=1)
    for _ in range(rounds):
        for name, model in models.items():
            for nth in range(burst):
                began = time.perf_counter()
                model.forward(0, [5], parents=[255])
                if nth:
                    times[name].append(time.perf_counter() - began)
                model.rewind(0, 1)
    return {name: statistics.quantiles(values, n=10)[0] * 1e3 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", type=Path, required=True, help="folder of the target's answers")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--shipped", help="name of the drafter that the goals are held against")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("drafters", nargs="*", help="NAME=FOLDER")
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = Checkpoint(args.target, max_length=MAX_LENGTH)
    write_answers(checkpoint, args.answers, args.tokens)
    measured: dict[str, Any] = {}
    lms = {TARGET: checkpoint.load()}
    for named in args.drafters:
        name, _, folder = named.partition("=")
        lm = lms[name] = load_distilled(Path(folder), checkpoint, dtype=args.dtype, device="cpu")
        about = json.loads((Path(folder) / "drafter.json").read_text())
        model = CachedModel(lm, num_slots=1, max_length=MAX_LENGTH, max_tree_rows=1)
        kept = set(load_file(Path(folder) / "drafter.safetensors")["ids"].tolist())
        entry: dict[str, Any] = {
            "about": {k: v for k, v in about.items() if k not in ("history", "shards", "target_weights")},
        }
        for label, sampling in SAMPLINGS.items():
            rows = json.loads((args.answers / f"{label.replace('=', '')}.json").read_text())
            ranked = [(row["kind"], hits_of(model, row, sampling, checkpoint.tokenizer.vocab_size)) for row in rows]
            inside = [token in kept for row in rows if row["kind"] == "chat" for token in row["answer"]]
            entry[f"share of {label} chat tokens inside the head"] = round(statistics.fmean(inside), 4)
            entry[label] = {"all": figures(ranked)} | {
                kind: figures([pair for pair in ranked if pair[0] == kind]) for kind in sorted({k for k, _ in ranked})
            }
        measured[name] = entry
        print(name, "greedy chat", json.dumps(entry["greedy"]["chat"]), flush=True)
    add_costs(measured, step_costs(lms))
    if args.results:
        report(args, measured)
    if args.picture:
        draw(args.picture, measured)


def add_costs(measured: dict[str, Any], costs: dict[str, float]) -> None:
    """Put each drafter's cost, and its share of the target's, with its figures."""
    for name, entry in measured.items():
        entry["ms per draft token"] = round(costs[name], 3)
        entry["one-row target pass, float32, ms"] = round(costs[TARGET], 3)
        entry["share of a one-row target pass"] = round(costs[name] / costs[TARGET], 4)
        print(f"{name}: {costs[name]:.2f} ms, {costs[name] / costs[TARGET]:.1%} of a pass", flush=True)


def report(args: argparse.Namespace, measured: dict[str, Any]) -> None:
    """Write the figures and the goals of the shipped drafter."""
    shipped = measured[args.shipped]
    chat = shipped["greedy"]["chat"]
    share = shipped["share of a one-row target pass"]
    write_results(
        args.results,
        command="taskset -c 1 python scripts/bench_drafter.py ... --results docs/results/drafter.json",
        packages=("torch", "transformers"),
        models={"target": Path(args.target).name, "shipped": args.shipped},
        parameters={
            "prompts": len(heldout_prompts()), "answer tokens": args.tokens, "drafter dtype": args.dtype, "threads": 1,
        },
        figures={"drafters": measured},
        goals=[
            Goal("top-1 hit rate, greedy chat", ">= 0.60", chat["top1"], chat["top1"] >= 0.6),
            Goal("top-4 hit rate, greedy chat", ">= 0.80", chat["top4"], chat["top4"] >= 0.8),
            Goal("draft step over one-row target pass", "<= 0.1", share, share <= 0.1),
        ],
    )  # fmt: skip


def draw(path: Path, measured: dict[str, Any]) -> None:
    """Quality against cost, one point for each drafter."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, entry in measured.items():
        x = 100 * entry["share of a one-row target pass"]
        for key, marker in (("top1", "o"), ("top4", "s")):
            axes.plot(x, entry["greedy"]["chat"][key], marker, color="C0" if key == "top1" else "C1")
        right = x > 8  # the label goes where there is room
        axes.annotate(
            name, (x, entry["greedy"]["chat"]["top1"]), textcoords="offset points", xytext=(6, -12), fontsize=7,
            ha="right" if right else "left",
        )  # fmt: skip
    axes.axhline(0.60, color="C0", linestyle=":", label="goal top-1")
    axes.axhline(0.80, color="C1", linestyle=":", label="goal top-4")
    axes.axvline(10, color="grey", linestyle="--", label="goal: a tenth of a target pass")
    axes.set_xlabel("draft step over one-row target pass, %, one core")
    axes.set_ylabel("hit rate, greedy chat (circles top-1, squares top-4)")
    axes.legend(loc=(0.02, 0.64))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
