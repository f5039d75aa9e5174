"""Graphs of operations, and the raw session that runs them: a run changes everything or nothing.

graph       Graph and its nodes; the default graph; the values of variables, shared by the sessions
            of a process
session     Session: runs of a plan, which has nested fetches and feeds, the operations that they
            need, and their order
"""

from aiohooks.graph.graph import (
    Graph,
    Operation,
    Placeholder,
    Variable,
    Variables,
    get_default_graph,
    in_thread,
)
from aiohooks.graph.session import Session

__all__ = [
    "Graph",
    "Operation",
    "Placeholder",
    "Session",
    "Variable",
    "Variables",
    "get_default_graph",
    "in_thread",
]

for _name in __all__:
    globals()[_name].__module__ = __name__
