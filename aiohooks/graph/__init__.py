"""Graphs of operations, and the raw session that runs them: one run is all or nothing."""
