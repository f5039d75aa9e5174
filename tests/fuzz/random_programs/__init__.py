"""Random programs: sessions whose hooks, operations and callers do at random what users' code does, checked by a model.

programs.py       what a program is: generated from a seed, printed, made smaller
execution.py      runs a program on a clock that moves one second with each turn of the loop, and records what happened
model.py          the reference model: what the records may look like, and what each run and each session must end with
campaign.py       many programs on one loop, replay and shrinking
injected_bugs.py  bugs of the library that the model must find
"""
