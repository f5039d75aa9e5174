"""See `NatsStepStore`."""

from aiohooks.stores.nats.store import NatsStepStore as NatsStepStore

__all__ = ["NatsStepStore"]

NatsStepStore.__module__ = __name__
