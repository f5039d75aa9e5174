"""The monitored session: a loop of steps with hooks around each.

`AsyncMonitoredSession` and the types of its arguments are in `aiohooks`; this package has the types of its results.
"""

from aiohooks.session.status import Activity as Activity
from aiohooks.session.status import SessionStatus as SessionStatus
from aiohooks.session.steps import StepContext as StepContext
from aiohooks.session.steps import Steps as Steps

__all__ = ["Activity", "SessionStatus", "StepContext", "Steps"]

for _name in __all__:
    globals()[_name].__module__ = __name__
