"""Invalid values: every constructor of a public class refuses them, and says what to give
instead.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

import aiohooks as ah
from aiohooks.adapters.trackers import TrackerHook
from aiohooks.checkpoint import KeepBest, KeepNewest, Mirror, Saver
from aiohooks.stores.local import LocalEngine
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.checks import invalid, refused
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.sessions import counting_graph, doubling
from tests.support.trackers import ScriptedTracker

GRAPH = counting_graph()
NAN = math.nan
EVERY_STEP = ah.Every(steps=1)


def plain(session: object) -> None:
    """Not a coroutine function."""


class Observer:
    """A plain object with a method of a hook."""

    def begin(self) -> None: ...


async def evaluate(evaluation: object) -> None:
    """An evaluation."""


def monitored(**options: Any) -> ah.AsyncMonitoredSession:
    return doubling(**options)


def remote_store(**options: Any) -> FakeStepStore:
    return FakeStepStore(FakeEngine(), **options)


# What has no meaning to any parameter.

CONSTRUCTORS: dict[Callable[..., Any], dict[str, Any]] = {
    ah.AsyncMonitoredSession: {"source": GRAPH},
    ah.Session: {"graph": GRAPH},
    ah.ChiefSessionCreator: {"graph": GRAPH},
    ah.WorkerSessionCreator: {"graph": GRAPH, "variables": ah.Variables()},
    ah.Scaffold: {},
    ah.Backoff: {},
    ah.RecoveryPolicy: {},
    ah.SignalPolicy: {},
    ah.training.monitored_training_session: {"source": GRAPH},
    ah.MemoryStepStore: {},
    ah.Every: {"steps": 1},
    ah.StopAtStepHook: {"last_step": 1},
    ah.LoggingHook: {"values": ["loss"], "at_end": True},
    ah.CheckpointSaverHook: {"checkpoint_dir": "run", "every": EVERY_STEP},
    ah.hooks.EffectsHook: {"handlers": {"publish": evaluate}, "run": "r"},
    ah.hooks.GlobalStepWaiterHook: {"wait_until_step": 1},
    ah.hooks.StepCounterHook: {},
    ah.hooks.FeedFnHook: {"feed_fn": dict},
    ah.hooks.FinalOpsHook: {"final_ops": "loss"},
    ah.hooks.BlockingHook: {"obj": Observer()},
    ah.hooks.EvaluatorHook: {"eval_fn": evaluate, "every": EVERY_STEP},
    ah.hooks.StopAtTimeHook: {"secs": 1},
    ah.hooks.EarlyStoppingHook: {"monitor": "loss", "patience": 1},
    ah.hooks.ProfilerHook: {"output_dir": "profiles"},
    ah.hooks.ProgressHook: {},
    ah.hooks.SummarySaverHook: {"output_dir": "runs", "values": ["loss"]},
    ah.hooks.HookTimingHook: {},
    ah.hooks.WatchdogHook: {"step_secs": 1},
    ah.hooks.JSONLinesHook: {"path": "run", "values": ["loss"]},
    ah.version_gate.VersionGate: {"versions": ah.MemoryStepStore(), "max_lag": 1},
    Saver: {"checkpoint_dir": "run"},
    Mirror: {"url": "file:///mirror"},
    KeepNewest: {},
    KeepBest: {"k": 1, "metric": "loss"},
    TrackerHook: {"tracker": ScriptedTracker()},
}
"""Each with arguments that it takes."""
NOT_CHECKED = {
    *("hooks", "chief_only_hooks", "listeners", "final_ops", "monitor", "file", "name"),
    *("summaries", "summary_dir", "signals", "stopping_threshold"),
}
"""Parameters that take anything, or that Python itself refuses as no iterable."""


def meaningless_values(parameter: inspect.Parameter) -> list[object]:
    """Return values that a parameter must refuse; none if it is a switch."""
    if isinstance(parameter.default, bool) or parameter.kind is parameter.VAR_KEYWORD:
        return []
    values: list[object] = [object()]
    if re.search("float|int", str(parameter.annotation)):
        values.append(-1)
    if "Literal" in str(parameter.annotation):
        values.append("unknown")
    return values


REFUSED = [
    pytest.param(make, name, value, id=f"{make.__name__} {name} {type(value).__name__}")
    for make in CONSTRUCTORS
    for name, parameter in inspect.signature(make).parameters.items()
    if name not in NOT_CHECKED
    for value in meaningless_values(parameter)
]


@pytest.mark.parametrize(("make", "name", "value"), REFUSED)
def test_a_value_of_no_meaning_is_refused(
    make: Callable[..., Any], name: str, value: object
) -> None:
    """A constructor refuses any object, a number below zero and an unknown word when they are
    given, in an error that shows the value.
    """
    errors = (ah.errors.InvalidArgumentError, ah.errors.InvalidHookError)
    with pytest.raises(errors, match=re.escape(repr(value))):
        make(**{**CONSTRUCTORS[make], name: value})


# Values of the right type.


class Case(NamedTuple):
    """What is made, with which arguments, and what the message says."""

    make: Callable[..., Any]
    arguments: dict[str, Any]
    says: tuple[str, ...]


def case(make: Callable[..., Any], *says: str, **arguments: Any) -> Case:
    """The message has these words; `make` gets its arguments of `CONSTRUCTORS`, too."""
    return Case(make, {**CONSTRUCTORS.get(make, {}), **arguments}, says)


VALUES = [
    case(
        monitored, "stop_grace_period_secs is nan", "seconds, 0 or more", stop_grace_period_secs=NAN
    ),
    case(ah.AsyncMonitoredSession, "write the step as `async def`", source=plain),
    case(
        ah.AsyncMonitoredSession,
        "a SessionCreator has its own step store and variables",
        "give them to it",
        source=ah.WorkerSessionCreator(GRAPH, variables=ah.Variables()),
        variables=ah.Variables(),
    ),
    case(ah.WorkerSessionCreator, "give both the same Variables()", variables=None),
    case(ah.Scaffold, "init_fn is <function plain", "give a coroutine function", init_fn=plain),
    case(ah.Scaffold, "tracked['model'] is 5", "state_dict()", tracked={"model": 5}),
    case(ah.Backoff, "max_secs is inf", max_secs=math.inf),
    case(ah.RecoveryPolicy, "on is [<class 'OSError'>]", "or a tuple of them", on=[OSError]),
    case(
        ah.training.monitored_training_session,
        "summaries are given and no directory for them",
        summaries=["loss"],
    ),
    case(
        ah.training.monitored_training_session,
        "output_dir is ''; give a path",
        summaries=["loss"],
        summary_dir="",
        checkpoint_dir="checkpoints",
    ),
    case(ah.training.monitored_training_session, "a worker waits for a chief", is_chief=False),
    case(ah.hooks.EffectsHook, "max_pending is 0", max_pending=0),
    case(TrackerHook, "values", values="loss"),
    case(ah.MemoryStepStore, f"step {2**53}", "give a whole number from 0", step=2**53),
    case(ah.MemoryStepStore, r"run='a\nb'", "give a printable name", run="a\nb"),
    case(ah.Every, "Every() is never due", "give steps=, secs= or at=", steps=None),
    case(ah.Every, "steps of Every is 0", "at least 1", steps=0),
    case(ah.Every, "secs of Every is 0", "give seconds, above 0", secs=0),
    case(ah.Every, "at of Every is True", "at least 1", at=(True,)),
    case(ah.StopAtStepHook, "one of num_steps or last_step must be given", last_step=None),
    case(ah.StopAtStepHook, "only one of num_steps (1) or last_step (1)", num_steps=1),
    case(ah.hooks.GlobalStepWaiterHook, "timeout is 0", "None for no limit", timeout=0),
    case(ah.LoggingHook, "values is the str 'loss'", "['loss']", values="loss"),
    case(ah.LoggingHook, "values is empty", "give a mapping", values=[]),
    case(ah.LoggingHook, "it would never log", "every=Every(...), at_end=True", at_end=False),
    case(ah.NanHook, "value is None", "give the node or name to watch", value=None),
    case(ah.hooks.EvaluatorHook, "max_pending is 0", max_pending=0),
    case(ah.hooks.EvaluatorHook, "max_results is True", max_results=True),
    case(ah.hooks.EarlyStoppingHook, "it would never stop", "use NanHook", patience=None),
    case(ah.hooks.EarlyStoppingHook, "patience is 0", "1 or more", patience=0),
    case(ah.hooks.EarlyStoppingHook, "an Every of steps alone", patience=ah.Every(secs=5)),
    case(ah.hooks.ProfilerHook, "every is None", every=None),
    case(ah.hooks.ProfilerHook, "window_steps is 0", window_steps=0),
    case(ah.hooks.ProgressHook, "total is 0", total=0),
    case(ah.hooks.ProgressHook, "description is None", description=None),
    case(ah.hooks.SummarySaverHook, "tag 3", values={3: "loss"}),
    case(ah.hooks.SummarySaverHook, "output_dir is ''", output_dir=""),
    case(ah.hooks.HookTimingHook, "warn_secs is 0", warn_secs=0),
    case(ah.hook, "go with after_run", method="end", every=EVERY_STEP),
    case(
        ah.hook,
        "go with after_run, and this is before_run",
        method="before_run",
        fetches="loss",
    ),
    case(ah.hooks.WatchdogHook, "step_secs is 0", step_secs=0),
    case(ah.hooks.WatchdogHook, "wait_secs is 0", wait_secs=0),
    case(ah.CheckpointSaverHook, "a listener", listeners=[ah.hooks.CheckpointSaverListener]),
    case(ah.CheckpointSaverHook, "checkpoint_dir is ''", checkpoint_dir=""),
    case(ah.CheckpointSaverHook, "the URL is for `mirror=`", checkpoint_dir="s3://bucket/run"),
    case(ah.CheckpointSaverHook, "give os.path.expanduser('~/run')", checkpoint_dir="~/run"),
    case(KeepNewest, " is 0", "give ", n=0),
    case(KeepBest, " is 0", "give ", k=0),
    case(remote_store, "on_lost is 'ask'", on_lost="ask"),
    case(remote_store, "lease_secs", lease_secs=0),
    case(remote_store, "heartbeat", heartbeat=0),
    case(FaultInjectionHook, "('run', 1) is no call", faults={("run", 1): OSError()}),
    case(FaultInjectionHook, "('begin', 0) is no call", faults={("begin", 0): OSError()}),
    case(ah.hooks.JSONLinesHook, "tag 'step'", "another tag", values={"step": "loss"}),
    case(LocalEngine, "give the path of a directory", directory=""),
    case(LocalEngine, "give the path of a directory", directory="local:///run"),
]


def case_id(case: Case) -> str:
    shown = ",".join(
        f"{name}={re.sub(r' object.*| at 0x.*|^<Graph.*', '', repr(value))}"
        for name, value in case.arguments.items()
    )
    make = case.make.func if isinstance(case.make, partial) else case.make
    return f"{make.__name__}({shown})"


@pytest.mark.parametrize("case", VALUES, ids=case_id)
def test_an_invalid_argument_is_refused(case: Case) -> None:
    """A constructor refuses an invalid value when it is given: a ValueError with the value and what
    to give instead.
    """
    with invalid(*case.says) as caught:
        case.make(**case.arguments)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("number", [10**400, -(10**5000)], ids=["fits no float", "has no repr"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (monitored, "stop_grace_period_secs"),
        (partial(ah.configure, ah.NanHook("loss")), "timeout"),
        (ah.Every, "secs"),
        (partial(ah.hooks.EarlyStoppingHook, "loss", patience=1), "min_delta"),
        (ManualClock().advance, "secs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_huge_number_is_refused(make: Callable[..., Any], name: str, number: int) -> None:
    """An int that no float can stand for is refused like infinity, in a message that can be
    read.
    """
    with invalid("give") as caught:
        make(**{name: number})
    assert len(str(caught.value)) < 300


class AsyncObserver:
    """An object whose method is a coroutine function."""

    async def begin(self) -> None: ...


@pytest.mark.parametrize(
    ("obj", "says"),
    [
        (None, ("None has none of the methods of a hook: begin,",)),
        (5, ("5 has none of the methods", "before_run")),
        (
            AsyncObserver(),
            ("AsyncObserver.begin is a coroutine function", "register the hook as it is"),
        ),
        (
            ah.StopAtStepHook(last_step=1),
            ("StopAtStepHook.begin is a coroutine function", "register the hook as it is"),
        ),
        (Observer, ("the class Observer", "give an object of it")),
    ],
    ids=["none", "int", "async", "hook", "class"],
)
def test_a_blocking_hook_wraps_an_object_with_plain_methods(
    obj: Any, says: tuple[str, ...]
) -> None:
    """`BlockingHook` refuses an object without a method of a hook, and one that needs no
    wrapping.
    """
    with refused(ah.errors.InvalidHookError, *says):
        ah.hooks.BlockingHook(obj)


@pytest.mark.parametrize("secs", [-1, NAN])
def test_the_manual_clock_only_moves_forward(secs: float) -> None:
    """A manual clock is moved by a finite number of seconds, and not back."""
    clock = ManualClock()
    with invalid(f"advance({secs!r})", "seconds >= 0"):
        clock.advance(secs)
    assert clock.now() == 0


@pytest.mark.parametrize("value", [-1, NAN, "1"], ids=repr)
async def test_timeouts_of_waits_are_checked(value: Any) -> None:
    """Every wait with a timeout refuses one that is not a number of seconds, before it waits."""
    coord, store, variables = ah.Coordinator(), ah.MemoryStepStore(), ah.Variables()
    waits: list[Callable[[], Any]] = [
        lambda: coord.wait_for_stop(value),
        lambda: coord.join(value),
        lambda: variables.wait_ready(value),
        lambda: store.wait_for(1, timeout=value),
    ]
    for wait in waits:
        with invalid(repr(value), "seconds"):
            await wait()


@pytest.mark.parametrize("by", [0, True], ids=repr)
async def test_steps_only_advance(by: Any) -> None:
    """A store advances by a whole number, at least 1, and stays where it was otherwise."""
    store = ah.MemoryStepStore(3)
    with invalid(f"advance by {by!r}", "give a whole number from 1"):
        await store.advance(by)
    assert store.latest.step == 3


@pytest.mark.parametrize("step", [-1, 1.5, 2**53], ids=repr)
async def test_steps_are_whole_numbers(step: Any) -> None:
    """A store is raised and reset to whole numbers from 0 on."""
    store = ah.MemoryStepStore(3)
    with invalid(f"raise to step {step!r}", "give a whole number from 0"):
        await store.raise_to(step)
    with invalid(f"reset to step {step!r}", "give a whole number from 0"):
        await store.reset(step)
    assert store.latest == (1, 3)


async def test_arguments_of_store_methods_are_checked() -> None:
    """`wait_for` and `publisher` refuse invalid arguments."""
    store: Any = ah.MemoryStepStore()
    with invalid("wait for step 1.5", "give a whole number"):
        await store.wait_for(1.5)
    with invalid("on_reset='ignore'", '"keep" or "raise"'):
        await store.wait_for(1, on_reset="ignore")
    with invalid("publisher ''", "give a printable name"):
        store.publisher("")
    assert store.statistics().waiting == 0


@pytest.mark.parametrize("values", [5, ["w"], None], ids=repr)
def test_variables_are_assigned_from_a_mapping(values: Any) -> None:
    """`Variables.assign` takes a mapping, and says so."""
    with invalid(repr(values), "give a Mapping"):
        ah.Variables().assign(values)
