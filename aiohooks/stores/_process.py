"""What belongs to the process that made it: it is neither forked nor pickled."""

from __future__ import annotations

import os
import weakref
from typing import NoReturn

from aiohooks._errors import WrongLoopError

_HOW = "open one in the other process by its URL: open_step_store(url, run=...), or AIOHOOKS_STEP_STORE and AIOHOOKS_RUN"


class ProcessBound:
    """Knows whether it came into this process by a fork, and refuses to be pickled."""

    _forked = False

    def __init__(self) -> None:
        """Belongs to this process from now on."""
        _all.add(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: {_HOW}")

    def _check_process(self) -> None:
        if self._forked:
            raise WrongLoopError(f"{self!r} came here by a fork and does not work here: {_HOW}")


_all: weakref.WeakSet[ProcessBound] = weakref.WeakSet()


def _after_fork() -> None:
    for one in _all:
        one._forked = True  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
