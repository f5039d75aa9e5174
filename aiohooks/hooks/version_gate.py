"""A gate for a session's own step: it may be a few versions ahead of the published one, then it
waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from aiohooks._core.calls import Wait
from aiohooks._core.cancel import current_task
from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.validate import check_instance, check_secs
from aiohooks._core.waits import WaitLog
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import InvalidArgumentError, StepResetError, is_clean_end
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import checked_step
from aiohooks.stores.base import publishers_of
from aiohooks.stores.publishers import current_publisher, publisher_summary, shortened
from aiohooks.version_gate.gate import NotNeeded


class VersionGateHook(SessionRunHook):
    """Let a run begin only while the session's step is at most `max_lag` versions ahead of the
    published one.

    For a session that ships one item a step to a trainer that makes a version of each: run n
    (counted from 0) waits until version n - max_lag is published. The wait also ends with a stop,
    when a background task fails, and when no publisher is left.

    Step and version are taken as they are at the first run. When the versions get ahead of the
    step, because it went back in a recovery or began anew, or when they are reset, the two count as
    equal from then on. So neither lets runs get further ahead. Sessions that share one step each
    count the steps of all.

    Several sessions of a process may have gates on one store, for a trainer that makes each version
    of one item of every session. When one of them has left, however it ended, the trainer lacks its
    items. So when all others wait, and the trainer waits in `session.until` or for the next feed of
    `session.steps`, one of them begins a run in its place.

    A wait that lasts is logged once a minute, with the publishers and with the sessions that have
    left.
    """

    def __init__(self, versions: StepStore, *, max_lag: int, timeout: float | None = None) -> None:
        """Set the bound.

        Args:
            versions: counts the published versions; not the session's own step.
            max_lag: how many versions ahead a run may begin.
            timeout: the time limit of a wait in seconds, None for no limit.
        """
        check_instance(versions, StepStore, "versions")
        check_secs(timeout, "timeout", optional=True, positive=True)
        self.versions: StepStore = versions
        self.max_lag: int = checked_step(max_lag, "max_lag")
        self._timeout = timeout
        self._reset()

    def _reset(self) -> None:
        self._clock: Clock = current_clock()
        self._coord: Coordinator | None = None
        self._member = _Member(self.max_lag)
        self._sessions: _Sessions | None = None
        self._began: Position | None = None
        self.ahead: int | None = None
        """How many versions ahead the current or last run began; None before the first."""
        self.lag: int | None = None
        """How many versions were published during the last run; None before the first, and if they
        were reset in it.
        """
        self.waits: int = 0
        """How many runs have had to wait so far."""
        self.waited_secs: float = 0.0
        """The sum of those waits that are over."""

    async def begin(self) -> None:
        """Forget an earlier session."""
        self._reset()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Keep the coordinator, whose stop ends the waits.

        Raises:
            InvalidArgumentError: the versions are the session's own step.
        """
        if session.global_step is self.versions:
            raise InvalidArgumentError(
                f"{self!r}: this is the session's own step, never ahead of itself; give the store"
                " of the publisher"
            )
        self._coord = coord
        self._member.steps = session.global_step
        if self._sessions is None:
            self._member.name = current_task().get_name()
            watcher = publishers_of(self.versions).watcher
            self._sessions = watcher if isinstance(watcher, _Sessions) else _Sessions(self.versions)
            self._sessions.join(self._member)

    async def close(self, exc: BaseException | None) -> None:
        """Leave the other sessions that wait for the same versions."""
        if self._sessions is not None:
            self._sessions.leave(self._member, exc)
            self._sessions = None

    @only_if("_is_too_far_ahead")
    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Wait while the run would be too far ahead.

        Raises:
            StopRequestedError: a stop was requested; a clean end.
            PublisherFinishedError: no publisher is left, the last one finished; a clean end.
            PublisherFailedError: no publisher is left, the last one failed.
            StepTimeoutError: the version was not published in time.
        """
        if self._is_too_far_ahead(run_context):
            step, seen = run_context.global_step, self.versions.latest.step
            logger.info("step %d waits for version %d, now at %d", step, self._member.wanted, seen)
            began = self._clock.now()
            self.waits += 1
            try:
                await self._wait_published(step - 1, began)
            finally:
                self.waited_secs += self._clock.now() - began
            self._note_begin()
        return None

    def _is_too_far_ahead(self, run_context: SessionRunContext) -> bool:
        """Return whether the run has to wait for a version; if not, note that it begins."""
        wanted = self._member.wanted_version(run_context.global_step - 1, self.versions.latest)
        if self._began is None and (publisher := current_publisher()) is not None:
            self._member.name = publisher.name
        if self.versions.latest.step < wanted:
            return True
        self._note_begin()
        return False

    def _note_begin(self) -> None:
        self._began = self.versions.latest
        self.ahead = self._member.position - self._began.step

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Count the versions that were published during the run."""
        self._member.position = run_context.global_step + self._member.offset
        if self._began is not None:
            latest = self.versions.latest
            self.lag = latest.step - self._began.step if latest.epoch == self._began.epoch else None

    @property
    def taken_over(self) -> int:
        """How many runs it began in place of those of sessions that have left."""
        return self._member.taken_over

    async def _wait_published(self, done: int, began: float) -> None:
        """Wait for the version that run `done` needs, also when a reset makes it another one."""
        member, sessions = self._member, self._sessions
        if sessions is not None:
            sessions.log.begin(member)
        try:
            while self.versions.latest.step < (
                wanted := member.wanted_version(done, self.versions.latest)
            ):
                secs = (
                    None
                    if self._timeout is None
                    else max(0.0, began + self._timeout - self._clock.now())
                )
                member.wait = Wait(f"the wait for version {wanted}")
                if sessions is not None:
                    sessions.on_held_up()
                try:
                    await member.wait.result_of(
                        self._wait_for_version(wanted, self.versions.latest.epoch, secs)
                    )
                except StepResetError as reset:
                    logger.info("%s: the step counts as equal to the version from now on", reset)
                except NotNeeded:
                    pass  # its run counts as that of a session that has left
                finally:
                    member.wait = None
        finally:
            if sessions is not None:
                sessions.log.end(member)

    async def _wait_for_version(self, wanted: int, epoch: int, secs: float | None) -> None:
        """Wait for a version of this epoch; do not wait after a reset."""

        async def wait() -> None:
            if self.versions.latest.epoch == epoch:  # a task may begin later than it was made
                await self.versions.wait_for(wanted, timeout=secs, on_reset="raise")

        await (wait() if self._coord is None else self._coord.until(wait()))

    def __repr__(self) -> str:
        return (
            f"VersionGateHook({self.versions.run!r} at version {self.versions.latest.step},"
            f" max_lag={self.max_lag})"
        )


