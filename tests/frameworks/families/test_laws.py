"""The laws of composed hooks, for the frameworks of this environment."""

from __future__ import annotations

from tests.frameworks.families import agents, others  # noqa: F401 - they fill RUNNERS
from tests.frameworks.laws import *  # noqa: F403 - the tests, and what gives them each framework
