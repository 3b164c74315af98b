"""Record what a target answers to held-out prompts, and what a drafter would have proposed, for `scripts/bench.py`.

Greedy answers; at each position the target's most probable tokens and the drafter's children, teacher-forced along
the answer. Prompts whose answer is shorter than `--min-tokens` are passed over.

    python scripts/record_answers.py --target DIR --drafter distilled:models/... --out recordings.json.gz
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.checkpoint import Checkpoint, choose_format
from engine.distilled import load_distilled
from engine.drafter import HFDrafter
from engine.model import CachedModel
from engine.replay import Recording, save_recordings
from engine.runner import DraftRunner, TargetRunner
from engine.target import HFTarget
from scripts.heldout import heldout_prompts
from speculation.local import NUM_TOPS
from speculation.passes import DraftResult, DraftStep, NodeRow, Sampling, VerifyPass, VerifyResult

NUM_CHILDREN = 8


def write_answer(
    target: TargetRunner, prompt: tuple[int, ...], *, max_tokens: int, stop_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The target's own answer with its tops at each position; the stop token is its last."""
    target.open(0, sampling=Sampling(), tokens=prompt, num_prompt=len(prompt), stop_ids=stop_ids)
    try:
        target.prefill(0, 0, len(prompt) - 1)
        tokens = list(prompt)
        tops: list[tuple[int, ...]] = []
        while len(tokens) < len(prompt) + max_tokens and not (len(tokens) > len(prompt) and tokens[-1] in stop_ids):
            request = VerifyPass(
                slot=0, start=len(tokens), tokens=(tokens[-1],), parents=(-1,), max_tokens=1, num_tops=NUM_TOPS
            )
            (result,) = target.verify([request])
            if not isinstance(result, VerifyResult):
                raise result
            tokens += result.tokens
            tops += result.tops
    finally:
        target.close(0)
    return tuple(tokens[len(prompt) :]), tuple(tops)


def draft_along(
    drafter: DraftRunner, prompt: tuple[int, ...], answer: tuple[int, ...]
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The drafter's children behind each prefix of the answer."""
    drafter.open(0, sampling=Sampling(), num_prompt=len(prompt))
    drafted = []
    try:
        accepted: tuple[int, ...] = ()
        for i in range(len(answer)):
            step = DraftStep(
                slot=0, accepted=accepted, keep=frozenset(), num_children=NUM_CHILDREN,
                commit_start=0 if i == 0 else len(prompt) + i - 1, commit=prompt if i == 0 else (),
                nodes=() if i == 0 else (NodeRow(node=i, parent=-1, token=answer[i - 1]),), expand_root=i == 0,
            )  # fmt: skip
            (result,) = drafter.step([step])
            if not isinstance(result, DraftResult):
                raise result
            children = result.children[-1 if i == 0 else i]
            drafted.append(tuple((child.token, child.logprob) for child in children))
            accepted = () if i == 0 else (i,)
    finally:
        drafter.close(0)
    return tuple(drafted)


def record(
    target_dir: str, drafter_dir: Path | None, *, per_kind: int, min_tokens: int, max_tokens: int
) -> list[Recording]:
    """Recordings of held-out prompts, `per_kind` of each kind if there are as many with long enough answers."""
    checkpoint = Checkpoint(target_dir, max_length=1024)
    vocab_size = checkpoint.tokenizer.vocab_size
    target = HFTarget(
        CachedModel(checkpoint.load(), num_slots=1, max_length=1024, max_tree_rows=1), vocab_size=vocab_size
    )
    drafter = None
    if drafter_dir is not None:
        dtype, device = choose_format("auto", on_cpu="int8")
        lm = load_distilled(drafter_dir, checkpoint, dtype=dtype, device=device)
        model = CachedModel(lm, num_slots=1, max_length=1024, max_tree_rows=8)
        drafter = HFDrafter(model, vocab_size=vocab_size)
    stop_ids = checkpoint.identity().stop_ids
    recordings: list[Recording] = []
    have: Counter[str] = Counter()
    for kind, text in heldout_prompts():
        if have[kind] >= per_kind:
            continue
        prompt = tuple(checkpoint.tokenizer.encode_chat([{"role": "user", "content": text}]))
        answer, tops = write_answer(target, prompt, max_tokens=max_tokens, stop_ids=stop_ids)
        if len(answer) < min_tokens:
            continue
        drafted = draft_along(drafter, prompt, answer) if drafter is not None else ()
        recordings.append(Recording(kind=kind, prompt=prompt, answer=answer, tops=tops, drafted=drafted))
        have[kind] += 1
        print(f"{kind} {have[kind]}: {len(answer)} tokens", file=sys.stderr, flush=True)
    return recordings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="checkpoint directory")
    parser.add_argument("--drafter", type=Path, help="folder of a drafter distilled for it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-kind", type=int, default=4)
    parser.add_argument("--min-tokens", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=192)
    args = parser.parse_args()
    torch.set_num_threads(1)
    recordings = record(
        args.target, args.drafter, per_kind=args.per_kind, min_tokens=args.min_tokens, max_tokens=args.max_tokens
    )
    save_recordings(args.out, recordings)


if __name__ == "__main__":
    main()