@dataclasses.dataclass(slots=True, eq=False)
class _Member:
    """A session that has a gate on the versions, as the others see it."""

    max_lag: int
    name: str = ""
    steps: StepStore | None = None
    """The store of its own step."""
    offset: int = 0
    """Added to its step to compare it with the versions."""
    position: int = 0
    """The number of runs that it has made, compared with the versions: its step with the offset."""
    wanted: int = 0
    """The version that its latest run needs."""
    wait: Wait[None] | None = None
    """Its wait for that version, until it takes over a run."""
    taken_over: int = 0
    left: str | None = None
    """How it has left: it finished, or the class of its error."""
    _seen: Position | None = None

    def wanted_version(self, done: int, latest: Position) -> int:
        """Return the version that run `done` needs, by the current step and version."""
        behind = latest.step - done
        if self._seen is not None and latest.epoch != self._seen.epoch:
            self.offset = behind
        self.offset = max(self.offset, behind)
        self._seen = latest
        self.position = done + self.offset
        self.wanted = self.position - self.max_lag
        return self.wanted

    def waits(self, version: int) -> bool:
        """Whether it waits, and for a version beyond `version`."""
        return self.wait is not None and self.wanted > version

    def take_over(self) -> None:
        """Let its next run count as that of another session, and begin."""
        assert self.wait is not None
        self.offset -= 1
        self.position -= 1  # it may leave before its run begins
        self.taken_over += 1
        wait, self.wait = self.wait, None
        wait.end(NotNeeded("the run of a session that has left"))


