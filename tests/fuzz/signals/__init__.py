"""Signals to processes, in every phase of a training. See `tests.fuzz.explored.signals` too.

    python -m tests.fuzz.signals --processes 150 --loop both

`processes` sends one, two or three signals to processes that run `program`, the first of them in a
chosen phase or at a random moment, and checks the stop with its reason, the calls of hooks, the
last save and the exit code.
"""
