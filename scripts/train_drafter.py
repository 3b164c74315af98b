"""Distil a drafter for a target from text that the target wrote (`scripts/drafter_data.py`).

The drafter is the target's own embeddings and first `--frozen` layers, unchanged, then `--layers` trained layers that
start as copies of the layers that follow, then the final norm and a head of the `--vocab` most frequent tokens whose
rows are the target's. Only the trained layers, the norm and the id map are saved: everything else lies in the target's
checkpoint. The frozen layers' output is computed once and kept in memory.

Loss, over answer positions: half cross-entropy against the target's argmax, half against its top log-probabilities
(soft labels, Hinton et al. 2015); and smooth L1 against the target's last state where the shard has it (Li et al. 2024,
EAGLE).
Deterministic for a seed on one machine, unless `--minutes` ends it; `--out` holds a resume point.

    python scripts/train_drafter.py --target DIR --data DIR [DIR ...] --out DIR --epochs 8
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.checkpoint import Checkpoint
from scripts.drafter_batches import Batch, Sequences, frequent_tokens, make_batch, read_shards

ROWS_AT_ONCE = 256


def causal_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention in plain products, half of what torch's fused one takes on a CPU with its gradient.

    query [batch, heads, length, dim], key and value [batch, key heads, length, dim] -> [batch, length, heads, dim].
    """
    batch, heads, length, dim = query.shape
    group = heads // key.shape[1]
    unseen = torch.full((length, length), -math.inf, dtype=query.dtype).triu(1).repeat(group, 1)
    # The query heads that share a key head lie behind one another.
    scores = torch.baddbmm(
        unseen, query.reshape(-1, group * length, dim), key.reshape(-1, length, dim).transpose(1, 2), alpha=scaling
    )
    mixed = torch.bmm(scores.softmax(-1), value.reshape(-1, length, dim))
    return mixed.view(batch, heads, length, dim).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("causal", causal_attention)


def through_layers(layers: Iterable[Any], hidden: Tensor, rotary: Any) -> Tensor:
    """The states [batch, length, dim] after these decoder layers, with causal attention (padding comes last)."""
    length = hidden.shape[1]
    positions = torch.arange(length)[None]
    embeddings = rotary(hidden, positions)
    for layer in layers:
        out = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=embeddings)
        hidden = out[0] if isinstance(out, tuple) else out
    return hidden


