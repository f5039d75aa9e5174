"""A store over processes belongs to its process, and checks what it is given."""

from __future__ import annotations

import asyncio
import os

import pytest

import aiohooks as ah
from tests.support.fake_engine import FakeEngine, FakeStepStore

pytestmark = pytest.mark.every_python


async def test_a_forked_store_is_refused() -> None:
    """A forked child cannot use its parent's store, and is told what to do; the parent's goes on."""
    async with FakeStepStore(FakeEngine()) as store:
        child = os.fork()
        if child == 0:
            store.statistics()
            refused = 0
            for use in (lambda: store.publisher("child"), lambda: store.advance_threadsafe()):
                try:
                    use()
                except ah.errors.WrongLoopError as error:
                    refused += "by a fork" in str(error) and "open_step_store" in str(error)
                except BaseException:
                    os._exit(3)
            os._exit(refused != 2)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await store.advance() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_lost": "ask"}, "on_lost='ask'"),
        ({"lease_secs": 0}, "lease_secs"),
        ({"join_grace_secs": -1}, "join_grace_secs"),
        ({"heartbeat": 0}, "heartbeat"),
        ({"connect_timeout": "x"}, "connect_timeout"),
        ({"max_outage_secs": -3}, "max_outage_secs"),
        ({"run": ""}, "run="),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    """An option that cannot be meant is refused by name before anything is opened."""
    with pytest.raises(ah.errors.InvalidArgumentError, match=message):
        FakeStepStore(FakeEngine(), **options)  # type: ignore[arg-type]
