"""See `RedisStepStore`."""

from aiohooks.stores.redis.store import RedisStepStore as RedisStepStore

__all__ = ["RedisStepStore"]

RedisStepStore.__module__ = __name__
