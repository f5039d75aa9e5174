"""The step store on a Ray cluster.

`store` is the store, `_actor` the actor that keeps a run (plain Python, with its messages), and
`_cluster` the only module that knows Ray; the launcher in `aiohooks.distributed.ray` uses it as
well.
"""

from aiohooks.stores.ray.store import RayEngine

__all__ = ["RayEngine"]

RayEngine.__module__ = __name__
