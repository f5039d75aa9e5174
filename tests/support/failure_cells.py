"""One cell of the failure matrix: a session with five hooks of which one misbehaves, and its
outcome.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohooks as ah
from tests.conformance.replay import within_ticks
from tests.support.hooks import EveryPhaseHook

if TYPE_CHECKING:
    from collections.abc import Callable

HOOKS = (1, 2, 3, 4, 5)
RUNS = 2
"""How often the body calls `run`, unless it is asked to stop."""

Event = tuple[str, int]
"""A method that was called, and the number of its hook; 0 for the session's own `create`, `run` and
`aclose`.
"""

OVERLAPPING = ("after_create_session", "before_run", "run", "after_run")
"""Phases whose hooks, or operations, overlap; in the others they run one after the other."""


class Cell(NamedTuple):
    """Hook `hook` misbehaves in `phase`; `raises` is what it raises, for errors and clean ends.

    If hooks suspend, the others in a phase that is to be interrupted wait until they are cancelled,
    and those cancelled with the task raise an error of their own on the way out. The body does not
    ask `should_stop` then, either.
    """

    phase: str
    kind: str
    hook: int
    raises: type[Exception] | None
    suspends: bool

    @property
    def others_wait(self) -> bool:
        """Whether the others in the phase can only be ended by a cancellation."""
        return self.suspends and self.kind != "stop" and self.phase in OVERLAPPING

    def __str__(self) -> str:
        what = self.raises.__name__ if self.raises else self.kind
        kind = "suspending" if self.suspends else "plain"
        return f"{self.phase}-{what}-hook{self.hook}-{kind}"


@dataclass
class Outcome:
    """The outcome of one cell. `reached` is the object that the caller got, `raised` the one that
    was raised.
    """

    events: list[Event] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    closed_with: list[BaseException | None] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    entered: bool = False
    raised: BaseException | None = None
    reached: BaseException | None = None
    step: int = 0
    cancelling: int = 0
    left_running: int = 0


class CellRun:
    """One run of a cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.outcome = Outcome()
        self.misbehaved = False
        self.waiting = 0
        self.others_wait = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None
        self.monitored: ah.AsyncMonitoredSession | None = None
        self.graph = ah.Graph()
        self.steps = ah.MemoryStepStore()

        @self.graph.train_op
        async def train() -> str:
            return "trained"

        for number in HOOKS:
            self.add_operation(number)

    def add_operation(self, number: int) -> None:
        async def operation() -> int:
            await self.act("run", number, self.request_stop)
            return number

        self.graph.operation(name=f"operation_{number}")(operation)

    def request_stop(self) -> None:
        assert self.monitored is not None
        self.monitored.request_stop("asked by a hook")

    async def act(self, phase: str, number: int, request_stop: Callable[[], None]) -> None:
        """Suspend if the cell does, and misbehave if this is the hook that does."""
        cell, outcome = self.cell, self.outcome
        if phase == cell.phase and number != cell.hook and cell.others_wait:
            await self.wait_forever(number)
        if cell.suspends:
            await asyncio.sleep(0)
        if (phase, number) != (cell.phase, cell.hook) or self.misbehaved:
            return
        self.misbehaved = True
        if cell.others_wait:
            await self.others_wait.wait()
        if cell.kind == "stop":
            request_stop()
        elif cell.kind == "cancel":
            assert self.task is not None
            self.task.cancel()
            await asyncio.sleep(0)
        else:
            assert cell.raises is not None
            outcome.raised = cell.raises("misbehaving")
            raise outcome.raised

    async def wait_forever(self, number: int) -> None:
        self.waiting += 1
        if self.waiting == len(HOOKS) - 1:
            self.others_wait.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.outcome.cancelled.append(number)
            if self.cell.kind == "cancel":
                raise OSError("an error during cleanup") from None
            raise

    async def run_program(self) -> None:
        """Run the user's program."""
        outcome = self.outcome
        before = asyncio.all_tasks()
        self.task = asyncio.current_task()
        assert self.task is not None
        try:
            self.monitored = ah.AsyncMonitoredSession(
                Creator(self), [MisbehavingHook(self, n) for n in HOOKS]
            )
            async with self.monitored as session:
                outcome.entered = True
                for _ in range(RUNS):
                    if session.should_stop() and not self.cell.suspends:
                        break
                    outcome.results.append(await session.run("train"))
        except BaseException as error:  # the error that reached the caller is part of the outcome
            outcome.reached = error
        outcome.step = self.steps.latest.step
        outcome.cancelling = self.task.cancelling()
        outcome.left_running = len(asyncio.all_tasks() - before)


class MisbehavingHook(EveryPhaseHook):
    """Records every call; fetches an operation of its own, so that a run can fail on its
    account.
    """

    def __init__(self, cell_run: CellRun, number: int) -> None:
        self.cell_run = cell_run
        self.number = number

    async def in_phase(self, phase: str, *args: Any) -> ah.SessionRunArgs | None:
        outcome, request_stop = self.cell_run.outcome, self.cell_run.request_stop
        match phase, args:
            case "after_create_session", (_, coord):
                request_stop = coord.request_stop
            case "before_run", (run_context,):
                request_stop = run_context.request_stop
            case "after_run", (run_context, run_values):
                assert run_values.results == self.number
                request_stop = run_context.request_stop
            case "end", (session,):
                assert not session.closed
            case "close", (error,):
                outcome.closed_with.append(error)
        outcome.events.append((phase, self.number))
        await self.cell_run.act(phase, self.number, request_stop)
        if phase == "close":
            outcome.closed.append(self.number)
        return ah.SessionRunArgs(f"operation_{self.number}") if phase == "before_run" else None


class Creator:
    """Makes sessions that record their calls."""

    def __init__(self, cell_run: CellRun) -> None:
        self.cell_run = cell_run
        self.graph = cell_run.graph

    async def create_session(self) -> ah.Session:
        self.cell_run.outcome.events.append(("create", 0))
        return RecordingSession(self.cell_run)


class RecordingSession(ah.Session):
    """Records `run` and `aclose`."""

    def __init__(self, cell_run: CellRun) -> None:
        super().__init__(cell_run.graph, global_step=cell_run.steps)
        self.cell_run = cell_run

    async def run(self, fetches: Any, feed_dict: Any = None, **kwargs: Any) -> Any:
        self.cell_run.outcome.events.append(("run", 0))
        return await super().run(fetches, feed_dict, **kwargs)

    async def aclose(self) -> None:
        self.cell_run.outcome.events.append(("aclose", 0))
        await super().aclose()


def run_cell(
    cell: Cell, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> Outcome:
    """Run one cell in a loop of its own; raise if it hangs."""

    async def main() -> Outcome:
        cell_run = CellRun(cell)
        hanging = await within_ticks(cell_run.run_program())
        if hanging is not None:
            raise AssertionError(f"{cell} {hanging}")
        return cell_run.outcome

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())
