"""Random programs: sessions whose hooks, operations and callers do at random what users' code does,
checked by a model.

programs.py       what a program is, chosen by the schedule of an exploration
execution.py      runs a program, and records what happened
records.py        what is recorded, and tasks that know who cancelled them
model.py          the reference model: what the records may look like, and what each run and each
                  session must end with
injected_bugs.py  bugs of the library that the model must find
"""
