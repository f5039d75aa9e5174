"""A session in a web service.

app          SessionService, the ASGI application: routes, limits, headers
_access      which requests are answered, and what text may be shown
_lifespan    the task that runs the session alongside the server; the server's signals
_report      health and progress of the session as plain data; waits for a step
"""

from aiohooks.adapters.asgi._report import ServiceHealth
from aiohooks.adapters.asgi.app import SessionService

__all__ = ["ServiceHealth", "SessionService"]

ServiceHealth.__module__ = SessionService.__module__ = __name__
