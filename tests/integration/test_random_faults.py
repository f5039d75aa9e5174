"""Random faults of each engine that is installed: some trials of `tests.fuzz.random_faults`, and what it is to find."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from tests.fuzz.random_faults import run_trials
from tests.support.engine_faults import ENGINES, GROUPS, LocalSetup, RedisSetup, ServerSetup
from tests.support.fault_plans import CLIENT_FAULTS, LINK_FAULTS
from tests.support.store_servers import available

pytestmark = pytest.mark.slow


def is_installed(engine: str) -> bool:
    """Return whether the engine can be used here."""
    if engine in ("local", "ray"):
        return engine == "local" or importlib.util.find_spec("ray") is not None
    return bool(available(engine)) and importlib.util.find_spec("nats" if engine == "nats" else "redis") is not None


COUNT, SEED = 18, 26
"""With this seed so many trials have each fault of each engine, and each of a process."""
STRIKES = {"redis": RedisSetup.strikes, "valkey": RedisSetup.strikes, "nats": ServerSetup.strikes, "local": LocalSetup.strikes}


# Ray's trials take seconds each: some are in tests/integration/test_ray.py.
@pytest.mark.parametrize("engine", [one for one in ENGINES if one != "ray"])
def test_no_law_is_broken(engine: str, tmp_path: Path) -> None:
    """Nothing is stuck, counted twice, written by two leaders, ended wrongly or left over, whatever fails."""
    if not is_installed(engine):
        pytest.skip(f"{engine} is not installed")
    outcome = asyncio.run(run_trials(engine, COUNT, SEED, tmp_path, parallel=3))
    assert outcome.texts == []
    faults = {(plan.group, plan.engine_fault) for plan in outcome.plans}
    assert faults == {(group, fault) for group in GROUPS for fault in STRIKES[engine][group]}
    assert {plan.client_fault for plan in outcome.plans} == {*CLIENT_FAULTS, *(LINK_FAULTS if engine != "local" else ())}
