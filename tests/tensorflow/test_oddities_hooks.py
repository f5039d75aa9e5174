"""The original's oddities (O1-O68 in the table), where ours does the better thing: ends that fail,
and what hooks may be.
"""

from __future__ import annotations

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.hooks import RequestingHook
from tests.support.sessions import NO_BACKOFF, counting, run_session
from tests.tensorflow.blocks import ONE_RUN, DyingCreator, run_block, train

pytestmark = pytest.mark.every_python

# -- ends that fail


@pytest.mark.parametrize(
    "kind",
    [ah.OutOfRangeError, StopAsyncIteration, ah.AbortedError],
    ids=lambda kind: kind.__name__,
)
async def test_an_error_of_end_is_an_error(kind: type[Exception]) -> None:
    """O7, O33: an error of `end` is never suppressed or recovered from; a note says where it comes
    from.
    """
    error = kind("in end")
    hook = FaultInjectionHook({("end", 1): error})
    with pytest.raises(kind) as caught:
        await run_block(counting(hook, recovery=NO_BACKOFF), train())
    assert caught.value is error
    assert error.__notes__[0] == "raised by FaultInjectionHook.end"
    assert hook.closed_with == [error]


@pytest.mark.parametrize(
    "phase", ["begin", "after_create_session", "before_run", "after_run", "end", "close"]
)
async def test_an_error_says_which_hook_raised_it(phase: str) -> None:
    """O33: the error stays the same object, and a note has the hook, its phase, and in a run the
    step.
    """
    error = OSError("no")
    with pytest.raises(OSError, match="no"):
        await run_block(
            counting(FaultInjectionHook({(phase, 1): error})),
            train(),
        )
    step = {
        "after_create_session": " at step 0",
        "before_run": " at step 1",
        "after_run": " at step 1",
    }.get(phase, "")
    assert error.__notes__[0] == f"raised by FaultInjectionHook.{phase}{step}"


class BadlyClosed(DyingCreator):
    """Makes sessions whose `aclose` fails."""

    async def create_session(self) -> ah.Session:
        session = await super().create_session()

        async def aclose() -> None:
            raise OSError("cannot close")

        session.aclose = aclose  # type: ignore[method-assign]
        return session


async def test_an_error_of_closing_is_not_hidden(caplog: pytest.LogCaptureFixture) -> None:
    """O44: closing a session that fails is raised at a clean end, noted on the error of another,
    logged in a recovery.
    """
    hook, error = RecordingHook(), ValueError("body")
    with pytest.raises(OSError, match="cannot close"):
        await run_block(ah.AsyncMonitoredSession(BadlyClosed([9]), [hook]), train())
    assert hook.phases()[-2:] == ["end", "close"]

    async def body(session: ah.AsyncMonitoredSession) -> None:
        raise error

    with pytest.raises(ValueError, match="body"):
        await run_block(ah.AsyncMonitoredSession(BadlyClosed([9])), body)
    assert error.__notes__ == ["and then: OSError('cannot close')"]
    caplog.clear()

    async def recover(session: ah.AsyncMonitoredSession) -> None:
        await train(2)(session)
        assert "closing its raw session failed" in caplog.text
        await session.aclose()

    with pytest.raises(OSError, match="cannot close"):
        await run_block(ah.AsyncMonitoredSession(BadlyClosed([1, 9]), recovery=NO_BACKOFF), recover)


# -- what hooks may be


class Peculiar(RequestingHook):
    """A hook that equals all others of its kind and has no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Peculiar)

    __hash__ = None  # type: ignore[assignment]


async def test_hooks_are_compared_by_identity() -> None:
    """O30, O68: hooks need no hash, and equal hooks each get what they fetched."""
    hooks = [Peculiar("loss"), Peculiar(["total"]), Peculiar(None)]
    await run_session(counting(*hooks), 1, "train")
    assert [hook.values[0].results for hook in hooks] == [10, [0], None]


async def test_hooks_may_come_from_an_iterator() -> None:
    """O31: the hooks are read once, from any iterable; later changes of a list change nothing."""
    hook = RecordingHook()
    await run_block(counting(*iter([hook])), train())
    given: list[ah.SessionRunHook] = [hook]
    session = counting(*given)
    given.clear()
    await run_block(session, train())
    assert hook.phases() == [*ONE_RUN, "end", "close"] * 2
