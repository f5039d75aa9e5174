"""A step store in a database of one machine: no server.

store        LocalEngine, and inotify
_database    a run: its state, and the files by which its processes wake each other
_directory   the directory of a run
_processes   the files of the processes that have a run open
"""

from aiohooks.stores.local._directory import default_directory
from aiohooks.stores.local.store import LocalEngine

__all__ = ["LocalEngine", "default_directory"]

LocalEngine.__module__ = default_directory.__module__ = __name__
