"""A training that is cut anywhere and resumed ends as if it had not been cut: with all hooks that
keep anything, at random cuts.

    python -m tests.fuzz.resumed_runs --count 1000 --seed 0

Each program makes its hooks with random schedules (steps, seconds of a manual clock, given steps),
keep policies and evaluations, and runs once without a cut, and once with some: a stop, a kill (what
is on the disk at some moment is all that is left), and failures of a step and of a hook; except
after a kill, the same hooks are used again. Stop step and reason, weights, evaluations, records,
log lines, rates and the checkpoints that are kept must be equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohooks as ah
from aiohooks.checkpoint import Checkpoint, KeepBest, KeepNewest, KeepPolicy
from aiohooks.testing import ManualClock
from tests.fuzz._harness import command, log_disabled, scratch
from tests.support.hooks import NotedRates
from tests.support.record_files import without_time

CUTS = ("stop", "kill", "failing step", "failing hook")


def last_values(folder: Path) -> list[Any]:
    """Return what TensorBoard shows, where it is installed: steps and values, without those that a
    restart made void.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        return []

    shown: list[Any] = []
    for path in sorted(folder.iterdir()):
        for event in map(Event.FromString, RawEventFileLoader(str(path)).Load()):
            if event.HasField("session_log"):
                shown = [each for each in shown if each[0] < event.step]
            elif event.summary.value:
                shown.append((event.step, [value.simple_value for value in event.summary.value]))
    return shown


@dataclasses.dataclass(frozen=True)
class KeepMultiples(KeepPolicy):
    """Keeps the checkpoints whose step is a multiple of a number."""

    steps: int

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        return {checkpoint for checkpoint in checkpoints if checkpoint.step % self.steps == 0}


class CutError(Exception):
    """The failure by which a part of a run ends."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The schedules of the hooks, and where the run is cut; each cut is a kind and a step."""

    number: int
    steps: int
    cuts: tuple[tuple[str, int], ...]
    every: dict[str, ah.Every]
    keep: KeepPolicy
    mode: Any
    at_begin: bool
    at_end: bool
    patience: int
    save_on_error: bool


def generate(seed: int, number: int) -> Program:
    """Return the program of a number."""
    rng = random.Random(f"{seed} {number}")
    steps = rng.randint(8, 30)

    def every() -> ah.Every:
        at = tuple(sorted(rng.sample(range(1, steps), rng.randint(1, 4))))
        period, secs = rng.randint(1, 7), rng.randint(1, 30) / 4
        return rng.choice(
            [
                ah.Every(steps=period),
                ah.Every(secs=secs),
                ah.Every(at=at),
                ah.Every(steps=period, secs=secs),
            ]
        )

    names = (
        "save",
        "evaluate",
        "stop",
        "json",
        "summary",
        "count",
        "log",
        "other log",
        "call",
        "profile",
    )
    parts: list[KeepPolicy] = [
        KeepNewest(rng.randint(1, 3)),
        KeepBest(rng.randint(1, 2), "val", rng.choice(["min", "max"])),
        KeepMultiples(rng.randint(2, 9)),
    ]
    keep = parts[0]
    for part in rng.sample(parts, rng.randint(1, 3)):
        keep = keep | part
    cuts = tuple((rng.choice(CUTS), rng.randint(1, steps)) for _ in range(rng.randint(1, 4)))
    schedules = {name: every() for name in names}
    if rng.random() < 0.5:  # so that checkpoints have evaluations
        schedules["evaluate"] = schedules["save"]
    mode = rng.choice(["inline", "background"])
    ends = rng.random() < 0.3, rng.random() < 0.7
    return Program(
        number, steps, cuts, schedules, keep, mode, *ends, rng.randint(2, 6), rng.random() < 0.3
    )


class Data:
    """Endless feeds that know their position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, float]]:
        while True:
            self.position += 1
            yield {"batch": (self.position * 7) % 11 - 5.0}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _copy_if_there(source: str, target: str) -> None:
    """Copy a file, unless a thread of the profiler has renamed it meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


