"""What `scripts/drafter_data.py` wrote, read for training: sequences, the reduced vocabulary, and padded batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass
class Sequences:
    """Written text: ids and, for the answer, what the target's logits and last states were."""

    ids: list[Tensor]  # [length], int64
    num_prompt: list[int]
    top_ids: list[Tensor]  # [answer, k], int32
    top_logprobs: list[Tensor]  # [answer, k], float16
    finals: list[Tensor]  # [answer, dim], float16, or [0, dim] where the shard was written without

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(t) for t in self.top_ids)


def read_shards(paths: list[Path], max_length: int) -> Sequences:
    """Read shards; sequences longer than `max_length` are cut."""
    out = Sequences([], [], [], [], [])
    for path in paths:
        with np.load(path) as shard:
            arrays = {name: torch.from_numpy(shard[name]) for name in shard.files if shard[name].ndim}
        none = torch.zeros(0, 1, dtype=torch.float16)
        at = row = 0
        for num_prompt, num_answer in arrays["lengths"].tolist():
            kept = min(num_prompt + num_answer, max_length) - num_prompt
            if kept > 1:
                out.ids.append(arrays["ids"][at : at + num_prompt + kept].long())
                out.num_prompt.append(num_prompt)
                out.top_ids.append(arrays["top_ids"][row : row + kept])
                out.top_logprobs.append(arrays["top_logprobs"][row : row + kept])
                out.finals.append(arrays["states"][row : row + kept] if "states" in arrays else none)
            at += num_prompt + num_answer
            row += num_answer
    return out


def frequent_tokens(data: Sequences, size: int, width: int, always: list[int]) -> Tensor:
    """Ids of the `size` tokens that the target is most inclined to write, ascending; `always` are among them."""
    counts = torch.zeros(width, dtype=torch.float64)
    for ids, logprobs in zip(data.top_ids, data.top_logprobs, strict=True):
        counts.index_add_(0, ids.flatten().long(), logprobs.float().exp().double().flatten())
    counts[always] = math.inf
    return counts.topk(size).indices.sort().values


@dataclass
class Batch:
    """Sequences padded to one length, and where the answers' predictions lie in them."""

    hidden: Tensor  # [batch, length, dim]
    rows: Tensor  # [n], flat indices of the positions that predict answer tokens
    top_ids: Tensor  # [n, k], in the reduced vocabulary, -1 outside it
    top_probs: Tensor  # [n, k]
    final_rows: Tensor  # [m], those of `rows` whose last state in the target is known
    finals: Tensor  # [m, dim], that state


def make_batch(data: Sequences, states: list[Tensor], chosen: list[int], reduced: Tensor) -> Batch:
    """Put the chosen sequences together. `reduced` maps target ids to reduced ids, or -1."""
    length = max(len(data.ids[i]) for i in chosen)
    dim = states[0].shape[1]
    hidden = torch.zeros(len(chosen), length, dim, dtype=states[0].dtype)
    rows, ids, probs, final_rows, finals = [], [], [], [], []
    for b, i in enumerate(chosen):
        hidden[b, : len(states[i])] = states[i]
        first = data.num_prompt[i] - 1
        rows.append(b * length + first + torch.arange(len(data.top_ids[i])))
        ids.append(reduced[data.top_ids[i].long()])
        probs.append(data.top_logprobs[i].float().exp())
        if len(data.finals[i]):
            final_rows.append(rows[-1])
            finals.append(data.finals[i])
    return Batch(
        hidden, torch.cat(rows), torch.cat(ids), torch.cat(probs),
        torch.cat(final_rows) if finals else torch.zeros(0, dtype=torch.long),
        torch.cat(finals).float() if finals else torch.zeros(0, dim),
    )  # fmt: skip
