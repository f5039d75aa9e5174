"""The step store on a Redis or Valkey server.

`store` waits and sends requests, `_connection` is one connection and what its errors mean,
`script.lua` does the requests in the server, and `_script` writes its arguments and reads its
replies.
"""

from aiohooks.stores.redis.store import RedisEngine

__all__ = ["RedisEngine"]

RedisEngine.__module__ = __name__
