"""Graphs of operations, and the raw session that runs them: a run changes everything or nothing."""
