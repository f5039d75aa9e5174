"""The scenarios of the cancel sweep: sessions with 0 to 5 hooks, in every phase and every kind of trouble.

Then what a session stands on and has around it: stores over processes, checkpoints, version gates, evaluations, watchdogs.
"""

from tests.fuzz import plays_of_checkpoints as plays_of_checkpoints
from tests.fuzz import plays_of_gates as plays_of_gates
from tests.fuzz import plays_of_services as plays_of_services
from tests.fuzz import plays_of_steps as plays_of_steps
from tests.fuzz import plays_of_stores as plays_of_stores
from tests.fuzz import plays_of_waits as plays_of_waits
from tests.fuzz.playbook import SCENARIOS as SCENARIOS
