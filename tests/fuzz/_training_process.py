"""Runs `examples/train_torch.py`, and kills it at an event.

    python -m tests.fuzz._training_process KIND N FILE OPTIONS...

The event is the N-th of its kind: a committed step ("step"), or an operation of the checkpoints on
the disk ("file"); no event has another kind. The file gets a line for each step that was restored
or committed.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import warnings
from typing import Any

import aiohooks as ah
from aiohooks.session import creators
from aiohooks.stores import Position
from tests.support.checkpoint_files import Call, Seam
from tests.support.source import ROOT


class Events:
    """Counts the events of a kind, and kills this process at the last one."""

    def __init__(self, kind: str, last: int) -> None:
        self._kind = kind
        self._remaining = last

    def add(self, kind: str) -> None:
        """Count an event."""
        if kind == self._kind:
            self._remaining -= 1
            if self._remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class CountedFiles(Seam):
    """The file system of the checkpoints: each operation is an event."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def do(self, call: Call) -> Any:
        self._events.add("file")
        return call.make()


def main(kind: str, last: str, file: str, *options: str) -> None:
    """Run the example with these options."""
    events = Events(kind, int(last))
    steps = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    class ReportingStore(ah.MemoryStepStore):
        """Writes each step when it is committed or restored."""

        def advance_nowait(self, by: int = 1) -> int:
            step = super().advance_nowait(by)
            os.write(steps, b"committed %d\n" % step)
            events.add("step")
            return step

        async def reset(self, step: int) -> Position:
            position = await super().reset(step)
            os.write(steps, b"restored %d\n" % step)
            return position

    warnings.simplefilter("error")
    ah.checkpoint.Saver._fs = CountedFiles(events)
    where_it_is_made: Any = creators
    where_it_is_made.MemoryStepStore = ReportingStore
    example = str(ROOT / "examples" / "train_torch.py")
    sys.argv = [example, *options]
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
