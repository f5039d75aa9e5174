"""Runs examples/train_digits.py as it is, and reports every committed step through a pipe, so that a killer knows it exactly.

    python -m tests.programmes._reported_training FD waiting|background OPTIONS OF THE EXAMPLE

With `background` the example's checkpoints are written while training goes on.
"""

from __future__ import annotations

import os
import runpy
import struct
import sys
from typing import Any

import aiohooks as ah
from tests.source import ROOT

RECORD = struct.Struct("<?q")
"""Whether the step was restored, and the step."""


def main(arguments: list[str]) -> None:
    """Runs the example with reports to the file descriptor that comes first."""
    fd, mode = int(arguments[0]), arguments[1]

    class ReportingStore(ah.MemoryStepStore):
        """Writes each step down after it was made."""

        def advance_nowait(self, by: int = 1) -> int:
            step = super().advance_nowait(by)
            os.write(fd, RECORD.pack(False, step))
            return step

        async def raise_to(self, step: int) -> int:
            step = await super().raise_to(step)
            os.write(fd, RECORD.pack(True, step))
            return step

    class InBackground(ah.CheckpointSaverHook):
        """Does not wait for the disk, whatever the example says."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "background": True})

    changed: Any = ah
    changed.MemoryStepStore = ReportingStore
    if mode == "background":
        changed.CheckpointSaverHook = InBackground
    example = ROOT / "examples" / "train_digits.py"
    sys.argv = [str(example), *arguments[2:]]
    runpy.run_path(str(example), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
