"""Step stores of real processes, whose engines, connections and processes fail: `python -m
tests.fuzz.store_faults`.
"""
