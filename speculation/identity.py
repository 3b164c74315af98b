"""The arithmetic of published figures: what they imply about a round, and whether they can be of one run.

tokens/s = tokens per round / round time holds only on the same rounds. A peak throughput beside an average acceptance
breaks it, and then every residual computed from the two is fiction.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculation.ledger import network_cap, round_rate

TOLERANCE = 0.02


def implied_round_s(*, tokens_per_s: float, tokens_per_round: float) -> float:
    """The round that both figures imply, if they are of the same rounds."""
    # The identity is symmetric: tokens per round over tokens per second.
    return round_rate(tokens_per_round=tokens_per_round, round_s=tokens_per_s)


def identity_warning(
    *, tokens_per_s: float, tokens_per_round: float, round_s: float, tolerance: float = TOLERANCE
) -> str | None:
    """What to say if the three figures cannot be of the same rounds; None if they can."""
    implied = round_rate(tokens_per_round=tokens_per_round, round_s=round_s)
    if abs(tokens_per_s / implied - 1) <= tolerance:
        return None
    return (
        f"{tokens_per_round:.2f} tokens a round / {round_s * 1e3:.1f} ms = {implied:.2f} tokens/s, not "
        f"{tokens_per_s:.2f}: one of these figures was taken from another run"
    )


def wire_share(*, rtt_s: float, tokens_per_s: float, tokens_per_round: float = 1.0) -> float:
    """Share of the time that the round trip takes, one for each round; with one token a round, of each token."""
    return rtt_s / implied_round_s(tokens_per_s=tokens_per_s, tokens_per_round=tokens_per_round)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Figures of a pipeline with one round in flight, as somebody has published them."""

    tokens_per_s: float
    tokens_per_round: float
    rtt_s: float
    draft_s: float

    @property
    def round_s(self) -> float:
        """Implied."""
        return implied_round_s(tokens_per_s=self.tokens_per_s, tokens_per_round=self.tokens_per_round)

    @property
    def residual_s(self) -> float:
        """What is neither network nor drafting: verification and everything that has no name."""
        return self.round_s - self.rtt_s - self.draft_s

    @property
    def cap(self) -> float:
        """Tokens/s if all but the network were free."""
        return network_cap(tokens_per_round=self.tokens_per_round, rtt_s=self.rtt_s)


BEFORE = Published(tokens_per_s=14.3, tokens_per_round=4.07, rtt_s=0.086, draft_s=0.112)
AFTER = Published(tokens_per_s=28.10, tokens_per_round=4.07, rtt_s=0.086, draft_s=0.025)
WITHOUT_SPECULATION_PER_S = 4.92
LAUNCHES, LAUNCH_S = 12_000, (8e-6, 10e-6)


def worked_example() -> dict[str, float]:
    """What the first write-up's figures imply; milliseconds unless the name says otherwise."""
    saved_s = BEFORE.round_s - AFTER.round_s
    drafting_s = BEFORE.draft_s - AFTER.draft_s
    return {
        "round at 28.10 tok/s": AFTER.round_s * 1e3,
        "residual at 28.10 tok/s": AFTER.residual_s * 1e3,
        "round at 14.3 tok/s": BEFORE.round_s * 1e3,
        "residual at 14.3 tok/s": BEFORE.residual_s * 1e3,
        "saved": saved_s * 1e3,
        "saved in drafting": drafting_s * 1e3,
        "saved and not itemised": (saved_s - drafting_s) * 1e3,
        "wire share at 4.92 tok/s, one token a round trip": wire_share(
            rtt_s=AFTER.rtt_s, tokens_per_s=WITHOUT_SPECULATION_PER_S
        ),
        "wire per token at 4.07 tokens a round": AFTER.rtt_s / AFTER.tokens_per_round * 1e3,
        "network cap, tok/s": AFTER.cap,
        "share of the cap": AFTER.tokens_per_s / AFTER.cap,
        "launch overhead, least": LAUNCHES * LAUNCH_S[0] * 1e3,
        "launch overhead, most": LAUNCHES * LAUNCH_S[1] * 1e3,
    }
