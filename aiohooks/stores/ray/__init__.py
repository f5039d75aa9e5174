"""See `RayStepStore`."""

from aiohooks.stores.ray.store import RayStepStore as RayStepStore

__all__ = ["RayStepStore"]

RayStepStore.__module__ = __name__
