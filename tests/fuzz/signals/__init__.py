"""Signals, at every suspension inside this process and in every phase of other processes.

    python -m tests.fuzz.signals --points 5000 --real 150 --loop both

`sweep` runs one of nine small `scenarios` in this process and sends it a signal at its k-th suspension, for all k, and in half of
the points a second one a few suspensions later. `processes` sends one, two or three signals to processes that run `program`, the
first of them in a chosen phase or at a random moment. After each point these are checked: the stop was recorded with its reason;
`begin`, `end` and `close` of each hook were called as often as they should be; after one signal the last step is saved; the exit
code is the documented one; the previous handlers are installed again; no task is left; nothing hangs. The counts are per event
loop.
"""
