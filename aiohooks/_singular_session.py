"""The monitored session that never recovers."""

from __future__ import annotations

from collections.abc import Iterable

from aiohooks._hook import HookRegistration, SessionRunHook
from aiohooks._monitored_session import AsyncMonitoredSession
from aiohooks._recovery import NEVER
from aiohooks._session import Session
from aiohooks._signals import SignalPolicy
from aiohooks._source import Source
from aiohooks._variables import Variables
from aiohooks.stores import StepStore


class AsyncSingularMonitoredSession(AsyncMonitoredSession):
    """A monitored session that never recovers: every error reaches the caller."""

    def __init__(
        self,
        source: Source,
        hooks: Iterable[SessionRunHook | HookRegistration] = (),
        *,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        stop_grace_period_secs: float = 120.0,
        handle_signals: bool | SignalPolicy = False,
        name: str | None = None,
    ) -> None:
        """See `AsyncMonitoredSession`."""
        super().__init__(
            source,
            hooks,
            global_step=global_step,
            variables=variables,
            recovery=NEVER,
            stop_grace_period_secs=stop_grace_period_secs,
            handle_signals=handle_signals,
            name=name,
        )

    def raw_session(self) -> Session | None:
        """The session without hooks; None when it is closed."""
        return self._life.session
