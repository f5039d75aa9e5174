"""Runs an example that trains, in a process that reports every committed step.

The processes are forked from a server that has imported this module, and with it what the example
imports, which saves seconds for each of them; torch only where an example needs it. The example
itself is executed anew.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import struct
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any

import sklearn.datasets
import sklearn.model_selection  # noqa: F401 - what the example imports

import aiohooks as ah
from aiohooks.session import creators
from aiohooks.stores import Position
from tests.support.source import ROOT

RECORD = struct.Struct("<?q119x")
"""Whether the step was restored, and the step; so long that a pipe of one page is full after a
few.
"""


def start(steps_fd: int, output_fd: int, example: str, options: Sequence[str]) -> ForkServerProcess:
    """Start a process that runs an example with these options.

    Args:
        steps_fd: where it writes a record of each step, after it has been committed or restored.
        output_fd: its standard output and error output.
        example: the name of its file.
        options: of the example.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a server with threads cannot fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *(["torch"] if "torch" in example else [])])
    arguments = (
        DupFd(steps_fd),
        DupFd(output_fd),
        str(ROOT / "examples" / example),
        [*options],
    )
    process = context.Process(target=_train, args=arguments, daemon=True)
    process.start()
    return process


def _train(steps: Any, output: Any, example: str, options: list[str]) -> None:
    fd = steps.detach()
    os.dup2(output.detach(), 1)
    os.dup2(1, 2)
    warnings.simplefilter("error")

    class ReportingStore(ah.MemoryStepStore):
        """Reports each step when it is committed or restored."""

        def advance_nowait(self, by: int = 1) -> int:
            step = super().advance_nowait(by)
            os.write(fd, RECORD.pack(False, step))
            return step

        async def reset(self, step: int) -> Position:
            position = await super().reset(step)
            os.write(fd, RECORD.pack(True, step))
            return position

    changed: Any = ah
    changed.MemoryStepStore = ReportingStore
    where_it_is_made: Any = creators
    where_it_is_made.MemoryStepStore = ReportingStore
    sys.argv = [example, *options]
    runpy.run_path(example, run_name="__main__")
