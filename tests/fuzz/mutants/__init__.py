"""Small faults in the library's code, each of which a fast test must notice.

changes      the faults that are made in a module
trials       runs the tests of each fault, in a copy of the tree
arbiter      shows which tests add nothing
equivalent   the faults that change no behaviour, each with its reason
"""
