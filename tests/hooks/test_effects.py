"""EffectsHook: when effects are delivered, what a recovery and a kill leave of them, their keys,
and how they are repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.errors import EffectError, InvalidArgumentError, InvalidHookError
from aiohooks.testing import ManualClock, choose, explore, unreliable
from tests.support.saving_sessions import HeldSaver, saving, state_at, writes_done
from tests.support.sessions import NO_BACKOFF, Loader, make_runs, run_session, use_up
from tests.support.waiting import Uncancellable, advance_clock, parked, ticks, until_true

pytestmark = pytest.mark.every_python

LAST = ah.Every(at=(1_000,))
"""Saves at the begin and the end only."""


class Receiver:
    """Notes what it gets; its first calls have these outcomes, of which None is a success."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.keys: list[str] = []
        self.calls = 0
        self.errors = [*errors]
        self.received = asyncio.Event()

    async def __call__(self, effect: ah.hooks.Effect) -> None:
        self.calls += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.keys.append(effect.key)
        self.received.set()

    async def wait_for(self, count: int) -> None:
        while len(self.keys) < count:
            self.received.clear()
            await self.received.wait()
        for _ in range(5):  # the delivering task counts it
            await asyncio.sleep(0)


def effects(*, publish: Any = None, charge: Any = None, **options: Any) -> ah.hooks.EffectsHook:
    """Return a hook of the run `r` that repeats deliveries immediately."""
    handlers = {
        kind: handler
        for kind, handler in (("publish", publish), ("charge", charge))
        if handler is not None
    }
    return ah.hooks.EffectsHook(
        handlers, **{"run": "r", "backoff": ah.Backoff(initial_secs=0), **options}
    )


async def step() -> dict[str, int]:
    """Record one effect, and wait."""
    ah.effect("publish", "data")
    await asyncio.sleep(0)
    return {"loss": 1}


async def step_without_effects() -> None: ...


def chief(path: Any, fn: Any = step) -> ah.ChiefSessionCreator:
    return ah.ChiefSessionCreator(fn, checkpoint_dir=path)


async def train(
    source: Any, hooks: list[Any], runs: int, **options: Any
) -> ah.AsyncMonitoredSession:
    """Return a session after so many runs."""
    async with ah.AsyncMonitoredSession(source, hooks, **options) as session:
        await make_runs(session, runs, ())
    return session


async def kill_after(creator: Any, hooks: list[Any], runs: int) -> None:
    """Make so many runs, wait until they are saved, and end without a clean end."""

    async def train_and_fail() -> None:
        async with ah.AsyncMonitoredSession(creator, hooks) as session:
            await make_runs(session, runs, ())
            await writes_done()
            raise ValueError("killed")

    with pytest.raises(ValueError, match="killed"):
        await train_and_fail()


class Calling(ah.SessionRunHook):
    """Calls a function with the context in `after_run`."""

    def __init__(self, call: Callable[[ah.SessionRunContext], object]) -> None:
        self.call = call

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        self.call(run_context)


# -- when


async def test_an_effect_waits_for_the_checkpoint_that_has_it(tmp_path: Path) -> None:
    """It is delivered when the checkpoint is durable, and not before; later ones wait for the next
    checkpoint.
    """
    receiver = Receiver()
    saver = HeldSaver(tmp_path)
    saver.let()  # the first one, of step 0
    hooks = [saving(saver, every=ah.Every(steps=2)), effects(publish=receiver)]
    async with ah.AsyncMonitoredSession(chief(saver), hooks) as session:
        await make_runs(session, 3, ())
        assert receiver.keys == []
        assert session.status().effects == (ah.session.EffectStatus("publish", 3, 3),)
        assert "EffectStatus(kind='publish', pending=3, unsaved=3" in str(session.status())
        saver.let()
        await receiver.wait_for(2)
        assert session.status().effects == (ah.session.EffectStatus("publish", 1, 1),)
        saver.let(5)
    await saver.aclose()
    assert receiver.keys == ["r/1/publish/1", "r/2/publish/1", "r/3/publish/1"]


