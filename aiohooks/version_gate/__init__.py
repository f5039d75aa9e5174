"""Version gates: work is admitted and used only while it is a few versions old.

Work is admitted only a few versions ahead of the published version:

    item 0   item 1 | item 2   item 3 | item 4   item 5 |
    version 0 -> 1  | version 1 -> 2  | version 2 -> 3  |
    not ahead         1 ahead           2 ahead

Here `per_version=2`, so that a version uses up two items, and `max_lag=1`: items 4 and 5 wait until
version 1 is published.

This count bounds the lag only of items that are used in the order of their admission. If items
overtake each other, the ticket decides: it counts the versions published after the admission, and
`use` rejects stale items.

    gate       VersionGate, and its waiting callers
    tickets    Ticket; the ledger of admitted items

A gate needs a step store and no session.
"""

from aiohooks.version_gate.gate import Admission, GateStatistics, VersionGate
from aiohooks.version_gate.tickets import Ticket, TicketState

__all__ = ["Admission", "GateStatistics", "Ticket", "TicketState", "VersionGate"]

for _name in __all__:
    globals()[_name].__module__ = __name__
