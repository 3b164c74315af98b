"""How often candidates of one kind turn out to be the target's token, learned while answers are written.

A drafter's own estimate may be too sure of itself, and a table lookup has none. So a candidate is filed under a *key*
(its source's score in coarse steps, or the kind of lookup it came from), and each key has a rate: observed hits over
observed trials, shrunk towards a prior. A trial costs nothing: whenever a token is committed, every candidate that
stood for its position has been right or wrong, whether a pass has scored it or not. So a source that has become
useless is noticed, and so is one that has recovered, without spending a row on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

MIN_PROBABILITY = 1e-4
MAX_PROBABILITY = 0.999
STEPS_PER_NAT = 2
MAX_STEPS = 16


@dataclass(slots=True)
class HitRates:
    """Rates by key, an exponentially weighted average with a prior (the mean of a beta distribution).

    Args:
        prior: expected rate of a key, 0..1.
        prior_trials: how many trials the prior is worth.
        memory: trials after which an observation counts 1/e.
    """

    prior: Callable[[int], float]
    prior_trials: float = 6.0
    memory: float = 200.0
    _counts: dict[int, tuple[float, float]] = field(default_factory=dict)  # key -> (hits, trials)
    _logprobs: dict[int, float] = field(default_factory=dict)

    def observe(self, key: int, hit: bool) -> None:
        """One candidate under this key was right or wrong."""
        hits, trials = self._counts.get(key, (0.0, 0.0))
        fade = 1.0 - 1.0 / self.memory
        self._counts[key] = (hits * fade + hit, trials * fade + 1.0)
        self._logprobs.pop(key, None)

    def probability(self, key: int) -> float:
        """Rate of a key, within MIN_PROBABILITY..MAX_PROBABILITY."""
        hits, trials = self._counts.get(key, (0.0, 0.0))
        rate = (hits + self.prior_trials * self.prior(key)) / (trials + self.prior_trials)
        return min(max(rate, MIN_PROBABILITY), MAX_PROBABILITY)

    def logprob(self, key: int) -> float:
        """Its logarithm, in nats; kept, as it is asked for every candidate of every pass."""
        known = self._logprobs.get(key)
        if known is None:
            known = self._logprobs[key] = math.log(self.probability(key))
        return known


def score_key(logprob: float) -> int:
    """The key of a drafter's own estimate, in nats: coarse steps, 0 for a certain one."""
    return min(MAX_STEPS, int(-logprob * STEPS_PER_NAT + 0.5))


def score_rates() -> HitRates:
    """Rates of a drafter that gives estimates; the prior takes them at their word."""
    return HitRates(lambda key: math.exp(-key / STEPS_PER_NAT))
