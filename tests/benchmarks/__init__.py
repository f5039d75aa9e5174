"""The library's costs, measured side by side with the same work without it: `python -m
tests.benchmarks`.
"""
