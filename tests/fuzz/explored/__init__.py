"""Programs that `aiohooks.testing.explore` disturbs, and their laws: `python -m
tests.fuzz.explored`.
"""
