"""The target model: scores the pending token and candidates in one pass, and walks them with its own tokens.

Between passes a slot's cache holds the committed tokens without the last one, the pending token: row i is position i,
for i below committed length - 1, and there are no tree rows. A pass adds the pending token as row 0 and the
candidates behind it; afterwards row 0 and the accepted rows are moved together, the others are forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from engine.errors import CacheError, NumericalError, is_of_all
from engine.model import CachedModel, NewRows
from engine.sampler import Sampler
from engine.slots import Slots, one_by_one
from speculation.passes import Sampling, TokenLogprob, VerifyPass, VerifyResult
from speculation.walk import Walk, walk


class _Session:
    """One open slot: the tokens, and the sampler that knows them."""

    def __init__(self, tokens: Sequence[int], sampler: Sampler, stop_ids: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.sampler = sampler
        self.stop_ids = frozenset(stop_ids)


@dataclass(frozen=True, slots=True)
class _Walked:
    """What a pass has committed in one session."""

    walk: Walk
    logprobs: tuple[TokenLogprob, ...] | None
    tops: tuple[tuple[int, ...], ...]

    def result(self, compute_s: float, overhead_s: float) -> VerifyResult:
        return VerifyResult(
            tokens=self.walk.tokens, rows=self.walk.rows, logprobs=self.logprobs, tops=self.tops,
            compute_s=compute_s, overhead_s=overhead_s,
        )  # fmt: skip


class HFTarget:
    """`TargetRunner` over a `CachedModel`.

    Args:
        vocab_size: number of real token ids; logits beyond them are padding.
    """

    def __init__(self, model: CachedModel, *, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._sessions: Slots[_Session] = Slots(model.num_slots)

    @property
    def num_slots(self) -> int:
        return self._model.num_slots

    @property
    def max_length(self) -> int:
        return self._model.max_length

    @property
    def max_rows(self) -> int:
        return self._model.max_tree_rows

    def open(
        self, slot: int, *, sampling: Sampling, tokens: Sequence[int], num_prompt: int, stop_ids: Sequence[int]
    ) -> None:
        """See `TargetRunner.open`.

        Raises:
            CacheError: the slot is in use, or the tokens leave no room for another.
        """
        self._sessions.check_free(slot)
        if not 0 < len(tokens) < self.max_length:
            raise CacheError(f"{len(tokens)} tokens leave no room in a slot of {self.max_length}")
        if not all(0 <= token < self._vocab_size for token in tokens):
            raise CacheError(f"token ids must be in 0..{self._vocab_size - 1}")
        sampler = Sampler(sampling, num_prompt=num_prompt, stop_ids=stop_ids, vocab_size=self._vocab_size)
        sampler.commit(tokens)
        self._sessions.open(slot, _Session(tokens, sampler, stop_ids))

    def prefill(self, slot: int, start: int, end: int) -> None:
        """See `TargetRunner.prefill`. Longer ranges than one pass takes are run in several."""
        session = self._sessions[slot]
        cached = self._model.rows[slot].length
        if start != cached or not start <= end < len(session.tokens):
            raise CacheError(
                f"cannot prefill {start}..{end - 1}: {cached} positions are cached, and of {len(session.tokens)} "
                "tokens the last is left to the first pass"
            )
        step = self._model.max_pass_rows
        for first in range(start, end, step):
            tokens = session.tokens[first : min(first + step, end)]
            self._model.forward(slot, tokens, num_committed=len(tokens), num_logits=1)

    def verify(self, batch: Sequence[VerifyPass]) -> list[VerifyResult | Exception]:
        """See `TargetRunner.verify`.

        Raises:
            CacheError: a slot comes twice; nothing was changed.
        """
        started = time.perf_counter()
        run_before = self._model.run_s
        outcomes: list[_Walked | Exception | None] = [None] * len(batch)
        new: dict[int, NewRows] = {}
        for index, request in enumerate(batch):
            try:
                new[index] = self._new_rows(request)
            except CacheError as exc:
                outcomes[index] = exc
        logits = dict(zip(new, self._model.forward_batch(list(new.values())), strict=True))
        run_s = self._model.run_s - run_before
        walk_started = time.perf_counter()
        again: list[int] = []
        for index, rows in logits.items():
            outcome = self._walk_and_keep(batch[index], rows) if isinstance(rows, Tensor) else rows
            if isinstance(outcome, NumericalError) and (len(new) > 1 or len(batch[index].tokens) > 1):
                again.append(index)
            outcomes[index] = outcome
        ended = time.perf_counter()
        compute_s = run_s + ended - walk_started
        overhead_s = max(0.0, ended - started - compute_s)
        results: list[VerifyResult | Exception] = [
            outcome.result(compute_s, overhead_s) if isinstance(outcome, _Walked) else outcome
            for outcome in outcomes
            if outcome is not None
        ]
        for index in again:
            # Others' rows and wrong candidates are part of the products, if behind a mask: score it without the others,
            # then without candidates.
            request = batch[index]
            alone = request if len(new) > 1 else replace(request, tokens=request.tokens[:1], parents=(-1,))
            results[index] = one_by_one([alone], lambda each: self.verify([each])[0])[0]
        return results

    def close(self, slot: int) -> None:
        self._sessions.close(slot)
        self._model.clear(slot)

    def _new_rows(self, request: VerifyPass) -> NewRows:
        """The rows of a pass.

        Raises:
            CacheError: they do not fit what is committed and cached.
        """
        session = self._sessions[request.slot]
        base = self._model.rows[request.slot].length  # row of the pending token
        if request.start != len(session.tokens) or base != request.start - 1:
            raise CacheError(
                f"a pass from position {request.start}, but {len(session.tokens)} tokens are committed "
                f"and {base} rows are cached"
            )
        if not 0 < len(request.tokens) <= self.max_rows or request.tokens[0] != session.tokens[-1]:
            raise CacheError(f"a pass takes 1..{self.max_rows} rows, and row 0 is the pending token")
        if not all(0 <= token < self._vocab_size for token in request.tokens):
            raise CacheError(f"token ids must be in 0..{self._vocab_size - 1}")
        if request.parents[0] != -1 or min(request.parents[1:], default=0) < 0:
            raise CacheError(f"candidates must follow an earlier row; parents are {request.parents}")
        if min(request.max_tokens, self.max_length - request.start) < 1:
            raise CacheError(f"no token fits at position {request.start} of {self.max_length}")
        return NewRows(
            slot=request.slot, tokens=request.tokens, parents=[base + parent for parent in request.parents]
        )  # fmt: skip

    def _walk_and_keep(self, request: VerifyPass, logits: Tensor) -> _Walked | Exception:
        """Walk one session's rows, commit, compact. A failure is that session's alone, and its rows are dropped."""
        slot, session = request.slot, self._sessions[request.slot]
        try:
            walked = self._walk(session, logits, request, min(request.max_tokens, self.max_length - request.start))
            logprobs = self._logprobs(session, logits, walked, request.num_logprobs)
            tops = self._tops(logits, walked, request.num_tops)
        except Exception as exc:
            self._model.rewind(slot, len(request.tokens))
            if is_of_all(exc):
                raise
            return exc
        base = self._model.rows[slot].length
        # The last token is pending again: its row, if it was a candidate, is not kept.
        kept = walked.rows[: len(walked.tokens) - 1]
        try:
            self._model.keep(slot, [base, *(base + row for row in kept)])
        except Exception as exc:
            # Its rows may have been moved in part, so it cannot go on; the others of the pass have been committed.
            if is_of_all(exc):
                raise
            return exc
        session.tokens.extend(walked.tokens)
        session.sampler.commit(walked.tokens)
        return _Walked(walked, logprobs, tops)

    def _walk(self, session: _Session, logits: Tensor, request: VerifyPass, max_tokens: int) -> Walk:
        """Follow the target's own tokens; only rows on the way are sampled."""

        def choose(row: int, path: Sequence[int]) -> int:
            return session.sampler.choose(logits[row], request.start + len(path), path)

        return walk(request.parents, request.tokens, choose, max_tokens=max_tokens, stop_ids=session.stop_ids)

    def _logprobs(
        self, session: _Session, logits: Tensor, walked: Walk, num: int | None
    ) -> tuple[TokenLogprob, ...] | None:
        if num is None:
            return None
        rows = (0, *walked.rows)
        return tuple(
            session.sampler.logprobs(logits[rows[i]], walked.tokens[:i], token, num)
            for i, token in enumerate(walked.tokens)
        )

    def _tops(self, logits: Tensor, walked: Walk, num: int) -> tuple[tuple[int, ...], ...]:
        if num == 0:
            return ()
        rows = [0, *walked.rows][: len(walked.tokens)]
        best = logits[rows, : self._vocab_size].topk(num).indices
        return tuple(tuple(row) for row in best.tolist())
