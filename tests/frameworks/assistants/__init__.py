"""Hooks of agents and pipelines that bring many packages, each composed as its row in
docs/guides/agent-frameworks.md says; the session `frameworks` of CI runs these tests.
"""
