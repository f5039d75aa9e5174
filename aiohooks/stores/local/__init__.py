"""A step store in a database of one machine: no server.

store        LocalEngine, and inotify
_database    a run: its state, the waiting processes, and how they wake each other
_directory   where a run is kept
_processes   the files that show which processes are alive
"""

from aiohooks.stores.local._directory import default_directory
from aiohooks.stores.local.store import LocalEngine

__all__ = ["LocalEngine", "default_directory"]

LocalEngine.__module__ = default_directory.__module__ = __name__
