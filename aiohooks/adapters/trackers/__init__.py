"""The metrics of a session in an experiment tracker, sent in the background.

hook           `Tracker`, the contract of trackers, and `TrackerHook`, which sends metrics to one
mlflow, wandb, tensorboard
               ready trackers; each module needs the package
"""

from aiohooks.adapters.trackers.hook import Tracker, TrackerHook, TrackerStatistics

__all__ = ["Tracker", "TrackerHook", "TrackerStatistics"]

Tracker.__module__ = TrackerHook.__module__ = TrackerStatistics.__module__ = __name__
