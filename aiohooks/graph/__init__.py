"""Graphs of operations, and the raw session that runs them: a run changes everything or nothing.

graph       Graph and its nodes; the default graph
plan        nested fetches and feeds, the operations that they need, and their order
variables   the values of variables, shared by the sessions of a process
session     Session: runs of a plan
"""
