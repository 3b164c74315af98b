"""Distil a drafter for a target from text that the target wrote (`scripts/drafter_data.py`).

The drafter is the target's own embeddings and first `--frozen` layers, unchanged, then `--layers` trained layers that
start as copies of the layers that follow, then the final norm and a head of the `--vocab` most frequent tokens whose
rows are the target's. Only the trained layers, the norm and the id map are saved: everything else lies in the target's
checkpoint. The frozen layers' output is computed once and kept in memory.

Loss: half cross-entropy against the target's argmax, half against its top log-probabilities (soft labels, Hinton et
al. 2015), over answer positions; and smooth L1 against the target's last state, over all positions (Li et al. 2024,
EAGLE). Deterministic for a seed on one machine; `--out` holds a resume point.

    python scripts/train_drafter.py --target DIR --data DIR --out DIR --epochs 8
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.checkpoint import Checkpoint


@dataclass
class Sequences:
    """Written text: ids and, for the answer, what the target's logits were."""

    ids: list[Tensor]  # [length], int64
    num_prompt: list[int]
    top_ids: list[Tensor]  # [answer, k], int64
    top_logprobs: list[Tensor]  # [answer, k], float32

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(t) for t in self.top_ids)


def read_shards(paths: list[Path], max_length: int) -> Sequences:
    """Read shards; sequences longer than `max_length` are cut."""
    out = Sequences([], [], [], [])
    for path in paths:
        with np.load(path) as shard:
            ids, lengths = shard["ids"], shard["lengths"]
            top_ids, top_logprobs = shard["top_ids"], shard["top_logprobs"]
        at = row = 0
        for num_prompt, num_answer in lengths:
            total = num_prompt + num_answer
            keep = min(total, max_length)
            if num_answer > 1 and num_prompt < max_length:
                kept = keep - num_prompt
                out.ids.append(torch.from_numpy(ids[at : at + keep].astype(np.int64)))
                out.num_prompt.append(int(num_prompt))
                out.top_ids.append(torch.from_numpy(top_ids[row : row + kept].astype(np.int64)))
                out.top_logprobs.append(torch.from_numpy(top_logprobs[row : row + kept].astype(np.float32)))
            at += total
            row += num_answer
    return out


def frequent_tokens(data: Sequences, size: int, width: int, always: list[int]) -> Tensor:
    """Ids of the `size` tokens that the target is most inclined to write, ascending; `always` are among them."""
    counts = torch.zeros(width, dtype=torch.float64)
    for ids, logprobs in zip(data.top_ids, data.top_logprobs, strict=True):
        counts.index_add_(0, ids.flatten(), logprobs.exp().double().flatten())
    counts[always] = math.inf
    return counts.topk(size).indices.sort().values


def through_layers(layers: Iterable[Any], hidden: Tensor, rotary: Any) -> Iterator[Tensor]:
    """The states [batch, length, dim] after each decoder layer, with a causal mask."""
    length = hidden.shape[1]
    positions = torch.arange(length)[None]
    embeddings = rotary(hidden, positions)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    for layer in layers:
        out = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=embeddings)
        hidden = out[0] if isinstance(out, tuple) else out
        yield hidden


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
        self.head = torch.nn.Parameter(target.get_output_embeddings().weight[ids].float().clone(), requires_grad=False)
        self.rotary = base.rotary_emb

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [batch, length, dim] from the frozen layers -> states [batch, length, dim] before the head."""
        *_, hidden = through_layers(self.layers, hidden, self.rotary)
        normed: Tensor = self.norm(hidden)
        return normed


@torch.inference_mode()
def target_states(target: Any, num_frozen: int, data: Sequences) -> tuple[list[Tensor], list[Tensor]]:
    """Of each sequence, [length, dim], bfloat16: output of the first `num_frozen` layers, and the last normed state."""
    base = target.model
    states, finals = [], []
    for ids in data.ids:
        after = [embedded := base.embed_tokens(ids[None]), *through_layers(base.layers, embedded, base.rotary_emb)]
        states.append(after[num_frozen][0].to(torch.bfloat16))
        finals.append(base.norm(after[-1])[0].to(torch.bfloat16))
    return states, finals


def cached_states(target: Any, num_frozen: int, path: Path, data: Sequences) -> tuple[list[Tensor], list[Tensor]]:
    """`target_states` of one shard, kept in a file beside it: they cost more than the training itself."""
    cache = path.with_name(f"{path.stem}.states-{num_frozen}.pt")
    if not cache.exists():
        torch.save(target_states(target, num_frozen, data), cache)
    states, finals = torch.load(cache, weights_only=True)
    return states, finals


@dataclass
class Batch:
    """Sequences padded to one length, and where the answers' predictions lie in them."""

    hidden: Tensor  # [batch, length, dim]
    final: Tensor  # [batch, length, dim], the target's own last state
    real: Tensor  # [batch, length], False where padded
    rows: Tensor  # [n], flat indices of the positions that predict answer tokens
    top_ids: Tensor  # [n, k], in the reduced vocabulary, -1 outside it
    top_probs: Tensor  # [n, k]


