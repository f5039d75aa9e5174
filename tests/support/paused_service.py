"""examples/service.py as a process that pauses, or fails, at a step.

    python -m tests.support.paused_service DIRECTORY WHAT STEP GRACE_SECS

WHAT is `hook` (a hook that waits), `save` (a disk that waits in the middle of a checkpoint), `crash` (a hook that fails),
`names` (names that are markup), or `nothing`. At its pause it prints "paused", and continues after a byte on the standard input.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import aiohooks as ah
from aiohooks.checkpoint import Saver
from examples.service import Service, serve

MARKUP = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"


class PausingHook(ah.SessionRunHook):
    """Waits, or fails, after a step."""

    def __init__(self, what: str, step: int) -> None:
        self.name = MARKUP
        self._what = what
        self._step = step

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        if run_context.global_step != self._step:
            return
        if self._what == "crash":
            raise OSError("cannot reach postgres://trainer:hunter2@db/rows")
        if self._what == "hook":
            released = asyncio.Event()
            asyncio.get_running_loop().add_reader(0, released.set)
            print("paused", flush=True)
            try:
                await released.wait()
            finally:
                asyncio.get_running_loop().remove_reader(0)


class PausingDisk:
    """A file system that waits in one write."""

    def __init__(self, step: int) -> None:
        self.service: Service | None = None
        self._step = step
        self._paused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, fd: int) -> None:
        """Wait at the first call after the step; called in a worker thread of the saver."""
        assert self.service is not None
        step = self.service.training.health().step
        if step is not None and step >= self._step and not self._paused:
            self._paused = True
            os.write(1, b"paused\n")
            os.read(0, 1)
        os.fsync(fd)


def main() -> int:
    """Serve until a signal."""
    directory, what, step, grace_secs = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    disk = PausingDisk(step)
    if what == "save":
        Saver._fs = disk
    hooks = [PausingHook(what, step)]
    title = MARKUP if what == "names" else "paused"
    service = Service(directory, checkpoint_every=step, hooks=hooks, title=title, grace_secs=grace_secs)
    disk.service = service
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/training/", flush=True)
        return ah.run(serve, service, listener)


if __name__ == "__main__":
    sys.exit(main())
