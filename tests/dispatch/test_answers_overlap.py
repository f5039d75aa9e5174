"""Hooks that overlap and have one answer: `"together"`, `"race"`, `"merge"`; and observers, whose
answers do not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import HookTimeoutError, InvalidHookError
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.waiting import parked, ticks, uncancellable

pytestmark = pytest.mark.every_python


class Asked:
    """A class with a method for each way to have one answer of several hooks."""

    @ah.point("together")
    async def together(self, text: str) -> Any: ...

    @ah.point("race")
    async def race(self, text: str) -> Any: ...

    @ah.point("merge")
    async def merge(self, text: str) -> Any: ...

    @ah.point("first")
    async def first(self, text: str) -> Any: ...

    @ah.point("chain")
    async def chain(self, text: str) -> str:
        return f"own {text}"

    @ah.point("wrap")
    async def wrap(self, text: str, call_next: Callable[[str], Awaitable[str]]) -> str:
        return await call_next(text)

    async def one(self, text: str) -> str | None: ...

    @ah.point("together")
    def plain(self, text: str) -> str | None: ...


class Waits:
    """Answers, or fails, after some turns of the loop, and records when it begins and how it
    ends.
    """

    def __init__(
        self, name: str, turns: int = 0, answer: object = None, *, log: list[str] | None = None
    ) -> None:
        self.name, self.turns, self.answer = name, turns, answer
        self.log = [] if log is None else log

    async def race(self, text: str) -> Any:
        self.log.append(f"{self.name} begins")
        try:
            await ticks(self.turns)
            if isinstance(self.answer, BaseException):
                raise self.answer
        except asyncio.CancelledError:
            self.log.append(f"{self.name} is cancelled")
            raise
        self.log.append(f"{self.name} ends")
        return self.answer

    together = merge = first = race


class Plain(Waits):
    """Answers immediately, in methods that cannot wait."""

    async def race(self, text: str) -> Any:
        return self.plain(text)

    together = merge = first = race

    def plain(self, text: str) -> Any:
        self.log.append(self.name)
        return self.answer


class Single(Plain):
    """Has the methods of which only one hook may answer, too."""

    chain = one = Plain.race


async def test_together_takes_the_first_in_order_of_the_hooks() -> None:
    """All hooks begin before one ends, and who is quicker does not matter; without an answer the
    class itself has one.
    """
    log: list[str] = []
    given = [
        Waits("a", 9, log=log),
        Waits("b", 6, "slow", log=log),
        Waits("c", 1, "quick", log=log),
    ]
    assert await ah.compose(Asked, given).together("x") == "slow"
    assert log == ["a begins", "b begins", "c begins", "c ends", "b ends", "a ends"]
    log.clear()
    assert (
        await ah.compose(
            Asked, [Plain(name, 0, one, log=log) for name, one in [("d", None), ("e", 0), ("f", 1)]]
        ).together("x")
        == 0
    )
    assert (
        ah.compose(
            Asked,
            [Plain(name, 0, one, log=log) for name, one in [("g", None), ("h", "H"), ("i", "I")]],
        ).plain("x")
        == "H"
    )
    assert log == [*"defghi"]

    class Own(Asked):
        async def together(self, text: str) -> Any:
            return f"own {text}"

    assert (
        await ah.compose(Own, [Plain("a"), Waits("b")], results="together").together("x") == "own x"
    )
    assert await ah.compose(Asked, [Waits("a"), Plain("b")]).together("x") is None


async def test_race_takes_the_answer_that_is_there_first() -> None:
    """The others are cancelled and have ended when it is returned. None is no answer; the first of
    one turn of the loop wins.
    """
    log: list[str] = []
    given = [
        Waits("a", 9, "slow", log=log),
        Waits("b", 3, "quick", log=log),
        Waits("c", 1, log=log),
    ]
    assert await ah.compose(Asked, given).race("x") == "quick"
    assert log == ["a begins", "b begins", "c begins", "c ends", "b ends", "a is cancelled"]
    assert await ah.compose(Asked, [Waits("", 2, number) for number in range(5)]).race("x") == 0
    log.clear()
    plain = [Plain("d", log=log), Plain("e", 0, "E", log=log), Plain("f", 0, "F", log=log)]
    assert (
        await ah.compose(Asked, plain).race("x")
        == await ah.compose(Asked, [*plain, *given]).race("x")
        == "E"
    )
    assert log == ["d", "e"] * 2


async def test_a_race_continues_with_the_next_order() -> None:
    """Hooks of a higher order are only called if those before them have no answer; none at all is
    None.
    """
    log: list[str] = []
    late = ah.configure(Waits("late", 1, "late", log=log), order=1)
    assert await ah.compose(Asked, [late, Waits("a", 2, log=log)]).race("x") == "late"
    assert log == ["a begins", "a ends", "late begins", "late ends"]
    log.clear()
    assert await ah.compose(Asked, [late, Waits("b", 2, "b", log=log)]).race("x") == "b"
    assert log == ["b begins", "b ends"]
    assert await ah.compose(Asked, [Waits("a", 2), Waits("b")]).race("x") is None


async def test_a_failure_before_an_answer_is_raised() -> None:
    """A guard that fails refuses, also where another one would have answered; unless its errors are
    only logged.
    """
    log: list[str] = []
    failing, allowing = (
        Waits("a", 1, OSError("no connection"), log=log),
        Waits("b", 3, "allowed", log=log),
    )
    with pytest.raises(OSError, match="no connection"):
        await ah.compose(Asked, [failing, allowing]).race("x")
    assert log == ["a begins", "b begins", "b is cancelled"]
    assert (
        await ah.compose(Asked, [ah.configure(failing, on_error="log"), allowing]).race("x")
        == "allowed"
    )


async def test_what_losers_do_when_they_are_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """An error is not raised in place of the answer, and not lost; one that ignores its cancel has
    the grace period.
    """
    may_end = asyncio.Event()

    async def fails(text: str) -> None:
        try:
            await may_end.wait()
        finally:
            raise OSError("in its end")

    async def ignores(text: str) -> None:
        await uncancellable(may_end)

    with ManualClock() as clock:
        group = ah.HookGroup(Asked, [Waits("winner", 2, "answer")], grace_secs=3)
        for loser in (fails, ignores):
            group.on(Asked.race, loser)
        call = await parked(group.hooks.race("x"))
        await ticks()
        assert not call.done()
        clock.advance(3)
        assert await call == "answer"
    failed, left = caplog.records
    assert failed.getMessage() == "fails.race failed, but Waits.race has returned a result"
    assert failed.exc_info is not None
    assert isinstance(failed.exc_info[1], OSError)
    assert left.getMessage().startswith("ignores.race still runs 3 s after its cancellation")
    may_end.set()
    await ticks()


@pytest.mark.parametrize("how", ["first", "together", "race", "merge"])
async def test_a_guard_that_is_cut_off_refuses(how: str) -> None:
    """Its time limit is an error of the call in every way to answer; with `on_error="log"` it has
    no answer.
    """
    guard, other = (
        Waits("guard", 10**6, ["no"]),
        Waits("other", 0, ["yes"] if how == "first" else None),
    )
    with pytest.raises(
        HookTimeoutError, match=rf"^Waits#1\.{how} took longer than its timeout of 0.001 s"
    ):
        await getattr(ah.compose(Asked, [ah.configure(guard, timeout=0.001), other]), how)("x")
    logged = ah.configure(guard, timeout=0.001, on_error="log")
    expected = [] if how == "merge" else other.answer
    assert await getattr(ah.compose(Asked, [logged, other]), how)("x") == expected


@pytest.mark.parametrize(
    ("answers", "merged"),
    [
        ([[1, 2], None, [3]], [1, 2, 3]),
        ([(1,), (2, 3)], (1, 2, 3)),
        ([{"a": 1}, None, {"b": 2}], {"a": 1, "b": 2}),
        ([[1]], [1]),
        ([None, None], []),
        ([], []),
    ],
)
@pytest.mark.parametrize("kind", [Waits, Plain])
async def test_merge_joins_in_order_of_the_hooks(
    answers: list[Any], merged: object, kind: type[Waits]
) -> None:
    """Who is quicker does not matter, None is nothing, and no answer is changed; `call` returns the
    answers themselves.
    """
    group = ah.HookGroup(Asked, [kind("", 9 - place, one) for place, one in enumerate(answers)])
    assert await group.hooks.merge("x") == merged
    for method in (Asked.merge, Asked.together, Asked.race):
        assert await group.call(method, "x") == answers


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (
            [[1], "text"],
            ("Plain#2.merge returned 'text'", "return a list as Plain#1.merge does, or None"),
        ),
        ([(1,), [2]], ("Plain#2.merge returned [2]", "return a tuple as Plain#1.merge does")),
        ([7, None], ("Plain#1.merge returned 7", "return a list, tuple or dict, or None")),
        (
            [{"a": 1}, {"a": 1}],
            ("Plain#1.merge and Plain#2.merge both returned 'a'", "from one hook only"),
        ),
    ],
)
async def test_what_cannot_be_merged_is_an_error(answers: list[Any], says: tuple[str, ...]) -> None:
    """It names the hooks and the value."""
    with refused(InvalidHookError, *says):
        await ah.compose(Asked, [Plain("", 0, one) for one in answers]).merge("x")


@pytest.mark.parametrize("how", ["first", "together", "race", "chain", "one", "plain"])
async def test_an_observer_is_called_whatever_the_others_answer(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before them, also if one before it refuses; its own answer does not count, which is logged
    once.
    """
    log: list[str] = []
    audit = ah.configure(Single("audit", 0, "seen", log=log), observer=True)
    hooks = ah.compose(Asked, [Single("guard", 0, "refused", log=log), audit])
    for args, keywords in ((["x"], {}), ([], {"text": "x"})):
        answer = getattr(hooks, how)(*args, **keywords)
        assert (answer if how == "plain" else await answer) == "refused"
    assert log == ["audit", "guard"] * 2
    (record,) = caplog.records
    assert (
        record.getMessage()
        == f"Single#2.{how} returned 'seen', which is dropped: it is an observer"
    )
    assert await ah.compose(Asked, [audit]).chain("x") == "own x"


async def test_observers_overlap_and_their_errors_count() -> None:
    """They are called together; an error ends the call before the others, unless it is logged;
    `call` leaves them out.
    """
    log: list[str] = []
    observers = [
        ah.configure(Waits(name, turns, log=log), observer=True)
        for name, turns in (("a", 4), ("b", 1))
    ]
    group = ah.HookGroup(Asked, [Waits("guard", 1, "no", log=log), *observers])
    assert await group.hooks.first("x") == "no"
    assert log == ["a begins", "b begins", "b ends", "a ends", "guard begins", "guard ends"]
    assert await group.call(Asked.first, "x") == await group.call(Asked.first, text="x") == ["no"]
    log.clear()
    failing = ah.configure(Waits("c", 0, OSError("full")), observer=True)
    group.add(failing)
    with pytest.raises(OSError, match="full"):
        await group.hooks.first("x")
    assert "guard begins" not in log
    group.remove(failing.hook)
    group.add(ah.configure(failing, on_error="log"))
    assert await group.hooks.first("x") == "no"
