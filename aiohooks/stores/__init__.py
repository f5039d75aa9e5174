"""Step stores: where a global step is kept, advanced and waited for. They work without any session.

    _mark           Position, and which numbers can be steps
    _snapshot           what an engine tells of a run, and what can be asked of it
    _damage         that what an engine keeps cannot be read
    _run_state      what each request does to the state of a run: pure
    _waiters        who waits, parked under the step waited for
    _publishers     who may advance, who of them still could, how the last one left
    _changes        the newest position, again and again
    _progress       one line a minute about what is waited for
    _waits           the waiting room: all of these together, and how waits end
    _store          StepStore: the contract, and all that is the same on every engine
    memory          MemoryStepStore, for one process
    _writes         the writes of this process, numbered
    _members        the publishers and the chief's lease of this process, told to an engine
    _news           what the engine tells of other processes
    _shared         SharedStepStore: all that is the same where the state is outside the process
    _remote         RemoteStepStore: the same behind a connection
    local           LocalStepStore, for the processes of one machine: files
    redis           RedisStepStore: Redis or Valkey
    _nats_url, _nats_stream, _nats_commit, _nats_wire: its URL, its stream and messages, compare and set, its connection
    nats            NatsStepStore: NATS with JetStream
    ray             RayStepStore: an actor on a Ray cluster
    _open           open_step_store, by URL

Each imports only from those above it. What is for an engine of one's own is in `_shared` and `_remote`; the engines are
imported where they are asked for.
"""

from aiohooks.stores._protocol import Position as Position
from aiohooks.stores._publishers import Publisher as Publisher
from aiohooks.stores._publishers import current_publisher as current_publisher
from aiohooks.stores._waiting import Changes as Changes
from aiohooks.stores.base import StepStore as StepStore
from aiohooks.stores.base import StoreStatistics as StoreStatistics
from aiohooks.stores.base import Term as Term
from aiohooks.stores.memory import MemoryStepStore as MemoryStepStore
from aiohooks.stores.open import open_step_store as open_step_store
from aiohooks.stores.remote import RemoteStepStore as RemoteStepStore
from aiohooks.stores.shared import SharedStepStore as SharedStepStore

__all__ = [
    "Changes",
    "MemoryStepStore",
    "Position",
    "Publisher",
    "RemoteStepStore",
    "SharedStepStore",
    "StepStore",
    "StoreStatistics",
    "Term",
    "current_publisher",
    "open_step_store",
]

for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
