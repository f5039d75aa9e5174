"""Hooks of many frameworks, each composed as its row in docs/guides/agent-frameworks.md says;
the session `frameworks` of CI runs these tests.
"""
