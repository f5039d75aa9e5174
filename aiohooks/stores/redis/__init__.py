"""The step store on a Redis or Valkey server.

store       RedisEngine: its connections, its requests, and the meaning of errors
script.lua  carries out the requests in the server
"""

from aiohooks.stores.redis.store import RedisEngine

__all__ = ["RedisEngine"]

RedisEngine.__module__ = __name__
