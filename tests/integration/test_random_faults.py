"""Random faults of each engine that is installed: some trials of `tests.fuzz.random_faults`, and what it is to find."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from tests.fuzz.random_faults import run_trials
from tests.support.engine_faults import ENGINES, GROUPS
from tests.support.store_servers import available

pytestmark = pytest.mark.slow


def is_installed(engine: str) -> bool:
    """Return whether the engine can be used here."""
    if engine in ("local", "ray"):
        return engine == "local" or importlib.util.find_spec("ray") is not None
    return bool(available(engine)) and importlib.util.find_spec("nats" if engine == "nats" else "redis") is not None


# Ray's trials take seconds each: tests/integration/test_ray.py has the loss of its actor.
@pytest.mark.parametrize("engine", [one for one in ENGINES if one != "ray"])
def test_no_law_is_broken(engine: str, tmp_path: Path) -> None:
    """Nothing is stuck, counted twice, written by two leaders, ended wrongly or left over, whatever fails."""
    if not is_installed(engine):
        pytest.skip(f"{engine} is not installed")
    outcome = asyncio.run(run_trials(engine, 12, 5, tmp_path, parallel=3))
    assert outcome.texts == []
    assert {group for group, _ in outcome.statuses} == set(GROUPS)
    assert outcome.statuses.total() == 12
