"""A session in a web service."""

from aiohooks.adapters.asgi._report import ServiceHealth as ServiceHealth
from aiohooks.adapters.asgi.app import SessionService as SessionService

__all__ = ["ServiceHealth", "SessionService"]

ServiceHealth.__module__ = SessionService.__module__ = __name__
