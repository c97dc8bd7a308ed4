"""The machines of the core once more, for minutes and with fresh random choices."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.cachemgr.test_blocks import PoolMachine
from tests.cachemgr.test_groups_machine import GroupedMachine
from tests.cachemgr.test_leases_machine import LeaseMachine
from tests.cachemgr.test_manager_machine import ManagerMachine
from tests.cachemgr.test_quota_machine import QuotaMachine
from tests.cachemgr.test_radix import IndexMachine

MACHINES = [PoolMachine, IndexMachine, LeaseMachine, QuotaMachine, ManagerMachine, GroupedMachine]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_machine_finds_nothing(machine: type[RuleBasedStateMachine]) -> None:
    """Many long histories agree with the model."""
    deep = settings(
        max_examples=400,
        stateful_step_count=80,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=deep)