async def test_what_runs_without_a_step_record_is_saved_at_the_end(tmp_path: Path) -> None:
    """A run that does not advance the step has effects, too; its checkpoint is that of the end, and
    no key is used twice.
    """
    receiver = Receiver()
    graph = ah.Graph()
    graph.operation(name="look")(lambda: ah.effect("publish"))
    for _ in range(2):
        creator = ah.ChiefSessionCreator(graph, checkpoint_dir=tmp_path)
        async with ah.AsyncMonitoredSession(
            creator, [effects(publish=receiver), saving(None, every=LAST)]
        ) as session:
            await session.run("look")
            await session.run("look")
    assert receiver.keys == [f"r/0/publish/{number}" for number in (1, 2, 3, 4)]


# -- a failed run, a recovery, a kill


def failing_at(at: int, make: Callable[[], str]) -> Any:
    """Return a step that records what `make` returns, and fails once, at that step."""
    errors: list[BaseException] = [ah.UnavailableError("once")]

    async def failing(global_step: int) -> None:
        ah.effect("publish", make())
        if global_step + 1 == at and errors:
            raise errors.pop()

    return failing


async def test_a_recovery_drops_the_effects_of_undone_steps(tmp_path: Path) -> None:
    """They are recorded again with their steps, under the same keys."""
    payloads: list[tuple[str, str]] = []

    async def deliver(effect: ah.hooks.Effect) -> None:
        payloads.append((effect.key, effect.payload))

    made: list[str] = []

    def make() -> str:
        made.append(f"made {len(made) + 1}")
        return made[-1]

    hooks = [effects(publish=deliver), saving(None, every=ah.Every(steps=2), background=False)]
    async with ah.AsyncMonitoredSession(
        chief(tmp_path, failing_at(4, make)), hooks, recovery=NO_BACKOFF
    ) as session:
        while session.global_step.latest.step < 5:
            await session.run(())
    kept = [1, 2, 5, 6, 7]
    assert payloads == [
        (f"r/{number}/publish/1", f"made {execution}") for number, execution in enumerate(kept, 1)
    ]


async def test_a_checkpoint_from_before_the_hook_undoes_all(tmp_path: Path) -> None:
    """A recovery to a checkpoint that has no outbox drops what was recorded since."""
    await train(chief(tmp_path), [effects(publish=Receiver(), when="commit"), saving(None)], 1)
    hook: Any = effects(publish=(receiver := Receiver()))
    hook.name = "another"
    hooks = [hook, saving(None, every=LAST)]
    await train(chief(tmp_path, failing_at(3, lambda: "")), hooks, 3, recovery=NO_BACKOFF)
    assert receiver.keys == ["r/2/publish/1", "r/3/publish/1"]


async def blocked(effect: ah.hooks.Effect) -> None:
    """Never return."""
    await asyncio.Event().wait()


async def test_a_saver_of_another_directory_changes_nothing(tmp_path: Path) -> None:
    """What is saved elsewhere, and when, says nothing of the checkpoint that the next process is
    restored from.
    """
    receiver = Receiver()
    hooks = [saving(tmp_path / "other", every=LAST), effects(publish=receiver), saving(None)]
    async with ah.AsyncMonitoredSession(chief(tmp_path / "own"), hooks) as session:
        await session.run(())
        await receiver.wait_for(1)
    assert (await state_at(tmp_path / "own"))["hooks"]["EffectsHook"]["pending"] == []


async def test_kinds_without_a_handler_are_not_forgotten(tmp_path: Path) -> None:
    """A program that has lost the handler of what is left is refused."""
    await kill_after(chief(tmp_path), [effects(publish=blocked), saving(None)], 1)
    with pytest.raises(
        InvalidArgumentError, match=r"effects of the kinds \['publish'\] that were not delivered"
    ):
        await train(chief(tmp_path), [effects(charge=blocked), saving(None)], 1)


# -- keys


