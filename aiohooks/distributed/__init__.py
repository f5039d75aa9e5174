"""Launchers: they start a chief and its workers, hand each of them its task, start again what dies, and collect the results.

    _task           Task: what one of them is given; outcomes, which travel back
    _supervise      attempts, restarts, the end of all when one has failed
    local           tasks of one event loop, processes of one machine
    ray             tasks on a Ray cluster

The function is the same everywhere: `async def main(task: Task) -> T`.
"""

from aiohooks.distributed.task import Task as Task

__all__ = [
    "Task",
]

for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
