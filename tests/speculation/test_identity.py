"""The first write-up's arithmetic, and the warning when figures are of different runs."""

from __future__ import annotations

import pytest

from speculation.identity import identity_warning, implied_round_s, worked_example


def test_the_first_write_up_is_reproduced() -> None:
    found = worked_example()
    rounded = {name: round(value, 2 if value < 1 else 0) for name, value in found.items()}
    assert rounded == {
        "round at 28.10 tok/s": 145,
        "residual at 28.10 tok/s": 34,
        "round at 14.3 tok/s": 285,
        "residual at 14.3 tok/s": 87,
        "saved": 140,
        "saved in drafting": 87,
        "saved and not itemised": 53,
        "wire share at 4.92 tok/s, one token a round trip": 0.42,
        "wire per token at 4.07 tokens a round": 21,
        "network cap, tok/s": 47,
        "share of the cap": 0.59,
        "launch overhead, least": 96,
        "launch overhead, most": 120,
    }
    assert found["network cap, tok/s"] == pytest.approx(47.3, abs=0.05)


def test_figures_of_one_run_pass_and_a_peak_beside_an_average_does_not() -> None:
    round_s = implied_round_s(tokens_per_s=28.10, tokens_per_round=4.07)
    assert identity_warning(tokens_per_s=28.10, tokens_per_round=4.07, round_s=round_s) is None
    warning = identity_warning(tokens_per_s=33.0, tokens_per_round=4.07, round_s=round_s)
    assert warning is not None
    assert "= 28.10 tokens/s, not 33.00: one of these figures was taken from another run" in warning
