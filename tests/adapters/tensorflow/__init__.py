"""The adapter for TensorFlow, with the real one: the session `frameworks` of CI has it, and runs
these tests.
"""
