"""The conformance suite itself: which check failed, which hangs, which is unknown."""

from __future__ import annotations

import pytest

from aiohooks.errors import InvalidArgumentError
from aiohooks.stores import MemoryStepStore
from aiohooks.testing import check_step_store

pytestmark = pytest.mark.every_python


async def test_a_failed_check_is_named() -> None:
    """An error out of a check has a note with its name and its description."""

    class Forgetful(MemoryStepStore):
        async def raise_to(self, step: int) -> int:
            return step

    stores: dict[str, MemoryStepStore] = {}
    with pytest.raises(AssertionError) as caught:
        await check_step_store(lambda run: stores.setdefault(run, Forgetful(run=run)), "raises_to")
    assert "this fails the check raises_to" in caught.value.__notes__[0]


async def test_a_check_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that never ends fails after its limit, by name."""
    monkeypatch.setattr("aiohooks.testing._checks._LIMIT_SECS", 0.05)

    class NeverWakes(MemoryStepStore):
        async def wait_for(self, step: int, **_: object) -> int:
            return await super().wait_for(10**9)

    stores: dict[str, MemoryStepStore] = {}
    with pytest.raises(AssertionError, match=r"loses_no_race: stuck for 0\.05 s"):
        await check_step_store(
            lambda run: stores.setdefault(run, NeverWakes(run=run)),
            "loses_no_race",
        )


async def test_an_unknown_check_is_refused() -> None:
    """The error lists known ones."""
    with pytest.raises(
        InvalidArgumentError, match="unknown check 'x'; known are: cancelled_advance, "
    ):
        await check_step_store(lambda run: MemoryStepStore(run=run), "x")


async def test_what_makes_no_store_is_refused() -> None:
    """The error names the argument, or its result."""
    with pytest.raises(InvalidArgumentError, match="make is 3"):
        await check_step_store(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="what make returns is None"):
        await check_step_store(lambda run: None, "counts")  # type: ignore[arg-type, return-value]
