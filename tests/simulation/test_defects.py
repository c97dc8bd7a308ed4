"""The simulation finds each seeded defect of the core: it can fail, and it fails for the right reasons."""

from __future__ import annotations

import pytest

from tests.simulation.defects import (
    COMMON,
    RARE,
    SEEN_BY_MEMORY,
    Defect,
    the_last_resort_takes_whatever_is_oldest,
    what_a_branch_copies_from_loses_its_window_block,
)
from tests.simulation.kernel import Violation
from tests.simulation.world import run

FEW, MANY = 12, 400


def _find(defect: Defect, seeds: int, monkeypatch: pytest.MonkeyPatch, *, recount: bool = True) -> str:
    """What the first seed that finds the defect says; empty where none does."""
    defect(monkeypatch)
    for seed in range(seeds):
        try:
            run(seed, recount=recount)
        except Violation as error:
            if isinstance(error.__cause__, TypeError | AttributeError | NameError):
                raise  # the defect itself is written wrongly, so nothing was shown
            return str(error)
    return ""


@pytest.mark.parametrize("defect", COMMON, ids=lambda defect: defect.__name__)
def test_a_defect_is_found_soon(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few seeds are enough; the failure names the seed and shows the end of the trace."""
    found = _find(defect, FEW, monkeypatch)
    assert "python -m tests.simulation --seed" in found


@pytest.mark.slow
@pytest.mark.parametrize("defect", RARE, ids=lambda defect: defect.__name__)
def test_a_rare_defect_is_found(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs a coincidence is found well within the seeds that CI runs."""
    assert _find(defect, MANY, monkeypatch)


@pytest.mark.parametrize(
    ("defect", "seed", "says"),
    [
        (what_a_branch_copies_from_loses_its_window_block, 681, "the source of its copy: a window block is missing"),
        (the_last_resort_takes_whatever_is_oldest, 971, "and was to keep"),
    ],
)
def test_a_defect_that_few_seeds_meet_is_found(
    defect: Defect, seed: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed that meets it finds it, and nothing without it."""
    run(seed)
    defect(monkeypatch)
    with pytest.raises(Violation, match=says):
        run(seed)


@pytest.mark.parametrize("defect", SEEN_BY_MEMORY, ids=lambda defect: defect.__name__)
def test_the_shadow_memory_sees_a_defect(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong content is seen by who reads or writes it, without the manager's own check."""
    assert _find(defect, 60, monkeypatch, recount=False)


def test_without_a_defect_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the controls, with and without the manager's own check."""
    assert not _find(lambda patch: None, FEW, monkeypatch)
    assert not _find(lambda patch: None, FEW, monkeypatch, recount=False)
