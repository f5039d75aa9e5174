"""Step stores: where a global step is kept, advanced and waited for. They work without any session.

    _mark           Mark, and which numbers can be steps
    _waiters        who waits, parked under the step waited for
    _publishers     who may advance, who of them still could, how the last one left
    _changes        the newest mark, again and again
    _progress       one line a minute about what is waited for
    _room           the waiting room: all of these together, and how waits end
    _store          StepStore: the contract, and all that is the same on every engine
    memory          MemoryStepStore, for one process

Each imports only from those above it.
"""

from aiohooks.stores._changes import Changes as Changes
from aiohooks.stores._mark import Mark as Mark
from aiohooks.stores._publishers import Publisher as Publisher
from aiohooks.stores._publishers import current_publisher as current_publisher
from aiohooks.stores._store import StepStore as StepStore
from aiohooks.stores._store import StoreStatistics as StoreStatistics
from aiohooks.stores.memory import MemoryStepStore as MemoryStepStore

for _public in (Changes, Mark, Publisher, StepStore, StoreStatistics, MemoryStepStore):
    _public.__module__ = __name__
del _public
