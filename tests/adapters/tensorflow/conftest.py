"""A graph for each test, and warnings of TensorFlow's own code, which are not about this
library.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tensorflow

tf: Any = tensorflow.compat.v1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run each test on one loop: TensorFlow is called in threads, so the loops do not differ."""
    for item in items:
        if "adapters/tensorflow" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    """Make a new graph the current one: `train` adds `x` to `w` and 1 to the global step, `loss` is
    twice `x`.
    """
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        x = tf.placeholder_with_default(1.0, (), name="x")
        w = tf.get_variable("w", initializer=0.0, use_resource=False)
        tf.multiply(x, 2.0, name="loss")
        tf.group(tf.assign_add(w, x), tf.assign_add(step, 1), name="train")
        yield
