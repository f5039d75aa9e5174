"""The adapter for TensorFlow, with the real one; `.ci/frameworks` makes an environment that has it
and runs these tests.
"""
