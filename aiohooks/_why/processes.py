"""The state of other processes of this machine."""

from __future__ import annotations

import os

_STATES = {
    "T": "stopped by a signal; SIGCONT continues it",
    "t": "stopped by a debugger",
    "Z": "ended, and not waited for",
}


def process_state(pid: int) -> str | None:
    """Return why the system does not let a process run, or None if the process can run."""
    if not os.path.isdir("/proc/self"):
        return None
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "does not exist any more"
    except (OSError, IndexError):
        return None
    return _STATES.get(state)
