"""Effects of trainings that are killed and recover at random: each kept step has all of them, and
no undone step has any.

    python -m tests.fuzz.effects --count 2000 --seed 0
    python -m tests.fuzz.effects --injected-bugs

Each training is run by processes that are killed with SIGKILL, at a random event of the program or
at any moment, and recovers from failures of its step and of hooks. Steps, hooks and a group record
effects of three kinds, of which two are slow or fail, before or after the receiver has got them.
What was recorded and received is written to files, which outlive the processes; each execution of a
step has a name of its own, and the variables have the names of those that count in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.checkpoint import KeepNewest
from aiohooks.hooks.effects import EffectsHook
from tests.fuzz._harness import Bugs, Method, command, find_bugs, log_disabled, scratch

KINDS = ("publish", "charge", "notify")
MOST_KILLS = 6
_NO_BACKOFF = ah.Backoff(initial_secs=0)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training: what it does, and how often it is disturbed."""

    number: int
    steps: int
    every: int
    kills: int
    failures: float
    background: bool
    max_pending: int
    waits: bool
    when: Any
    has_checkpoints: bool
    """Without, a recovery continues with the variables in memory, and no step is undone."""

    @property
    def keeps_undone(self) -> bool:
        """Whether the effects of a step that is undone may have been delivered."""
        return self.has_checkpoints and self.when == "commit"


def generate(seed: int, number: int) -> Program:
    """Return the program of a number."""
    rng = random.Random(f"{seed} {number}")
    program = Program(
        number,
        steps=rng.randint(6, 20),
        every=rng.randint(1, 6),
        kills=rng.randint(0, MOST_KILLS),
        failures=rng.choice([0, 0.03, 0.1]),
        background=rng.random() < 0.8,
        max_pending=rng.choice([3, 20, 1000]),
        waits=rng.random() < 0.7,
        when=rng.choice(["checkpoint", "checkpoint", "checkpoint", "commit"]),
        has_checkpoints=rng.random() < 0.8,
    )
    if program.has_checkpoints:
        return program
    return dataclasses.replace(program, kills=0, when="commit")


