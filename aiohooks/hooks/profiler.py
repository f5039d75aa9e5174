"""Profiling selected runs."""

from __future__ import annotations

import cProfile
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from aiohooks._aio.cancel import to_thread
from aiohooks._validate import check_choice, check_instance, checked_int, checked_path
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import Sampling, logger, write_whole
from aiohooks.hooks.every import Every, ScheduledHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.hooks._pyinstrument import SampledProfile

_active: list[ProfilerHook] = []
"""The hook that is profiling; at most one in the process, of any session."""


class ProfilerHook(ScheduledHook):
    """Profiles a window of runs on each crossing of `every`, and writes `profile-<step>` with the step of its first run.

    It profiles everything that runs in the event loop's thread from its `before_run` of the first run to its `after_run` of
    the last. The first run of a session is never profiled, because it does one-time work. If another profiler is active, the
    window is skipped with a warning.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        every: Every = Every(steps=1000),
        window_steps: int = 1,
        backend: Literal["cprofile", "pyinstrument"] = "cprofile",
        max_captures: int | None = None,
    ) -> None:
        """Create the hook.

        Args:
            output_dir: the directory of the files; created if missing.
            every: when a window begins.
            window_steps: how many runs it has.
            backend: `"cprofile"` counts and times every call and writes `.pstats` for the standard library's `pstats` and
                its viewers; `"pyinstrument"` samples, costs less, and writes a web page, `.html`.
            max_captures: how many windows of a run to profile, over all its resumed parts; None for no limit.

        Raises:
            InvalidArgumentError: an argument is invalid.
            ImportError: pyinstrument is not installed.
        """
        check_instance(every, Every, "every")
        window_steps = checked_int(window_steps, "window_steps", 1)
        max_captures = checked_int(max_captures, "max_captures", 1, optional=True)
        check_choice(backend, "backend", "cprofile", "pyinstrument")
        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._every = every
        self._window_steps = window_steps
        self._max_captures = max_captures
        self._new_profile: type[_CountedProfile | SampledProfile] = _CountedProfile
        if backend == "pyinstrument":
            from aiohooks.hooks._pyinstrument import SampledProfile  # imported here to fail now

            self._new_profile = SampledProfile
        self._profile: _CountedProfile | SampledProfile | None = None
        self._first_step: int | None = None
        self._left = 0
        self._reset()

    def _reset(self) -> None:
        self._timer: Sampling = Sampling(self._every, first=False)
        self._warm = False
        self._captured = 0
        self.captures: list[str] = []
        """The files that this session has written."""

    async def begin(self) -> None:
        """Reset the state of an earlier session, and create the directory."""
        self._reset()
        await to_thread(os.makedirs, self.output_dir, 0o777, True)

    def state_dict(self) -> dict[str, Any]:
        """Return when it was last due, and how many windows were profiled."""
        return {**super().state_dict(), "captured": self._captured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from there; a recovery changes nothing."""
        if not self._timer.started:
            super().load_state_dict(state)
            self._captured = int(state["captured"])

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Count from the step at which the session starts; drop a window that a recovery interrupted."""
        self._stop()
        self._timer.start(session.global_step.latest.step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Begin a window if it is due."""
        asked = self._timer.should_fetch(run_context.global_step)
        done = self._max_captures is not None and self._captured >= self._max_captures
        if asked and self._warm and not done and self._profile is None:
            self._start(run_context.global_step)
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """End the window after its last run, and write it."""
        step = run_context.global_step
        due = self._warm and self._timer.mark_if_due(step)  # a first run leaves it to the next one
        self._warm = True
        if self._profile is None:
            return
        if self._first_step is None:
            if not due:  # the run did not commit the expected step
                self._stop()
                return
            self._first_step = step
        self._left -= 1
        if self._left <= 0:
            await self._write()

    async def end(self, session: Session) -> None:
        """Write an incomplete window."""
        if self._first_step is not None:
            await self._write()

    async def close(self, exc: BaseException | None) -> None:
        """Stop profiling."""
        self._stop()

    def _start(self, step: int) -> None:
        other = _other_profiler()
        if other is None:
            profile = self._new_profile()
            try:
                profile.start()
            except (RuntimeError, ValueError) as error:  # how the two backends report another profiler
                other = str(error)
            else:
                _active.append(self)
                self._profile, self._first_step, self._left = profile, None, self._window_steps
                return
        logger.warning("step %d is not profiled: another profiler is active (%s)", step, other)

    def _stop(self) -> _CountedProfile | SampledProfile | None:
        profile, self._profile = self._profile, None
        self._first_step = None
        if profile is not None:
            _active.remove(self)
            profile.stop()
        return profile

    async def _write(self) -> None:
        step = self._first_step
        profile = self._stop()
        assert profile is not None
        path = os.path.join(self.output_dir, f"profile-{step}{profile.suffix}")
        await to_thread(write_whole, path, profile.write)
        self.captures.append(path)
        self._captured += 1
        logger.info("profiled %d runs: %s", self._window_steps - max(0, self._left), path)

    def __repr__(self) -> str:
        return f"ProfilerHook({self.output_dir!r}, every={self._every}, window_steps={self._window_steps})"


class _CountedProfile(cProfile.Profile):
    """A profile by the standard library's cProfile."""

    suffix = ".pstats"
    start = cProfile.Profile.enable
    stop = cProfile.Profile.disable
    write = cProfile.Profile.dump_stats


def _other_profiler() -> str | None:
    """Return the profiler that is active in this thread, if any."""
    if _active:
        return repr(_active[0])
    if sys.version_info >= (3, 12):
        tool = sys.monitoring.get_tool(sys.monitoring.PROFILER_ID)
        if tool is not None:
            return tool
    function = sys.getprofile()
    return None if function is None else repr(function)
