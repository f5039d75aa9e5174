"""TensorFlow's own tests of its monitored session, ours of the same behaviour. The table is docs/tensorflow-tests.md."""
