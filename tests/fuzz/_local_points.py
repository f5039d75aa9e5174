"""Dying at a chosen call of the system: before it, or after it and before anything else."""

from __future__ import annotations

import os
import signal
from types import ModuleType, SimpleNamespace
from typing import Any

from aiohooks.stores.local import _files, _liveness, _lock, _notify

_CALLS = (
    *("open", "close", "read", "pread", "pwrite", "rename", "unlink", "ftruncate", "stat", "fstat", "listdir", "mkfifo"),
    *("flock", "lockf"),
)


def die_at_call(number: int) -> None:
    """Has this process die (SIGKILL) at a call that the local store makes: an even number before it, an odd one after it."""
    left = [number]

    def counted(call: Any) -> Any:
        def calling(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 2
            if left[0] == -2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if left[0] == -1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return calling

    for module in (_files, _liveness, _lock, _notify):
        for name in ("os", "fcntl"):
            real = getattr(module, name, None)
            if isinstance(real, ModuleType):
                counting = {call: counted(getattr(real, call)) for call in _CALLS if hasattr(real, call)}
                setattr(module, name, SimpleNamespace(**{**vars(real), **counting}))
