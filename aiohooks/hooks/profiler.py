"""Profiling some of the runs."""

from __future__ import annotations

import contextlib
import cProfile
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, to_thread
from aiohooks._validate import check_instance
from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._observing import checked_path
from aiohooks.hooks.every import Every, Sampling
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

_logger = logging.getLogger("aiohooks.hooks")
_active: list[ProfilerHook] = []
"""The hook that is profiling; there is one at most, of all sessions of the process."""


class ProfilerHook(SessionRunHook):
    """Profiles a window of runs on each crossing of `every`, and writes `profile-<step>` with the step of its first run.

    It sees all that runs in the event loop's thread from its `before_run` of the first run to its `after_run` of the last.
    The first run of a session is never profiled: it does what no other does. While another profiler is active, it says so
    and leaves the window out.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        every: Every = Every(steps=1000),  # noqa: B008 - frozen
        window_steps: int = 1,
        backend: Literal["cprofile", "pyinstrument"] = "cprofile",
        max_captures: int | None = None,
    ) -> None:
        """Takes where to write, and when.

        Args:
            output_dir: the folder of the files; made if it is not there.
            every: when a window begins.
            window_steps: how many runs it has.
            backend: `"cprofile"` counts and times every call and writes `.pstats` for the standard library's `pstats` and
                its viewers; `"pyinstrument"` samples, costs less, and writes a page, `.html`.
            max_captures: how many windows a session profiles; None for no limit.

        Raises:
            InvalidArgumentError: one of the arguments cannot be meant.
            ImportError: pyinstrument is not installed.
        """
        check_instance(every, Every, "every")
        _check_count(window_steps, "window_steps")
        if max_captures is not None:
            _check_count(max_captures, "max_captures")
        if backend not in ("cprofile", "pyinstrument"):
            raise InvalidArgumentError(f'backend is {backend!r}; give "cprofile" or "pyinstrument"')
        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._every = every
        self._window_steps = window_steps
        self._max_captures = max_captures
        self._new_profile: Callable[[], _Profile] = _CountedProfile
        if backend == "pyinstrument":
            from aiohooks.hooks._pyinstrument import SampledProfile  # an extra: now, and not after hours of training

            self._new_profile = SampledProfile
        self._sampling = Sampling(every, first=False)
        self._warm = False
        self._profile: _Profile | None = None
        self._first_step: int | None = None
        self._left = 0
        self.captures: list[str] = []
        """The files that this session has written."""

    async def begin(self) -> None:
        """Starts anew for a new session, and makes the folder."""
        self._sampling = Sampling(self._every, first=False)
        self._warm = False
        self.captures = []
        await to_thread(_make_folder, self.output_dir, grace_secs=DEFAULT_GRACE_SECS)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Counts from the step at which the session starts; a window that was cut off by a recovery is left out."""
        self._stop()
        self._sampling.start(session.global_step.latest.step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Begins a window if it is time."""
        asked = self._sampling.ask(run_context.global_step)
        done = self._max_captures is not None and len(self.captures) >= self._max_captures
        if asked and self._warm and not done and self._profile is None:
            self._start(run_context.global_step)
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Ends the window if it has all its runs, and writes it.

        Raises:
            OSError: the file cannot be written.
        """
        self._warm = True
        step = run_context.global_step
        due = self._sampling.take(step)
        if self._profile is None:
            return
        if self._first_step is None:
            if not due:  # the run did not lead to the step that was expected of it
                self._stop()
                return
            self._first_step = step
        self._left -= 1
        if self._left <= 0:
            await self._write()

    async def end(self, session: Session) -> None:
        """Writes a window that is not complete."""
        if self._first_step is not None:
            await self._write()

    async def close(self, exc: BaseException | None) -> None:
        """Stops profiling."""
        self._stop()

    def _start(self, step: int) -> None:
        other = _other_profiler()
        if other is None:
            profile = self._new_profile()
            try:
                profile.start()
            except (RuntimeError, ValueError) as error:  # both say in their own way that there is another
                other = str(error)
            else:
                _active.append(self)
                self._profile, self._first_step, self._left = profile, None, self._window_steps
                return
        _logger.warning("step %d is not profiled: another profiler is active (%s)", step, other)

    def _stop(self) -> _Profile | None:
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
        await to_thread(_write_whole, profile, path, grace_secs=DEFAULT_GRACE_SECS)
        self.captures.append(path)
        _logger.info("profiled %d runs: %s", self._window_steps - max(0, self._left), path)

    def __repr__(self) -> str:
        return f"ProfilerHook({self.output_dir!r}, every={self._every}, window_steps={self._window_steps})"


class _Profile(Protocol):
    """One profile being made."""

    suffix: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def write(self, path: str) -> None: ...


class _CountedProfile:
    """The standard library's profile."""

    suffix = ".pstats"

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def start(self) -> None:
        self._profile.enable()

    def stop(self) -> None:
        self._profile.disable()

    def write(self, path: str) -> None:
        self._profile.dump_stats(path)


def _other_profiler() -> str | None:
    """Who profiles this thread already."""
    if _active:
        return repr(_active[0])
    if sys.version_info >= (3, 12):
        tool = sys.monitoring.get_tool(sys.monitoring.PROFILER_ID)
        if tool is not None:
            return tool
    function = sys.getprofile()
    return None if function is None else repr(function)


def _make_folder(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def _write_whole(profile: _Profile, path: str) -> None:
    unfinished = f"{path}.{os.getpid()}.tmp"
    try:
        profile.write(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def _check_count(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{what} is {value!r}; give a whole number, at least 1")
