"""Run hooks that were written for TensorFlow 1.x, unchanged, beside hooks of this library, over a
graph of TensorFlow.

    pip install 'aiohooks[tensorflow]'
    python examples/tensorflow_hooks.py

A line is fitted. A hook with plain methods loses its connection once; the session recovers from
TensorFlow's last checkpoint.
"""

import asyncio
import tempfile
from typing import Any

import numpy as np
import tensorflow

import aiohooks as ah
from aiohooks.adapters.tensorflow import TensorFlowHooks, TensorFlowSessionCreator

tf: Any = tensorflow.compat.v1


class LosesItsConnection(tf.train.SessionRunHook):  # type: ignore[misc]
    """A hook as it was written for TensorFlow: plain methods, which get a `tf.Session`."""

    def begin(self) -> None:
        self.step = tf.train.get_global_step()
        self.is_lost = False

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self.step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_values.results == 130 and not self.is_lost:
            self.is_lost = True
            raise tf.errors.UnavailableError(None, None, "the connection is lost")


class Heartbeat(ah.SessionRunHook):
    """A hook of this library: its task continues while TensorFlow computes and while its hooks
    block.
    """

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        print(f"session at step {session.global_step.latest.step}")
        coord.start_soon(self.beat, coord)

    async def beat(self, coord: ah.Coordinator) -> None:
        """Beat until the session ends."""
        while not await coord.wait_for_stop(0.1):
            print("alive")


def line() -> Any:
    """Add a line to the current graph, and return the operation that fits it a little better."""
    x = tf.constant(np.linspace(-1.0, 1.0, 32, dtype=np.float32))
    slope = tf.get_variable("slope", initializer=0.0)
    loss = tf.reduce_mean(tf.square(slope * x - 3.0 * x), name="loss")
    return tf.train.GradientDescentOptimizer(0.05).minimize(
        loss, tf.train.get_or_create_global_step()
    )


async def main(checkpoint_dir: str) -> None:
    """Fit the line."""
    with tf.Graph().as_default():
        train = line()
        slope = tf.train.FinalOpsHook(tf.identity(tf.global_variables()[0]))
        hooks = TensorFlowHooks(
            [
                tf.train.StopAtStepHook(last_step=200),
                tf.train.NanTensorHook("loss:0"),
                tf.train.CheckpointSaverHook(checkpoint_dir, save_steps=50),
                LosesItsConnection(),
                slope,
            ]
        )
        creator = TensorFlowSessionCreator(
            tf.train.ChiefSessionCreator(checkpoint_dir=checkpoint_dir)
        )
        async with ah.AsyncMonitoredSession(creator, [hooks, Heartbeat()]) as session:
            while not session.should_stop():
                await session.run(train)
    print(
        f"{session.stop_reason}; recoveries: {session.status().recoveries}; slope:"
        f" {slope.final_ops_values:.2f}"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))
