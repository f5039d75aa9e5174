"""The metrics of a session in an experiment tracker, sent in the background.

tracker        what a tracker is
hook           `TrackerHook` sends the metrics of runs to one
mlflow, wandb, tensorboard
               ready trackers, each in a module of its own that needs the package
"""

from aiohooks.adapters.trackers.hook import TrackerHook, TrackerStatistics
from aiohooks.adapters.trackers.tracker import Tracker

__all__ = ["Tracker", "TrackerHook", "TrackerStatistics"]

for _name in __all__:
    globals()[_name].__module__ = __name__
