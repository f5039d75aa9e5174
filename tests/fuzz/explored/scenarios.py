"""The scenarios: sessions with 0 to 5 hooks, in every phase and with every kind of failure, and
what they depend on.
"""

from tests.fuzz.explored import checkpoints as checkpoints
from tests.fuzz.explored import evaluations as evaluations
from tests.fuzz.explored import hook_groups as hook_groups
from tests.fuzz.explored import steps as steps
from tests.fuzz.explored import stores as stores
from tests.fuzz.explored import version_gates as version_gates
from tests.fuzz.explored import waits as waits
from tests.fuzz.explored.fixture import SCENARIOS as SCENARIOS
