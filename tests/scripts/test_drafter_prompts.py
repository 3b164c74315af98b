"""Training prompts are varied, the same for a seed, and share nothing with the held-out ones."""

from __future__ import annotations

from scripts.drafter_prompts import Prompts, heldout_runs, overlaps, words_of
from scripts.heldout import heldout_prompts

PASSAGES = [prompt.partition(": ")[2] for kind, prompt in heldout_prompts() if kind in ("summary", "translation")]
OWN = "The river is long and deep. Boats carry grain to the city in spring. Nobody remembers when the mill was built."


def test_no_prompt_shares_eight_words_in_a_row_with_a_held_out_one() -> None:
    prompts = Prompts(3)
    # Held-out passages as if the target had written them: they must be thrown out.
    made = [*prompts.direct(4000), *prompts.over([OWN, *PASSAGES], 400)]
    held = {" ".join(words_of(prompt)) for _, prompt in heldout_prompts()}
    seen = {run for prompt in held for run in zip(*(prompt.split()[i:] for i in range(8)), strict=False)}
    for prompt in made:
        words = words_of(prompt)
        assert " ".join(words) not in held
        assert not any(tuple(words[i : i + 8]) in seen for i in range(len(words)))
    assert any("boats carry grain" in prompt.lower() for prompt in made)


def test_an_overlap_is_noticed() -> None:
    assert overlaps("Hello! The harbour of the old town was deepened in 1887, I heard.", heldout_runs())
    assert overlaps("why do cats purr", heldout_runs())
    assert not overlaps("Why do dogs bark?", heldout_runs())


def test_prompts_are_varied_and_follow_the_seed() -> None:
    assert Prompts(1).direct(50) == Prompts(1).direct(50)
    assert Prompts(1).direct(50) != Prompts(2).direct(50)
    assert len(set(Prompts(1).direct(1000))) > 800
