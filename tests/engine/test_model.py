import math
import random

import pytest
import torch
from torch import Tensor

from engine.errors import CacheError
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.rows import SlotRows
from engine.selfcheck import self_check

VOCAB = 320


def make_model(lm: CausalLM, *, num_slots: int = 2, max_length: int = 96, max_tree_rows: int = 24) -> CachedModel:
    return CachedModel(lm, num_slots=num_slots, max_length=max_length, max_tree_rows=max_tree_rows)


def poison_stale(model: CachedModel) -> None:
    """Put NaN in every row that is not in use."""
    for slot, rows in enumerate(model.rows):
        model.cache.fill(slot, rows.used, model.cache.capacity, math.nan)


def fresh_logits(lm: CausalLM, tokens: list[int]) -> Tensor:
    """Logits of the last token of a sequence, from an empty cache."""
    return make_model(lm, num_slots=1).forward(0, tokens, num_committed=len(tokens), num_logits=1)[0]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    scale = max(1.0, expected.abs().max().item())
    assert (actual - expected).abs().max().item() <= 1e-5 * scale


def test_logits_are_those_of_the_model_without_our_cache(lm: CausalLM) -> None:
    tokens = [5, 9, 200, 31, 7]
    with torch.inference_mode():
        expected = lm.model(input_ids=torch.tensor([tokens])).logits[0]
    model = make_model(lm)
    assert_close(model.forward(0, tokens, num_committed=5), expected)
    assert_close(model.forward(1, tokens[:2], num_committed=2), expected[:2])
    assert_close(model.forward(1, tokens[2:], num_committed=3, num_logits=2), expected[3:])


def test_each_tree_row_sees_its_own_path_only(lm: CausalLM) -> None:
    prefix, tree = [5, 9, 200], [11, 12, 13, 14, 15, 16]
    parents = [2, 3, 3, 5, 2, 7]
    paths = [[11], [11, 12], [11, 13], [11, 13, 14], [15], [15, 16]]
    model = make_model(lm)
    model.forward(0, prefix, num_committed=3)
    logits = model.forward(0, tree, parents=parents)
    for row, path in zip(logits, paths, strict=True):
        assert_close(row, fresh_logits(lm, prefix + path))


def test_committed_and_tree_rows_of_one_pass_fit_together(lm: CausalLM) -> None:
    model = make_model(lm)
    model.forward(0, [5], num_committed=1)
    logits = model.forward(0, [9, 200, 11, 12, 13], num_committed=2, parents=[2, 2, 4], num_logits=4)
    for row, path in zip(logits, ([], [11], [12], [12, 13]), strict=True):
        assert_close(row, fresh_logits(lm, [5, 9, 200, *path]))


def test_c022_logits_after_rejections_equal_a_fresh_cache_at_the_same_addresses(lm: CausalLM) -> None:
    model = make_model(lm)
    before = model.cache.addresses()
    tokens = [5, 9, 200]
    model.forward(0, tokens, num_committed=3)
    model.forward(0, [21, 22, 23, 24], parents=[2, 3, 4, 5])
    model.keep(0, [3])
    poison_stale(model)
    assert_close(model.forward(0, [30], num_committed=1)[0], fresh_logits(lm, [*tokens, 21, 30]))
    model.rewind(0, 2)
    poison_stale(model)
    assert_close(model.forward(0, [31], num_committed=1)[0], fresh_logits(lm, [*tokens, 31]))
    assert model.cache.addresses() == before


