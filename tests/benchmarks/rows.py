"""All rows by name, in the sections of FIGURES.md, which has their figures."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tests.benchmarks.measure import Row
from tests.benchmarks.rows_checkpoint import (
    background_checkpoint,
    checkpoint_memory,
    checkpoint_restore,
)
from tests.benchmarks.rows_dispatch import (
    against_aiosignal,
    feeds_ahead,
    making_groups,
    run_in_turn,
    silent_group,
    suspending_group,
)
from tests.benchmarks.rows_engines import against_ignite, against_tensorflow, tensorflow_hooks
from tests.benchmarks.rows_hooks import (
    asked_why,
    hooked_run,
    marginal_cost,
    no_effects,
    silent_hooks,
    suspending_hooks,
    waiting_hooks,
)
from tests.benchmarks.rows_import import imports
from tests.benchmarks.rows_processes import callers, crowd, wake
from tests.benchmarks.rows_stores import advance_past_waiters, wake_waiters
from tests.benchmarks.rows_telemetry import opentelemetry_spans, timeline
from tests.benchmarks.rows_torch import torch_checkpoint, torch_loop

DISPATCH: Mapping[str, Row] = {
    "aiosignal": against_aiosignal,
    "group": silent_group,
    "taskgroup": suspending_group,
    "making": making_groups,
    "in-turn": run_in_turn,
    "feeds-ahead": feeds_ahead,
}
"""Groups of hooks, with or without a session."""

SESSION: Mapping[str, Row] = {
    "gather": hooked_run,
    "silent": silent_hooks,
    "marginal": marginal_cost,
    "effects": no_effects,
    "why": asked_why,
    "suspending": suspending_hooks,
    "waiting": waiting_hooks,
    "opentelemetry": opentelemetry_spans,
    "timeline": timeline,
    "ignite": against_ignite,
    "tensorflow": against_tensorflow,
    "tf-hooks": tensorflow_hooks,
    "advance": advance_past_waiters,
    "wake": wake_waiters,
    "checkpoint": background_checkpoint,
    "restore": checkpoint_restore,
    "memory": checkpoint_memory,
    "torch-loop": torch_loop,
    "torch-checkpoint": torch_checkpoint,
    "import": imports,
}
"""In one process."""

OF_EACH_STORE = {"wake": wake, "callers": callers, "crowd": crowd}
STORES: Mapping[str, Mapping[str, Row]] = {
    store: {f"{store}-{name}": partial(row, store) for name, row in OF_EACH_STORE.items()}
    for store in ("local", "redis", "ray")
}
"""Over processes."""

SECTIONS: Mapping[str, Mapping[str, Row]] = {
    "dispatch": DISPATCH,
    "session": SESSION,
    "stores": {name: row for rows in STORES.values() for name, row in rows.items()},
}
ROWS: Mapping[str, Row] = {name: row for rows in SECTIONS.values() for name, row in rows.items()}
GROUPS: Mapping[str, Mapping[str, Row]] = {**SECTIONS, **STORES}
"""What else than a row can be asked for: a section, or a store."""
