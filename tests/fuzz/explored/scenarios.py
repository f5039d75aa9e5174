"""The scenarios: sessions with 0 to 5 hooks, in every phase and with every kind of failure, and
what they depend on.
"""

from tests.fuzz.explored import checkpoints as checkpoints
from tests.fuzz.explored import evaluations as evaluations
from tests.fuzz.explored import hook_groups as hook_groups
from tests.fuzz.explored import sessions as sessions
from tests.fuzz.explored import stores as stores
from tests.fuzz.explored import version_gates as version_gates
from tests.fuzz.explored.fixture import SCENARIOS as SCENARIOS
