"""TensorFlow's own tests of its monitored session and ours of the same behaviour; table:
docs/reference/tensorflow-tests.md.
"""
