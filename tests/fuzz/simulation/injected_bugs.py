"""Injected bugs: each changes the library for a while, and the simulation must find it.

Those whose name is that of a finding take back what mended it.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from aiohooks.checkpoint import _format
from aiohooks.session.feeds import FeedSource, SessionFeeds
from aiohooks.stores._connection import Writes
from aiohooks.stores._members import Members
from aiohooks.stores._protocol import Member, Position, Snapshot
from aiohooks.stores.base import WaitRegistry
from aiohooks.stores.engine import RunState
from aiohooks.stores.shared import SharedStepStore
from aiohooks.version_gate import Ticket
from tests.fuzz._harness import Bugs, Method
from tests.fuzz.simulation.training import ProcessFiles, training
from tests.support.checkpoint_files import Call

BUGS = Bugs()
"""Each with the scenario that finds it; that of the stores if there is none."""
bug = BUGS.add


# Findings.


@bug(RunState, "follow")
def terms_begin_again(follow: Method, self: RunState, lost: Snapshot) -> None:
    """Findings 02 and 03: after a loss the terms begin again."""
    follow(self, lost._replace(term=0, leader=""))


@bug(RunState, "follow")
def the_epoch_stays(follow: Method, self: RunState, lost: Snapshot) -> None:
    """After a loss the step falls within an epoch."""
    follow(self, lost._replace(position=Position(0, 0)))


@bug(RunState, "follow")
def the_members_of_a_lost_run_are_forgotten(follow: Method, self: RunState, lost: Snapshot) -> None:
    """Finding 04: after a loss an exit ends a wait before its trainer was announced again, and a
    wait for a trainer that has died while the run was lost never ends.
    """
    follow(self, lost._replace(members=()))


@bug(Members, "send_again")
def registrations_are_not_repeated(send_again: Method, self: Members) -> None:
    """Finding 05: a registration is given up for good."""


@bug(Members, "_expire_silent")
async def two_reads_end_a_lease(expire_silent: Method, self: Members) -> None:
    """Findings 08 and 15: a lease runs out because it could not be renewed in between."""
    self._silent_reads = dict.fromkeys(self._silent_reads, 3)
    await expire_silent(self)


# Others.


@bug(RunState, "_last_answer")
def repeated_writes_count(last_answer: Method, self: RunState, writer: str) -> None:
    """A write whose answer was lost counts again."""


@bug(Writes, "check_loss", training)
def writes_continue_after_a_loss(check: Method, self: Writes) -> None:
    """A chief continues in a later run, at another step, without its checkpoint."""


@bug(RunState, "_is_term_over")
def an_older_term_may_write(is_term_over: Method, self: RunState, term: int, process: str) -> bool:
    return False


@bug(SharedStepStore, "_on_unreachable")
def old_news_end_waits(on_unreachable: Method, self: SharedStepStore) -> None:
    """A wait ends by what the process knows, without asking."""
    self._waits.fail_unreachable()


@bug(SharedStepStore, "value")
async def a_read_is_answered_locally(value: Method, self: SharedStepStore) -> Position:
    await self._connection.wait()
    return self._waits.latest


@bug(WaitRegistry, "observe")
def a_wait_misses_a_step(observe: Method, self: WaitRegistry, position: Position) -> None:
    """One step in seven wakes no waiter."""
    if position.step % 7 == 3 and position > self.latest:
        self.latest = position
    else:
        observe(self, position)


@bug(RunState, "_lead")
def two_may_lead(lead: Method, self: RunState, member: Member) -> Any:
    others, self.members = (
        self.members,
        {id: each for id, each in self.members.items() if not each.term or id == member.id},
    )
    try:
        return lead(self, member)
    finally:
        self.members = {**others, **self.members}


# Of the sessions of a training, and their checkpoints.


@bug(ProcessFiles, "do", training)
def names_are_not_synced(do: Method, self: ProcessFiles, call: Call) -> Any:
    """After a power cut a checkpoint that was saved is gone."""
    if call.name == "fsync" and stat.S_ISDIR(os.fstat(call.args[0]).st_mode):
        return None
    return do(self, call)


@bug(_format, "checkpoint_names", training)
def the_oldest_checkpoint_is_restored(checkpoint_names: Method, names: Any) -> Any:
    """Training begins again at an earlier step than it could."""
    return checkpoint_names(names)[::-1]


@bug(SessionFeeds, "raise_if_element_went_back", training)
def an_interrupted_element_is_repeated(raise_if: Method, self: SessionFeeds) -> None:
    """The run of an element is repeated before those that come again, and the element comes once
    more.
    """


@bug(SessionFeeds, "state_of", training)
def a_position_is_saved_too_far(state_of: Method, self: SessionFeeds, stateful: Any) -> Any:
    """The state in a checkpoint counts what was read ahead, and has made no step."""
    state_of(self, stateful)
    return stateful.state_dict()


@bug(FeedSource, "begin_again", training)
def what_was_read_ahead_is_not_set_back(begin_again: Method, self: FeedSource) -> None:
    """After a recovery, steps are fed with what was taken before."""


@bug(SessionFeeds, "_report_undone_steps", training)
def lost_feeds_are_not_said(report: Method, self: SessionFeeds, *args: Any) -> None:
    """A recovery goes back, and the feeds of the steps since are gone without a word."""


@bug(SharedStepStore, "reset", training)
async def a_restore_at_the_same_step_begins_no_epoch(
    reset: Method, self: SharedStepStore, step: int
) -> Position:
    """The items that a killed trainer had received keep their places, and no others are shipped."""
    latest = await self.value()
    return latest if latest.step == step else await reset(self, step)


@bug(Ticket, "use", training)
def a_stale_item_is_used(use: Method, self: Ticket) -> bool:
    """The age of an item is not looked at."""
    use(self)
    return True
