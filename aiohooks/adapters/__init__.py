"""Bridges to other software; each is imported by its own name, and nothing in the library imports them.

asgi         a session in a web service: health, progress, waits for steps and a page, as a Starlette sub-application
prometheus   a session in Prometheus: its state whenever it is scraped
"""
