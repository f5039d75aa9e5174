"""The usual session of a training job: a chief or a worker, with the usual hooks."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS
from aiohooks._validate import check_instance
from aiohooks.checkpoint import Saver
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import InvalidArgumentError
from aiohooks.graph.graph import Graph
from aiohooks.graph.session import Session
from aiohooks.graph.variables import Variables
from aiohooks.hooks import CheckpointSaverHook, StepCounterHook, SummarySaverHook
from aiohooks.hooks.every import Every
from aiohooks.session._run_lock import DEFAULT_YIELD_SECS
from aiohooks.session.creators import ChiefSessionCreator, Scaffold, SessionCreator, WorkerSessionCreator, graph_of
from aiohooks.session.hook import SessionRunHook
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.session.recovery import RecoveryPolicy
from aiohooks.session.signals import SignalPolicy
from aiohooks.stores.base import StepStore

Hooks = Iterable[SessionRunHook | HookRegistration]


def monitored_training_session(
    source: Graph | Callable[..., Awaitable[Any]],
    *,
    is_chief: bool = True,
    checkpoint_dir: str | os.PathLike[str] | Saver | None = None,
    scaffold: Scaffold | None = None,
    hooks: Hooks = (),
    chief_only_hooks: Hooks = (),
    save_checkpoint: Every | None = Every(secs=600),
    save_summaries: Every | None = Every(steps=100),
    log_step_count: Every | None = Every(steps=100),
    summaries: Mapping[str, Any] | Iterable[Any] | None = None,
    summary_dir: str | os.PathLike[str] | None = None,
    global_step: StepStore | None = None,
    variables: Variables | None = None,
    max_wait_secs: float | None = 7200.0,
    session_factory: Callable[..., Session] = Session,
    recovery: RecoveryPolicy = RecoveryPolicy(),
    stop_grace_period_secs: float = DEFAULT_GRACE_SECS,
    handle_signals: bool | SignalPolicy = False,
    yield_secs: float | None = DEFAULT_YIELD_SECS,
    name: str | None = None,
) -> AsyncMonitoredSession:
    """Return a monitored session with the usual hooks of a training job.

    A chief restores from `checkpoint_dir` and has, in this order: `chief_only_hooks`, a `StepCounterHook`, a
    `SummarySaverHook`, a `CheckpointSaverHook`, `hooks`. Each of the three is present if its period is not None and it has
    something to do; they are independent. A worker waits for the chief, and has `hooks` only.

    Args:
        source: a graph, or a coroutine function that is the step.
        is_chief: whether it initialises, restores and saves, or waits for the chief that does.
        checkpoint_dir: the directory from which checkpoints are restored and to which they are saved; None for neither.
        scaffold: how sessions are initialised, and what is tracked in checkpoints.
        hooks: of chief and workers.
        chief_only_hooks: of the chief; they come first.
        save_checkpoint: when to save.
        save_summaries: when to write `summaries`.
        log_step_count: when to log the steps per second.
        summaries: the values to write for TensorBoard: a mapping from tags to fetches, or nodes and names.
        summary_dir: the directory of the summaries; by default `checkpoint_dir`.
        global_step: see `AsyncMonitoredSession`.
        variables: shared by a chief and its workers of one process; see `WorkerSessionCreator` for other processes.
        max_wait_secs: how long a worker waits for the chief; None for no limit.
        session_factory: makes the raw sessions; see `ChiefSessionCreator`.
        recovery: see `AsyncMonitoredSession`.
        stop_grace_period_secs: likewise.
        handle_signals: likewise.
        yield_secs: likewise.
        name: likewise.

    Raises:
        InvalidArgumentError: an argument is invalid, summaries have no directory, or a worker has no connection to its chief.
    """
    for what, every in (
        ("save_checkpoint", save_checkpoint),
        ("save_summaries", save_summaries),
        ("log_step_count", log_step_count),
    ):
        check_instance(every, Every, what, optional=True)
    graph = graph_of(source)
    creator: SessionCreator
    if is_chief:
        creator = ChiefSessionCreator(
            graph,
            scaffold=scaffold,
            checkpoint_dir=checkpoint_dir,
            global_step=global_step,
            variables=variables,
            session_factory=session_factory,
        )
        all_hooks: list[SessionRunHook | HookRegistration] = list(chief_only_hooks)
        if log_step_count is not None:
            all_hooks.append(StepCounterHook(log_step_count))
        if summaries is not None and save_summaries is not None:
            all_hooks.append(SummarySaverHook(_summary_dir(summary_dir, checkpoint_dir), summaries, every=save_summaries))
        if checkpoint_dir is not None and save_checkpoint is not None:
            all_hooks.append(CheckpointSaverHook(every=save_checkpoint))
        all_hooks.extend(hooks)
    else:
        creator = WorkerSessionCreator(
            graph,
            scaffold=scaffold,
            global_step=global_step,
            variables=variables,
            max_wait_secs=max_wait_secs,
            session_factory=session_factory,
        )
        all_hooks = list(hooks)
    return AsyncMonitoredSession(
        creator,
        all_hooks,
        recovery=recovery,
        stop_grace_period_secs=stop_grace_period_secs,
        handle_signals=handle_signals,
        yield_secs=yield_secs,
        name=name,
    )


def _summary_dir(
    summary_dir: str | os.PathLike[str] | None, checkpoint_dir: str | os.PathLike[str] | Saver | None
) -> str | os.PathLike[str]:
    if summary_dir is not None:
        return summary_dir
    if checkpoint_dir is not None:
        return checkpoint_dir.checkpoint_dir if isinstance(checkpoint_dir, Saver) else checkpoint_dir
    raise InvalidArgumentError("summaries are given and no directory for them; give summary_dir= or checkpoint_dir=")
