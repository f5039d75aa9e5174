"""The laws of composed hooks, for the frameworks of this environment."""

from __future__ import annotations

from tests.frameworks.laws import *  # noqa: F403 - the tests, and what gives them each framework
from tests.frameworks.services import servers  # noqa: F401 - it fills RUNNERS
