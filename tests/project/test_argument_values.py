"""Invalid values: every constructor of a public class refuses them, and says what to give
instead.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.checkpoint import KeepBest, KeepEvery, KeepNewest
from aiohooks.hooks.summaries import SummaryWriter
from aiohooks.stores.local import LocalStepStore
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.checks import refused
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.sessions import counting_graph, double

GRAPH = counting_graph()
NAN = math.nan


def plain(session: object) -> None:
    """Not a coroutine function."""


class Observer:
    """A plain object with a method of a hook."""

    def begin(self) -> None: ...


class NoGraph:
    """Creates sessions, and has no `graph`."""

    async def create_session(self) -> ah.Session:
        return ah.Session(GRAPH)


class PlainCreator:
    """Its `create_session` is a plain function."""

    graph = GRAPH

    def create_session(self) -> ah.Session:
        return ah.Session(GRAPH)


def worker(**options: Any) -> ah.WorkerSessionCreator:
    return ah.WorkerSessionCreator(GRAPH, **{"variables": ah.Variables(), **options})


def monitored(**options: Any) -> ah.AsyncMonitoredSession:
    return ah.AsyncMonitoredSession(double, **options)


async def evaluate(evaluation: object) -> None:
    """An evaluation."""


def evaluator(**options: Any) -> ah.EvaluatorHook:
    given: dict[str, Any] = {"eval_fn": evaluate, "every": ah.Every(steps=1), **options}
    return ah.EvaluatorHook(**given)


def saver_hook(**options: Any) -> ah.CheckpointSaverHook:
    given: dict[str, Any] = {"checkpoint_dir": "run", "every": ah.Every(steps=1), **options}
    return ah.CheckpointSaverHook(**given)


def remote_store(**options: Any) -> FakeStepStore:
    return FakeStepStore(FakeEngine(), **options)


Case = tuple[Callable[..., Any], dict[str, Any], str, str]

RECORDS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "nothing to write", ""),
    ({"values": {"step": "loss"}}, "tag 'step'", "another tag"),
    ({"path": 3, "values": ["loss"]}, "path is 3", ""),
    ({"values": ["loss"], "every": "often"}, "every is 'often'", ""),
    ({"values": ["loss"], "max_queue": True}, "max_queue is True", ""),
]
SUMMARIES: list[tuple[dict[str, Any], str]] = [
    ({"output_dir": ""}, "output_dir is ''"),
    ({"max_queue": 0}, "max_queue is 0"),
    ({"on_write_error": "ignore"}, "on_write_error is 'ignore'"),
]

# What is made, with which arguments, and what the message says: the offender, and the way out.
VALUES: list[Case] = [
    (
        monitored,
        {"stop_grace_period_secs": -1},
        "stop_grace_period_secs is -1",
        "seconds, 0 or more",
    ),
    (
        monitored,
        {"stop_grace_period_secs": math.inf},
        "stop_grace_period_secs is inf",
        "seconds, 0 or more",
    ),
    (
        monitored,
        {"stop_grace_period_secs": NAN},
        "stop_grace_period_secs is nan",
        "seconds, 0 or more",
    ),
    (
        monitored,
        {"stop_grace_period_secs": "1"},
        "stop_grace_period_secs is '1'",
        "seconds, 0 or more",
    ),
    (
        monitored,
        {"stop_grace_period_secs": True},
        "stop_grace_period_secs is True",
        "seconds, 0 or more",
    ),
    (monitored, {"global_step": 5}, "global_step is 5", "give a StepStore"),
    (monitored, {"global_step": ah.MemoryStepStore}, "global_step is <class", "give a StepStore"),
    (monitored, {"variables": {"w": 1}}, "variables is {'w': 1}", "give a Variables"),
    (monitored, {"recovery": None}, "recovery is None", "RecoveryPolicy"),
    (monitored, {"recovery": ah.AbortedError}, "recovery is <class", "RecoveryPolicy"),
    (monitored, {"name": 5}, "name", "5"),
    (monitored, {"name": ""}, "name", "''"),
    (
        ah.AsyncSingularMonitoredSession,
        {"source": double, "global_step": 5},
        "global_step is 5",
        "give a StepStore",
    ),
    (
        ah.AsyncMonitoredSession,
        {"source": 5},
        "5 cannot be run",
        "give a Graph, a SessionCreator, or an `async def`",
    ),
    (
        ah.AsyncMonitoredSession,
        {"source": None},
        "None cannot be run",
        "give a Graph, a SessionCreator",
    ),
    (
        ah.AsyncMonitoredSession,
        {"source": ah.Graph},
        "the class Graph cannot be run",
        "an object of it: Graph(...)",
    ),
    (
        ah.AsyncMonitoredSession,
        {"source": plain},
        "plain",
        "not a coroutine function; write the step as `async def`",
    ),
    (
        ah.AsyncMonitoredSession,
        {"source": print},
        "print",
        "give in_thread(...) of one that blocks",
    ),
    (ah.AsyncMonitoredSession, {"source": NoGraph()}, "NoGraph object", "graph"),
    (ah.AsyncMonitoredSession, {"source": PlainCreator()}, "PlainCreator", "async def"),
    (
        ah.AsyncMonitoredSession,
        {"source": worker(), "global_step": ah.MemoryStepStore()},
        "a SessionCreator has its own step store and variables",
        "give them to it",
    ),
    (
        ah.AsyncMonitoredSession,
        {"source": worker(), "variables": ah.Variables()},
        "SessionCreator",
        "give them to it",
    ),
    (ah.Session, {"graph": "graph"}, "graph is 'graph'", "give a Graph"),
    (ah.Session, {"graph": GRAPH, "global_step": 5}, "global_step is 5", "give a StepStore"),
    (ah.Session, {"graph": GRAPH, "variables": {}}, "variables is {}", "give a Variables"),
    (ah.Session, {"graph": GRAPH, "grace_secs": -1}, "grace_secs is -1", "seconds, 0 or more"),
    (
        ah.ChiefSessionCreator,
        {"graph": None},
        "None cannot be run",
        "give a Graph or an `async def`",
    ),
    (ah.ChiefSessionCreator, {"graph": GRAPH, "scaffold": 3}, "scaffold is 3", "give a Scaffold"),
    (
        ah.ChiefSessionCreator,
        {"graph": GRAPH, "global_step": 3},
        "global_step is 3",
        "give a StepStore",
    ),
    (
        ah.ChiefSessionCreator,
        {"graph": GRAPH, "variables": {}},
        "variables is {}",
        "give a Variables",
    ),
    (
        ah.WorkerSessionCreator,
        {"graph": GRAPH},
        "a worker waits for a chief's variables",
        "give both the same Variables()",
    ),
    (
        ah.WorkerSessionCreator,
        {"graph": 3, "variables": ah.Variables()},
        "3 cannot be run",
        "give a Graph or an `async def`",
    ),
    (worker, {"variables": {}}, "variables is {}", "give a Variables"),
    (worker, {"scaffold": "s"}, "scaffold is 's'", "give a Scaffold"),
    (worker, {"global_step": 3}, "global_step is 3", "give a StepStore"),
    (worker, {"max_wait_secs": -1}, "max_wait_secs is -1", "seconds"),
    (worker, {"max_wait_secs": NAN}, "max_wait_secs is nan", "seconds"),
    (worker, {"max_wait_secs": "1"}, "max_wait_secs is '1'", "seconds"),
    (ah.Scaffold, {"init_fn": 5}, "init_fn is 5", "give a coroutine function"),
    (ah.Scaffold, {"ready_fn": plain}, "ready_fn is <function plain", "give a coroutine function"),
    (
        ah.Scaffold,
        {"local_init_fn": plain},
        "local_init_fn is <function plain",
        "give a coroutine function",
    ),
    (
        ah.Scaffold,
        {"ready_for_local_init_fn": "x"},
        "ready_for_local_init_fn is 'x'",
        "give a coroutine function",
    ),
    (ah.Scaffold, {"tracked": ["model"]}, "tracked is ['model']", "give a mapping"),
    (ah.Scaffold, {"tracked": {"model": 5}}, "tracked['model'] is 5", "state_dict()"),
    (ah.Scaffold, {"copy_from_scaffold": 3}, "copy_from_scaffold is 3", "give a Scaffold"),
    (ah.Backoff, {"initial_secs": -0.1}, "initial_secs is -0.1", "seconds, 0 or more"),
    (ah.Backoff, {"initial_secs": True}, "initial_secs is True", "seconds, 0 or more"),
    (ah.Backoff, {"max_secs": math.inf}, "max_secs is inf", "seconds, 0 or more"),
    (ah.Backoff, {"max_secs": None}, "max_secs is None", "seconds, 0 or more"),
    (
        ah.RecoveryPolicy,
        {"max_attempts": -1},
        "max_attempts is -1",
        "give a whole number, 0 for never",
    ),
    (ah.RecoveryPolicy, {"max_attempts": 1.5}, "max_attempts is 1.5", "give a whole number"),
    (ah.RecoveryPolicy, {"max_attempts": True}, "max_attempts is True", "give a whole number"),
    (
        ah.RecoveryPolicy,
        {"no_progress_limit": -1},
        "no_progress_limit is -1",
        "give a whole number",
    ),
    (
        ah.RecoveryPolicy,
        {"no_progress_limit": None},
        "no_progress_limit is None",
        "give a whole number",
    ),
    (ah.RecoveryPolicy, {"backoff": 3}, "backoff is 3", "Backoff"),
    (
        ah.RecoveryPolicy,
        {"on": OSError},
        "on is <class 'OSError'>",
        "give a tuple of exception classes",
    ),
    (
        ah.RecoveryPolicy,
        {"on": (OSError("x"),)},
        "on is (OSError('x'),)",
        "give a tuple of exception classes",
    ),
    (
        ah.RecoveryPolicy,
        {"on": (asyncio.CancelledError,)},
        "CancelledError",
        "cancellation is never recovered",
    ),
    (
        ah.RecoveryPolicy,
        {"on": (KeyboardInterrupt,)},
        "KeyboardInterrupt",
        "give a tuple of exception classes",
    ),
    (
        ah.Coordinator,
        {"clean_stop_exception_types": 5},
        "clean_stop_exception_types is 5",
        "tuple of exception classes",
    ),
    (
        ah.Coordinator,
        {"clean_stop_exception_types": OSError},
        "clean_stop_exception_types is <class",
        "tuple",
    ),
    (
        ah.Coordinator,
        {"clean_stop_exception_types": (OSError, int)},
        "clean_stop_exception_types is (<class",
        "tuple",
    ),
    (ah.MemoryStepStore, {"step": -1}, "step -1", "give a whole number from 0"),
    (ah.MemoryStepStore, {"step": 1.0}, "step 1.0", "give a whole number from 0"),
    (ah.MemoryStepStore, {"step": True}, "step True", "give a whole number from 0"),
    (ah.MemoryStepStore, {"step": 2**53}, f"step {2**53}", "give a whole number from 0"),
    (ah.MemoryStepStore, {"run": ""}, "run=''", "give a printable name"),
    (ah.MemoryStepStore, {"run": 5}, "run=5", "give a printable name"),
    (ah.MemoryStepStore, {"run": "a\nb"}, r"run='a\nb'", "give a printable name"),
    (ah.Every, {}, "Every() is never due", "give steps=, secs= or at="),
    (ah.Every, {"steps": 0}, "steps of Every is 0", "at least 1"),
    (ah.Every, {"steps": 1.5}, "steps of Every is 1.5", "a whole number of steps"),
    (ah.Every, {"steps": True}, "steps of Every is True", "a whole number of steps"),
    (ah.Every, {"secs": 0}, "secs of Every is 0", "give seconds, above 0"),
    (ah.Every, {"secs": NAN}, "secs of Every is nan", "give seconds, above 0"),
    (ah.Every, {"secs": math.inf}, "secs of Every is inf", "give seconds, above 0"),
    (ah.Every, {"secs": "1"}, "secs of Every is '1'", "give seconds, above 0"),
    (ah.Every, {"at": 5}, "at of Every is 5", "give a sequence of steps"),
    (ah.Every, {"at": (5, 5)}, "at of Every is (5, 5)", "rising order"),
    (ah.Every, {"at": (0,)}, "a step in at of Every is 0", "at least 1"),
    (ah.Every, {"steps": 1, "after": -1}, "after of Every is -1", "at least 0"),
    (ah.Every, {"steps": 1, "after": True}, "after of Every is True", "at least 0"),
    (ah.Every, {"steps": 1, "after": 0.5}, "after of Every is 0.5", "at least 0"),
    (ah.Every, {"after": 5}, "is never due", "give steps=, secs= or at="),
    (ah.Every, {"at": ()}, "is never due", "give steps=, secs= or at="),
    (ah.Every, {"at": (True,)}, "at of Every is True", "at least 1"),
    (ah.StopAtStepHook, {}, "one of num_steps or last_step must be given", ""),
    (
        ah.StopAtStepHook,
        {"num_steps": 1, "last_step": 2},
        "only one of num_steps (1) or last_step (2)",
        "",
    ),
    (ah.StopAtStepHook, {"num_steps": -1}, "num_steps is -1", "give a whole number, 0 or more"),
    (ah.StopAtStepHook, {"last_step": -1}, "last_step is -1", "give a whole number, 0 or more"),
    (ah.StopAtStepHook, {"last_step": 1.0}, "last_step is 1.0", "give a whole number"),
    (ah.StopAtStepHook, {"num_steps": True}, "num_steps is True", "give a whole number"),
    (ah.GlobalStepWaiterHook, {"wait_until_step": -1}, "wait_until_step is -1", "0 for no wait"),
    (
        ah.GlobalStepWaiterHook,
        {"wait_until_step": 2.5},
        "wait_until_step is 2.5",
        "give a whole number",
    ),
    (
        ah.GlobalStepWaiterHook,
        {"wait_until_step": True},
        "wait_until_step is True",
        "give a whole number",
    ),
    (
        ah.GlobalStepWaiterHook,
        {"wait_until_step": 1, "timeout": 0},
        "timeout is 0",
        "None for no limit",
    ),
    (
        ah.GlobalStepWaiterHook,
        {"wait_until_step": 1, "timeout": NAN},
        "timeout is nan",
        "None for no limit",
    ),
    (
        ah.GlobalStepWaiterHook,
        {"wait_until_step": 1, "timeout": "1"},
        "timeout is '1'",
        "give seconds",
    ),
    (ah.LoggingHook, {"values": "loss", "at_end": True}, "values is the str 'loss'", "['loss']"),
    (ah.LoggingHook, {"values": [], "at_end": True}, "values is empty", "give a mapping"),
    (ah.LoggingHook, {"values": ["loss"]}, "it would never log", "every=Every(...), at_end=True"),
    (ah.LoggingHook, {"values": 5, "at_end": True}, "values is 5", "give a mapping"),
    (ah.LoggingHook, {"values": ["loss"], "every": 100}, "every is 100", "Every"),
    (
        ah.LoggingHook,
        {"values": ["loss"], "at_end": True, "formatter": "%s"},
        "formatter is '%s'",
        "function",
    ),
    (ah.NanHook, {"value": None}, "value is None", "give the node or name to watch"),
    (ah.NanHook, {"value": "loss", "check": "inf"}, "check is 'inf'", '"nan" or "non-finite"'),
    (ah.StepCounterHook, {"every": 100}, "every is 100", "Every"),
    (ah.StepCounterHook, {"on_rate": 5}, "on_rate is 5", "function"),
    (ah.FeedFnHook, {"feed_fn": {"x": 1}}, "feed_fn is {'x': 1}", "give a function"),
    (ah.FinalOpsHook, {"final_ops": "loss", "feed_dict": 5}, "feed_dict is 5", "give a mapping"),
    (
        ah.hooks.BlockingHook,
        {"obj": Observer(), "grace_secs": -1},
        "grace_secs is -1",
        "seconds, 0 or more",
    ),
    (evaluator, {"eval_fn": 5}, "eval_fn is 5", "give a function"),
    (evaluator, {"every": 5}, "every is 5", "give an Every: Every(steps=5) or Every(secs=5)"),
    (
        evaluator,
        {"every": "5s"},
        "every is '5s'",
        "give an Every: Every(steps=...) or Every(secs=...)",
    ),
    (evaluator, {"mode": "process"}, "mode is 'process'", 'give "inline" or "background"'),
    (evaluator, {"timeout_secs": 0}, "timeout_secs is 0", "give seconds, above 0"),
    (evaluator, {"max_pending": 0}, "max_pending is 0", "give a whole number, 1 or more"),
    (evaluator, {"max_results": True}, "max_results is True", "give a whole number"),
    (evaluator, {"snapshot": 5}, "snapshot is 5", "give a function"),
    (evaluator, {"on_result": 5}, "on_result is 5", "give a function"),
    (evaluator, {"on_result": [print, 5]}, "on_result is 5", "give a function"),
    (ah.StopAtTimeHook, {}, "give one of them", ""),
    (ah.StopAtTimeHook, {"secs": 1, "deadline": 1}, "give one of them", ""),
    (ah.StopAtTimeHook, {"secs": -1}, "secs is -1", "give seconds"),
    (ah.StopAtTimeHook, {"secs": 1, "margin_secs": NAN}, "margin_secs is nan", "give seconds"),
    (ah.StopAtTimeHook, {"deadline": 1, "keep_elapsed": True}, "keep_elapsed is for secs=", ""),
    (ah.StopAtTimeHook, {"deadline": math.inf}, "deadline is inf", "give a datetime"),
    (ah.StopAtTimeHook, {"deadline": "noon"}, "deadline is 'noon'", "give a datetime"),
    (ah.StopAtTimeHook, {"deadline": datetime(2030, 1, 1)}, "has no time zone", ""),
    (ah.EarlyStoppingHook, {"monitor": "loss"}, "it would never stop", "use NanHook"),
    (ah.EarlyStoppingHook, {"patience": 0}, "patience is 0", "give observations, 1 or more"),
    (ah.EarlyStoppingHook, {"patience": 1.5}, "patience is 1.5", "give observations"),
    (
        ah.EarlyStoppingHook,
        {"patience": ah.Every(at=(5,))},
        "patience is Every(",
        "give an Every of steps, secs",
    ),
    (
        ah.EarlyStoppingHook,
        {"patience": ah.Every(steps=5, after=1)},
        "patience is Every(",
        "give an Every of steps, secs",
    ),
    (
        ah.EarlyStoppingHook,
        {"patience": 1, "mode": "auto"},
        "mode is 'auto'",
        'give "min" or "max"',
    ),
    (
        ah.EarlyStoppingHook,
        {"patience": 1, "min_delta": -1},
        "min_delta is -1",
        "give a finite number, 0 or more",
    ),
    (
        ah.EarlyStoppingHook,
        {"patience": 1, "min_delta": None},
        "min_delta is None",
        "give a finite number",
    ),
    (
        ah.EarlyStoppingHook,
        {"stopping_threshold": NAN},
        "stopping_threshold is nan",
        "give a finite number",
    ),
    (
        ah.EarlyStoppingHook,
        {"monitor": "loss", "patience": 1, "every": 100},
        "every is 100",
        "give an Every",
    ),
    (ah.ProfilerHook, {"output_dir": "profiles", "every": None}, "every is None", ""),
    (ah.ProfilerHook, {"output_dir": "profiles", "window_steps": 0}, "window_steps is 0", ""),
    (ah.ProfilerHook, {"output_dir": "profiles", "max_captures": 1.5}, "max_captures is 1.5", ""),
    (ah.ProfilerHook, {"output_dir": "profiles", "max_events": 0}, "max_events is 0", ""),
    (
        ah.ProfilerHook,
        {"output_dir": "profiles", "on_write_error": "ignore"},
        "on_write_error is 'ignore'",
        '"log"',
    ),
    (ah.ProfilerHook, {"output_dir": None}, "output_dir is None", ""),
    (ah.ProgressHook, {"total": 0}, "total is 0", ""),
    (ah.ProgressHook, {"total": 1.5}, "total is 1.5", ""),
    (ah.ProgressHook, {"description": None}, "description is None", ""),
    (ah.ProgressHook, {"values": "loss"}, "values is the str 'loss'", ""),
    *(
        (ah.JSONLinesHook, {"path": "run", **options}, says, way_out)
        for options, says, way_out in RECORDS
    ),
    (ah.SummarySaverHook, {"output_dir": "runs"}, "nothing to write", ""),
    (ah.SummarySaverHook, {"output_dir": "runs", "values": {}}, "values is empty", ""),
    (
        ah.SummarySaverHook,
        {"output_dir": "runs", "values": "loss"},
        "values is the str 'loss'",
        "['loss']",
    ),
    (ah.SummarySaverHook, {"output_dir": "runs", "values": {3: "loss"}}, "tag 3", ""),
    (ah.SummarySaverHook, {"output_dir": "runs", "values": ["loss"], "every": 5}, "every is 5", ""),
    (ah.SummarySaverHook, {"output_dir": "runs", "summary_fn": 3}, "summary_fn is 3", ""),
    *(
        (make, {"output_dir": "runs", **values, **options}, says, "")
        for make, values in ((ah.SummarySaverHook, {"values": ["loss"]}), (SummaryWriter, {}))
        for options, says in SUMMARIES
    ),
    (ah.hooks.HookTimingHook, {"warn_secs": 0}, "warn_secs is 0", ""),
    (ah.hooks.HookTimingHook, {"every": 3}, "every is 3", ""),
    (ah.LambdaHook, {}, "no function was given", ""),
    (ah.LambdaHook, {"end": 5}, "end is 5", "give a function"),
    (
        ah.LambdaHook,
        {"end": print, "every": ah.Every(steps=1)},
        "neither before_run nor after_run",
        "",
    ),
    (ah.LambdaHook, {"after_run": print, "every": 5}, "every is 5", "give an Every"),
    (
        ah.LambdaHook,
        {"end": print, "fetches": "loss"},
        "goes with after_run and without before_run",
        "",
    ),
    (
        ah.LambdaHook,
        {"after_run": print, "before_run": print, "fetches": "loss"},
        "goes with after_run and without",
        "",
    ),
    (ah.WatchdogHook, {"step_secs": 0}, "step_secs is 0", ""),
    (ah.WatchdogHook, {"step_secs": math.inf}, "step_secs is inf", ""),
    (ah.WatchdogHook, {"step_secs": 1, "first_step_secs": -1}, "first_step_secs is -1", ""),
    (ah.WatchdogHook, {"step_secs": 1, "save_secs": "1"}, "save_secs is '1'", ""),
    (ah.WatchdogHook, {"step_secs": 1, "evaluation_secs": NAN}, "evaluation_secs is nan", ""),
    (ah.WatchdogHook, {"step_secs": 1, "wait_secs": 0}, "wait_secs is 0", ""),
    (ah.WatchdogHook, {"step_secs": 1, "blocked_secs": 0}, "blocked_secs is 0", ""),
    (ah.WatchdogHook, {"step_secs": 1, "on_stall": "abort"}, "on_stall is 'abort'", ""),
    (ah.VersionGateHook, {"versions": ah.MemoryStepStore(), "max_lag": -1}, "max_lag -1", ""),
    (ah.VersionGateHook, {"versions": ah.MemoryStepStore(), "max_lag": None}, "max_lag None", ""),
    (
        ah.VersionGateHook,
        {"versions": ah.MemoryStepStore(), "max_lag": 1, "timeout": 0},
        "timeout is 0",
        "",
    ),
    (ah.VersionGateHook, {"versions": 7, "max_lag": 1}, "give a StepStore", ""),
    (saver_hook, {"every": 10}, "every is 10", ""),
    (saver_hook, {"metrics": ["loss"]}, "metrics is ['loss']", ""),
    (saver_hook, {"on_busy": "drop"}, "on_busy is 'drop'", 'give "wait" or "skip"'),
    (saver_hook, {"on_save_error": "ignore"}, "on_save_error is 'ignore'", ""),
    (saver_hook, {"on_save_error": 0}, "on_save_error is 0", ""),
    (saver_hook, {"on_save_error": True}, "on_save_error is True", ""),
    (saver_hook, {"listeners": [ah.CheckpointSaverListener]}, "a listener", ""),
    (saver_hook, {"checkpoint_dir": 7}, "checkpoint_dir is 7", ""),
    (saver_hook, {"checkpoint_dir": ""}, "checkpoint_dir is ''", ""),
    (
        saver_hook,
        {"checkpoint_dir": "s3://bucket/run"},
        "checkpoint_dir is 's3://bucket/run'",
        "the URL is for `mirror=`",
    ),
    (
        saver_hook,
        {"checkpoint_dir": "~/run"},
        "checkpoint_dir is '~/run'",
        "give os.path.expanduser('~/run')",
    ),
    (ah.Saver, {"checkpoint_dir": ""}, "checkpoint_dir is ''", ""),
    (ah.Saver, {"checkpoint_dir": 3}, "checkpoint_dir is 3", ""),
    (ah.Saver, {"checkpoint_dir": "run", "keep": 5}, "keep is 5", ""),
    (ah.Saver, {"checkpoint_dir": "run", "keep": None}, "keep is None", ""),
    (ah.Saver, {"checkpoint_dir": "run", "min_free_bytes": -1}, "min_free_bytes is -1", ""),
    (ah.Saver, {"checkpoint_dir": "run", "min_free_bytes": 1.5}, "min_free_bytes is 1.5", ""),
    (KeepNewest, {"n": 0}, " is 0", "give "),
    (KeepNewest, {"n": True}, " is True", "give "),
    (KeepNewest, {"n": 1.5}, " is 1.5", "give "),
    (KeepEvery, {"steps": -1}, " is -1", "give "),
    (KeepEvery, {"steps": "5"}, " is '5'", "give "),
    (KeepBest, {"k": 0, "metric": "loss"}, " is 0", "give "),
    (KeepBest, {"k": 1, "metric": ""}, " is ''", "give "),
    (KeepBest, {"k": 1, "metric": None}, " is None", "give "),
    (KeepBest, {"k": 1, "metric": "loss", "mode": "least"}, " is 'least'", "give "),
    (remote_store, {"on_lost": "ask"}, "on_lost is 'ask'", ""),
    (remote_store, {"lease_secs": 0}, "lease_secs", ""),
    (remote_store, {"join_grace_secs": -1}, "join_grace_secs", ""),
    (remote_store, {"heartbeat": 0}, "heartbeat", ""),
    (remote_store, {"connect_timeout": "x"}, "connect_timeout", ""),
    (remote_store, {"max_outage_secs": -3}, "max_outage_secs", ""),
    (remote_store, {"run": ""}, "run=", ""),
    *(
        (LocalStepStore, {"directory": bad}, "give the path of a directory", "")
        for bad in ("", 3, b"", "local:///run")
    ),
    (
        FaultInjectionHook,
        {"faults": {("run", 1): OSError()}},
        "('run', 1) is no call",
        "give a method (begin,",
    ),
    (
        FaultInjectionHook,
        {"faults": {("begin", 0): OSError()}},
        "('begin', 0) is no call",
        "from 1 on",
    ),
]


def case_id(case: Case) -> str:
    make, arguments, *_ = case
    shown = ",".join(
        f"{name}={re.sub(r' object.*| at 0x.*|^<Graph.*', '', repr(value))}"
        for name, value in arguments.items()
    )
    return f"{make.__name__}({shown})"


@pytest.mark.parametrize("case", VALUES, ids=case_id)
def test_an_invalid_argument_is_refused(case: Case) -> None:
    """A constructor refuses an invalid value when it is given: a ValueError with the value and what
    to give instead.
    """
    make, arguments, offender, way_out = case
    with refused(ah.errors.InvalidArgumentError, offender, way_out) as caught:
        make(**arguments)
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
        (partial(ah.GlobalStepWaiterHook, 1), "timeout"),
        (ah.StopAtTimeHook, "deadline"),
        (partial(ah.EarlyStoppingHook, "loss", patience=1), "min_delta"),
        (ManualClock().advance, "secs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_huge_number_is_refused(make: Callable[..., Any], name: str, number: int) -> None:
    """An int that no float can stand for is refused like infinity, in a message that can be
    read.
    """
    with refused(ah.errors.InvalidArgumentError, "give") as caught:
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
    with refused(ah.errors.InvalidArgumentError, f"advance({secs!r})", "seconds >= 0"):
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
        with refused(ah.errors.InvalidArgumentError, repr(value), "seconds"):
            await wait()


@pytest.mark.parametrize("by", [0, -1, 1.5, True, "1", None], ids=repr)
async def test_steps_only_advance(by: Any) -> None:
    """A store advances by a whole number, at least 1, and stays where it was otherwise."""
    store = ah.MemoryStepStore(3)
    with refused(
        ah.errors.InvalidArgumentError, f"advance by {by!r}", "give a whole number from 1"
    ):
        await store.advance(by)
    with refused(ah.errors.InvalidArgumentError, f"advance by {by!r}"):
        store.advance_threadsafe(by)
    assert store.latest.step == 3


@pytest.mark.parametrize("step", [-1, 1.5, True, "1", None, 2**53], ids=repr)
async def test_steps_are_whole_numbers(step: Any) -> None:
    """A store is raised and reset to whole numbers from 0 on."""
    store = ah.MemoryStepStore(3)
    with refused(
        ah.errors.InvalidArgumentError, f"raise to step {step!r}", "give a whole number from 0"
    ):
        await store.raise_to(step)
    with refused(
        ah.errors.InvalidArgumentError, f"reset to step {step!r}", "give a whole number from 0"
    ):
        await store.reset(step)
    assert store.latest == (1, 3)


async def test_arguments_of_store_methods_are_checked() -> None:
    """`wait_for`, `publisher` and `fail` refuse invalid arguments."""
    store: Any = ah.MemoryStepStore()
    with refused(ah.errors.InvalidArgumentError, "wait for step 1.5", "give a whole number"):
        await store.wait_for(1.5)
    with refused(ah.errors.InvalidArgumentError, "on_reset='ignore'", '"keep" or "raise"'):
        await store.wait_for(1, on_reset="ignore")
    with refused(ah.errors.InvalidArgumentError, "publisher ''", "give a printable name"):
        store.publisher("")
    with refused(ah.errors.InvalidArgumentError, "fail('broken')", "give the exception"):
        store.fail("broken")
    assert store.statistics().waits == 0


@pytest.mark.parametrize("values", [5, ["w"], None], ids=repr)
def test_variables_are_assigned_from_a_mapping(values: Any) -> None:
    """`Variables.assign` takes a mapping, and says so."""
    with refused(ah.errors.InvalidArgumentError, repr(values), "give a mapping"):
        ah.Variables().assign(values)


def test_the_context_of_a_timer_is_started_first() -> None:
    """A timer that was not started says that it must be."""
    timer = ah.Every(steps=1).timer()
    for ask in (lambda: timer.due(1, 0.0), lambda: timer.mark(1, 0.0)):
        with refused(ah.errors.NotReadyError, "not started", "call start(step, now) first"):
            ask()
