"""Step stores: where a global step is kept, advanced and waited for. They work without any session.

    _protocol       the values that stores, engines and users exchange: Position, Snapshot, requests
                    and answers
    publishers      Publisher: a party that may advance a store
    base            StepStore: the contract of all stores; WaitRegistry: the waits and the
                    publishers of a store, and the errors of waits; MemoryStepStore, for one
                    process
    engine          Engine: the contract of all engines; EngineLink: the parts of the store that an
                    engine uses; RunState: the effect of each request on the state of a run
    _connection     Connection: outages, repeated calls; Writes: combined advances
    _members        Members: the members of this process and of the others, and their leases
    shared          SharedStepStore: a store for several processes, over an engine
    local/          LocalEngine, for the processes of one machine: SQLite
    redis           RedisEngine: Redis or Valkey
    ray             RayEngine: an actor on a Ray cluster
    open            open_step_store, by URL

Each module imports only from those above it. `open` imports an engine when it is used. Write your
own engine as an `Engine`, and give it to a `SharedStepStore`.

An advance calls store.advance -> Writes.write -> Connection.call -> Engine.request ->
WaitRegistry.observe -> wake. In another process the engine reports the step to
WaitRegistry.observe. A wait calls wait_for -> WaitRegistry.wait, which parks it under its step.
Engine.subscribe gets the lowest step with a waiter.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohooks.stores._protocol import Position, StoreStatistics, Term
    from aiohooks.stores.base import Changes, MemoryStepStore, StepStore
    from aiohooks.stores.engine import Engine, EngineLink
    from aiohooks.stores.open import open_step_store
    from aiohooks.stores.publishers import Publisher, current_publisher
    from aiohooks.stores.shared import SharedStepStore

__all__ = [
    "Changes",
    "Engine",
    "EngineLink",
    "MemoryStepStore",
    "Position",
    "Publisher",
    "SharedStepStore",
    "StepStore",
    "StoreStatistics",
    "Term",
    "current_publisher",
    "open_step_store",
]

if not TYPE_CHECKING:  # a session of one process needs no more than the memory store
    from aiohooks._core.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "aiohooks.stores._protocol": ("Position", "StoreStatistics", "Term"),
            "aiohooks.stores.base": ("Changes", "MemoryStepStore", "StepStore"),
            "aiohooks.stores.engine": ("Engine", "EngineLink"),
            "aiohooks.stores.open": ("open_step_store",),
            "aiohooks.stores.publishers": ("Publisher", "current_publisher"),
            "aiohooks.stores.shared": ("SharedStepStore",),
        },
    )
    del lazy_names
