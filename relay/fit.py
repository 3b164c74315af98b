"""Which draft and verify nodes can serve together."""

from __future__ import annotations

from wire.messages import ModelIdentity


def misfit(draft: ModelIdentity, verify: ModelIdentity) -> str | None:
    """Why the two cannot serve together, naming model, tokenizer and protocol of both sides; None if they can.

    Only token ids cross the wire, so the tokenizers must be the same to the last token; logits may be padded to
    different widths. One model in two revisions, or a drafter made for another revision of the target, would work and
    be slow for no visible reason: that is refused as well.
    """
    causes = []
    if draft.tokenizer != verify.tokenizer:
        causes.append("their tokenizers differ")
    if draft.vocab_size != verify.vocab_size:
        causes.append(f"their vocabularies have {draft.vocab_size} and {verify.vocab_size} ids")
    if draft.name == verify.name and draft.revision != verify.revision:
        causes.append("they are different revisions of one model")
    name, _, revision = draft.drafts_for.partition("@")
    if name == verify.name and revision not in ("", verify.revision):
        causes.append(f"the drafter was made for revision {revision}")
    if not causes:
        return None
    return f"draft model {draft} does not fit verify model {verify}: {'; '.join(causes)}"
