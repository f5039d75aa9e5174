"""Invalid values: every constructor of a public class refuses them, and says what to give
instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

import aiohooks as ah
from aiohooks.adapters.trackers import TrackerHook
from aiohooks.checkpoint import KeepBest, KeepEvery, KeepNewest
from aiohooks.stores.local import LocalEngine
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.checks import invalid, refused
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.sessions import counting_graph, double, doubling
from tests.support.trackers import ScriptedTracker

GRAPH = counting_graph()
NAN = math.nan


def plain(session: object) -> None:
    """Not a coroutine function."""


class Observer:
    """A plain object with a method of a hook."""

    def begin(self) -> None: ...


def worker(**options: Any) -> ah.WorkerSessionCreator:
    return ah.WorkerSessionCreator(GRAPH, **{"variables": ah.Variables(), **options})


def monitored(**options: Any) -> ah.AsyncMonitoredSession:
    return doubling(**options)


async def evaluate(evaluation: object) -> None:
    """An evaluation."""


def evaluator(**options: Any) -> ah.hooks.EvaluatorHook:
    given: dict[str, Any] = {"eval_fn": evaluate, "every": ah.Every(steps=1), **options}
    return ah.hooks.EvaluatorHook(**given)


def saver_hook(**options: Any) -> ah.CheckpointSaverHook:
    given: dict[str, Any] = {"checkpoint_dir": "run", "every": ah.Every(steps=1), **options}
    return ah.CheckpointSaverHook(**given)


def remote_store(**options: Any) -> FakeStepStore:
    return FakeStepStore(FakeEngine(), **options)


def tracker_hook(**options: Any) -> TrackerHook:
    return TrackerHook(**{"tracker": ScriptedTracker(), **options})


def effects_hook(**options: Any) -> ah.hooks.EffectsHook:
    return ah.hooks.EffectsHook(**{"handlers": {"publish": evaluate}, "run": "r", **options})


class Case(NamedTuple):
    """What is made, with which arguments, and what the message says."""

    make: Callable[..., Any]
    arguments: dict[str, Any]
    says: tuple[str, ...]


Refusal = tuple[dict[str, Any], tuple[str, ...]]


def value(*says: str, **arguments: Any) -> Refusal:
    """The last argument is invalid: its name and value are in the message, with these words."""
    name, wrong = [*arguments.items()][-1]
    return arguments, (f"{name} is {wrong!r}", *says)


def other(*says: str, **arguments: Any) -> Refusal:
    """The message has these words."""
    return arguments, says


def refusals(make: Callable[..., Any], *cases: Refusal) -> list[Case]:
    return [Case(make, *case) for case in cases]


VALUES = [
    *refusals(
        monitored,
        value("seconds, 0 or more", stop_grace_period_secs=-1),
        value("seconds, 0 or more", stop_grace_period_secs=math.inf),
        value("seconds, 0 or more", stop_grace_period_secs=NAN),
        value("seconds, 0 or more", stop_grace_period_secs="1"),
        value("seconds, 0 or more", stop_grace_period_secs=True),
        value("give a StepStore", global_step=5),
        value("give a Variables", variables={"w": 1}),
        value("RecoveryPolicy", recovery=None),
        value("give seconds, 0 or more, or None", yield_secs=-1),
        value("give True, False or a SignalPolicy", handle_signals=None),
        value("give True, False or a SignalPolicy", handle_signals=1),
    ),
    *refusals(
        ah.session.AsyncSingularMonitoredSession,
        value("give a StepStore", source=double, global_step=5),
    ),
    *refusals(
        ah.AsyncMonitoredSession,
        other("5 cannot be run", "give a Graph, a SessionCreator, or an `async def`", source=5),
        other("plain", "not a coroutine function; write the step as `async def`", source=plain),
        other("print", "give in_thread(...) of one that blocks", source=print),
        other(
            "a SessionCreator has its own step store and variables",
            "give them to it",
            source=worker(),
            global_step=ah.MemoryStepStore(),
        ),
        other("SessionCreator", "give them to it", source=worker(), variables=ah.Variables()),
    ),
    *refusals(
        ah.Session,
        value("give a Graph", graph="graph"),
        value("give a StepStore", graph=GRAPH, global_step=5),
        value("give a Variables", graph=GRAPH, variables={}),
    ),
    *refusals(
        ah.ChiefSessionCreator,
        other("None cannot be run", "give a Graph or an `async def`", graph=None),
        value("give a Scaffold", graph=GRAPH, scaffold=3),
        value("give a StepStore", graph=GRAPH, global_step=3),
        value("give a Variables", graph=GRAPH, variables={}),
    ),
    *refusals(
        ah.WorkerSessionCreator,
        other(
            "a worker waits for a chief's variables", "give both the same Variables()", graph=GRAPH
        ),
        other(
            "3 cannot be run", "give a Graph or an `async def`", graph=3, variables=ah.Variables()
        ),
    ),
    *refusals(
        worker,
        value("give a Variables", variables={}),
        value("give a Scaffold", scaffold="s"),
        value("give a StepStore", global_step=3),
        value("seconds", max_wait_secs=-1),
    ),
    *refusals(
        ah.Scaffold,
        value("give a coroutine function", init_fn=5),
        other("ready_fn is <function plain", "give a coroutine function", ready_fn=plain),
        other("local_init_fn is <function plain", "give a coroutine function", local_init_fn=plain),
        value("give a coroutine function", ready_for_local_init_fn="x"),
        value("give a Mapping", tracked=["model"]),
        other("tracked['model'] is 5", "state_dict()", tracked={"model": 5}),
    ),
    *refusals(
        ah.Backoff,
        value("seconds, 0 or more", initial_secs=-0.1),
        value("seconds, 0 or more", max_secs=math.inf),
    ),
    *refusals(
        ah.RecoveryPolicy,
        value("give a whole number, 0 for never", max_attempts=-1),
        value("Backoff", backoff=3),
        value("give a type of exceptions, or a tuple of them", on=[OSError]),
    ),
    Case(ah.RecoveryPolicy, *value(on_lost_feeds="none")),
    *refusals(
        ah.SignalPolicy,
        value(step_secs=-1),
        value(grace_secs="30"),
        value(drain_secs=-2),
    ),
    *refusals(
        partial(ah.training.monitored_training_session, GRAPH),
        value(save_checkpoint=600),
        value(save_summaries="often"),
        value(log_step_count=0),
        other("summaries are given and no directory for them", summaries=["loss"]),
        other(
            "output_dir is ''; give a path",
            summaries=["loss"],
            summary_dir="",
            checkpoint_dir="checkpoints",
        ),
        other("a worker waits for a chief's variables", is_chief=False),
        value(is_chief=False, variables=ah.Variables(), max_wait_secs=-1),
        value(checkpoint_dir=7),
    ),
    *refusals(
        effects_hook,
        value(handlers=[evaluate]),
        other("handlers is empty", handlers={}),
        other("a kind of handlers is 3; give a str", handlers={3: evaluate}),
        value(when="later"),
        value(run=3),
        value(max_pending=0),
        value(drain_secs=-1),
        value(backoff=1),
    ),
    *refusals(
        tracker_hook,
        value(tracker=5),
        value(every=10),
        value(drain_secs=-1),
        other("values", values="loss"),
    ),
    *refusals(
        ah.MemoryStepStore,
        other("step -1", "give a whole number from 0", step=-1),
        other("step True", "give a whole number from 0", step=True),
        other(f"step {2**53}", "give a whole number from 0", step=2**53),
        other("run=''", "give a printable name", run=""),
        other("run=5", "give a printable name", run=5),
        other(r"run='a\nb'", "give a printable name", run="a\nb"),
    ),
    *refusals(
        ah.Every,
        other("Every() is never due", "give steps=, secs= or at="),
        other("steps of Every is 0", "at least 1", steps=0),
        other("steps of Every is True", "a whole number of steps", steps=True),
        other("secs of Every is 0", "give seconds, above 0", secs=0),
        other("secs of Every is inf", "give seconds, above 0", secs=math.inf),
        other("at of Every is 5", "give a sequence of steps", at=5),
        other("at of Every is (5, 5)", "rising order", at=(5, 5)),
        other("a step in at of Every is 0", "at least 1", at=(0,)),
        other("after of Every is -1", "at least 0", steps=1, after=-1),
        other("is never due", "give steps=, secs= or at=", after=5),
        other("is never due", "give steps=, secs= or at=", at=()),
        other("at of Every is True", "at least 1", at=(True,)),
    ),
    *refusals(
        ah.StopAtStepHook,
        other("one of num_steps or last_step must be given"),
        other("only one of num_steps (1) or last_step (2)", num_steps=1, last_step=2),
        value("give a whole number, 0 or more", num_steps=-1),
        value("give a whole number, 0 or more", last_step=-1),
    ),
    *refusals(
        ah.hooks.GlobalStepWaiterHook,
        value("0 for no wait", wait_until_step=-1),
        value("give a whole number", wait_until_step=2.5),
        value("None for no limit", wait_until_step=1, timeout=0),
    ),
    *refusals(
        ah.LoggingHook,
        other("values is the str 'loss'", "['loss']", values="loss", at_end=True),
        other("values is empty", "give a mapping", values=[], at_end=True),
        other("it would never log", "every=Every(...), at_end=True", values=["loss"]),
        other("values is 5", "give a mapping", values=5, at_end=True),
        value("Every", values=["loss"], every=100),
        value("function", values=["loss"], at_end=True, formatter="%s"),
    ),
    *refusals(
        ah.NanHook,
        value("give the node or name to watch", value=None),
    ),
    *refusals(
        ah.hooks.StepCounterHook,
        value("Every", every=100),
        value("function", on_rate=5),
    ),
    *refusals(
        ah.hooks.FeedFnHook,
        value("give a function", feed_fn={"x": 1}),
    ),
    *refusals(
        ah.hooks.FinalOpsHook,
        value("give a Mapping", final_ops="loss", feed_dict=5),
    ),
    *refusals(
        ah.hooks.BlockingHook,
        value("seconds, 0 or more", obj=Observer(), grace_secs=-1),
    ),
    *refusals(
        evaluator,
        value("give a function", eval_fn=5),
        value("give an Every: Every(steps=5) or Every(secs=5)", every=5),
        value("give an Every: Every(steps=...) or Every(secs=...)", every="5s"),
        value('give "inline" or "background"', mode="process"),
        value("give a whole number, 1 or more", max_pending=0),
        value("give a whole number", max_results=True),
        value("give a function", snapshot=5),
        value("give a function", on_result=5),
    ),
    *refusals(
        ah.hooks.StopAtTimeHook,
        value("give seconds", secs=-1),
    ),
    *refusals(
        ah.hooks.EarlyStoppingHook,
        other("it would never stop", "use NanHook", monitor="loss"),
        value("give observations, 1 or more", patience=0),
        other("patience is Every(", "give an Every of steps alone", patience=ah.Every(secs=5)),
        other(
            "patience is Every(",
            "give an Every of steps alone",
            patience=ah.Every(steps=5, after=1),
        ),
        value('give "min" or "max"', patience=1, mode="auto"),
        value("give a finite number, 0 or more", patience=1, min_delta=-1),
        value("give a finite number", stopping_threshold=NAN),
        value("give an Every", monitor="loss", patience=1, every=100),
    ),
    *refusals(
        ah.hooks.ProfilerHook,
        value(output_dir="profiles", every=None),
        value(output_dir="profiles", window_steps=0),
        value(output_dir=None),
    ),
    *refusals(
        ah.hooks.ProgressHook,
        value(total=0),
        value(description=None),
        other("values is the str 'loss'", values="loss"),
    ),
    *refusals(
        ah.hooks.SummarySaverHook,
        other("values is empty", output_dir="runs", values={}),
        other("values is the str 'loss'", "['loss']", output_dir="runs", values="loss"),
        other("tag 3", output_dir="runs", values={3: "loss"}),
        value(output_dir="runs", values=["loss"], every=5),
    ),
    *refusals(
        ah.hooks.HookTimingHook,
        value(warn_secs=0),
    ),
    *refusals(
        ah.hooks.LambdaHook,
        other("no function was given"),
        value("give a function", end=5),
        other("go with after_run", end=print, every=ah.Every(steps=1)),
        value("give an Every", after_run=print, every=5),
        other("go with after_run and without before_run", end=print, fetches="loss"),
        other("go with after_run and without", after_run=print, before_run=print, fetches="loss"),
    ),
    *refusals(
        ah.hooks.WatchdogHook,
        value(step_secs=0),
        value(step_secs=1, first_step_secs=-1),
        value(step_secs=1, first_step_secs="1"),
        value(step_secs=1, wait_secs=0),
        value(step_secs=1, on_stall="abort"),
    ),
    *refusals(
        saver_hook,
        value(every=10),
        other("a listener", listeners=[ah.hooks.CheckpointSaverListener]),
        value(checkpoint_dir=""),
        value("the URL is for `mirror=`", checkpoint_dir="s3://bucket/run"),
        value("give os.path.expanduser('~/run')", checkpoint_dir="~/run"),
    ),
    *refusals(
        ah.checkpoint.Saver,
        value(checkpoint_dir=""),
        value(checkpoint_dir="run", keep=5),
    ),
    *refusals(
        KeepNewest,
        other(" is 0", "give ", n=0),
    ),
    *refusals(
        KeepEvery,
        other(" is -1", "give ", steps=-1),
        other(" is '5'", "give ", steps="5"),
    ),
    *refusals(
        KeepBest,
        other(" is 0", "give ", k=0, metric="loss"),
        other(" is 'least'", "give ", k=1, metric="loss", mode="least"),
    ),
    *refusals(
        remote_store,
        value(on_lost="ask"),
        other("lease_secs", lease_secs=0),
        other("heartbeat", heartbeat=0),
        other("connect_timeout", connect_timeout="x"),
        other("run=", run=""),
    ),
    *refusals(
        FaultInjectionHook,
        other("('run', 1) is no call", "give a method (begin,", faults={("run", 1): OSError()}),
        other("('begin', 0) is no call", "from 1 on", faults={("begin", 0): OSError()}),
    ),
    *refusals(
        ah.hooks.JSONLinesHook,
        other("tag 'step'", "another tag", path="run", values={"step": "loss"}),
        value(values=["loss"], path=3),
        value(path="run", values=["loss"], every="often"),
    ),
    *refusals(
        partial(ah.hooks.SummarySaverHook, values=["loss"]),
        value(output_dir=""),
    ),
    *refusals(
        LocalEngine,
        *(
            other("give the path of a directory", directory=bad)
            for bad in ("", 3, b"", "local:///run")
        ),
    ),
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


HUGE = [10**400, 10**5000, -(10**5000)]


@pytest.mark.parametrize("number", HUGE, ids=["fits no float", "has no repr", "negative"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (monitored, "stop_grace_period_secs"),
        (monitored, "yield_secs"),
        (partial(ah.configure, ah.NanHook("loss")), "timeout"),
        (ah.Backoff, "initial_secs"),
        (ah.Every, "secs"),
        (ah.SignalPolicy, "grace_secs"),
        (partial(ah.hooks.GlobalStepWaiterHook, 1), "timeout"),
        (ah.hooks.StopAtTimeHook, "secs"),
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


@pytest.mark.parametrize("secs", [-1, math.inf, NAN])
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


@pytest.mark.parametrize("by", [0, -1, 1.5, True, "1", None], ids=repr)
async def test_steps_only_advance(by: Any) -> None:
    """A store advances by a whole number, at least 1, and stays where it was otherwise."""
    store = ah.MemoryStepStore(3)
    with invalid(f"advance by {by!r}", "give a whole number from 1"):
        await store.advance(by)
    assert store.latest.step == 3


@pytest.mark.parametrize("step", [-1, 1.5, True, "1", None, 2**53], ids=repr)
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


def test_the_context_of_a_timer_is_started_first() -> None:
    """A timer that was not started says that it must be."""
    timer = ah.Every(steps=1).timer()
    for ask in (lambda: timer.due(1, 0.0), lambda: timer.mark(1, 0.0)):
        with refused(ah.errors.NotReadyError, "not started", "call start(step, now) first"):
            ask()
