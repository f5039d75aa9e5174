"""Runs that are cut at random places and resumed: some of them in every test run, and the proof
that the program finds bugs.

All of them are a command: `python -m tests.fuzz.resumed_runs --count 1000`.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from aiohooks.checkpoint import Saver
from aiohooks.hooks import checkpoint_saver
from aiohooks.hooks._observing import Sampling
from aiohooks.hooks.evaluator import EvaluatorHook
from aiohooks.hooks.every import EveryTimer
from aiohooks.hooks.records import _JSONLinesFile
from aiohooks.hooks.stopping import EarlyStoppingHook
from tests.fuzz.resumed_runs import main, run_programs


async def nothing(*_: Any) -> None:
    """Do nothing, instead of what is replaced."""


def changed(state_dict: Any, **values: Any) -> Any:
    """Return a `state_dict` that has other values."""
    return lambda self: {**state_dict(self), **values}


BUGS: dict[str, tuple[Any, str, Any]] = {
    "timers begin again": (EveryTimer, "load_state_dict", lambda *_: None),
    "a first run is due again": (Sampling, "load_state_dict", lambda *_: None),
    "the evaluation at the end counts": (EarlyStoppingHook, "_note_evaluation", lambda *_: None),
    "a checkpoint leaves an evaluation behind": (EvaluatorHook, "_finish_earlier", nothing),
    "a checkpoint of a stop counts": (checkpoint_saver, "INTERIM", "other"),
    "late evaluations are no metrics": (Saver, "add_metrics", nothing),
    "lines of undone steps stay valid": (_JSONLinesFile, "open_at", lambda self, step: self.open()),
    "an unfinished evaluation is lost": (
        EvaluatorHook,
        "state_dict",
        changed(EvaluatorHook.state_dict, unfinished=False),
    ),
    "the best states are lost": (
        EarlyStoppingHook,
        "state_dict",
        changed(EarlyStoppingHook.state_dict, best_states={}),
    ),
    "patience begins again": (EarlyStoppingHook, "load_state_dict", lambda *_: None),
    "counts of an earlier session stay": (EarlyStoppingHook, "begin", nothing),
}


@pytest.mark.parametrize("count", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_a_run_that_is_cut_ends_as_a_whole_one(
    count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever a run is stopped, killed or fails: resumed, it has the records, stop, weights and
    checkpoints of a whole one.
    """
    assert main(["--count", str(count), "--seed", "7"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS.values(), ids=list(BUGS))
def test_an_injected_bug_is_found(bug: tuple[Any, str, Any]) -> None:
    """The program notices what a hook forgets."""
    owner, name, replacement = bug
    with mock.patch.object(owner, name, replacement):
        assert any(run_programs(20, seed, lambda text: None) for seed in range(15))
