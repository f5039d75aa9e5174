"""Hooks of servers, clients, bots, crawlers and terminals, each composed as its row in
docs/guides/agent-frameworks.md says; `.ci/frameworks` runs these tests.
"""
