"""The scenarios of the cancel sweep: sessions with 0 to 5 hooks, in every phase and with every kind of failure.

Then what a session depends on: stores of several processes, checkpoints, version gates, evaluations, watchdogs.
"""

from tests.fuzz.cancel_sweep.fixture import SCENARIOS as SCENARIOS
from tests.fuzz.cancel_sweep.scenarios import checkpoints as checkpoints
from tests.fuzz.cancel_sweep.scenarios import evaluations as evaluations
from tests.fuzz.cancel_sweep.scenarios import foreign_cancels as foreign_cancels
from tests.fuzz.cancel_sweep.scenarios import hook_groups as hook_groups
from tests.fuzz.cancel_sweep.scenarios import steps as steps
from tests.fuzz.cancel_sweep.scenarios import stores as stores
from tests.fuzz.cancel_sweep.scenarios import version_gates as version_gates
from tests.fuzz.cancel_sweep.scenarios import waits as waits