@pytest.mark.parametrize("turns", [(0, 5), (5, 0)])
async def test_a_recorder_has_numbers_of_its_own(turns: tuple[int, int]) -> None:
    """So the order of concurrent operations and hooks changes no key."""
    payloads: dict[str, str] = {}

    async def deliver(effect: ah.hooks.Effect) -> None:
        payloads[effect.key] = effect.payload

    class Waiting(ah.SessionRunHook):
        def __init__(self, name: str, turns: int) -> None:
            self.name = name
            self.turns = turns

        async def after_run(self, run_context: ah.SessionRunContext, _: object) -> None:
            for number in range(2):
                await ticks(self.turns)
                run_context.effect("publish", f"{self.name} {number}", recorder=self.name)

    graph = ah.Graph()
    for name, count in zip(("one", "two"), turns, strict=True):

        @graph.operation(name=name)
        async def operation(name: str = name, count: int = count) -> None:
            await ticks(count)
            ah.effect("publish", name, recorder=name)

    hooks = [Waiting("a", turns[0]), Waiting("b", turns[1])]
    session = ah.AsyncMonitoredSession(graph, [*hooks, effects(publish=deliver, when="commit")])
    await run_session(session, 1, ["one", "two"])
    assert payloads == {
        "r/0/one/1": "one",
        "r/0/two/1": "two",
        "r/0/a/1": "a 0",
        "r/0/a/2": "a 1",
        "r/0/b/1": "b 0",
        "r/0/b/2": "b 1",
    }


async def double() -> int:
    return 2


async def test_a_step_that_was_reset_has_the_same_keys() -> None:
    """Whoever sets the step back, what follows repeats the effects of its steps."""
    receiver = Receiver()
    async with ah.AsyncMonitoredSession(
        step, [effects(publish=receiver, when="commit")]
    ) as session:
        await session.run(())
        await session.run(())
        await session.global_step.reset(0)
        await session.run(())
        await session.run(())
    assert receiver.keys == ["r/1/publish/1", "r/2/publish/1"] * 2


async def test_an_operation_that_is_repeated_records_once() -> None:
    """A run that reads a variable anew, as another one has replaced it, makes its operations again,
    and their effects.
    """
    graph = ah.Graph()
    graph.variable("v", 0)
    turns = asyncio.Event()

    @graph.operation(updates="v")
    async def update(v: int) -> int:
        ah.effect("publish", v)
        await turns.wait()
        return v + 1

    delivered: list[tuple[str, int]] = []

    async def deliver(effect: ah.hooks.Effect) -> None:
        delivered.append((effect.key, effect.payload))

    variables = ah.Variables()
    async with ah.AsyncMonitoredSession(
        graph, [effects(publish=deliver, when="commit")], variables=variables
    ) as session:
        running = await parked(session.run("update"), 5)
        variables.assign({"v": 10})
        turns.set()
        assert await running == 11
    assert delivered == [("r/0/publish/1", 10)]


# -- where effects may be recorded


async def test_threads_record_at_the_same_time() -> None:
    """Each has its key, and none is lost."""
    receiver = Receiver()
    interval = sys.getswitchinterval()

    async def train_step() -> None:
        start = threading.Barrier(4)

        def record() -> None:
            start.wait()
            for _ in range(20):
                ah.effect("publish")

        await asyncio.gather(*(asyncio.to_thread(record) for _ in range(4)))

    sys.setswitchinterval(1e-6)
    try:
        await train(train_step, [effects(publish=receiver, when="commit", max_pending=10_000)], 20)
    finally:
        sys.setswitchinterval(interval)
    assert len(receiver.keys) == len({*receiver.keys}) == 20 * 4 * 20


