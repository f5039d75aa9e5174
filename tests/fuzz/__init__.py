"""Long-running test programs, each a command: `python -m tests.fuzz.<name>`; CI runs them with
small counts.
"""
