"""Every built-in hook passes the conformance suite of hooks; what else holds for several of them in
the same way.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
import aiohooks.hooks._tensorboard  # before what exists is frozen for quick collections
from aiohooks.adapters.opentelemetry import OpenTelemetryHook
from aiohooks.adapters.prometheus import PrometheusHook
from aiohooks.hooks.evaluator import EvaluatorHook
from aiohooks.testing import RecordingHook, check_hook, hook_checks
from tests.support.extras import hide

EVERY_RUN = ah.Every(steps=1)


class Plain:
    """An object with plain methods."""

    def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        return ah.SessionRunArgs("loss")

    def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        assert run_values.results == 1.0

    def close(self, exc: BaseException | None) -> None:
        pass


async def evaluate(_: object) -> dict[str, float]:
    return {"accuracy": 0.5}


HOOKS: dict[str, Callable[[Path], ah.SessionRunHook]] = {
    "BlockingHook": lambda _: ah.hooks.BlockingHook(Plain()),
    "CheckpointSaverHook": lambda folder: ah.CheckpointSaverHook(folder, every=EVERY_RUN),
    "EarlyStoppingHook": lambda _: ah.hooks.EarlyStoppingHook("loss", patience=5),
    "EvaluatorHook": lambda _: EvaluatorHook(evaluate, every=EVERY_RUN),
    "EvaluatorHook in the background": lambda _: EvaluatorHook(
        evaluate, every=EVERY_RUN, mode="background", snapshot=dict
    ),
    "FeedFnHook": lambda _: ah.hooks.FeedFnHook(dict),
    "FinalOpsHook": lambda _: ah.hooks.FinalOpsHook("loss"),
    "GlobalStepWaiterHook": lambda _: ah.hooks.GlobalStepWaiterHook(wait_until_step=0),
    "HookTimingHook": lambda _: ah.hooks.HookTimingHook(),
    "JSONLinesHook": lambda folder: ah.hooks.JSONLinesHook(folder / "losses.jsonl", ["loss"]),
    "hook": lambda _: ah.hook("after_run")(lambda *_: None),
    "LoggingHook": lambda _: ah.LoggingHook(["loss"], every=EVERY_RUN),
    "NanHook": lambda _: ah.NanHook("loss"),
    "OpenTelemetryHook": lambda _: OpenTelemetryHook(),
    "ProfilerHook": lambda folder: ah.hooks.ProfilerHook(folder, every=EVERY_RUN),
    "ProgressHook": lambda _: ah.hooks.ProgressHook(["loss"], file=io.StringIO()),
    "PrometheusHook": lambda _: PrometheusHook(),
    "RecordingHook": lambda _: RecordingHook(fetches="loss", suspend=True),
    "StepCounterHook": lambda _: ah.hooks.StepCounterHook(EVERY_RUN),
    "StopAtStepHook": lambda _: ah.StopAtStepHook(num_steps=2),
    "StopAtTimeHook": lambda _: ah.hooks.StopAtTimeHook(secs=3600),
    "SummarySaverHook": lambda folder: ah.hooks.SummarySaverHook(folder, ["loss"], every=EVERY_RUN),
    "WatchdogHook": lambda _: ah.hooks.WatchdogHook(3600),
}


# The loops differ in what the checks of the library itself are about.
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("check", hook_checks())
@pytest.mark.parametrize("name", HOOKS)
async def test_it_passes(name: str, check: str, tmp_path: Path) -> None:
    """It works in sessions however they end, alone and beside others, passes on cancels, and leaves
    nothing behind.
    """

    def make() -> ah.SessionRunHook:
        return HOOKS[name](Path(tempfile.mkdtemp(dir=tmp_path)))

    await check_hook(make, check)


NAMED: tuple[Callable[[str | None], Any], ...] = (
    lambda name: ah.hooks.EarlyStoppingHook("loss", patience=1, name=name),
    lambda name: EvaluatorHook(evaluate, every=EVERY_RUN, name=name),
)


@pytest.mark.parametrize("make", NAMED)
def test_its_state_may_be_named(make: Callable[[str | None], Any]) -> None:
    """Several hooks of a class in one session have names, which distinguish their states."""
    assert [make(name).name for name in (None, "mine")] == ["", "mine"]


PACKAGES: list[tuple[str, str, str, Callable[[], object]]] = [
    ("rich", "_rich", "rich", ah.hooks.ProgressHook),
    (
        "tensorboardX",
        "_tensorboard",
        "tensorboard",
        lambda: ah.hooks.SummarySaverHook("runs", ["loss"]),
    ),
]


@pytest.mark.parametrize(("package", "module", "extra", "make"), PACKAGES)
def test_without_its_package_it_says_what_to_install(
    package: str,
    module: str,
    extra: str,
    make: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the hook is made, and not in the middle of the run; what needs no package can be
    made.
    """
    hide(monkeypatch, package, f"aiohooks.hooks.{module}")
    with pytest.raises(ImportError, match=rf"pip install 'aiohooks\[{extra}\]'"):
        make()
    ah.hooks.ProfilerHook("profiles")
