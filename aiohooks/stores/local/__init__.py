"""A step store in the files of one machine: no server.

store      LocalStepStore
_files     a run's directory, its records, slots and state
_lock      the lock of a run, and the files that show which processes are alive
_notify    inotify, and named pipes where there is none
"""

from aiohooks.stores.local._files import default_directory
from aiohooks.stores.local.store import LocalStepStore

__all__ = ["LocalStepStore", "default_directory"]

LocalStepStore.__module__ = default_directory.__module__ = __name__
