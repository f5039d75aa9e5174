"""What a session is doing, as a value."""

from __future__ import annotations

import dataclasses

from aiohooks._recoverable import Recoverable
from aiohooks._run_gate import RunGate


@dataclasses.dataclass(frozen=True, slots=True)
class SessionStatus:
    """A session at one moment.

    `state` is "new", "opening", "open", "closing" or "closed"; `runs` counts the runs begun, `queued` the tasks that wait for
    their turn to run.
    """

    state: str
    global_step: int | None
    runs: int
    running: bool
    queued: int
    stop_reason: str | None
    recoveries: int
    failure: str | None

    @classmethod
    def of(cls, gate: RunGate, life: Recoverable) -> SessionStatus:
        """Takes it from the parts of a monitored session."""
        failure = life.given_up or next(iter([*life.coord.errors, *life.root.errors]), None)
        return cls(
            state=gate.state,
            global_step=None if life.store is None else life.store.latest.step,
            runs=gate.runs,
            running=gate.running,
            queued=gate.turns.waiting,
            stop_reason=life.root.stop_reason,
            recoveries=life.history.total,
            failure=None if failure is None else repr(failure),
        )
