"""Graphs of operations, and the raw session that runs them: a run changes everything or nothing.

graph       Graph and its nodes; the default graph
fetches     nested fetches and feeds: requests merged, results split
plan        the operations that a set of fetches needs, and their order
variables   the values of variables, shared by the sessions of a process
session     Session: runs of a plan
"""
