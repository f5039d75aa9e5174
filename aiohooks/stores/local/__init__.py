"""See `LocalStepStore`."""

from aiohooks.stores.local.store import LocalStepStore as LocalStepStore

__all__ = ["LocalStepStore"]

LocalStepStore.__module__ = __name__
