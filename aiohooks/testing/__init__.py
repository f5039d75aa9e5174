"""Helpers for people who write hooks and stores: time by hand, hooks that record or fail, and a look for what was left over."""

from aiohooks.testing.clock import ManualClock as ManualClock
from aiohooks.testing.hooks import FaultInjectionHook as FaultInjectionHook
from aiohooks.testing.hooks import RecordingHook as RecordingHook
from aiohooks.testing.residue import no_residue as no_residue
from aiohooks.testing.step_store import check_step_store as check_step_store
from aiohooks.testing.step_store import step_store_laws as step_store_laws
