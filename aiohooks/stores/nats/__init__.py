"""The step store in NATS with JetStream.

`store` is the store, `_connection` one connection and JetStream's replies on it, and `_compare_and_set` changes the
message that is a run. docs/decisions/nats-compare-and-set.md says why it is not NATS's key-value store.
"""

from aiohooks.stores.nats.store import NatsStepStore

__all__ = ["NatsStepStore"]

NatsStepStore.__module__ = __name__
