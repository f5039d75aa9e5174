"""Launchers: start a chief and its workers, restart dead ones, and collect the results.

task        Task, the argument of each `main`; specs and results of tasks; restarts
local       tasks of one event loop, processes of one machine
ray         tasks on a Ray cluster

The function is the same everywhere: `async def main(task: Task) -> T`.
"""

from aiohooks.distributed.task import Task

__all__ = ["Task"]

Task.__module__ = __name__
