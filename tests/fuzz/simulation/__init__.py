"""A simulated cluster: the unchanged clients of the step stores on a virtual clock, network and
disk; see `scenario`.
"""
