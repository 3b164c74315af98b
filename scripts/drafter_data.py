"""Text that the target writes itself, with its top logits and last states kept: the training data of a drafter.

Three kinds of prompts: those that the target writes too, given only the opening of a user turn (as in Magpie, Xu et al.
2024); forms and subjects (`scripts/drafter_prompts.py`); and forms over passages of the shard's own answers. Half are
answered greedily, half at temperature 0.8. Each shard is one `.npz`, written atomically and named by its number; a
second call goes on after the last shard. Deterministic for a seed.

    python scripts/drafter_data.py --model DIR --out DIR --shards 16
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.batch_writer import BatchWriter, Job, Written
from scripts.drafter_prompts import Prompts, heldout_runs, overlaps

OPENINGS = (
    # Most prompts are the model's own; the openings make sure that the kinds of the held-out set are written too.
    "", "", "", "", "Write a Python function", "Summarize the following text:", "Translate the following sentence",
    "Explain", "How do I", "What is", "Write a short story about", "Give me a list of",
)  # fmt: skip


class Chat:
    """User turns under the checkpoint's own chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        marker = "\x00"
        message = [{"role": "user", "content": marker}]
        text: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        before, _, after = text.partition(marker)
        self.prefix = self._ids(before)
        self._suffix = self._ids(after)
        self.end = self._suffix[0]

    def opening(self, text: str) -> list[int]:
        """An unfinished user turn."""
        return self.prefix + self._ids(text)

    def prompt(self, turn: str) -> list[int]:
        """A whole user turn, and the opening of the answer."""
        return self.finished(self.opening(turn))

    def finished(self, opened: list[int]) -> list[int]:
        """The same for a turn that is there as ids, with or without its end."""
        return (opened[:-1] if opened[-1] == self.end else opened) + self._suffix

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids


def jobs_of(prompts: list[list[int]], args: argparse.Namespace) -> list[Job]:
    """Answers wanted to the prompts that are not too long, every second one greedy."""
    fitting = [prompt for prompt in prompts if len(prompt) + args.max_answer <= args.capacity]
    return [Job(prompt, 0.0 if i % 2 == 0 else 0.8, args.max_answer) for i, prompt in enumerate(fitting)]


def without_heldout(turns: list[list[int]], tokenizer: Any) -> list[list[int]]:
    """The user turns that share no run of words with a held-out prompt: the target may well write one."""
    forbidden = heldout_runs()
    return [turn for turn in turns if not overlaps(tokenizer.decode(turn, skip_special_tokens=True), forbidden)]


def write_shard(writer: BatchWriter, chat: Chat, tokenizer: Any, seed: int, args: argparse.Namespace) -> Any:
    """The jobs of one shard with their answers: own and made prompts first, then prompts over those answers."""
    prompts = Prompts(seed)
    num_own = round(args.texts * args.own)
    num_over = round(args.texts * args.over)
    openings = [chat.opening(OPENINGS[(seed + i) % len(OPENINGS)]) for i in range(num_own)]
    asked = writer.write([Job(opening, 1.0, args.max_prompt) for opening in openings])
    turns = [opening[len(chat.prefix) :] + text.tokens for opening, text in zip(openings, asked, strict=True)]
    own = [chat.finished(chat.prefix + turn) for turn in without_heldout(turns, tokenizer)]
    direct = [chat.prompt(text) for text in prompts.direct(args.texts - num_own - num_over)]
    jobs = jobs_of(own + direct, args)
    answers = writer.write(jobs)
    texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    later = jobs_of([chat.prompt(text) for text in prompts.over(texts, num_over)], args)
    return jobs + later, answers + writer.write(later)


def save_shard(path: Path, jobs: list[Job], answers: list[Written], *, keep_states: bool) -> int:
    """Write the file; returns the number of answer tokens."""
    lengths = np.array([[len(j.prompt), len(a.tokens)] for j, a in zip(jobs, answers, strict=True)], dtype=np.int32)
    arrays = {
        "ids": np.concatenate([np.array(j.prompt + a.tokens, np.int32) for j, a in zip(jobs, answers, strict=True)]),
        "lengths": lengths,
        "temperatures": np.array([job.temperature for job in jobs], dtype=np.float32),
        "top_ids": torch.cat([a.top_ids for a in answers]).numpy(),
        "top_logprobs": torch.cat([a.top_logprobs for a in answers]).numpy(),
    }
    if keep_states:
        arrays["states"] = torch.cat([a.states for a in answers]).numpy()
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)
    return int(lengths[:, 1].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="target checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--shards", type=int, default=16, help="write until there are so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first shard, for a second process")
    parser.add_argument("--texts", type=int, default=1024, help="of a shard")
    parser.add_argument("--own", type=float, default=0.25, help="share of the prompts that the target writes itself")
    parser.add_argument("--over", type=float, default=0.25, help="share of the prompts over passages of the answers")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--max-prompt", type=int, default=80, help="most tokens of a prompt the target writes")
    parser.add_argument("--max-answer", type=int, default=128)
    parser.add_argument("--capacity", type=int, default=288, help="most tokens of prompt and answer")
    parser.add_argument("--states", action="store_true", help="keep the target's last states too, 1 KB a token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", help="of the target while it writes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    chat = Chat(tokenizer)
    generator = torch.Generator()
    writer = BatchWriter(
        model, batch=args.batch, capacity=args.capacity, prefix=chat.prefix, stop=chat.end, generator=generator
    )
    args.out.mkdir(parents=True, exist_ok=True)
    for shard in range(args.first, args.first + args.shards):
        path = args.out / f"shard-{args.seed:04d}-{shard:05d}.npz"
        if path.exists():
            continue
        started = time.monotonic()
        seed = args.seed * 1_000_003 + shard
        generator.manual_seed(seed)
        jobs, answers = write_shard(writer, chat, tokenizer, seed, args)
        tokens = save_shard(path, jobs, answers, keep_states=args.states)
        seconds = time.monotonic() - started
        print(f"shard {shard}: {tokens} answer tokens in {seconds:.0f} s ({tokens / seconds:.0f}/s)", flush=True)


if __name__ == "__main__":
    main()
