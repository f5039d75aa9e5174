"""The usual session of a training job: a chief or a worker, with the usual hooks."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks._core.validate import check_instance
from aiohooks.checkpoint import Saver
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import InvalidArgumentError
from aiohooks.graph.graph import Graph
from aiohooks.hooks import CheckpointSaverHook, StepCounterHook, SummarySaverHook
from aiohooks.hooks.every import Every
from aiohooks.session.creators import (
    ChiefSessionCreator,
    Scaffold,
    WorkerSessionCreator,
    graph_of,
)
from aiohooks.session.hook import SessionRunHook
from aiohooks.session.monitored import AsyncMonitoredSession

if TYPE_CHECKING:
    from typing import Unpack

    from aiohooks.session.creators import RecoveryPolicy
    from aiohooks.session.monitored import SessionOptions

    class TrainingOptions(SessionOptions, total=False):
        """The options of a session and of its creator."""

        max_wait_secs: float | None
        recovery: RecoveryPolicy


__all__ = ["monitored_training_session"]

Hooks = Iterable[SessionRunHook | HookRegistration]
_CREATOR_OPTIONS = ("global_step", "variables")
_MAX_WAIT_SECS = 7200.0


def monitored_training_session(  # noqa: PLR0913 - options of users, by keyword
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
    **session: Unpack[TrainingOptions],
) -> AsyncMonitoredSession:
    """Return a monitored session with the usual hooks of a training job.

    A chief restores from `checkpoint_dir` and has, in this order: `chief_only_hooks`, a
    `StepCounterHook`, a `SummarySaverHook`, a `CheckpointSaverHook`, `hooks`. A period of None
    leaves out its hook. Without `summaries` there is no `SummarySaverHook`, and without
    `checkpoint_dir` no `CheckpointSaverHook`. A worker waits for the chief, and has only `hooks`.

    Args:
        source: a graph, or a coroutine function that is the step.
        is_chief: whether this process initializes, restores and saves the training. Otherwise it is
            a worker.
        checkpoint_dir: the directory from which checkpoints are restored and to which they are
            saved. With None, nothing is restored or saved.
        scaffold: how sessions are initialized, and which objects checkpoints track.
        hooks: the hooks of the chief and of the workers.
        chief_only_hooks: the hooks of the chief only. They come first.
        save_checkpoint: when to save.
        save_summaries: when to write `summaries`.
        log_step_count: when to log the steps per second.
        summaries: the values to write for TensorBoard: a mapping from tags to fetches, or nodes and
            names.
        summary_dir: the directory of the summaries, by default `checkpoint_dir`.
        session: the options of `AsyncMonitoredSession` (`global_step`, `variables`, `recovery`,
            `stop_grace_period_secs`, `handle_signals`, `yield_secs`, `name`), and `max_wait_secs`.
            A worker waits for its chief for at most `max_wait_secs`, by default 7,200; None sets no
            limit.

    Raises:
        InvalidArgumentError: an argument is invalid, summaries have no directory, or a worker has
            no connection to its chief.
    """
    periods = {
        "save_checkpoint": save_checkpoint,
        "save_summaries": save_summaries,
        "log_step_count": log_step_count,
    }
    for name, period in periods.items():
        check_instance(period, Every, name, optional=True)
    graph = graph_of(source)
    # Some of the options are those of the creator, and `AsyncMonitoredSession` would reject them.
    options: dict[str, Any] = {**session}
    max_wait_secs = options.pop("max_wait_secs", _MAX_WAIT_SECS)
    creator_options = {name: options.pop(name) for name in _CREATOR_OPTIONS if name in options}
    if not is_chief:
        # A worker has no usual hooks, because they write files that all processes would share.
        worker = WorkerSessionCreator(
            graph, scaffold=scaffold, max_wait_secs=max_wait_secs, **creator_options
        )
        return AsyncMonitoredSession(worker, hooks, **options)
    chief = ChiefSessionCreator(
        graph, scaffold=scaffold, checkpoint_dir=checkpoint_dir, **creator_options
    )
    # The hooks have the order of TensorFlow's `MonitoredTrainingSession`.
    usual_hooks: list[SessionRunHook] = []
    if log_step_count is not None:
        usual_hooks.append(StepCounterHook(log_step_count))
    if summaries is not None and save_summaries is not None:
        if summary_dir is None:
            if isinstance(checkpoint_dir, Saver):
                summary_dir = checkpoint_dir.checkpoint_dir
            else:
                summary_dir = checkpoint_dir
        if summary_dir is None:
            raise InvalidArgumentError(
                "summaries are given and no directory for them; give summary_dir= or"
                " checkpoint_dir="
            )
        usual_hooks.append(SummarySaverHook(summary_dir, summaries, every=save_summaries))
    if checkpoint_dir is not None and save_checkpoint is not None:
        usual_hooks.append(CheckpointSaverHook(every=save_checkpoint))
    return AsyncMonitoredSession(chief, [*chief_only_hooks, *usual_hooks, *hooks], **options)
