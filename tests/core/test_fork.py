"""The one registry of what happens at a fork."""

from __future__ import annotations

import os
import threading

import pytest

from aiohooks._core.fork import call_after_fork, hold_during_fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


class Owner:
    """Belongs to the process that made it; fails on request."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.forked = False
        call_after_fork(self)

    def after_fork(self) -> None:
        self.forked = True
        if self.fails:
            raise OSError("cannot be closed")


LOCK = threading.Lock()
hold_during_fork(LOCK)


def test_an_error_of_one_object_does_not_keep_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    """Every object is called in the child and none in the parent; locks are free on both sides; the
    error is reported.
    """
    owners = [Owner(fails=number % 2 == 0) for number in range(6)]
    child = os.fork()
    if child == 0:
        os._exit(0 if all(owner.forked for owner in owners) and LOCK.acquire(blocking=False) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not any(owner.forked for owner in owners)
    assert LOCK.acquire(blocking=False)
    LOCK.release()
    assert "OSError: cannot be closed" in capfd.readouterr().err
