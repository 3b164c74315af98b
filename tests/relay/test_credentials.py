"""Credentials, their file, and the limits that hang on them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.credentials import ROLES, Credential, Credentials, CredentialsError
from relay.limits import BURST_S, Pace, TokenBucket

FILE = """
[[credential]]
name = "nodes"
roles = ["node"]
secrets = ["node-secret-new", "node-secret-old"]

[[credential]]
name = "app"
roles = ["client"]
secrets = ["client-secret"]
max_sessions = 2
frames_per_s = 10
bytes_per_s = 1000.5
"""


def test_any_secret_of_an_entry_is_good_and_says_what_it_is_good_for() -> None:
    credentials = Credentials.from_toml(FILE)
    for secret in ("node-secret-new", "node-secret-old"):
        identity = credentials.find(secret)
        assert identity is not None
        assert identity.credential.name == "nodes"
        assert [identity.credential.allows(role) for role in ("draft", "verify", "client")] == [True, True, False]
    identity = credentials.find("client-secret")
    assert identity is not None
    limits = identity.credential
    assert (limits.max_sessions, limits.frames_per_s, limits.bytes_per_s) == (2, 10, 1000.5)
    for wrong in ("", "-", "node-secret", "node-secret-newer", "é", "x" * 10_000):
        assert credentials.find(wrong) is None


def test_the_shared_secret_is_good_for_everything() -> None:
    identity = Credentials.shared("the-only-secret").find("the-only-secret")
    assert identity is not None
    assert identity.credential.roles == ROLES


def test_a_secret_that_was_taken_away_is_not_renewed_and_the_others_are() -> None:
    before = Credentials.from_toml(FILE)
    after = Credentials.from_toml(FILE.replace(', "node-secret-old"', "").replace("max_sessions = 2", ""))
    old, new, app = (before.find(secret) for secret in ("node-secret-old", "node-secret-new", "client-secret"))
    assert old is not None
    assert new is not None
    assert app is not None
    assert after.renew(old) is None
    assert after.renew(new) is not None
    renewed = after.renew(app)
    assert renewed is not None
    assert renewed.credential.max_sessions is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[[credential]]", "[[credentials]]"), r"at least one \[\[credential\]\]"),
        (('name = "app"', ""), "credential 2 needs a name"),
        (('"client"', '"root"'), "app: roles must be some of admin, node, client"),
        (('"client-secret"', '"short"'), "app: a secret has 5 characters, too few"),
        (('"client-secret"', '"with a space"'), "app: a secret must be printable ASCII"),
        (('"client-secret"', '"node-secret-old"'), "the same secret"),
        (('name = "app"', 'name = "nodes"'), "the same name"),
        (("max_sessions = 2", "max_sessions = -1"), r"app: max_sessions must be a number in 0\.\.1e\+15, 0 for no"),
        (("frames_per_s = 10", "frames_per_s = inf"), "app: frames_per_s must be a number"),
        (("bytes_per_s = 1000.5", "bytes_per_s = nan"), "app: bytes_per_s must be a number"),
        (("max_sessions = 2", "max_session = 2"), "app has no field max_session"),
        (('["client-secret"]', "[]"), r"app: secrets must be a list of 1\.\.8"),
        (("roles", "roles = "), "not TOML"),
    ],
)
def test_a_bad_file_is_refused_by_entry_and_field_and_shows_no_secret(change: tuple[str, str], message: str) -> None:
    with pytest.raises(CredentialsError, match=message) as refused:
        Credentials.from_toml(FILE.replace(*change))
    for secret in ("node-secret", "client-secret"):
        assert secret not in str(refused.value)


@given(
    st.floats(1, 1e4),
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 0.5)), min_size=1, max_size=60),
)
def test_whoever_waits_as_told_stays_within_rate_and_burst(rate: float, frames: list[tuple[float, float]]) -> None:
    bucket, now, taken = TokenBucket(rate, 0.0), 0.0, 0.0
    for amount, idle_s in frames:
        now += idle_s
        taken += amount
        now += bucket.take(amount, now)
        assert taken <= rate * (now + BURST_S) * (1 + 1e-9) + 1e-6


def test_a_pace_is_that_of_the_stricter_limit_and_counts_its_delays() -> None:
    pace = Pace(Credential(name="app", roles=("client",), digests=(), frames_per_s=2, bytes_per_s=1000), 0.0)
    assert pace(100, 0.0) == 0.0
    assert pace(100, 0.0) == 0.0
    assert pace(100, 0.0) == pytest.approx(0.5)
    assert pace(2000, 10.0) == pytest.approx(1.0)
    assert pace.num_delayed == 2
