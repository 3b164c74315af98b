from __future__ import annotations

from dataclasses import replace

from relay.fit import misfit
from wire.messages import ModelIdentity


def test_same_tokenizer_and_vocabulary_fit(target: ModelIdentity, drafter: ModelIdentity) -> None:
    assert misfit(drafter, target) is None
    assert misfit(target, target) is None


def test_context_length_and_stop_ids_may_differ(target: ModelIdentity, drafter: ModelIdentity) -> None:
    assert misfit(replace(drafter, context_length=64, stop_ids=(1,)), replace(target, stop_ids=(1, 2))) is None


def test_c018_another_tokenizer_is_named_on_both_sides(target: ModelIdentity, drafter: ModelIdentity) -> None:
    reason = misfit(replace(drafter, tokenizer="cd" * 32), target)
    assert reason is not None
    for part in ("drafter@1", "cdcdcdcdcdcd", "target@1", "abababababab", "tokenizers differ"):
        assert part in reason
    assert reason.count("protocol 1") == 2


def test_c018_another_vocabulary_size_does_not_fit(target: ModelIdentity, drafter: ModelIdentity) -> None:
    assert "256 ids" in (misfit(replace(drafter, vocab_size=255), target) or "")


def test_c018_another_revision_of_the_same_model_does_not_fit(target: ModelIdentity) -> None:
    assert "revisions" in (misfit(replace(target, revision="2"), target) or "")


def test_c018_a_drafter_for_another_revision_does_not_fit(target: ModelIdentity, drafter: ModelIdentity) -> None:
    assert "made for revision 2" in (misfit(replace(drafter, drafts_for="target@2"), target) or "")
    assert misfit(replace(drafter, drafts_for="target@1"), target) is None
    assert misfit(replace(drafter, drafts_for="target"), target) is None


def test_a_drafter_made_for_another_model_fits(target: ModelIdentity, drafter: ModelIdentity) -> None:
    assert misfit(replace(drafter, drafts_for="other@2"), target) is None
