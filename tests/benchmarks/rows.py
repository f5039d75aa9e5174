"""All rows by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.benchmarks.measure import Row
from tests.benchmarks.rows_checkpoint import background_checkpoint, checkpoint_memory
from tests.benchmarks.rows_engines import against_ignite, against_tensorflow
from tests.benchmarks.rows_hooks import hooked_run, marginal_cost, silent_hooks, suspending_hooks, waiting_hooks
from tests.benchmarks.rows_stores import advance_past_waiters, wake_waiters

ROWS: Mapping[str, Row] = {
    "gather": hooked_run,
    "silent": silent_hooks,
    "marginal": marginal_cost,
    "suspending": suspending_hooks,
    "waiting": waiting_hooks,
    "ignite": against_ignite,
    "tensorflow": against_tensorflow,
    "advance": advance_past_waiters,
    "wake": wake_waiters,
    "checkpoint": background_checkpoint,
    "memory": checkpoint_memory,
}
