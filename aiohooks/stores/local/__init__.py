"""A step store in a database of one machine: no server.

store        LocalEngine, inotify, and the directory of a run
_database    a run: its state, and the files of its processes, by which they wake each other
"""

from aiohooks.stores.local.store import LocalEngine, default_directory

__all__ = ["LocalEngine", "default_directory"]

LocalEngine.__module__ = default_directory.__module__ = __name__
