"""Waits as they are written by hand, and the same with a step store or a session: what each does when the other side dies.

`python -m examples.before_after` injects the same fault into both and prints what became of them.
"""