async def test_a_thread_that_outlives_its_attempt_records_nothing() -> None:
    """Its effect is that of the next attempt, under one key."""
    receiver = Receiver()
    go = threading.Event()
    refused = list[EffectError]()
    threads: list[asyncio.Future[None]] = []

    class Pay(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            is_first = not threads

            def pay() -> None:
                if is_first:
                    go.wait()
                try:
                    ah.effect("publish")
                except EffectError as error:
                    refused.append(error)

            threads.append(asyncio.ensure_future(asyncio.to_thread(pay)))
            if is_first:
                raise ah.AbortedError("its thread continues")
            await threads[1]
            go.set()
            await threads[0]

    hooks = [Pay(), effects(publish=receiver, when="commit")]
    await train(step_without_effects, hooks, 1, recovery=NO_BACKOFF)
    assert receiver.keys == ["r/1/publish/1"]
    assert len(refused) == 1


async def test_where_no_effect_can_be_recorded() -> None:
    """The error of each place says what to do."""
    hook = effects(publish=Receiver(), when="commit")
    late = ah.configure(Calling(lambda context: context.effect("publish")), order=100)
    with pytest.raises(EffectError, match="outside of a run with an EffectsHook; record effects"):
        ah.effect("publish")
    with pytest.raises(EffectError, match="outside of a run with an EffectsHook"):
        await train(step, [], 1)
    with pytest.raises(EffectError, match=r"that delivers none; add EffectsHook\(\{kind: handler"):
        await train(step, [ah.StopAtStepHook(last_step=5)], 1)
    with pytest.raises(EffectError, match="In after_run, only a hook with an order below 99"):
        await train(double, [hook, late], 1)
    contexts: list[ah.SessionRunContext] = []
    background = ah.configure(Calling(contexts.append), background=True)
    await train(double, [hook, background], 1)
    with pytest.raises(EffectError, match="after the effects of its run were taken or dropped"):
        contexts[0].effect("publish")


@pytest.mark.parametrize(
    ("kind", "payload", "message"),
    [
        (
            "pubish",
            None,
            (
                r"kind of an effect is 'pubish'; give the kind of a handler .* did you mean"
                r" 'publish'\?"
            ),
        ),
        (3, None, "kind of an effect is 3"),
        ([], None, r"kind of an effect is \[\]"),
        (
            "publish",
            {"loss": {1, 2}},
            r"\[\"payload of effect 'publish'\"\]\['loss'\] is of the type builtins.set, which",
        ),
        ("publish", [np.array([object()])], r"'publish'\"\]\[0\] has the dtype object"),
        ("publish", {1.5: 2}, "has the key 1.5"),
        ("publish", "\ud800", "which is not valid text; give its bytes"),
    ],
)
async def test_what_cannot_be_recorded_is_refused(kind: Any, payload: Any, message: str) -> None:
    """An unknown kind, and a payload that a checkpoint cannot hold: where it is recorded, with its
    type.
    """

    async def wrong() -> None:
        ah.effect(kind, payload)

    with pytest.raises(InvalidArgumentError, match=message):
        await train(wrong, [effects(publish=Receiver(), when="commit")], 1)


@pytest.mark.parametrize(
    "directory", [False, True], ids=["no saver", "a saver of another directory"]
)
async def test_without_checkpoints_it_is_refused(directory: bool, tmp_path: Path) -> None:
    """What is never in a checkpoint that the session is restored from would never be delivered."""
    hooks = [effects(publish=Receiver()), *([saving(tmp_path / "other")] if directory else [])]
    with pytest.raises(
        InvalidArgumentError,
        match=r"Give it ChiefSessionCreator\(..., checkpoint_dir=...\) and Checkpoint",
    ):
        await train(chief(tmp_path) if directory else step, hooks, 1)


async def test_what_cannot_handle_is_refused() -> None:
    """Handlers take the effect, and one hook has the handlers of all kinds."""
    with pytest.raises(
        InvalidHookError,
        match="the handler of 'publish' is <built-in function len>, not a coroutine function",
    ):
        ah.hooks.EffectsHook({"publish": len}, run="r")  # type: ignore[dict-item]
    with pytest.raises(InvalidArgumentError, match="handlers is empty; give "):
        ah.hooks.EffectsHook({}, run="r")
    with pytest.raises(InvalidArgumentError, match="a kind of handlers is 3; give a str"):
        ah.hooks.EffectsHook({3: blocked}, run="r")  # type: ignore[dict-item]
    effects(publish=blocked, max_pending=1)  # the least
    two = [effects(publish=blocked, when="commit"), effects(charge=blocked, when="commit")]
    two[1].name = "second"
    with pytest.raises(InvalidHookError, match="has two EffectsHooks; give one all the handlers"):
        await train(step, [*two], 1)


# -- deliveries


async def test_a_kind_that_fails_blocks_itself_alone(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is repeated, in order, after growing pauses; the log says what fails."""
    error = ConnectionError("refused")
    publish = Receiver(error, None, *[error] * 10)
    charge = Receiver()

    async def both() -> None:
        ah.effect("publish")
        ah.effect("charge")

    hook = effects(
        publish=publish,
        charge=charge,
        when="commit",
        backoff=ah.Backoff(initial_secs=1, max_secs=4, jitter=False),
    )
    async with ah.AsyncMonitoredSession(both, [hook]) as session:
        await session.run(())
        await session.run(())
        await charge.wait_for(2)
        while len(publish.keys) < 2:
            clock.advance(1)
            await asyncio.sleep(0)
        await publish.wait_for(2)
        assert session.status().effects[0] == ("publish", 0, 0)
    assert publish.keys == ["r/1/publish/1", "r/2/publish/1"]
    assert charge.keys == ["r/1/charge/1", "r/2/charge/1"]
    failed = [text for text in caplog.messages if "failed, in attempt" in text]
    repeated = "it is repeated: ConnectionError('refused')"
    assert failed[0] == f"delivery of r/1/publish/1 failed, in attempt 1; {repeated}"
    assert failed[-1] == f"delivery of r/2/publish/1 failed, in attempt 10; {repeated}"
    assert len(failed) == 11


async def test_a_drain_waits_for_room_and_nothing_is_lost(
    tmp_path: Path, clock: ManualClock
) -> None:
    """While the receiver is down, until the drain is a stop: what was recorded and what was not
    used are the next process's.
    """
    receiver = Receiver()

    async def step(number: int) -> None:
        ah.effect("publish", number)

    async def use_all(session: ah.AsyncMonitoredSession, loader: Loader) -> None:
        async with session:
            await use_up(session.steps((), feeds=loader, prefetch=2))

    def process(**options: Any) -> tuple[ah.AsyncMonitoredSession, asyncio.Task[None]]:
        loader = Loader(6)
        creator = ah.ChiefSessionCreator(
            step, checkpoint_dir=tmp_path, scaffold=ah.Scaffold(tracked={"loader": loader})
        )
        session = ah.AsyncMonitoredSession(
            creator,
            [effects(max_pending=1, **options), saving(None)],
        )
        return session, asyncio.create_task(use_all(session, loader))

    session, running = process(publish=blocked)
    await until_true(lambda: "EffectsHook.after_run" in str(session.status()))
    session.request_drain("enough")
    await ticks(20)
    assert "EffectsHook.after_run" in str(session.status())
    session.request_stop("it took too long")
    while not running.done():  # the end waits for the receiver
        await advance_clock(clock, 0.5)
    await running
    assert session.stop_reason == "it took too long"
    assert 0 < session.global_step.latest.step < 6
    session, running = process(publish=receiver)
    await running
    assert receiver.keys == [f"r/{number}/publish/1" for number in range(1, 7)]


@pytest.mark.parametrize("saved", [False, True])
async def test_the_end_waits_for_the_grace_period(
    saved: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then what is left is counted: the checkpoint has it, or it is lost."""
    brief = {"stop_grace_period_secs": 0.01}
    if saved:
        await train(chief(tmp_path), [effects(publish=blocked), saving(None)], 2, **brief)
    else:
        await train(step, [effects(publish=blocked, when="commit")], 2, **brief)
    kept = "the next process delivers them, or repeats their steps"
    what = kept if saved else "they are lost, as no checkpoint has them"
    assert f"effects that were not delivered: {{'publish': 2}}; {what}" in caplog.messages
    if saved:
        assert len((await state_at(tmp_path))["hooks"]["EffectsHook"]["pending"]) == 2


async def test_a_handler_that_ignores_its_cancel_is_left_behind(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the grace period of the end, which is a clean one: what is not delivered is
    counted.
    """
    stubborn = Uncancellable()

    async def until_it_is_delivered() -> None:
        hook = effects(publish=stubborn.wait, when="commit")
        async with ah.AsyncMonitoredSession(step, [hook], stop_grace_period_secs=9) as session:
            await session.run(())
            await stubborn.waiting.wait()

    running = asyncio.create_task(until_it_is_delivered())
    while not stubborn.cancels:  # the end waits for the delivery
        await advance_clock(clock, 1)
    for _ in range(2):
        await advance_clock(clock, 4.5)
    await stubborn.release()
    await running
    said = [message for message in caplog.messages if "has waited" not in message]
    assert said[-2:] == [
        "delivery of r/1/publish/1 still runs 4.5 s after its cancellation; continuing without it",
        "effects that were not delivered: {'publish': 1}; they are lost, as no checkpoint has them",
    ]


# -- explored


async def program(folder: Path) -> None:
    """Train three steps, whose effects the receiver writes to a file; check them where the training
    ends cleanly.
    """
    receiver = folder / "receiver"

    async def receive(effect: ah.hooks.Effect) -> None:
        with receiver.open("a") as file:
            file.write(f"{effect.key} {effect.payload}\n")

    deliver = unreliable(receive, ConnectionError)
    graph = ah.Graph()
    graph.variable("made", ())

    @graph.train_op(updates="made", name="train")
    async def train_op(made: tuple[int, ...]) -> tuple[int, ...]:
        number = next(_executions)
        ah.effect("publish", number)
        await sleep(choose(0, 0.01))
        return (*made, number)

    kept: list[int] = []

    class Last(ah.SessionRunHook):
        async def end(self, session: ah.Session) -> None:
            kept.extend(session.variables.snapshot()["made"])

    hook = effects(publish=deliver, backoff=ah.Backoff(0.01))
    creator = ah.ChiefSessionCreator(graph, checkpoint_dir=folder / "checkpoints")
    async with ah.AsyncMonitoredSession(
        creator,
        [Last(), hook, saving(None, every=ah.Every(steps=2))],
        stop_grace_period_secs=1e6,
    ) as session:
        while session.global_step.latest.step < 3 and not session.should_stop():
            await session.run("train")
    expected = {f"r/{step}/publish/1 {number}" for step, number in enumerate(kept, 1)}
    assert {*(receiver.read_text().splitlines() if receiver.exists() else ())} == expected


_executions = itertools.count()


async def in_a_new_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        await program(Path(folder))


@pytest.mark.asyncio(loop_factories=["asyncio"])  # what is explored has a loop of its own
async def test_whatever_happens_kept_steps_have_their_effects() -> None:
    """In any order of tasks, with failures and cancels: no undone step has an effect."""
    explored = await explore(in_a_new_folder, seeds=30)
    assert explored.disturbances["failure"] > 0


class Abandoned(BaseException):
    """An error that is no Exception, as frameworks raise."""


async def test_a_handler_that_raises_no_exception_fails_the_session() -> None:
    """Nothing would repeat the delivery, and a run that waits for room would wait forever."""
    hook = effects(publish=Receiver(Abandoned("not now")), when="commit", max_pending=1)
    with pytest.raises(Abandoned):
        await run_session(ah.AsyncMonitoredSession(step, [hook]), 3, "loss")


@pytest.mark.parametrize("method", ["run", "aclose"])
async def test_a_handler_cannot_run_or_end_the_session(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Either would wait for the deliveries, of which the handler is one."""
    calls = list[str]()

    async def publish(effect: ah.hooks.Effect) -> None:
        calls.append(effect.key)
        if len(calls) == 1:
            await (session.run("loss") if method == "run" else session.aclose())

    hook = effects(publish=publish, when="commit", max_pending=1)
    async with ah.AsyncMonitoredSession(step, [hook]) as session:
        await session.run("loss")
    assert calls == ["r/1/publish/1"] * 2
    assert f"NestedRunError('{method} was called from inside" in caplog.text
