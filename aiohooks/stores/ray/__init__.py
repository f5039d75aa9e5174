"""The step store on a Ray cluster.

`store` is the engine of the store, and the only module here that imports Ray. `_actor` is the actor
that keeps a run: plain Python, with its messages.
"""

from aiohooks.stores.ray.store import RayEngine

__all__ = ["RayEngine"]

RayEngine.__module__ = __name__
