"""Waits as they are usually written by hand, and the same waits with a step store or a session.

`python -m examples.before_after` injects the same fault into both programs of each pair and prints
how they end.
"""