class _Sessions:
    """The sessions of this process that have gates on the same versions.

    A trainer that makes a version of one item of every session waits for the items of those that
    have left, and the others wait for its next version. Whether it needs those items only it knows:
    when all wait it does. Then an item that is begun in their place is used for the next version,
    so that no item gets older by it.
    """

    def __init__(self, versions: StepStore) -> None:
        self.log: WaitLog = WaitLog(60.0, self._log_long_wait)
        self._versions = versions
        self._members: dict[_Member, None] = {}
        self._left: list[
            _Member
        ] = []  # their positions are the runs that were made by them or in their place
        self._missing = (
            0  # runs that sessions that have left did not make until others joined in their place
        )
        self._epoch: int = versions.latest.epoch
        self._check_scheduled = False
        self._warned = False  # that all have left
        publishers_of(versions).watcher = self

    def join(self, member: _Member) -> None:
        """Add a session; it replaces one that has left, if there is one."""
        self._members[member] = None
        self._warned = False
        self._drop_old_epoch()
        if self._left:
            self._missing += max(0, self._versions.latest.step - self._left.pop(0).position)

    def leave(self, member: _Member, error: BaseException | None) -> None:
        """Remove a session."""
        del self._members[member]
        if all(
            member.steps is not other.steps for other in self._members
        ):  # otherwise others make the steps that it does not
            member.left = (
                "finished" if error is None or is_clean_end(error) else type(error).__name__
            )
            self._left.append(member)
            self.on_held_up()

    def on_held_up(self) -> None:
        """Look soon whether all wait: not in this tick, in which a wait that has just begun may
        end.
        """
        if (self._left or self._missing) and not self._check_scheduled:
            self._check_scheduled = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        """If the sessions and the publishers all wait, let one begin a run in place of one that has
        left.
        """
        self._check_scheduled = False
        self._drop_old_epoch()
        version = self._versions.latest.step
        if not publishers_of(self._versions).all_held_up or not all(
            member.waits(version) for member in self._members
        ):
            return
        if not self._members:
            if not self._warned:
                self._warned = True
                logger.warning("%s; nothing is made for it any more", self._describe_waits())
            return
        left = next((one for one in self._left if one.position <= version + one.max_lag), None)
        if self._missing:
            self._missing -= 1
        elif left is not None:
            left.position += 1
        else:
            return
        member = min(self._members, key=lambda member: member.position + member.taken_over)
        if not any(member.taken_over for member in self._members):
            logger.info("%s: %s makes a run in their place", self._describe_waits(), member.name)
        member.take_over()

    def _drop_old_epoch(self) -> None:
        """After a reset of the versions let those that have left count as equal to the version, as
        the others do.
        """
        latest = self._versions.latest
        if latest.epoch != self._epoch:
            self._epoch, self._missing = latest.epoch, 0
            for left in self._left:
                left.position = latest.step

    def _log_long_wait(self, secs: float) -> None:
        log = logging.getLogger("aiohooks.version_gate")
        log.info("%s, for %.0f s now", self._describe_waits(), secs)

    def _describe_waits(self) -> str:
        latest, publishers = self._versions.latest, publishers_of(self._versions)
        waiting = [member for member in self._members if member.waits(latest.step)]
        left = shortened(tuple(f"{one.name} ({one.left})" for one in self._left))
        published = (
            f"now at {latest.step},"
            f" {publisher_summary(publishers.names)}{f'; left: {left}' if left else ''}"
        )
        if not self._members:
            return f"no session waits for versions of {self._versions.run!r}, {published}"
        wanted = min((member.wanted for member in waiting), default=latest.step)
        sessions = f"{len(waiting)} of {len(self._members)} sessions wait"
        return f"{sessions} for version {wanted} or more of {self._versions.run!r}, {published}"
