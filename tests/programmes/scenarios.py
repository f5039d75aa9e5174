"""The scenarios of the cancel sweep: sessions with 0 to 5 hooks, in every phase and every kind of trouble."""

from tests.programmes import plays_of_steps as plays_of_steps
from tests.programmes import plays_of_waits as plays_of_waits
from tests.programmes.playbook import SCENARIOS as SCENARIOS
