"""Grants: only an unchanged, unexpired grant of this daemon's secret is believed."""

from __future__ import annotations

import pytest

from cachemgr.grants import GRANT_VALIDITY_NS, MAX_GRANT_BYTES, AcceptedGrants, GrantSigner, mark_of
from common.errors import Unauthenticated

NOW = 10**15
MARK = mark_of(b"secret" * 5)
SIGNER = GrantSigner(b"s" * 32)


def test_grant_says_what_it_was_issued_for():
    """A fresh grant verifies until its expiry, also in another process with the same secret."""
    grant = SIGNER.issue("a" * 64, "0123456789abcdef", MARK, NOW)
    found = GrantSigner(b"s" * 32).verify(grant, NOW + GRANT_VALIDITY_NS - 1)
    assert (found.tenant, found.key_id, found.expiry_ns) == ("a" * 64, "0123456789abcdef", NOW + GRANT_VALIDITY_NS)
    assert found.mark == MARK != mark_of(b"another")
    assert len(grant) <= MAX_GRANT_BYTES


def test_every_changed_bit_and_every_cut_is_refused():
    """No single-bit change, prefix or extension of a grant verifies."""
    grant = SIGNER.issue("acme", "0123456789abcdef", MARK, NOW)
    SIGNER.verify(grant, NOW)
    for bit in range(len(grant) * 8):
        changed = bytearray(grant)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Unauthenticated):
            SIGNER.verify(bytes(changed), NOW)
    for size in range(len(grant)):
        with pytest.raises(Unauthenticated):
            SIGNER.verify(grant[:size], NOW)
    for extra in (b"\0", b"x" * 10_000_000):
        with pytest.raises(Unauthenticated):
            SIGNER.verify(grant + extra, NOW)


def test_another_secret_is_refused():
    """A grant of another daemon proves nothing here."""
    with pytest.raises(Unauthenticated):
        SIGNER.verify(GrantSigner(b"t" * 32).issue("acme", "k", MARK, NOW), NOW)


def test_expired_grant_is_refused_and_says_so():
    """At its expiry a grant is over."""
    grant = SIGNER.issue("acme", "k", MARK, NOW)
    with pytest.raises(Unauthenticated, match="expired"):
        SIGNER.verify(grant, NOW + GRANT_VALIDITY_NS)


def test_grant_that_was_accepted_before_may_have_expired_and_nothing_else():
    """Its expiry alone is forgiven: a changed one, and one from the future, are refused all the same."""
    grant = SIGNER.issue("acme", "k", MARK, NOW)
    late = NOW + 100 * GRANT_VALIDITY_NS
    assert SIGNER.verify(grant, late, accepted_before=True).tenant == "acme"
    with pytest.raises(Unauthenticated):
        SIGNER.verify(grant[:-1] + bytes([grant[-1] ^ 1]), late, accepted_before=True)
    with pytest.raises(Unauthenticated):
        SIGNER.verify(grant, NOW - 1, accepted_before=True)


def test_accepted_grants_are_bounded_and_the_least_used_goes():
    """No more than the limit are remembered; one that is used again stays."""
    accepted = AcceptedGrants(limit=2)
    assert b"a" not in accepted
    for grant in (b"a", b"b", b"a", b"c"):
        accepted.add(grant)
    assert [grant in accepted for grant in (b"a", b"b", b"c")] == [True, False, True]


def test_clock_that_went_back_prolongs_nothing():
    """A grant whose expiry lies further away than any validity is refused."""
    grant = SIGNER.issue("acme", "k", MARK, NOW)
    with pytest.raises(Unauthenticated):
        SIGNER.verify(grant, NOW - 1)


def test_signing_secret_has_a_fixed_length():
    """A short secret is a defect and is refused at once."""
    with pytest.raises(ValueError, match="32"):
        GrantSigner(b"short")
