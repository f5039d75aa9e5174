"""What holds for all hooks of a group: a time limit and `on_error` where a hook has none of its
own; calls in reverse.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.dispatch import Hook, HookRegistration
from aiohooks.errors import HookTimeoutError
from tests.support.waiting import forever, ticks

pytestmark = pytest.mark.every_python


class Resources:
    """A class with a method that does something, ones that undo it, and one that answers."""

    async def on_start(self) -> None: ...

    async def on_end(self) -> None: ...

    async def on_close(self) -> str | None: ...

    def on_exit(self) -> None: ...


class Recording:
    """Records its calls."""

    def __init__(self, log: list[str], name: str, *, waits: bool = False) -> None:
        self.log, self.name, self.waits = log, name, waits

    async def on_start(self) -> None:
        await ticks(self.waits)
        self.log.append(self.name)

    on_end = on_start

    async def on_close(self) -> str | None:
        self.log.append(self.name)
        return self.name if self.name == "a" else None

    def on_exit(self) -> None:
        self.log.append(self.name)


@pytest.mark.parametrize("waits", [False, True])
async def test_what_undoes_is_called_in_reverse(waits: bool) -> None:
    """From the last hook to the first, those of a higher order before; other methods are called as
    ever, and `call` too.
    """
    log: list[str] = []
    hooks: list[Any] = [Recording(log, name, waits=waits) for name in "abc"]
    hooks.insert(0, ah.configure(Recording(log, "late", waits=waits), order=1))

    async def called(on: Resources, method: str) -> str:
        log.clear()
        answer = getattr(on, method)()
        assert answer is None or await answer == ("a" if method == "on_close" else None)
        return " ".join(log)

    group = ah.HookGroup(
        Resources, hooks, results="first", exit_reverse=("on_end", "on_close", "on_exit")
    )
    assert await called(group.hooks, "on_start") == "a b c late"
    for method in ("on_end", "on_close", "on_exit"):
        assert await called(group.hooks, method) == "late c b a"
    assert await group.call(Resources.on_close) == [None, None, None, "a"]
    group.add(Recording(log, "d", waits=waits))
    assert await called(group.hooks, "on_end") == "late d c b a"
    composite = ah.compose(Resources, hooks, results="together", exit_reverse="on_close")
    assert await called(composite, "on_close") == "late c b a"
    assert await called(composite, "on_end") == "a b c late"
    log.clear()
    assert (
        await ah.compose(
            Resources,
            [ah.configure(one, observer=True) for one in hooks],
            exit_reverse=["on_close"],
        ).on_close()
        is None
    )
    assert log == ["late", "c", "b", "a"]


class Broken:
    """Waits until it is cancelled, or fails."""

    async def on_start(self) -> None:
        await forever()

    async def on_end(self) -> None:
        raise OSError("lost")


class BrokenHook(Broken, Hook):
    """Has no options of its own."""


class Decided(BrokenHook):
    """Says what `Hook` says too: it means it."""

    timeout = None
    on_error = "raise"


async def test_the_time_limit_of_a_group_is_for_hooks_without_one() -> None:
    """Those that give one keep it, also None; it does not hold for plain methods, and refuses
    nothing.
    """

    class WithPlain(Broken):
        def on_exit(self) -> None: ...

    for hook in (Broken(), BrokenHook(), ah.configure(Broken(), order=1), WithPlain()):
        hooks = ah.compose(Resources, [hook], timeout=0.001)
        hooks.on_exit()
        with pytest.raises(HookTimeoutError, match=r"timeout of 0.001 s"):
            await hooks.on_start()
    own = ah.configure(Broken(), timeout=0.002)
    for registration in (
        own,
        HookRegistration(own.hook, timeout=0.002),
        ah.configure(own, order=1),
    ):
        with pytest.raises(HookTimeoutError, match=r"timeout of 0.002 s"):
            await ah.compose(Resources, [registration], timeout=60).on_start()
    for unlimited in (Decided(), ah.configure(ah.configure(BrokenHook(), timeout=None), order=1)):
        with pytest.raises(TimeoutError) as raised:
            await asyncio.wait_for(
                ah.compose(Resources, [unlimited], timeout=0.001).on_start(), 0.05
            )
        assert not isinstance(raised.value, HookTimeoutError)


async def test_on_error_of_a_group_is_for_hooks_that_do_not_say_it() -> None:
    """`"log"`, except for hooks whose class or registration says `"raise"`; hooks that are added
    later have it too.
    """
    group = ah.HookGroup(Resources, [Broken(), BrokenHook()], on_error="log")
    group.add(ah.configure(Broken(), order=1))
    await group.hooks.on_end()
    assert [status.failures for status in group.status()] == [1, 1, 1]
    for hook in (Decided(), ah.configure(Broken(), on_error="raise")):
        with pytest.raises(OSError, match="lost"):
            await ah.compose(Resources, [hook], on_error="log").on_end()
    with pytest.raises(OSError, match="lost"):
        await ah.compose(Resources, [Broken()]).on_end()