def test_c022_random_work_on_two_slots_equals_a_fresh_cache_and_never_reads_stale_rows(lm: CausalLM) -> None:
    rng = random.Random(11)
    model = make_model(lm)
    addresses = model.cache.addresses()
    committed: list[list[int]] = [[], []]
    tree: list[list[list[int]]] = [[], []]  # tokens from the root to each tree row
    for _ in range(250):
        slot = rng.randrange(2)
        poison_stale(model)
        rows = model.rows[slot]
        match rng.choice(["extend", "append", "append", "keep", "rewind", "clear"] if committed[slot] else ["extend"]):
            case "extend" if not rows.tree:
                new = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
                logits = model.forward(slot, new, num_committed=len(new), num_logits=1)
                committed[slot] += new
                assert_close(logits[0], fresh_logits(lm, committed[slot]))
            case "append" if rows.used - rows.length < 16:
                parents, new = [], [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
                for token in new:
                    parent = rng.randrange(-1, len(tree[slot]))
                    parents.append(rows.length + parent)
                    tree[slot].append([*(tree[slot][parent] if parent >= 0 else []), token])
                logits = model.forward(slot, new, parents=parents)
                for row, path in zip(logits, tree[slot][-len(new) :], strict=True):
                    assert_close(row, fresh_logits(lm, committed[slot] + path))
            case "keep" if tree[slot]:
                end = rng.choice(tree[slot])
                path = [i for i, own in enumerate(tree[slot]) if own == end[: len(own)]]
                path = [next(i for i in path if len(tree[slot][i]) == n + 1) for n in range(len(end))]
                below = [i for i, own in enumerate(tree[slot]) if i > path[-1] and _descends(rows, path[-1], i)]
                model.keep(slot, [rows.length + i for i in path], [rows.length + i for i in below])
                committed[slot] += end
                tree[slot] = [tree[slot][i][len(end) :] for i in below]
            case "rewind" if not rows.tree:
                num = rng.randint(0, min(3, rows.length - 1))
                model.rewind(slot, num)
                committed[slot] = committed[slot][: len(committed[slot]) - num]
            case "clear" if rows.used > 60:
                model.clear(slot)
                committed[slot], tree[slot] = [], []
        if model.rows[slot].used > 60:
            model.clear(slot)
            committed[slot], tree[slot] = [], []
    assert model.cache.addresses() == addresses


def _descends(rows: SlotRows, above: int, row: int) -> bool:
    return bool(rows.tree[row].ancestors >> above & 1)


def test_c026_a_tree_pass_and_single_rows_choose_the_same_tokens(lm: CausalLM) -> None:
    """The best score of every row, alone and with up to eight others, over prompts of different lengths."""
    rng = random.Random(3)
    for prompt in range(25):
        alone, together = make_model(lm, num_slots=1), make_model(lm, num_slots=1)
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 40))]
        for model in (alone, together):
            model.forward(0, tokens, num_committed=len(tokens), num_logits=1)
        for num in range(1, 9):
            new = [rng.randrange(VOCAB) for _ in range(num)]
            one_by_one = [alone.forward(0, [token], num_committed=1)[0].argmax().item() for token in new]
            length = together.rows[0].length
            other = [(token + 1) % VOCAB for token in new]  # a second branch, to be ignored
            parents = [length - 1 + i for i in range(num)]
            logits = together.forward(0, new + other, parents=[*parents, *[length - 1] * num])
            assert logits[:num].argmax(-1).tolist() == one_by_one, f"prompt {prompt}, {num} rows"
            together.keep(0, list(range(length, length + num)))


def test_a_pass_that_does_not_fit_changes_nothing(lm: CausalLM) -> None:
    model = make_model(lm, max_length=8, max_tree_rows=4)
    model.forward(0, [1, 2, 3], num_committed=3)
    with pytest.raises(CacheError, match="beyond the limit"):
        model.forward(0, [1] * 6, num_committed=6)
    with pytest.raises(CacheError, match="parent"):
        model.forward(0, [4, 5], num_committed=1, parents=[9])
    with pytest.raises(CacheError, match="one for each row"):
        model.forward(0, [4, 5], num_committed=1)
    assert model.rows[0].used == 3
    assert_close(model.forward(0, [4], num_committed=1)[0], fresh_logits(model._lm, [1, 2, 3, 4]))


def test_a_failed_pass_leaves_the_bookkeeping_as_it_was(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(lm)
    model.forward(0, [1, 2, 3], num_committed=3)

    def fail(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model._passes, "run", fail)
    with pytest.raises(RuntimeError, match="memory"):
        model.forward(0, [4, 5], num_committed=1, parents=[3])
    assert (model.rows[0].length, model.rows[0].used) == (3, 3)


def test_logits_belong_to_the_caller(lm: CausalLM) -> None:
    model = make_model(lm)
    first = model.forward(0, [1, 2], num_committed=2)
    copy = first.clone()
    model.forward(0, [3, 4], num_committed=2)
    assert first.dtype == torch.float32
    assert torch.equal(first, copy)


def test_tree_attention_is_checked_at_load_and_leaves_the_slot_empty(lm: CausalLM) -> None:
    model = make_model(lm)
    self_check(model)
    assert model.rows[0].used == 0
