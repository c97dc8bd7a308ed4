"""The fuzzer in the default run: a few short rounds with faults. `python -m tests.e2e.fuzzer` goes on longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Result
from tests.e2e.fuzzer import Fuzzer, fuzzing
from tests.e2e.traces import FAULTS, make_trace


@pytest.fixture(scope="module")
def fuzzer(tiny_model: Path) -> Iterator[Fuzzer]:
    """A fuzzer with every kind of fault."""
    with fuzzing(tiny_model, FAULTS) as ready:
        yield ready


def test_a_trace_is_a_function_of_its_seed(tiny_model: Path) -> None:
    """The same seed gives the same calls and faults, another one others."""

    def trace(seed: int) -> object:
        return make_trace(seed, tiny_model, num_tenants=2, num_decoders=2, faults=FAULTS)

    assert trace(5) == trace(5)
    assert trace(5) != trace(6)


@pytest.mark.parametrize("rounds", [1, pytest.param(40, marks=pytest.mark.slow)], ids=["few", "full"])
def test_random_traces_end_as_their_solo_runs(fuzzer: Fuzzer, seed: int, rounds: int) -> None:
    """What ends well equals solo, what does not is explained by its own leaving or a fault, nothing stays behind."""
    before = fuzzer.outcomes["equal to solo"]
    for number in range(rounds):
        fuzzer.round(seed + number)
    assert fuzzer.outcomes["equal to solo"] > before


def test_a_wrong_token_is_found(fuzzer: Fuzzer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: where one token of each answer is wrong, the round fails and names its seed."""
    check = fuzzer.solo.check

    def one_off(request: pb.GenerateRequest, result: Result) -> None:
        result.samples[0].token_ids[-1] += 1
        check(request, result)

    monkeypatch.setattr(fuzzer.solo, "check", one_off)
    with pytest.raises(AssertionError, match=f"seed {seed} .*differs from its solo run"):
        fuzzer.round(seed)
