"""TensorFlow's own tests of its monitored session and ours of the same behaviour; table:
tests/tensorflow/ORIGINAL_TESTS.md.
"""
