"""Random faults of each engine: some trials of `tests.fuzz.random_faults`, and what it is to find."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fuzz.random_faults import run_trials
from tests.support.engine_faults import ENGINES, GROUPS, LocalSetup, RedisSetup, ServerSetup
from tests.support.fault_plans import CLIENT_FAULTS, LINK_FAULTS

pytestmark = pytest.mark.slow


COUNT, SEED = 18, 26
"""With this seed so many trials have each fault of each engine, and each of a process."""
STRIKES = {"redis": RedisSetup.strikes, "valkey": RedisSetup.strikes, "nats": ServerSetup.strikes, "local": LocalSetup.strikes}


# Ray's trials take seconds each: some are in tests/integration/test_ray.py.
@pytest.mark.parametrize("engine", [one for one in ENGINES if one != "ray"])
def test_no_law_is_broken(engine: str, tmp_path: Path) -> None:
    """Nothing is stuck, counted twice, written by two leaders, ended wrongly or left over, whatever fails."""
    outcome = asyncio.run(run_trials(engine, COUNT, SEED, tmp_path, parallel=3))
    assert outcome.texts == []
    faults = {(plan.group, plan.engine_fault) for plan in outcome.plans}
    assert faults == {(group, fault) for group in GROUPS for fault in STRIKES[engine][group]}
    assert {plan.client_fault for plan in outcome.plans} == {*CLIENT_FAULTS, *(LINK_FAULTS if engine != "local" else ())}
