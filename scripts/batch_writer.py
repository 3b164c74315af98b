"""Many texts written at once by one causal LM on a CPU, with the top logits and last states of every position kept.

`generate()` in batches of 96 writes 80 tokens a second on one core: padded prompts, a cache that is copied as it grows,
and rows that have ended are computed until the last has. Here each sequence has a slot of fixed storage, a pass takes
one new token of each live one through the packed products, and a slot that is free is taken by the next prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.lean import LeanForward, Part

TOP_LOGITS = 16
CANDIDATES = 32
"""Sampling chooses among so many; at temperature 0.8 hardly anything lies beyond."""


@dataclass(frozen=True, slots=True)
class Job:
    """A text to be continued until a stop id or `max_new` tokens."""

    prompt: list[int]
    temperature: float
    max_new: int


@dataclass(slots=True)
class Written:
    """A continuation of n tokens, and what the model said at each position."""

    tokens: list[int]
    top_ids: Tensor  # [n, TOP_LOGITS], int32, best first
    top_logprobs: Tensor  # [n, TOP_LOGITS], float16
    states: Tensor  # [n, hidden], float16: the normed last state that the logits came from


@dataclass(slots=True)
class _Live:
    job: Job
    index: int  # of the job
    tokens: list[int]  # prompt and continuation

    @property
    def num_new(self) -> int:
        return len(self.tokens) - len(self.job.prompt)


class BatchWriter(LeanForward):
    """Continues prompts that all begin with `prefix`, `batch` at a time, none longer than `capacity` tokens.

    Deterministic for the generator's seed and the jobs.
    """

    @torch.inference_mode()
    def __init__(
        self, model: Any, *, batch: int, capacity: int, prefix: list[int], stop: int, generator: torch.Generator
    ) -> None:
        super().__init__(model)
        self.reserve(capacity)
        self._prefix, self._stop, self._generator = prefix, stop, generator
        self._head_rows = model.get_output_embeddings().weight.detach()
        self._capacity = capacity
        shape = (batch, self.num_kv_heads, capacity, self.head_dim)
        dtype = self.embeddings.dtype
        # Keys lie with positions last, as the product with the queries wants them: a third of the time.
        self._keys = [torch.zeros(shape, dtype=dtype).transpose(2, 3).contiguous() for _ in self.layers]
        self._values = [torch.zeros(shape, dtype=dtype) for _ in self.layers]
        self._top_ids = torch.zeros(batch, capacity, TOP_LOGITS, dtype=torch.int32)
        self._top_logprobs = torch.zeros(batch, capacity, TOP_LOGITS, dtype=torch.float16)
        self._states = torch.zeros(batch, capacity, self.embeddings.shape[1], dtype=torch.float16)
        if prefix:
            self._prefill(0, prefix, 0)
            for slot in range(1, batch):
                self._move(0, slot)

    @torch.inference_mode()
    def write(self, jobs: Sequence[Job]) -> list[Written]:
        """Continue all jobs; results in their order."""
        for job in jobs:
            if len(job.prompt) + job.max_new > self._capacity:
                raise ValueError(
                    f"prompt + max_new must be at most {self._capacity}, got {len(job.prompt)} + {job.max_new}"
                )
            if job.prompt[: len(self._prefix)] != self._prefix:
                raise ValueError("every prompt must begin with the common prefix")
        written: dict[int, Written] = {}
        waiting = iter(enumerate(jobs))
        live: list[_Live] = []
        while True:
            while len(live) < len(self._top_ids) and (entry := next(waiting, None)):
                index, job = entry
                self._prefill(len(live), job.prompt[:-1], len(self._prefix))
                live.append(_Live(job, index, list(job.prompt)))
            if not live:
                return [written[i] for i in range(len(jobs))]
            for row, token in zip(live, self._choose(live), strict=True):
                row.tokens.append(token)
            for slot in reversed(range(len(live))):
                row = live[slot]
                if row.tokens[-1] != self._stop and row.num_new < row.job.max_new:
                    continue
                n = row.num_new
                written[row.index] = Written(
                    row.tokens[len(row.job.prompt) :],
                    self._top_ids[slot, :n].clone(),
                    self._top_logprobs[slot, :n].clone(),
                    self._states[slot, :n].clone(),
                )
                last = live.pop()
                if slot < len(live):
                    self._move(len(live), slot)
                    live[slot] = last

    def _prefill(self, slot: int, tokens: list[int], first: int) -> None:
        """Fill the slot's cache with tokens[first:]."""
        n, length = len(tokens) - first, len(tokens)
        if n > 0:  # a prompt that is the prefix alone has its last token decoded again
            self(
                torch.tensor(tokens[first:]), torch.arange(first, length),
                [Part(
                    torch.ones(n, length, dtype=torch.bool).tril(first),
                    [keys[slot].transpose(1, 2) for keys in self._keys], [values[slot] for values in self._values],
                    num_logits=1,
                )],
            )  # fmt: skip

    def _move(self, source: int, slot: int) -> None:
        for store in (*self._keys, *self._values, self._top_ids, self._top_logprobs, self._states):
            store[slot] = store[source]

    def _choose(self, live: list[_Live]) -> list[int]:
        """One pass over the last token of each; keeps what the model said and returns the next tokens."""
        positions = torch.tensor([len(row.tokens) - 1 for row in live])
        states = self._decode(torch.tensor([row.tokens[-1] for row in live]), positions)
        logits = self.head(states)
        rough, ids = logits.topk(min(CANDIDATES, logits.shape[1]))
        total = rough[:, 0].float() - logits.log_softmax(-1, dtype=torch.float32).amax(-1)  # log of the sum of exp
        # bfloat16 logits are an eighth apart: the best are computed again in float32.
        exact = torch.bmm(self._head_rows[ids].float(), states.float()[:, :, None])[:, :, 0]
        logprobs, order = (exact - total[:, None]).sort(-1, descending=True)
        ids = ids.gather(1, order)
        slots, news = torch.arange(len(live)), torch.tensor([row.num_new for row in live])
        self._top_ids[slots, news] = ids[:, :TOP_LOGITS].to(torch.int32)
        self._top_logprobs[slots, news] = logprobs[:, :TOP_LOGITS].to(torch.float16)
        self._states[slots, news] = states.to(torch.float16)
        # Sampling as the argmax of logits with Gumbel noise, scaled by the temperature: none at 0.
        noise = -torch.empty(logprobs.shape).exponential_(generator=self._generator).log_()
        best = (logprobs + noise * torch.tensor([[row.job.temperature] for row in live])).argmax(-1)
        chosen: list[int] = ids.gather(1, best[:, None])[:, 0].tolist()
        return chosen

    def _decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Token i at its position in slot i, for the first n slots -> normed last states [n, hidden]."""
        n, longest = len(tokens), int(positions.max()) + 1
        heads, kv, dim, group = self.num_heads, self.num_kv_heads, self.head_dim, self.group
        half, slots = dim // 2, torch.arange(n)
        cos, sin = self._cos[positions], self._sin[positions]  # [n, 1, D]
        hidden = self.embeddings[tokens]
        unseen = torch.zeros(n, longest, dtype=hidden.dtype)
        unseen.masked_fill_(torch.arange(longest) > positions[:, None], float("-inf"))
        unseen = unseen[:, None, None].expand(n, kv, group, longest).reshape(n * kv, group, longest)
        for layer, keys, values in zip(self.layers, self._keys, self._values, strict=True):
            qkv = layer.qkv(self._rms_norm(hidden, layer.input_norm)).view(n, heads + 2 * kv, dim)
            to_turn = qkv[:, : heads + kv]
            turned = to_turn * cos
            turned[..., :half].addcmul_(to_turn[..., half:], sin[..., :half])
            turned[..., half:].addcmul_(to_turn[..., :half], sin[..., half:])
            keys[slots, :, :, positions] = turned[:, heads:]
            values[slots, :, positions] = qkv[:, heads + kv :]
            queries = turned[:, :heads].reshape(n * kv, group, dim)
            scores = torch.baddbmm(
                unseen, queries, keys[:n].flatten(0, 1)[:, :, :longest], alpha=self.scale
            )  # [n K, group, longest]
            mixed = torch.bmm(scores.softmax(-1), values[:n].flatten(0, 1)[:, :longest])
            hidden = hidden + layer.out(mixed.view(n, heads * dim))
            gate, up = layer.gate_up(self._rms_norm(hidden, layer.post_norm)).chunk(2, -1)
            hidden = hidden + layer.down(functional.silu(gate).mul_(up))
        return self._rms_norm(hidden, self.norm)