class Drafter(torch.nn.Module):
    """The trained part: decoder layers, final norm, and the (frozen) reduced head."""

    def __init__(self, target: Any, *, first_layer: int, num_layers: int, ids: Tensor) -> None:
        super().__init__()
        import copy

        base = target.model
        self.layers = torch.nn.ModuleList(
            copy.deepcopy(base.layers[first_layer + i]).float() for i in range(num_layers)
        )
        self.norm = copy.deepcopy(base.norm).float()
        with torch.no_grad():
            # Far from the target's state at first, the full scale would make the wrong logits very sure of themselves.
            self.norm.weight *= 0.3
        self.head = torch.nn.Parameter(target.get_output_embeddings().weight[ids].clone(), requires_grad=False)
        self.rotary = base.rotary_emb

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [batch, length, dim] from the frozen layers -> states [batch, length, dim] before the head."""
        normed: Tensor = self.norm(through_layers(self.layers, hidden, self.rotary))
        return normed


@torch.inference_mode()
def frozen_states(target: Any, num_frozen: int, data: Sequences) -> list[Tensor]:
    """Of each sequence, [length, dim], bfloat16: output of the first `num_frozen` layers."""
    base = target.model
    states = []
    for ids in data.ids:
        hidden = through_layers(base.layers[:num_frozen], base.embed_tokens(ids[None]), base.rotary_emb)
        states.append(hidden[0].to(torch.bfloat16))
    return states


def cached_states(target: Any, num_frozen: int, path: Path, data: Sequences) -> list[Tensor]:
    """`frozen_states` of one shard, kept in a file beside it."""
    cache = path.with_name(f"{path.stem}.frozen-{num_frozen}.pt")
    if not cache.exists():
        torch.save(frozen_states(target, num_frozen, data), cache)
    states: list[Tensor] = torch.load(cache, weights_only=True)
    return states


class HeadLoss(torch.autograd.Function):
    """Mean over rows of -sum(weight x log-probability), of a frozen head, with the gradient of the states only.

    Taken a block of rows at a time and with its gradient at once, so that the logits stay in the core's cache.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """states [n, dim], head [vocab, dim], ids and weights [n, k] -> scalar."""
        gradient = torch.empty_like(states)
        total = torch.zeros(())
        for start in range(0, len(states), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            logprobs = (states[rows].to(head.dtype) @ head.T).log_softmax(-1, dtype=torch.float32)
            total -= (weights[rows] * logprobs.gather(1, ids[rows])).sum()
            excess = logprobs.exp_().mul_(weights[rows].sum(1, keepdim=True))
            excess.scatter_add_(1, ids[rows], -weights[rows])
            gradient[rows] = (excess.to(head.dtype) @ head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return total / len(states)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (outer / len(gradient)), None, None, None


def states_of(drafter: Drafter, batch: Batch) -> Tensor:
    """The drafter's last states [batch x length, dim]."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states: Tensor = drafter(batch.hidden.float()).flatten(0, 1)
    return states


def loss_of(drafter: Drafter, batch: Batch, state_weight: float) -> Tensor:
    """Mean loss over answer positions: half the target's argmax, half its best log-probabilities; and its states."""
    states = states_of(drafter, batch)
    inside = batch.top_ids >= 0
    weights = torch.where(inside, batch.top_probs, 0.0)
    weights = 0.5 * weights / weights.sum(1, keepdim=True).clamp_min(1e-6)
    weights[:, 0] += 0.5 * inside[:, 0]
    loss: Tensor = HeadLoss.apply(states[batch.rows], drafter.head, batch.top_ids.clamp_min(0), weights)  # type: ignore[no-untyped-call]
    if state_weight and len(batch.finals):
        # The last state itself is a richer target than 16 logits (as in EAGLE).
        known = states[batch.final_rows].float()
        loss = loss + state_weight * torch.nn.functional.smooth_l1_loss(known, batch.finals)
    return loss


@torch.inference_mode()
def hit_rates(drafter: Drafter, data: Sequences, states: list[Tensor], reduced: Tensor) -> dict[str, float]:
    """Share of answer positions whose target argmax is among the drafter's best 1, 2, 4, 8."""
    hits, total = dict.fromkeys((1, 2, 4, 8), 0), 0
    for first in range(0, len(data), 16):
        batch = make_batch(data, states, list(range(first, min(first + 16, len(data)))), reduced)
        logits = states_of(drafter, batch)[batch.rows].to(drafter.head.dtype) @ drafter.head.T
        best = logits.topk(8).indices
        wanted = batch.top_ids[:, :1]
        total += len(wanted)
        for k in hits:
            hits[k] += int((best[:, :k] == wanted).any(1).sum())
    return {f"top{k}": n / total for k, n in hits.items()}


def optimizers_of(drafter: Drafter, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices where wanted, AdamW for the rest; `top_lr` is each group's peak."""
    trained = [p for p in drafter.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2] if args.muon_lr else []
    rest = [p for p in trained if p.ndim != 2] if args.muon_lr else trained
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    ]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.05))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["top_lr"] = group["lr"]
    return optimizers


