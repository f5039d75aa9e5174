"""Replays of scenarios recorded from TensorFlow's monitored session; `python -m tests.conformance`
runs them.
"""