class Life:
    """One process of a training, which is killed at an event, after a time, or not at all."""

    def __init__(self, program: Program, number: int, folder: Path) -> None:
        self.program, self.number, self.folder = program, number, folder
        self.rng = random.Random(f"{program} {number}")
        self.events = itertools.count()
        self.last: int | None = None
        if number < program.kills:
            if self.rng.random() < 0.6:
                self.last = int(self.rng.expovariate(1 / 60))
            else:
                signal.setitimer(
                    signal.ITIMER_REAL, self.rng.uniform(0.001, 0.08)
                )  # the signal's default action is the end
        self.executions = itertools.count()
        self.execution = ""
        self.step = 0
        self.recorded = Counter[tuple[str, str]]()
        """The effects of the execution, by kind and recorder."""
        self.kept: Sequence[str] = ()

    def event(self) -> None:
        """Count an event; it may be the last one."""
        if next(self.events) == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, name: str, *values: Any) -> None:
        """Append a line to a file, which is there when this process is killed."""
        with open(self.folder / name, "ab", buffering=0) as file:
            file.write(json.dumps(values).encode() + b"\n")

    def record(self, kind: str, recorder: str, context: ah.SessionRunContext | None = None) -> None:
        """Record an effect; its payload names it, and is unique."""
        self.event()
        self.recorded[kind, recorder] += 1
        name = [self.step, kind, recorder, self.recorded[kind, recorder]]
        payload = {"execution": self.execution, "name": name}
        record = ah.effect if context is None else context.effect
        record(kind, payload, recorder=f"{kind} {recorder}")
        self.write("recorded", payload)

    def may_fail(self, what: str) -> None:
        """Raise an error from which the session recovers."""
        if self.rng.random() < self.program.failures:
            raise ah.UnavailableError(what)

    async def pause(self) -> None:
        """Let others continue, for a random time."""
        for _ in range(self.rng.choice([0, 1, 3])):
            await asyncio.sleep(0)
        if self.program.waits and self.rng.random() < 0.3:
            await sleep(self.rng.uniform(0, 0.003))

    def handler(self, kind: str) -> Callable[[ah.hooks.Effect], Any]:
        async def deliver(effect: ah.hooks.Effect) -> None:
            self.event()
            if kind == "charge":
                await sleep(self.rng.uniform(0, 0.004))
            fails = kind == "notify" and self.rng.random() < 0.4
            if fails and self.rng.random() < 0.5:
                raise ConnectionError("the receiver has not got it")
            self.write("received", os.getpid(), kind, effect.key, effect.step, effect.payload)
            self.event()
            await asyncio.sleep(0)
            if fails:
                raise ConnectionError("the answer was lost")
            self.write("received", os.getpid(), kind, effect.key, effect.step, None)

        return deliver

    async def run(self) -> None:
        """Train until the end."""
        life, program = self, self.program
        graph = ah.Graph()
        graph.variable("executions", ())

        class Points:
            async def called(self) -> None: ...

        class Waiting(Points):
            async def called(self) -> None:
                await life.pause()
                life.record("notify", "group")

        group = ah.HookGroup(Points, [Waiting()]).hooks

        async def train(executions: tuple[str, ...]) -> tuple[str, ...]:
            life.record("publish", "train")
            if program.waits:
                await life.pause()
                await group.called()
            life.may_fail("step")
            life.record("charge", "train")
            life.event()
            return (*executions, life.execution)

        async def train_plainly(executions: tuple[str, ...]) -> tuple[str, ...]:
            life.record("publish", "train")
            life.may_fail("step")
            return (*executions, life.execution)

        graph.train_op(updates="executions", name="train")(
            train if program.waits else train_plainly
        )

        class Begins(ah.SessionRunHook):
            order = -1

            async def before_run(self, run_context: ah.SessionRunContext) -> None:
                life.event()
                life.execution = f"{life.number}.{next(life.executions)}"
                life.step = run_context.global_step
                life.recorded.clear()

        class Plain(ah.SessionRunHook):
            async def after_run(self, run_context: ah.SessionRunContext, run_values: Any) -> None:
                life.record("publish", "Plain", run_context)
                life.record("charge", "Plain", run_context)

        class Slow(ah.SessionRunHook):
            def __init__(self, name: str) -> None:
                self.name = name

            async def before_run(self, run_context: ah.SessionRunContext) -> None:
                await life.pause()
                life.record("notify", self.name, run_context)
                await life.pause()

            async def after_run(self, run_context: ah.SessionRunContext, run_values: Any) -> None:
                await life.pause()
                life.record("publish", self.name, run_context)
                life.may_fail("hook")

        class Noted(ah.hooks.CheckpointSaverListener):
            async def before_save(self, *_: object) -> None:
                life.event()

            async def after_save(self, *_: object) -> None:
                life.event()

        class Last(ah.SessionRunHook):
            order = 200

            async def after_run(self, *_: object) -> None:
                life.may_fail("the last hook")

            async def end(self, session: ah.Session) -> None:
                life.kept = session.variables.snapshot()["executions"]

        hooks = [
            Begins(),
            Plain(),
            Slow("first"),
            Slow("second"),
            Last(),
            EffectsHook(
                {kind: self.handler(kind) for kind in KINDS},
                run="r",
                when=program.when,
                backoff=ah.Backoff(0.0005, 0.002),
                max_pending=program.max_pending,
            ),
            ah.StopAtStepHook(last_step=program.steps),
        ]
        checkpoint_dir = None
        if program.has_checkpoints:
            checkpoint_dir = ah.checkpoint.Saver(self.folder / "checkpoints", keep=KeepNewest(2))
            hooks.append(
                ah.CheckpointSaverHook(
                    every=ah.Every(steps=program.every),
                    listeners=[Noted()],
                    background=program.background,
                )
            )
        life.rng.shuffle(hooks)
        policy = ah.RecoveryPolicy(
            max_attempts=1000,
            backoff=_NO_BACKOFF,
        )
        creator = ah.ChiefSessionCreator(graph, checkpoint_dir=checkpoint_dir)
        session = ah.AsyncMonitoredSession(
            creator, hooks, recovery=policy, stop_grace_period_secs=1e6
        )
        async with session:
            async for _ in session.steps("train"):
                self.event()
        (self.folder / "kept").write_text(json.dumps(self.kept))