def make_batch(
    data: Sequences, states: list[Tensor], finals: list[Tensor], chosen: list[int], reduced: Tensor
) -> Batch:
    """Put the chosen sequences together. `reduced` maps target ids to reduced ids, or -1."""
    length = max(len(data.ids[i]) for i in chosen)
    hidden = torch.zeros(len(chosen), length, states[0].shape[1], dtype=states[0].dtype)
    final = torch.zeros_like(hidden)
    real = torch.zeros(len(chosen), length, dtype=torch.bool)
    rows, ids, probs = [], [], []
    for b, i in enumerate(chosen):
        hidden[b, : len(states[i])] = states[i]
        final[b, : len(states[i])] = finals[i]
        real[b, : len(states[i])] = True
        first = data.num_prompt[i] - 1
        rows.append(b * length + first + torch.arange(len(data.top_ids[i])))
        ids.append(reduced[data.top_ids[i]])
        probs.append(data.top_logprobs[i].exp())
    return Batch(hidden, final, real, torch.cat(rows), torch.cat(ids), torch.cat(probs))


def loss_of(drafter: Drafter, batch: Batch, state_weight: float) -> tuple[Tensor, Tensor]:
    """Mean loss over answer positions, and the logits [n, vocab] it was taken from."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        every = drafter(batch.hidden.float())
        states = every.flatten(0, 1)[batch.rows]
        logits = (states.to(torch.bfloat16) @ drafter.head.to(torch.bfloat16).T).float()
    logprobs = torch.log_softmax(logits, -1)
    inside = batch.top_ids >= 0
    picked = logprobs.gather(1, batch.top_ids.clamp_min(0))
    weights = torch.where(inside, batch.top_probs, 0.0)
    weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-6)
    soft = -(weights * picked).sum(1)
    hard = torch.where(inside[:, 0], -picked[:, 0], 0.0)
    # The last state itself is a richer target than 16 logits, and is known at prompt positions too (as in EAGLE).
    regression = torch.nn.functional.smooth_l1_loss(every[batch.real].float(), batch.final[batch.real].float())
    return (0.5 * soft + 0.5 * hard).mean() + state_weight * regression, logits


@torch.inference_mode()
def hit_rates(
    drafter: Drafter, data: Sequences, states: list[Tensor], finals: list[Tensor], reduced: Tensor
) -> dict[str, float]:
    """Share of answer positions whose target argmax is among the drafter's best 1, 2, 4, 8."""
    hits, total = dict.fromkeys((1, 2, 4, 8), 0), 0
    for first in range(0, len(data), 16):
        batch = make_batch(data, states, finals, list(range(first, min(first + 16, len(data)))), reduced)
        _, logits = loss_of(drafter, batch, 0.0)
        best = logits.topk(8).indices
        wanted = batch.top_ids[:, :1]
        total += len(wanted)
        for k in hits:
            hits[k] += int((best[:, :k] == wanted).any(1).sum())
    return {f"top{k}": n / total for k, n in hits.items()}


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
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frozen", type=int, default=2, help="first layers of the target that are taken as they are")
    parser.add_argument("--layers", type=int, default=2, help="trained layers behind them")
    parser.add_argument("--init", choices=["next", "last"], default="next", help="layers of the target to start from")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=6e-4)
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

    shards = sorted(args.data.glob("shard-*[0-9].npz"))
    train_paths, held_paths = shards[: -args.held_out], shards[-args.held_out :]
    if args.max_shards:
        train_paths = train_paths[: args.max_shards]
    train, held = read_shards(train_paths, args.max_length), read_shards(held_paths, args.max_length)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    stop = target.config.eos_token_id
    ids = frequent_tokens(train, args.vocab, target.config.vocab_size, [stop] if isinstance(stop, int) else list(stop))
    reduced = torch.full((target.config.vocab_size,), -1)
    reduced[ids] = torch.arange(len(ids))
    coverage = torch.cat([reduced[t[:, 0]] >= 0 for t in held.top_ids]).float().mean().item()
    size = f"{len(train)} sequences, {train.num_answer_tokens} answer tokens"
    print(f"{size}; held-out coverage {coverage:.3f}", flush=True)
    began = time.monotonic()

    def states_of(paths: list[Path]) -> tuple[list[Tensor], list[Tensor]]:
        parts = [cached_states(target, args.frozen, path, read_shards([path], args.max_length)) for path in paths]
        return [t for states, _ in parts for t in states], [t for _, finals in parts for t in finals]

    (train_states, train_finals), (held_states, held_finals) = states_of(train_paths), states_of(held_paths)
    print(f"frozen states after {time.monotonic() - began:.0f} s", flush=True)
    first_layer = target.config.num_hidden_layers - args.layers if args.init == "last" else args.frozen
    drafter = Drafter(target, first_layer=first_layer, num_layers=args.layers, ids=ids)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
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
        optimizer.load_state_dict(kept["optimizer"])
        first_epoch, step, history = kept["epoch"], kept["step"], kept["history"]
    num_steps = args.epochs * len(batches)
    started, first_step = time.monotonic(), step
    for epoch in range(first_epoch, args.epochs):
        generator = torch.Generator().manual_seed(args.seed * 1000 + epoch)
        total = 0.0
        for n, b in enumerate(torch.randperm(len(batches), generator=generator).tolist()):
            elapsed_min = (time.monotonic() - started) / 60
            # With a time limit the schedule is a function of the time, so that it always ends at the bottom.
            done = max(step / num_steps, elapsed_min / args.minutes)
            if done >= 1:
                break
            rate = args.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, _ = loss_of(drafter, make_batch(train, train_states, train_finals, batches[b], reduced), args.state_weight)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            total += loss.item()
            step += 1
            if step % 20 == 0:
                left = num_steps - step
                pace = (time.monotonic() - started) / (step - first_step)
                bar = "#" * round(30 * done) + "." * (30 - round(30 * done))
                end = "\r" if sys.stdout.isatty() else "\n"
                figures = f"epoch {epoch} loss {total / (n + 1):.3f} {pace:.2f} s/step"
                print(f"[{bar}] {figures}, {left * pace / 60:.0f} min left", end=end, flush=True)
        rates = hit_rates(drafter, held, held_states, held_finals, reduced)
        history.append({"epoch": epoch, "loss": total / max(1, len(batches)), **rates})
        print(f"epoch {epoch}: {json.dumps(history[-1])} after {(time.monotonic() - started) / 60:.1f} min", flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        state = {"drafter": drafter.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1, "step": step, "history": history}, resume)
        save(drafter, ids, args.out, {**about, "history": history})
        if (time.monotonic() - started) / 60 >= args.minutes:
            break


if __name__ == "__main__":
    main()
