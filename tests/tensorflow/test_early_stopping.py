"""TensorFlow's own tests of the estimator's early stopping (289-298 in the table) and of its limit
in seconds (299).
"""

from __future__ import annotations

from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.stopping import EarlyStoppingHook
from tests.support.checks import invalid

pytestmark = pytest.mark.every_python

# What the original's tests have in their event files: the step, and what was found there.
RECORDS = {
    1000: {"loss": 1.0, "accuracy": 0.5},
    1500: {"loss": 0.8, "accuracy": 0.6},
    2000: {"loss": 0.7, "accuracy": 0.7},
    2500: {"loss": 0.7, "accuracy": 0.7},
    3000: {"loss": 0.65, "accuracy": 0.7},
    3500: {"loss": 0.65, "accuracy": 0.7},
}


def reports(monitor: str = "loss", **options: Any) -> EarlyStoppingHook:
    """A hook that receives results and fetches nothing."""
    return EarlyStoppingHook(monitor=monitor, every=None, **options)


HIGH: dict[str, Any] = {"monitor": "accuracy", "mode": "max"}
LONG = ah.Every(steps=9000)


async def test_an_old_plateau_does_not_stop() -> None:
    """A plateau before a resumed run does not count: what counts is the age of the current best
    value.
    """
    hook = reports(patience=ah.Every(steps=500))
    await hook.begin()
    for step in (1000, 1500, 2000):
        hook.report(step, RECORDS[step])
    assert hook.report(2500, RECORDS[2500])
    resumed = reports(patience=ah.Every(steps=1000))
    await resumed.begin()
    resumed.load_state_dict(hook.state_dict())
    assert not resumed.report(3000, RECORDS[3000])
    assert (resumed.best, resumed.best_step, resumed.reason) == (0.65, 3000, None)


@pytest.mark.parametrize("not_a_hook", [5, None, "stop"])
def test_what_decides_must_be_a_function(not_a_hook: Any) -> None:
    """Anything but a function is refused when the hook is made."""
    with invalid("give"):
        ah.hook("after_run")(not_a_hook)
