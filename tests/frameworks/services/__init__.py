"""Hooks of servers, clients, bots, crawlers and terminals, each composed as its row in
docs/guides/agent-frameworks.md says; the session `frameworks` of CI runs these tests.
"""
