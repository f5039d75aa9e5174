"""The public names, what they are called with, and where they say they come from."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import aiohooks as ah
from tests.support.source import ROOT

# Every error and the class it derives from besides AiohooksError: what a caller would expect to
# catch.
ERRORS: dict[str, type[BaseException] | None] = {
    "AiohooksError": None,
    "AbortedError": None,
    "CheckpointBusyError": ah.errors.CheckpointError,
    "CheckpointError": OSError,
    "CheckpointMismatchError": ah.errors.CheckpointError,
    "EffectError": RuntimeError,
    "CorruptCheckpointError": ah.errors.CheckpointError,
    "FeedConflictError": RuntimeError,
    "FetchError": ValueError,
    "GraphError": ValueError,
    "GraphFinalizedError": RuntimeError,
    "HookCancelledError": None,
    "HookTimeoutError": TimeoutError,
    "InvalidArgumentError": ValueError,
    "InvalidHookError": TypeError,
    "NanLossDuringTrainingError": RuntimeError,
    "NestedRunError": RuntimeError,
    "NotReadyError": RuntimeError,
    "OutOfRangeError": None,
    "ProducerFinishedError": ah.StopRequestedError,
    "PublisherFailedError": None,
    "PublisherFinishedError": ah.StopRequestedError,
    "RecoveryExhaustedError": None,
    "SessionClosedError": RuntimeError,
    "SessionNotReadyError": TimeoutError,
    "SessionStalledError": TimeoutError,
    "StaleTermError": None,
    "StepResetError": None,
    "StepTimeoutError": TimeoutError,
    "StopRequestedError": RuntimeError,
    "StoreClosedError": None,
    "StoreDamagedError": None,
    "StoreRefusedError": ah.errors.StoreUnavailableError,
    "StoreUnavailableError": ah.UnavailableError,
    "TaskDiedError": None,
    "UnavailableError": None,
    "UnsupportedSystemError": RuntimeError,
    "WrongLoopError": RuntimeError,
}

# What users call, and with what. A default that is no plain value shows as the name of its type.
# Names without a signature are made by the library and not by users.
SIGNATURES: dict[str, str | None] = {
    "AsyncMonitoredSession": (
        "(source, hooks=(), *, global_step=None, variables=None, recovery=<RecoveryPolicy>, "
        "stop_grace_period_secs=10.0, handle_signals=False, yield_secs=0.005, name=None)"
    ),
    "AsyncMonitoredSession.run": "async (self, fetches, feed_dict=None, options=None)",
    "AsyncMonitoredSession.run_step_fn": "async (self, fn)",
    "AsyncMonitoredSession.steps": (
        "(self, fetches=(), *, feeds=None, producer=None, prefetch=0, thread=False)"
    ),
    "AsyncMonitoredSession.should_stop": "(self)",
    "AsyncMonitoredSession.request_stop": "(self, reason=None)",
    "AsyncMonitoredSession.stop_reason": "property",
    "AsyncMonitoredSession.stop_signal": "property",
    "AsyncMonitoredSession.start_soon": "(self, fn, *args, name=None)",
    "AsyncMonitoredSession.until": "async (self, awaitable, *, producer=None, drain=False)",
    "AsyncMonitoredSession.coord": "property",
    "AsyncMonitoredSession.graph": "property",
    "AsyncMonitoredSession.global_step": "property",
    "AsyncMonitoredSession.status": "(self)",
    "AsyncMonitoredSession.why": "(self)",
    "AsyncMonitoredSession.aclose": "async (self)",
    "session.AsyncSingularMonitoredSession": (
        "(source, hooks=(), **options)"
    ),  # those of AsyncMonitoredSession, but `recovery`
    "session.AsyncSingularMonitoredSession.raw_session": "(self)",
    "Backoff": "(initial_secs=0.1, max_secs=30.0, jitter=True)",
    "session.Activity": None,
    "hooks.Blocker": None,
    "hooks.BlockingHook": "(obj, *, grace_secs=10.0)",
    "checkpoint.Checkpoint": None,
    "CheckpointSaverHook": (
        "(checkpoint_dir=None, *, every=<Every>, listeners=(), background=True,"
        " save_on_begin=True, save_on_end=True, save_on_error=False)"
    ),
    "hooks.CheckpointSaverListener": "()",
    "hooks.CheckpointSaverListener.begin": "async (self)",
    "hooks.CheckpointSaverListener.before_save": "async (self, session, global_step)",
    "hooks.CheckpointSaverListener.after_save": "async (self, session, global_step)",
    "hooks.CheckpointSaverListener.end": "async (self, session, global_step)",
    "ChiefSessionCreator": (
        "(graph, *, scaffold=None, checkpoint_dir=None, global_step=None, variables=None,"
        " lead=True)"
    ),
    "ChiefSessionCreator.create_session": "async (self)",
    "ChiefSessionCreator.aclose": "async (self, *, grace_secs=10.0)",
    "hooks.Clock": None,
    "configure": "(hook, **options)",
    "HookGroup": "(kind, hooks=(), *, results=None, grace_secs=10.0, init=None)",
    "HookGroup.on": "(self, method, fn=None, **options)",
    "HookGroup.add": "(self, hook)",
    "HookGroup.remove": "(self, hook)",
    "HookGroup.status": "(self)",
    "compose": "(kind, hooks, *, results=None, init=None)",
    "compose_functions": "(functions, *, results=None)",
    "in_order": "(hooks)",
    "point": "(how)",
    "chain": "(*, argument)",
    "dispatch.end_chain": "(value)",
    "wrap": "(*, argument)",
    "Coordinator": "()",
    "Coordinator.start_soon": "(self, fn, *args, name=None)",
    "Coordinator.request_stop": "(self, reason=None)",
    "Coordinator.should_stop": "(self)",
    "Coordinator.stop_reason": "property",
    "Coordinator.until": "async (self, awaitable, *, producer=None, drain=False)",
    "Coordinator.wait_for_stop": "async (self, timeout=None)",
    "Coordinator.join": "async (self, stop_grace_period_secs=10.0)",
    "Coordinator.status": "(self)",
    "Coordinator.tasks": "property",
    "Coordinator.stop_on_exception": "(self)",
    "Coordinator.raise_requested_exception": "(self)",
    "hooks.current_clock": "()",
    "hooks.EarlyStoppingHook": (
        "(monitor=None, *, mode='min', patience=None, min_delta=0.0, stopping_threshold=None,"
        " every=<Every>, restore_best=None, name=None)"
    ),
    "hooks.EarlyStoppingHook.report": "(self, step, value, states=None)",
    "hooks.EarlyStoppingHook.state_dict": "(self)",
    "hooks.EarlyStoppingHook.load_state_dict": "(self, state)",
    "hooks.Effect": "(kind, payload, key, step)",
    "effect": "(kind, payload=None, *, recorder=None)",
    "session.EffectStatus": None,
    "hooks.EffectsHook": (
        "(handlers, *, run, when='checkpoint', max_pending=1000, backoff=<Backoff>,"
        " drain_secs=10.0)"
    ),
    "hooks.Evaluation": None,
    "hooks.Evaluation.run": "async (self, fetches, feed_dict=None)",
    "hooks.EvaluatorHook": (
        "(eval_fn, *, every, mode='inline', at_begin=False, at_end=True,"
        " max_pending=1, snapshot=None, on_result=None, max_results=1000, name=None)"
    ),
    "Every": "(*, steps=None, secs=None, at=(), after=0)",
    "Every.timer": "(self)",
    "hooks.EveryTimer": None,
    "hooks.EveryTimer.start": "(self, step, now)",
    "hooks.EveryTimer.due": "(self, step, now)",
    "hooks.EveryTimer.mark": "(self, step, now)",
    "hooks.EveryTimer.resume": "(self, step, now)",
    "hooks.EveryTimer.last_step": "property",
    "hooks.FeedFnHook": "(feed_fn)",
    "hooks.FinalOpsHook": "(final_ops, *, feed_dict=None)",
    "graph.get_default_graph": "()",
    "hooks.GlobalStepWaiterHook": "(wait_until_step, *, timeout=None)",
    "in_thread": "(fn)",
    "Graph": "()",
    "Graph.placeholder": "(self, name, *, default=<_Missing>)",
    "Graph.variable": "(self, name, initial)",
    "Graph.operation": "(self, fn=None, **options)",
    "Graph.train_op": "(self, fn=None, *, steps=1, **options)",
    "Graph.finalize": "(self)",
    "Graph.finalized": "property",
    "Graph.as_default": "(self)",
    "Graph.unique_name": "(self, name)",
    "hook": "(method, *, fetches=None, every=None, name=None)",
    "dispatch.HookRegistration": None,
    "hooks.HookTimes": None,
    "hooks.HookTimingHook": "(*, warn_secs=0.1)",
    "hooks.HookTimingHook.statistics": "(self)",
    "hooks.HookTimingHook.report": "(self)",
    "hooks.JSONLinesHook": ("(path, values, *, every=<Every>)"),
    "checkpoint.KeepBest": "(k, metric, mode='min')",
    "checkpoint.KeepEvery": "(steps)",
    "checkpoint.KeepNewest": "(n=5)",
    "checkpoint.KeepPolicy": None,
    "checkpoint.KeepPolicy.kept": "(self, checkpoints)",
    "checkpoint.RandomState": "(*generators)",
    "checkpoint.RandomState.load_state_dict": "(self, state)",
    "checkpoint.RandomState.state_dict": "(self)",
    "hooks.LambdaHook": "(*, fetches=None, every=None, name=None, **functions)",
    "LoggingHook": "(values, *, every=None, at_end=False, formatter=None)",
    "stores.Position": "(epoch, step)",
    "MemoryStepStore": "(step=0, *, run='default')",
    "training.monitored_training_session": (
        "(source, *, is_chief=True, checkpoint_dir=None, scaffold=None, hooks=(),"
        " chief_only_hooks=(), save_checkpoint=<Every>, save_summaries=<Every>,"
        " log_step_count=<Every>, summaries=None, summary_dir=None, **session)"
    ),
    "NanHook": "(value, *, fail_on_nan_loss=True)",
    "graph.Operation": None,
    "hooks.PhaseTime": None,
    "graph.Placeholder": None,
    "hooks.ProfilerHook": ("(output_dir, *, every=<Every>, window_steps=1)"),
    "hooks.ProgressHook": "(values=None, *, total=None, description='run', file=None)",
    "RecoveryPolicy": (
        "(on=(AbortedError, UnavailableError), *, max_attempts=10, backoff=<Backoff>,"
        " on_lost_feeds='log')"
    ),
    "checkpoint.Restored": None,
    "run": "(main, *args)",
    "checkpoint.Mirror": ("(url, storage_options=None, timeout_secs=60.0, backoff=<Backoff>)"),
    "checkpoint.MirrorStatus": None,
    "checkpoint.Saver": ("(checkpoint_dir, *, keep=<KeepNewest>, read_only=False, mirror=None)"),
    "checkpoint.Saver.mirror_status": "property",
    "checkpoint.Saver.flush_mirror": "async (self, timeout=None)",
    "checkpoint.Saver.save": "async (self, state, step, *, metrics=None)",
    "checkpoint.Saver.restore": "async (self, step=None)",
    "checkpoint.Saver.checkpoints": "async (self)",
    "checkpoint.Saver.follow": "(self, *, every_secs, timeout=None)",
    "checkpoint.Saver.verify": "async (self)",
    "checkpoint.Saver.aclose": "async (self, *, grace_secs=10.0)",
    "Scaffold": (
        "(*, init_fn=None, ready_for_local_init_fn=None, local_init_fn=None, ready_fn=None,"
        " tracked=None)"
    ),
    "Session": "(graph, *, global_step=None, variables=None)",
    "Session.run": "async (self, fetches, feed_dict=None)",
    "Session.aclose": "async (self)",
    "Session.closed": "property",
    "Session.state_dict": "(self)",
    "session.SessionCreator": None,
    "session.SessionCreator.graph": "property",
    "session.SessionCreator.create_session": "async (self)",
    "SessionRunArgs": "(fetches=None, feed_dict=None, options=None)",
    "SessionRunContext": (
        "(original_args, session, coord=None, *, global_step=0, attempt=1, effect_recorder=None)"
    ),
    "SessionRunContext.metrics": "property",
    "SessionRunContext.effect": "(self, kind, payload=None, *, recorder=None)",
    "SessionRunContext.stop_requested": "property",
    "SessionRunContext.request_stop": "(self, reason=None)",
    "SessionRunHook": "()",
    "SessionRunHook.begin": "async (self)",
    "SessionRunHook.after_create_session": "async (self, session, coord, /)",
    "SessionRunHook.before_run": "async (self, run_context, /)",
    "SessionRunHook.after_run": "async (self, run_context, run_values, /)",
    "SessionRunHook.end": "async (self, session, /)",
    "SessionRunHook.close": "async (self, exc, /)",
    "SessionRunValues": "(results, options, run_metadata)",
    "session.Event": None,
    "session.Event.subscribe": "(self, callback)",
    "session.SessionEvents": None,
    "session.SessionEvents.request_save": "(self)",
    "session.session_events": "()",
    "session.SessionStatus": None,
    "SignalPolicy": ("(*, signals=<tuple>, step_secs=None, grace_secs=None, drain_secs=None)"),
    "hooks.Stall": None,
    "hooks.WatchdogHook": (
        "(step_secs, *, first_step_secs=None, wait_secs=None, on_stall='report')"
    ),
    "checkpoint.Stateful": None,
    "checkpoint.Stateful.state_dict": "(self)",
    "checkpoint.Stateful.load_state_dict": "(self, state, /)",
    "session.StepContext": None,
    "session.StepContext.session": "property",
    "session.StepContext.run_with_hooks": "async (self, fetches, feed_dict=None, options=None)",
    "session.StepContext.request_stop": "(self, reason=None)",
    "hooks.StepCounterHook": "(every=<Every>, *, on_rate=None)",
    "session.Steps": None,
    "session.WaitGraph": None,
    "session.WaitEdge": None,
    "session.WaitNode": None,
    "stores.Term": None,
    "open_step_store": "(url=None, *, run=None, **options)",
    "StepStore": None,
    "StepStore.latest": "property",
    "StepStore.value": "async (self)",
    "StepStore.advance": "async (self, by=1)",
    "StepStore.raise_to": "async (self, step)",
    "StepStore.wait_for": "async (self, step, *, timeout=None, on_reset='keep')",
    "StepStore.changes": "(self)",
    "StepStore.reset": "async (self, step)",
    "StepStore.publisher": "(self, name)",
    "StepStore.statistics": "(self)",
    "StepStore.aclose": "async (self)",
    "StepStore.lead": "(self)",
    "StepStore.mark_initialised": "async (self)",
    "StepStore.wait_initialised": "async (self, timeout=None)",
    "StepStore.flush": "async (self, timeout=None)",
    "StopAtStepHook": "(*, num_steps=None, last_step=None)",
    "hooks.StopAtTimeHook": "(secs)",
    "hooks.SummarySaverHook": ("(output_dir, values, *, every=<Every>)"),
    "graph.Variable": None,
    "version_gate.Ticket": None,
    "version_gate.Ticket.drop": "(self)",
    "version_gate.Ticket.hand_off": "(self)",
    "version_gate.Ticket.lag": "property",
    "version_gate.Ticket.ship": "(self)",
    "version_gate.Ticket.use": "(self)",
    "version_gate.Ticket.version": "property",
    "version_gate.VersionGate": "(versions, *, max_lag, per_version=1)",
    "version_gate.VersionGate.admit": "(self, *, timeout=None, until=None)",
    "version_gate.VersionGate.due": "property",
    "version_gate.VersionGate.admit_nowait": "(self)",
    "version_gate.VersionGate.lag_of": "(self, position)",
    "version_gate.VersionGate.statistics": "(self)",
    "Variables": "()",
    "Variables.ready": "property",
    "Variables.wait_ready": "async (self, timeout=None)",
    "Variables.snapshot": "(self)",
    "WorkerSessionCreator": (
        "(graph, *, scaffold=None, global_step=None, variables=None, max_wait_secs=1800.0)"
    ),
    "WorkerSessionCreator.create_session": "async (self)",
}

# Errors that steps raise, and the base class of all; the others are in aiohooks.errors alone.
COMMON_ERRORS = {
    "AiohooksError",
    "AbortedError",
    "OutOfRangeError",
    "StopRequestedError",
    "UnavailableError",
}
PUBLIC = {*COMMON_ERRORS, *(name for name in SIGNATURES if "." not in name)}

# Packages of their own: what they offer beside what the front door has.
PACKAGES = (
    "aiohooks.adapters.asgi",
    "aiohooks.adapters.opentelemetry",
    "aiohooks.adapters.prometheus",
    "aiohooks.adapters.trackers",
    "aiohooks.adapters.trackers.mlflow",
    "aiohooks.adapters.trackers.tensorboard",
    "aiohooks.adapters.trackers.wandb",
    "aiohooks.checkpoint",
    "aiohooks.dispatch",
    "aiohooks.distributed",
    "aiohooks.errors",
    "aiohooks.graph",
    "aiohooks.hooks",
    "aiohooks.session",
    "aiohooks.stores",
    "aiohooks.stores.local",
    "aiohooks.stores.ray",
    "aiohooks.stores.redis",
    "aiohooks.testing",
    "aiohooks.training",
    "aiohooks.version_gate",
)


class Shown:
    """Stands for a default in a signature's text."""

    def __init__(self, default: object) -> None:
        self.default = default

    def __repr__(self) -> str:
        if isinstance(self.default, tuple) and all(isinstance(each, type) for each in self.default):
            names = ", ".join(each.__name__ for each in self.default)
            return f"({names})"
        plain = self.default is None or isinstance(self.default, bool | int | float | str)
        return repr(self.default) if plain else f"<{type(self.default).__name__}>"


