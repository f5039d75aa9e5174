"""The metrics of a session in an experiment tracker, sent in the background.

tracker        the contract of trackers
hook           `TrackerHook`, which sends the metrics of runs to a tracker
mlflow, wandb, tensorboard
               ready trackers; each module needs the package
"""

from aiohooks.adapters.trackers.hook import TrackerHook, TrackerStatistics
from aiohooks.adapters.trackers.tracker import Tracker

__all__ = ["Tracker", "TrackerHook", "TrackerStatistics"]

Tracker.__module__ = TrackerHook.__module__ = TrackerStatistics.__module__ = __name__
