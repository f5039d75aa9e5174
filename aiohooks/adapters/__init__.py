"""Bridges to other worlds; each is imported by name, none by the library itself.

asgi     a session in a web service: health, progress, waits for steps and a page, as a Starlette sub-application
"""
