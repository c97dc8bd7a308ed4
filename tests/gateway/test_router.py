"""Which decoder takes a prompt."""

from __future__ import annotations

import pytest

from common.tokens import pack_tokens
from gateway.router import Candidate, affinity, choose_decoder


def idle(count: int) -> list[Candidate]:
    return [Candidate(index, 0, 8) for index in range(count)]


def test_prompts_with_the_same_leading_blocks_meet() -> None:
    """Prompts that share their first blocks go to one decoder; other prompts and tenants spread over all."""
    head = list(range(64))
    first, second = pack_tokens([*head, 1, 2, 3]), pack_tokens([*head, 9, 9])
    assert affinity(first, 16, "a") == affinity(second, 16, "a") != affinity(first, 16, "b")
    chosen = {choose_decoder(affinity(pack_tokens([n] * 64), 16, "a"), idle(4)).index for n in range(64)}
    assert chosen == {0, 1, 2, 3}


def test_when_a_decoder_goes_only_its_own_prompts_move() -> None:
    """Rendezvous hashing: a prompt keeps its decoder unless that one is gone."""
    for name in range(200):
        before = choose_decoder(name, idle(4)).index
        after = choose_decoder(name, [one for one in idle(4) if one.index != 2]).index
        assert after == before or before == 2


def test_an_overloaded_winner_loses_the_prompt_to_the_least_loaded() -> None:
    """A full batch sends the prompt to a decoder less than half as loaded, and to no other."""
    name = next(name for name in range(100) if choose_decoder(name, idle(2)).index == 0)
    assert choose_decoder(name, [Candidate(0, 7, 8), Candidate(1, 0, 8)]).index == 0
    assert choose_decoder(name, [Candidate(0, 8, 8), Candidate(1, 0, 8)]).index == 1
    assert choose_decoder(name, [Candidate(0, 8, 8), Candidate(1, 4, 8)]).index == 0


def test_no_candidate_is_an_error() -> None:
    """Without a decoder there is nothing to choose."""
    with pytest.raises(ValueError, match="no candidate"):
        choose_decoder(1, [])