def live(program: Program, number: int, folder: Path) -> bool:
    """Run one process of a training, a fork of this one; return whether it has come to its end.

    Raises:
        RuntimeError: it has failed.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            asyncio.run(Life(program, number, folder).run())
            code = 0
        except BaseException:
            (folder / "failure").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and number < program.kills:
        return False
    if status:
        raise RuntimeError(f"{program} ended with {status}: {(folder / 'failure').read_text()}")
    return True


def lines(path: Path) -> list[Any]:
    """Return the lines of a file; the last may have been cut."""
    found: list[Any] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def violations(folder: Path, tally: Counter[str], *, keeps_undone: bool) -> list[str]:
    """Return the broken promises of a training that has ended."""
    kept = json.loads((folder / "kept").read_text())
    recorded = [payload for (payload,) in lines(folder / "recorded")]
    received = Received(kept, keeps_undone=keeps_undone)
    for line in lines(folder / "received"):
        received.add(*line)
    expected = [json.dumps(payload) for payload in recorded if payload["execution"] in kept]
    found = received.violations
    if len(kept) != len({*kept}):
        found.append(f"an execution counts twice: {kept}")
    found += [f"{name} was not delivered" for name in expected if name not in received.keys]
    executions = {payload["execution"] for payload in recorded}
    tally["calls"] += received.calls
    tally["repeated"] += received.repeated
    tally["kept"] += len(expected)
    tally["undone"] += len(recorded) - len(expected)
    tally["executions"] += len(executions)
    tally["steps"] += len(kept)
    return found


class Received:
    """The deliveries of a training, in order, and the promises that they break."""

    def __init__(self, kept: Sequence[str], *, keeps_undone: bool) -> None:
        self._undoes = not keeps_undone
        self._kept = kept
        self._done: set[tuple[int, str]] = set()
        self._latest_steps = Counter[str]()
        self._keys_by_name: dict[str, str] = {}
        self._payloads: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        """The key of each payload."""
        self.calls = 0
        self.repeated = 0
        self.violations: list[str] = []

    def add(self, pid: int, kind: str, key: str, step: int, payload: Any) -> None:
        """Add a call of a handler; without a payload, its successful end."""
        if payload is None:
            self._done.add((pid, key))
            return
        text = json.dumps(payload)
        self.calls += 1
        name = json.dumps(payload["name"])
        if self._keys_by_name.setdefault(name, key) != key:
            self.violations.append(f"{name} has two keys: {self._keys_by_name[name]} and {key}")
        if payload["name"][:2] != [step, kind]:
            self.violations.append(f"{key} of step {step} and kind {kind} is {text}")
        if text in self.keys:
            self.repeated += 1
            # At the commit, a repeated step has its effect again, under the same key.
            if self._undoes and (pid, key) in self._done:
                self.violations.append(f"{key} was delivered twice by one process")
            return
        self.keys[text] = key
        if not self._undoes:
            return
        if payload["execution"] not in self._kept:
            self.violations.append(f"{key} of an undone step was delivered: {payload}")
        if self._payloads.setdefault(key, text) != text:
            self.violations.append(f"{key} was delivered as {self._payloads[key]} and as {text}")
        if step < self._latest_steps[kind]:
            self.violations.append(f"{kind} was delivered in another order: step {step}")
        self._latest_steps[kind] = step


def run_programs(count: int, seed: int, report: Callable[[str], None], tally: Counter[str]) -> int:
    """Run so many programs; report each that breaks a promise, and return how many."""
    wrong = 0
    for module in (
        "aiohooks.checkpoint._directory",
        "aiohooks.session.monitored",
        "anyio._backends._asyncio",
    ):
        importlib.import_module(module)  # here, and not in each fork
    with log_disabled():
        for number in range(count):
            program = generate(seed, number)
            with scratch() as folder:
                try:
                    lives = next(
                        life for life in itertools.count(1) if live(program, life - 1, folder)
                    )
                    found = violations(folder, tally, keeps_undone=program.keeps_undone)
                except RuntimeError as error:
                    found = [str(error)]
                    lives = 0
            tally["kills"] += lives - 1
            if found:
                wrong += 1
                report("\n  ".join([f"{program}, seed {seed}", *found[:10]]))
    return wrong


# -- bugs that must be found

BUGS = Bugs()
bug = functools.partial(BUGS.add, EffectsHook)


@bug("_move_to_outbox")
def delivered_at_the_commit(original: Method, self: Any) -> None:
    original(self)
    self._release(self._unsaved.keys())


@bug("_release")
def a_save_releases_what_came_after_it(original: Method, self: Any, keys: Any) -> None:
    original(self, self._unsaved.keys() if keys else keys)


@bug("state_dict")
def the_outbox_is_not_saved(original: Method, self: Any) -> Any:
    return {**original(self), "pending": []}


@bug("load_state_dict")
def undone_effects_stay(original: Method, self: Any, state: Any) -> None:
    outbox = self._ready | self._unsaved
    original(self, state)
    self._ready |= outbox


@bug("_move_to_outbox")
def a_failed_attempt_leaves_its_effects(original: Method, self: Any) -> None:
    for attempt in self._attempts:
        attempt.committed = attempt.committed or not attempt.accepts_effects
    original(self)


@bug("_take_effects_of_run")
def a_committed_run_loses_its_effects(original: Method, self: Any, *values: Any) -> Any:
    self._attempts = self._attempts[-1:]
    return original(self, *values)


@bug("__init__")
def a_failed_delivery_is_not_repeated(
    original: Method, self: Any, handlers: Any, **options: Any
) -> None:
    def ignoring(handler: Any) -> Any:
        async def deliver(effect: Any) -> None:
            with contextlib.suppress(ConnectionError):
                await handler(effect)

        return deliver

    original(self, {kind: ignoring(handler) for kind, handler in handlers.items()}, **options)


@bug("load_state_dict")
def a_recovery_delivers_again(original: Method, self: Any, state: Any) -> None:
    coord, self._coord = self._coord, None
    original(self, state)
    self._coord = coord


@bug("record")
def all_have_one_numbering(
    original: Method, self: Any, attempt: Any, kind: str, data: Any, _: Any
) -> None:
    original(self, attempt, kind, data, "step")


@bug("load_state_dict")
def keys_depend_on_the_process(original: Method, self: Any, state: Any) -> None:
    original(self, state)
    self._run = f"r{os.getpid()}"


def finding(name: str) -> str | None:
    """Return which training is the first that finds a bug."""
    with BUGS[name].injected():
        return next(
            (
                f"training {number + 1}"
                for number in range(300)
                if run_programs(1, 1000 + number, lambda _: None, Counter())
            ),
            None,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = command("effects", __doc__, count=2000, has_bugs=True).parse_args(arguments)
    if options.injected_bugs:
        return find_bugs(BUGS, finding)
    tally = Counter[str]()
    wrong = run_programs(options.count, options.seed, lambda text: print(text, flush=True), tally)
    print(
        f"{options.count} trainings with {tally['kills']} kills, {wrong} of which broke a"
        f" promise\n{tally['executions']} executions of steps, {tally['steps']} of them"
        f" kept\n{tally['kept']} effects of the kept ones, all delivered, {tally['repeated']} times"
        f" again under the same key\n{tally['undone']} effects of the others, none delivered",
        flush=True,
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
