"""Checkpoints under faults of one layer; see `__main__`."""
