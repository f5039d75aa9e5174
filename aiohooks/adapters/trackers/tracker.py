"""The contract of trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tracker(Protocol):
    """Stores metrics by step.

    All methods are plain, may block, and are called from one thread at a time.

    A tracker connects when it is first used, not when it is made: an error of `start` or
    `log_metrics` means that the metrics could not be sent, and the next call may try again.
    """

    def start(self, step: int) -> int:
        """Begin, or continue after a recovery: the next metrics are of later steps than `step`.

        Returns:
            The last step that remains here: metrics of steps up to it are not sent. A tracker that
            can drop metrics drops those of later steps, and returns `step`. Another tracker returns
            its last step if that is later, so that no step is stored twice.
        """
        ...

    def log_metrics(
        self,
        metrics: Mapping[str, float],
        step: int,
        time: float,
    ) -> None:
        """Store the metrics of a step; `time` is the Unix time at which they were taken."""

    def close(self, error: BaseException | None) -> None:
        """Called once at the end, also without `start`.

        `error` is the one that ended the session, None after a clean end.
        """
