"""Text that the target writes itself, with its top logits kept: the training data of a drafter.

The target is given only the opening of a user turn and writes the prompt too (as in Magpie, Xu et al. 2024), then
answers it, half of the batches greedily and half at temperature 0.8. Each batch is one `.npz` shard, written atomically
and named by its number; a second call goes on after the last shard. Deterministic for a seed.

    python scripts/drafter_data.py --model DIR --out DIR --shards 100
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

TOP_LOGITS = 16
OPENINGS = (
    # Most prompts are the model's own; the openings make sure that the kinds of the held-out set are written too.
    "", "", "", "", "Write a Python function", "Summarize the following text:", "Translate the following sentence",
    "Explain", "How do I", "What is", "Write a short story about", "Give me a list of",
)  # fmt: skip


def user_opening(tokenizer: Any, opening: str) -> list[int]:
    """Ids of an unfinished user turn under the checkpoint's own chat template."""
    marker = "\x00"
    text = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    ids: list[int] = tokenizer(text.split(marker)[0] + opening, add_special_tokens=False).input_ids
    return ids


class Writer:
    """Batched decoding of a causal LM with the top logits of every position written."""

    def __init__(self, model: Any, pad: int, stop: int, generator: torch.Generator) -> None:
        self.model = model
        self.pad = pad
        self.stop = stop
        self.generator = generator

    @torch.inference_mode()
    def write(
        self, prompts: list[list[int]], *, max_new: int, temperature: float, keep_logits: bool
    ) -> tuple[list[list[int]], Any, Any]:
        """Continue each prompt to its stop id or `max_new` tokens.

        Returns (ids [batch][...], top ids [batch, max_new, TOP_LOGITS], top log-probabilities, same shape).
        """
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        position = (mask.cumsum(1) - 1).clamp_min(0)
        cache = DynamicCache()
        new: list[torch.Tensor] = []
        top_ids, top_logprobs = [], []
        alive = torch.ones(len(prompts), dtype=torch.bool)
        step_ids, step_position = ids, position
        for _ in range(max_new):
            out = self.model(
                input_ids=step_ids, attention_mask=mask, position_ids=step_position, past_key_values=cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            logits = out.logits[:, -1].float()
            if keep_logits:
                best, index = torch.log_softmax(logits, -1).topk(TOP_LOGITS)
                top_ids.append(index.to(torch.int32))
                top_logprobs.append(best.to(torch.float16))
            if temperature > 0:
                probs = torch.softmax(logits / temperature, -1)
                token = torch.multinomial(probs, 1, generator=self.generator)[:, 0]
            else:
                token = logits.argmax(-1)
            token = torch.where(alive, token, self.pad)
            new.append(token)
            alive &= token != self.stop
            if alive.sum() <= len(prompts) // 8:
                break
            mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], 1)
            step_ids = token[:, None]
            step_position = mask.sum(1, keepdim=True) - 1
        answers = torch.stack(new, 1).tolist()
        for row in answers:
            if self.stop in row:
                del row[row.index(self.stop) + 1 :]
        kept = (torch.stack(top_ids, 1).numpy(), torch.stack(top_logprobs, 1).numpy()) if keep_logits else (None, None)
        return answers, *kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="target checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--shards", type=int, default=100, help="write until there are so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first shard, for a second process")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--max-prompt", type=int, default=80, help="most tokens of a prompt the target writes")
    parser.add_argument("--max-answer", type=int, default=224)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the target while it writes; bfloat16 is 4 x as fast here"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
    args.out.mkdir(parents=True, exist_ok=True)
    turn = tokenizer("\n<|im_start|>assistant\n", add_special_tokens=False).input_ids
    for shard in range(args.first, args.first + args.shards):
        path = args.out / f"shard-{args.seed:04d}-{shard:05d}.npz"
        if path.exists():
            continue
        started = time.monotonic()
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + shard)
        writer = Writer(model, pad=end, stop=end, generator=generator)
        openings = [
            user_opening(tokenizer, OPENINGS[(shard * args.batch + i) % len(OPENINGS)]) for i in range(args.batch)
        ]
        asked, _, _ = writer.write(openings, max_new=args.max_prompt, temperature=1.0, keep_logits=False)
        prompts = [
            opening + (turn_ids if turn_ids[-1] == end else [*turn_ids, end]) + turn
            for opening, turn_ids in zip(openings, asked, strict=True)
        ]
        temperature = 0.0 if shard % 2 == 0 else 0.8
        answers, top_ids, top_logprobs = writer.write(
            prompts, max_new=args.max_answer, temperature=temperature, keep_logits=True
        )
        flat = np.concatenate([np.array(p + a, dtype=np.int32) for p, a in zip(prompts, answers, strict=True)])
        lengths = np.array([[len(p), len(a)] for p, a in zip(prompts, answers, strict=True)], dtype=np.int32)
        rows = [slice(0, len(a)) for a in answers]
        partial = path.with_suffix(".partial.npz")
        np.savez(
            partial,
            ids=flat,
            lengths=lengths,
            temperature=np.float32(temperature),
            top_ids=np.concatenate([top_ids[i, r] for i, r in enumerate(rows)]),
            top_logprobs=np.concatenate([top_logprobs[i, r] for i, r in enumerate(rows)]),
        )
        os.replace(partial, path)
        tokens = int(lengths[:, 1].sum())
        seconds = time.monotonic() - started
        print(f"shard {shard}: {tokens} answer tokens in {seconds:.0f} s ({tokens / seconds:.0f}/s)", flush=True)


if __name__ == "__main__":
    main()
