"""The laws of composed hooks, for the frameworks of this environment."""

from __future__ import annotations

from tests.frameworks.assistants import agents  # noqa: F401 - it fills RUNNERS
from tests.frameworks.laws import *  # noqa: F403 - the tests, and what gives them each framework