def shown(thing: Callable[..., Any] | property) -> str:
    """How something is called, without its types."""
    if not callable(thing):
        return "property"
    signature = inspect.signature(thing)
    parameters = [
        each.replace(
            annotation=each.empty,
            default=each.default if each.default is each.empty else Shown(each.default),
        )
        for each in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return f"async {text}" if inspect.iscoroutinefunction(thing) else text


def find(path: str) -> Any:
    """A public object, or an attribute of a public class as it stands in the class."""
    first, *rest = path.split(".")
    found = getattr(ah, first)
    if inspect.ismodule(found):
        found = getattr(found, rest.pop(0))
    return inspect.getattr_static(found, rest.pop(0)) if rest else found


def test_the_public_names_are_these() -> None:
    """`aiohooks.__all__` is exactly the list of this file, in order and without doubles."""
    assert set(ah.__all__) == PUBLIC
    assert list(ah.__all__) == sorted(set(ah.__all__))


def test_the_front_door_is_small() -> None:
    """The front door has at most 40 names: dispatch and a plain session. Others are public in their
    package only.
    """
    assert len(ah.__all__) <= 40


def test_nothing_public_is_left_out() -> None:
    """What stands in the front door without an underscore is in `__all__`, submodules left
    aside.
    """
    visible = {
        name
        for name in dir(ah)
        if not name.startswith("_") and not inspect.ismodule(getattr(ah, name))
    }
    assert visible - {"Any", "TYPE_CHECKING"} == PUBLIC


NOT_FOR_A_SESSION = {
    "aiohooks.hooks",
    "aiohooks.version_gate",
    "aiohooks.training",
    "aiohooks.distributed",
    "aiohooks.adapters",
    "aiohooks.testing",
    "aiohooks.checkpoint.saver",
    "aiohooks.stores.shared",
    "aiohooks.stores.engine",
    "aiohooks.stores.open",
    "aiohooks.stores.local",
    # What takes longest to import of what anyio and the standard library have.
    "anyio._backends",
    "hashlib",
    "json",
    "pathlib",
    "difflib",
    "secrets",
    "csv",
    "cProfile",
    "multiprocessing",
    "ctypes",
}
NOT_FOR_A_GROUP = {
    *NOT_FOR_A_SESSION,
    "aiohooks.session",
    "aiohooks.graph",
    "aiohooks.stores",
    "aiohooks.checkpoint",
}
NOT_FOR_A_STORE = {
    *NOT_FOR_A_SESSION,
    "aiohooks.session",
    "aiohooks.graph",
    "aiohooks.checkpoint",
}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        pytest.param(
            "import aiohooks",
            NOT_FOR_A_GROUP,
            id="the front door",
        ),
        pytest.param("from aiohooks import HookGroup", NOT_FOR_A_GROUP, id="a hook group"),
        pytest.param("from aiohooks import MemoryStepStore", NOT_FOR_A_STORE, id="a step store"),
        pytest.param(
            "from aiohooks import AsyncMonitoredSession", NOT_FOR_A_SESSION, id="a session"
        ),
    ],
)
def test_names_are_imported_when_they_are_used(statement: str, unwanted: set[str]) -> None:
    """Importing `aiohooks` loads hook groups, which are small; using another name of it loads what
    that needs, and none of what it does not.
    """
    program = (
        f"import sys; before = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - before)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert sorted(unwanted.intersection(loaded)) == []


def test_a_module_is_imported_where_a_package_has_the_same_name() -> None:
    """A module with the name of something in `aiohooks` can be imported from its own package."""
    program = "from aiohooks.session import hook, run; print(hook.__name__, run.__name__)"
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == "aiohooks.session.hook aiohooks.session.run\n"


def test_an_unknown_name_is_reported_as_by_python(capsys: pytest.CaptureFixture[str]) -> None:
    """With the name alone: a similar one could be another class."""
    name = "Grph"
    with pytest.raises(AttributeError) as caught:
        getattr(ah, name)
    # Python itself adds similar names here, if it knows the object.
    sys.__excepthook__(type(caught.value), caught.value, caught.value.__traceback__)
    message = "AttributeError: module 'aiohooks' has no attribute 'Grph'\n"
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize("path", [path for path, text in SIGNATURES.items() if text is not None])
def test_signatures(path: str) -> None:
    """Names, kinds and defaults of parameters, and what must be awaited, are as designed."""
    assert shown(find(path)) == SIGNATURES[path]


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_tree(name: str) -> None:
    """An error derives from AiohooksError, and from the builtin that a caller would expect."""
    error = getattr(ah.errors, name)
    assert issubclass(error, ah.AiohooksError)
    builtin = ERRORS[name]
    if builtin is None:
        assert not issubclass(error, RuntimeError | ValueError | TypeError | TimeoutError)
    else:
        assert issubclass(error, builtin)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_what_is_public_says_so(name: str) -> None:
    """A public object names the package as its module, carries the name it is found by, and has a
    docstring.
    """
    thing = getattr(ah, name)
    assert (thing.__module__, thing.__qualname__) == (
        "aiohooks.errors" if name in COMMON_ERRORS else "aiohooks",
        name,
    )
    assert inspect.getdoc(thing)


@pytest.mark.parametrize("package", ["aiohooks", *PACKAGES])
def test_what_is_public_is_explained(package: str) -> None:
    """Each method and property of a public class has a docstring, its own or the one it
    overrides.
    """
    module = importlib.import_module(package)
    silent = [
        f"{name}.{attribute}"
        for name in module.__all__
        if inspect.isclass(thing := getattr(module, name))
        for attribute, value in vars(thing).items()
        if not attribute.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
        if not inspect.getdoc(getattr(thing, attribute))
    ]
    assert not silent


@pytest.mark.parametrize("package", ["aiohooks", *PACKAGES])
def test_what_is_public_is_on_a_page(package: str) -> None:
    """A reader of docs/ or the README meets each public name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = {
        word for page in pages for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))
    }
    assert [name for name in importlib.import_module(package).__all__ if name not in words] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_have_a_front_door_too(package: str) -> None:
    """A public package lists its names; the classes and functions among them have docstrings."""
    module = importlib.import_module(package)
    names = {
        name
        for name in dir(module)
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    }
    assert list(module.__all__) == sorted(set(module.__all__))
    assert set(module.__all__) <= names
    things = {name: getattr(module, name) for name in module.__all__}
    made = {
        name: thing
        for name, thing in things.items()
        if inspect.isclass(thing) or inspect.isfunction(thing)
    }
    assert [name for name, thing in made.items() if not inspect.getdoc(thing)] == []