def save(drafter: Drafter, ids: Tensor, folder: Path, about: dict[str, Any]) -> None:
    """Write what the target's checkpoint does not hold, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"layers.{name}": value.detach() for name, value in drafter.layers.state_dict().items()}
    tensors["norm.weight"] = drafter.norm.weight.detach()
    halves = {name: value.to(torch.float16).contiguous() for name, value in tensors.items()}
    save_file({**halves, "ids": ids.to(torch.int32)}, folder / "drafter.safetensors")
    (folder / "drafter.json").write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True, nargs="+", help="folders of shards")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frozen", type=int, default=2, help="first layers of the target that are taken as they are")
    parser.add_argument("--layers", type=int, default=2, help="trained layers behind them")
    parser.add_argument("--init", choices=["next", "last"], default="next", help="layers of the target to start from")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument(
        "--muon-lr", type=float, default=0.0, help="train the matrices with Muon at this rate; 0: AdamW"
    )
    parser.add_argument("--max-length", type=int, default=320)
    parser.add_argument("--held-out", type=int, default=1, help="last shards kept for validation")
    parser.add_argument("--max-shards", type=int, default=0, help="use only the first so many, to see what data buys")
    parser.add_argument("--state-weight", type=float, default=1.0, help="of the regression on the target's last state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="end the schedule so that it takes no longer")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    shards = [path for folder in args.data for path in sorted(folder.glob("shard-*[0-9].npz"))]
    train_paths, held_paths = shards[: -args.held_out], shards[-args.held_out :]
    if args.max_shards:
        train_paths = train_paths[: args.max_shards]
    train, held = read_shards(train_paths, args.max_length), read_shards(held_paths, args.max_length)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    target.set_attn_implementation("causal")
    stop = target.config.eos_token_id
    ids = frequent_tokens(train, args.vocab, target.config.vocab_size, [stop] if isinstance(stop, int) else list(stop))
    reduced = torch.full((target.config.vocab_size,), -1)
    reduced[ids] = torch.arange(len(ids))
    coverage = torch.cat([reduced[t[:, 0]] >= 0 for t in held.top_ids]).float().mean().item()
    size = f"{len(train)} sequences, {train.num_answer_tokens} answer tokens"
    print(f"{size}; held-out coverage {coverage:.3f}", flush=True)
    began = time.monotonic()

    def states_at(paths: list[Path]) -> list[Tensor]:
        parts = [cached_states(target, args.frozen, path, read_shards([path], args.max_length)) for path in paths]
        return [state for states in parts for state in states]

    train_states, held_states = states_at(train_paths), states_at(held_paths)
    print(f"frozen states after {time.monotonic() - began:.0f} s", flush=True)
    first_layer = target.config.num_hidden_layers - args.layers if args.init == "last" else args.frozen
    drafter = Drafter(target, first_layer=first_layer, num_layers=args.layers, ids=ids)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizers = optimizers_of(drafter, args)
    # Sequences of like length go together, or padding would be a third of the work.
    order = sorted(range(len(train)), key=lambda i: len(train.ids[i]))
    batches = [order[i : i + args.batch] for i in range(0, len(order), args.batch)]
    about = {
        "target": Path(args.target).name,
        "target_weights": Checkpoint(args.target).weights,
        "frozen_layers": args.frozen,
        "trained_layers": args.layers,
        "vocab": args.vocab,
        "answer_tokens": train.num_answer_tokens,
        "shards": [path.name for path in train_paths],
        "seed": args.seed,
        "held_out_coverage": coverage,
    }
    resume = args.out / "resume.pt"
    first_epoch, step, history = 0, 0, []
    if resume.exists():
        kept = torch.load(resume, weights_only=True)
        drafter.load_state_dict(kept["drafter"])
        for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first_epoch, step, history = kept["epoch"], kept["step"], kept["history"]
    num_steps = args.epochs * len(batches)
    started, first_step = time.monotonic(), step
    for epoch in range(first_epoch, args.epochs):
        generator = torch.Generator().manual_seed(args.seed * 1000 + epoch)
        total, steps_of_epoch = 0.0, 0
        for b in torch.randperm(len(batches), generator=generator).tolist():
            elapsed_min = (time.monotonic() - started) / 60
            # With a time limit the schedule is a function of the time, so that it always ends at the bottom.
            done = max(step / num_steps, elapsed_min / args.minutes)
            if done >= 1:
                break
            share = min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["top_lr"] * share
            loss = loss_of(drafter, make_batch(train, train_states, batches[b], reduced), args.state_weight)
            drafter.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for optimizer in optimizers:
                optimizer.step()
            total += loss.item()
            step += 1
            steps_of_epoch += 1
            if step % 20 == 0:
                left = num_steps - step
                pace = (time.monotonic() - started) / (step - first_step)
                bar = "#" * round(30 * done) + "." * (30 - round(30 * done))
                end = "\r" if sys.stdout.isatty() else "\n"
                figures = f"epoch {epoch} loss {total / steps_of_epoch:.3f} {pace:.2f} s/step"
                print(f"[{bar}] {figures}, {left * pace / 60:.0f} min left", end=end, flush=True)
        rates = hit_rates(drafter, held, held_states, reduced)
        history.append({"epoch": epoch, "loss": total / max(1, steps_of_epoch), **rates})
        print(f"epoch {epoch}: {json.dumps(history[-1])} after {(time.monotonic() - started) / 60:.1f} min", flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        state = {"drafter": drafter.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        torch.save({**state, "epoch": epoch + 1, "step": step, "history": history}, resume)
        save(drafter, ids, args.out, {**about, "history": history})
        if (time.monotonic() - started) / 60 >= args.minutes:
            break


if __name__ == "__main__":
    main()
