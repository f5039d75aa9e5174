"""The step store on a Ray cluster.

store       RayEngine; the only module that imports Ray
_actor      the actor that keeps a run, and its messages
"""

from aiohooks.stores.ray.store import RayEngine

__all__ = ["RayEngine"]

RayEngine.__module__ = __name__