class Trial:
    """A program, run in a directory; `found` has by step what hooks without a file have made."""

    def __init__(self, program: Program, clock: ManualClock, folder: Path) -> None:
        self.program, self.clock, self.folder = program, clock, folder
        self.found: dict[str, dict[int, Any]] = {
            name: {} for name in ("evaluate", "log", "other log", "rate", "call")
        }
        self.fails_at: dict[str, int] = {}
        self.killed = Path(f"{folder}-killed")
        self._new_process()

    def _new_process(self) -> None:
        self.data = Data()
        self.hooks = self._make_hooks(self.data)

    def _graph(self) -> ah.Graph:
        graph = ah.Graph()
        graph.placeholder("batch")
        graph.placeholder("scale")
        graph.variable("w", 0.0)
        graph.variable("count", 0)

        @graph.operation
        async def loss(w: float, batch: float, scale: float) -> float:
            return (w - batch) ** 2 * scale

        @graph.operation(adds_to="count")
        def number(count: int) -> int:
            if self.fails_at.pop("failing step", None) == count + 1:
                raise CutError("the step")
            self.clock.advance((count * 5 % 7 + 1) / 4)
            return 1

        @graph.train_op(adds_to="w")
        async def train(loss: float, number: int) -> float:
            await asyncio.sleep(0)
            return loss / 64 - 0.125 * number

        return graph

    def _make_hooks(self, data: Data) -> list[Any]:
        program, every, graph_values = (
            self.program,
            self.program.every,
            {"loss": "loss", "count": "count"},
        )

        def line(name: str) -> Callable[[dict[str, Any]], str]:
            return lambda values: (
                self.found[name].setdefault(values["count"] + 1, values["loss"]) and ""
            )

        async def evaluate(evaluation: ah.hooks.Evaluation) -> dict[str, float]:
            for _ in range(evaluation.step * 29 % 71):
                await asyncio.sleep(0)
            return {"val": abs(evaluation.variables["w"] - 3 + evaluation.step % 4)}

        stopping = ah.hooks.EarlyStoppingHook(
            "val", patience=program.patience, every=None, name="by evaluation"
        )

        def note_result(step: int, result: Any) -> None:
            self.found["evaluate"][step] = result
            # In the background it depends on turns of the loop at which step a result comes.
            if program.mode == "inline":
                stopping.report(step, result)

        self.evaluator = ah.hooks.EvaluatorHook(
            evaluate,
            every=every["evaluate"],
            mode=program.mode,
            at_begin=program.at_begin,
            at_end=program.at_end,
            on_result=note_result,
        )

        async def call(context: ah.SessionRunContext, values: ah.SessionRunValues) -> None:
            self.found["call"][context.global_step] = values.results

        async def fail(context: ah.SessionRunContext, values: object) -> None:
            if self.fails_at.pop("failing hook", None) == context.global_step:
                raise CutError("the hook")

        async def note_end(session: ah.Session) -> None:
            self.known = {*self.found["evaluate"], *self.evaluator.pending}

        self.profiler = ah.hooks.ProfilerHook(self.folder / "profiles", every=every["profile"])
        return [
            ah.hook("end")(note_end),
            self.evaluator,
            stopping,
            ah.hooks.EarlyStoppingHook(
                "loss",
                patience=program.patience,
                every=every["stop"],
                name="by observations",
            ),
            ah.hooks.EarlyStoppingHook(
                "loss",
                patience=ah.Every(steps=3 * program.patience),
                every=every["log"],
                restore_best={"data": data},
                name="by steps",
            ),
            ah.hooks.JSONLinesHook(self.folder / "run.jsonl", graph_values, every=every["json"]),
            ah.hooks.SummarySaverHook(
                self.folder / "summaries", graph_values, every=every["summary"]
            ),
            NotedRates(every["count"], self.found["rate"].__setitem__),
            ah.LoggingHook(graph_values, every=every["log"], formatter=line("log")),
            ah.LoggingHook(graph_values, every=every["other log"], formatter=line("other log")),
            ah.hook("after_run", fetches="loss", every=every["call"])(call),
            ah.hooks.FeedFnHook(lambda: {"scale": 1 + data.position % 3}),
            self.profiler,
            ah.CheckpointSaverHook(
                every=every["save"],
                save_on_error=program.save_on_error and "failing hook" not in dict(program.cuts),
            ),
            ah.configure(ah.hook("after_run")(fail), order=1),
            ah.StopAtStepHook(last_step=program.steps),
        ]

    def _copy(self, saver: ah.checkpoint.Saver) -> None:
        """Copy what is on the disk now."""
        with saver._directory._lock.mutex:  # kills within a write are for `tests.fuzz.checkpoints`
            shutil.copytree(self.folder / "checkpoints", self.killed / "checkpoints")
        shutil.copytree(
            self.folder,
            self.killed,
            ignore=lambda *_: ["checkpoints"],
            copy_function=_copy_if_there,
            dirs_exist_ok=True,
        )

    def _become_copy(self) -> None:
        if self.killed.exists():
            shutil.rmtree(self.folder)
            self.killed.rename(self.folder)
            self._new_process()

    async def run(self, cut: tuple[str, int] | None) -> str | None:
        """Run until the cut or the end; return why the run ended, None if it was cut."""
        kind, at = cut or ("", 0)
        rng = random.Random(f"{self.program.number} {cut}")
        self.fails_at = {kind: at} if kind.startswith("failing") else {}
        creator = ah.ChiefSessionCreator(
            self._graph(),
            scaffold=ah.Scaffold(tracked={"data": self.data}),
            checkpoint_dir=ah.checkpoint.Saver(self.folder / "checkpoints", keep=self.program.keep),
        )
        assert creator._saver is not None
        try:
            async with ah.AsyncMonitoredSession(creator, self.hooks) as session:
                start = session.global_step.latest.step
                for name, found in self.found.items():
                    # An evaluation before the first run was made since then.
                    late = [
                        step
                        for step in found
                        if step > start + (name == "evaluate" and step in self.evaluator.results)
                    ]
                    for step in late:
                        del found[step]
                async for _ in session.steps("train", feeds=self.data):
                    if session.global_step.latest.step == at and kind in ("stop", "kill"):
                        if kind == "stop":
                            session.request_stop("cut")
                            continue
                        for _ in range(rng.randint(0, 30)):
                            await asyncio.sleep(0)
                        self._copy(creator._saver)
                        raise CutError("killed")
        except CutError:
            self._become_copy()
            return None
        finally:
            self.clock.advance(
                rng.randint(0, 400) / 4
            )  # what passes between the parts does not count
            self.saver = creator._saver
            await self.saver.aclose()
        if session.stop_reason == "cut":
            for step in self.found["evaluate"].keys() - self.known:  # the one at the end
                del self.found["evaluate"][step]
            return None
        assert session.stop_reason is not None
        self.end = session.global_step.latest.step, creator._variables.snapshot()
        return session.stop_reason

    async def outcome(self, cuts: Sequence[tuple[str, int]]) -> dict[str, Any]:
        """Run through the cuts to the end, and return all that must not depend on them."""
        reason = None
        for cut in (*cuts, None):
            reason = await self.run(cut)
            if reason is not None:
                break
        kept = [
            (one.step, dict(one.metrics), one.interim) for one in await self.saver.checkpoints()
        ]
        return {
            # Of two hooks that stop at one step, the reason is that of the one which asks first.
            "end": ("the last step" if self.end[0] == self.program.steps else reason, self.end),
            **self.found,
            "best": self.data.position,
            "json": without_time(self.folder / "run.jsonl"),
            "summary": last_values(self.folder / "summaries"),
            "checkpoints": kept,
        }


async def differences(program: Program) -> list[str]:
    """Return what differs between the run with and the run without its cuts."""
    with scratch() as folder, ManualClock() as clock:
        outcomes: list[dict[str, Any]] = []
        for number, cuts in enumerate(((), program.cuts)):
            directory = folder / str(number)
            directory.mkdir()
            outcomes.append(await Trial(program, clock, directory).outcome(cuts))
        whole, cut = outcomes
        return [
            f"{name}: {whole[name]}\n   cut: {cut[name]}"
            for name in whole
            if whole[name] != cut[name]
        ]


def run_programs(count: int, seed: int, report: Callable[[str], None]) -> int:
    """Run so many programs; report each that differs, and return how many."""
    wrong = 0
    with log_disabled():
        for number in range(count):
            program = generate(seed, number)
            found = asyncio.run(differences(program))
            if found:
                wrong += 1
                report("\n  ".join([str(program), *found]))
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = command("resumed_runs", __doc__, count=1000).parse_args(arguments)
    wrong = run_programs(options.count, options.seed, lambda text: print(text, flush=True))
    print(
        f"{options.count} programs with random cuts, {wrong} of which did not end as the"
        " uninterrupted run",
        flush=True,
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
