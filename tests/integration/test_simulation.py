"""The simulated cluster: some seeds in every test run, and the proof that it finds bugs; all of it
is a command.

`python -m tests.fuzz.simulation --count 20000`, also with `--scenario training`, and
`python -m tests.fuzz.simulation.equality --count 2000`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.fuzz._harness import log_disabled
from tests.fuzz.simulation.__main__ import first_seed_with
from tests.fuzz.simulation.equality import compare
from tests.fuzz.simulation.injected_bugs import BUGS
from tests.fuzz.simulation.scenario import simulate, stores
from tests.fuzz.simulation.training import training
from tests.support.processes import run_python
from tests.support.redis_servers import KINDS
from tests.support.store_servers import running

QUICKLY_FOUND = (
    "terms_begin_again",
    "the_epoch_stays",
    "the_members_of_a_lost_run_are_forgotten",
    "registrations_are_not_repeated",
    "names_are_not_synced",
    "an_interrupted_element_is_repeated",
    "lost_feeds_are_not_said",
    "a_restore_at_the_same_step_begins_no_epoch",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Leave out what the stores log of the faults."""
    with log_disabled():
        yield


@pytest.mark.parametrize("engine", ["ray", "redis"])
@pytest.mark.parametrize(("scenario", "least"), [(stores, 20), (training, 5)])
def test_nothing_is_lost_in_a_simulated_cluster(engine: str, scenario: Any, least: int) -> None:
    """Under random faults: no step lost or counted twice, one chief, no wait that ends wrongly or
    not at all. In a training, with kills in the disk and power cuts too: each step has its model
    and its feed, no checkpoint is lost.
    """
    for seed in range(5):
        result = simulate(seed, engine, scenario)
        assert not result.violations, (seed, result.faults)
        assert result.operations > least


@pytest.mark.parametrize("name", QUICKLY_FOUND)
def test_an_injected_bug_is_found(name: str) -> None:
    """A bug in the library is a violation in a simulation that has none without it."""
    assert first_seed_with(BUGS[name], range(80)) is not None


@pytest.mark.slow
def test_a_seed_has_one_trace() -> None:
    """All that happens is decided by the seed, also in another interpreter with other hashes."""
    seeds = range(2)
    traces = [simulate(seed, scenario=one).digest for seed in seeds for one in (stores, training)]
    assert traces == [
        simulate(seed, scenario=one, tracing=True).digest
        for seed in seeds
        for one in (stores, training)
    ]
    program = (
        "import logging; logging.disable()\nfrom tests.fuzz.simulation.scenario import simulate,"
        " stores\nfrom tests.fuzz.simulation.training import training\nprint(*(simulate(seed,"
        f" scenario=one).digest for seed in {seeds!r} for one in (stores, training)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    other = run_python("-c", program, env=environment)
    assert other.stdout.split() == traces, other.stderr


@pytest.mark.parametrize("kind", [*KINDS, ""])
def test_the_script_is_the_state_machine(kind: str, tmp_path: Path) -> None:
    """The script in a server, and that of the simulation, answer as `RunState` does; without a
    server, the latter.
    """
    if not kind:
        assert compare(range(40), None) == []
        return
    with (
        running(kind, tmp_path, keeps=False) as server,
        redis.Redis(port=server.port, decode_responses=True) as client,
    ):
        assert compare(range(40), client) == []
