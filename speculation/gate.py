"""Switching a far drafter off that does not pay, and trying it again.

Rows that a useless drafter would waste are saved by selection already (`speculation.rates` learns that its candidates
are never right). What is left is what its mere work costs: frames to take in, and on a shared machine cores and memory.
So the drafter is judged by what the passes bring with it and without it:

    ON        candidates are wanted. After a trial of passes: pays, stays; brings next to nothing, off;
              in between, a short comparison decides.
    COMPARE   a few passes without it, to see whether passes are faster then
    OFF       starved; after a while, twice as long each time it fails again, ON for a trial

The draft node is told by a flag in every acceptance, so a lost message does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

TRIAL_PASSES = 48
PATIENCE_PASSES = 256
"""Passes without a single frame after which the trial counts as begun all the same: a drafter takes its time over a
long prompt."""
COMPARE_PASSES = 12
CLEARLY_PAYS = 0.15
"""Share of tokens from the far drafter above which no cost that we know of outweighs it."""
BRINGS_NOTHING = 0.01
FIRST_PAUSE_PASSES = 96
LONGEST_PAUSE_PASSES = 3072


class GateState(Enum):
    """See the module's docstring."""

    ON = auto()
    COMPARE = auto()
    OFF = auto()


@dataclass(slots=True)
class _Passes:
    """Sums over some passes."""

    num: int = 0
    num_tokens: int = 0
    num_far: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Gate:
    """Whether one far drafter is wanted."""

    state: GateState = GateState.ON
    num_closed: int = 0
    """How often it was switched off."""
    _seen: bool = False
    _unseen_passes: int = 0
    _pause: int = FIRST_PAUSE_PASSES
    _with: _Passes = field(default_factory=_Passes)
    _now: _Passes = field(default_factory=_Passes)

    @property
    def wanted(self) -> bool:
        """Whether the drafter should draft."""
        return self.state is GateState.ON

    def on_pass(self, *, num_tokens: int, num_far: int, seconds: float, candidates: bool) -> None:
        """A pass of a paired session is over.

        Args:
            num_tokens, num_far: committed by it; of those, proposed by the far drafter.
            seconds: from the end of the pass before to the end of this one.
            candidates: whether the far drafter has sent any since the pass before.
        """
        if self.state is GateState.ON and not self._seen:
            # The first candidates of a session, or after a pause, are a round trip away.
            self._unseen_passes += 1
            self._seen = candidates or self._unseen_passes > PATIENCE_PASSES
            if not self._seen:
                return
        sums = self._now
        sums.num += 1
        sums.num_tokens += num_tokens
        sums.num_far += num_far
        sums.seconds += seconds
        if self.state is GateState.ON and sums.num >= TRIAL_PASSES:
            self._after_trial(sums)
        elif self.state is GateState.COMPARE and sums.num >= COMPARE_PASSES:
            self._after_comparison(self._with, sums)
        elif self.state is GateState.OFF and sums.num >= self._pause:
            self._enter(GateState.ON)

    def on_paired(self) -> None:
        """A session begins: its first candidates are still to come."""
        if self.state is GateState.ON:
            self._enter(GateState.ON)

    def _after_trial(self, sums: _Passes) -> None:
        share = sums.num_far / max(1, sums.num_tokens)
        if share >= CLEARLY_PAYS:
            self._pause = FIRST_PAUSE_PASSES
            self._now = _Passes()
        elif share <= BRINGS_NOTHING:
            self._close()
        else:
            self._with = sums
            self._enter(GateState.COMPARE)

    def _after_comparison(self, with_it: _Passes, without: _Passes) -> None:
        """Tokens a second with it, against those of the same passes less its tokens at the speed without it.

        Which tokens a stretch of text lets through varies far more than the duration of a pass, so only durations
        are compared between the two stretches.
        """
        rate_with = with_it.num_tokens / with_it.seconds
        per_pass_without = (with_it.num_tokens - with_it.num_far) / with_it.num
        rate_without = per_pass_without * without.num / without.seconds
        if rate_with > rate_without:
            self._pause = FIRST_PAUSE_PASSES
            self._enter(GateState.ON)
        else:
            self._close()

    def _close(self) -> None:
        self.num_closed += 1
        self._enter(GateState.OFF)
        if self.num_closed > 1:
            self._pause = min(2 * self._pause, LONGEST_PAUSE_PASSES)

    def _enter(self, state: GateState) -> None:
        self.state = state
        self._seen = False
        self._unseen_passes = 0
        self._now = _Passes()
