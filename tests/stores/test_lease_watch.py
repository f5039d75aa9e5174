"""Leases, as each process measures them for itself."""

from __future__ import annotations

import pytest

from aiohooks.stores._protocol import Expire, Member
from aiohooks.stores._run_watcher import LeaseWatch
from aiohooks.testing import ManualClock

pytestmark = pytest.mark.every_python


def seen(heartbeat: int, ttl: float = 4.0, id: str = "p/1") -> tuple[Member, ...]:
    return (Member(id, "trainer", ttl, heartbeat=heartbeat),)


@pytest.fixture
def watch(clock: ManualClock) -> LeaseWatch:
    return LeaseWatch(clock, "here")


def test_a_silent_member_expires_after_its_lease(clock: ManualClock, watch: LeaseWatch) -> None:
    """Its lease has run out when no other heartbeat was seen for its time, in reads that were close
    together.
    """
    watch.observe(seen(5))
    for _ in range(4):
        assert watch.expired() == []
        assert watch.read_secs == 1.0
        clock.advance(1.0)
        watch.observe(seen(5))
    assert watch.expired() == [Expire("p/1", 5)]
    watch.observe(())
    assert (watch.expired(), watch.silences) == ([], {})


def test_the_next_read_is_not_put_off(clock: ManualClock, watch: LeaseWatch) -> None:
    """It comes a quarter of the lease after the last one, whenever the process asks."""
    watch.observe(seen(5))
    clock.advance(0.75)
    assert watch.read_secs == 0.25
    clock.advance(1.0)
    assert watch.read_secs == 0.0


def test_a_heartbeat_begins_the_lease_again(clock: ManualClock, watch: LeaseWatch) -> None:
    """A member that is renewed once in its lease never expires, whatever the numbers of its
    heartbeats.
    """
    for heartbeat in (5, 6, 0, 1, 2, 100):
        for _ in range(4):
            watch.observe(seen(heartbeat))
            clock.advance(0.99)
    assert watch.expired() == []


def test_time_without_a_read_does_not_count(clock: ManualClock, watch: LeaseWatch) -> None:
    """While the run cannot be read no heartbeat can arrive: a late read counts as one in time,
    however late it is.
    """
    for secs in (2.1, 5.0, 1e6):
        for _ in range(3):
            watch.observe(seen(5))
            clock.advance(0.99)
        clock.advance(secs)
        watch.observe(seen(5))
        assert watch.expired() == []
        clock.advance(1.9)
        watch.observe(seen(6))
        assert watch.expired() == []
        watch.restart()


def test_a_slow_engine_keeps_no_dead_member(clock: ManualClock, watch: LeaseWatch) -> None:
    """If every read is late, the lease runs out after four of them."""
    watch.observe(seen(5))
    for _ in range(4):
        assert watch.expired() == []
        clock.advance(9.0)
        watch.observe(seen(5))
    assert watch.expired() == [Expire("p/1", 5)]


def test_each_member_has_its_own_lease(clock: ManualClock, watch: LeaseWatch) -> None:
    """The shortest one says when to read; members of this process, and those without a lease, are
    not watched.
    """

    def read() -> None:
        watch.observe(
            (
                *seen(1, 8.0, "p/1"),
                *seen(1, 2.0, "q/1"),
                *seen(1, 1.0, "here/1"),
                *seen(1, float("inf"), "r/1"),
            ),
        )

    for _ in range(4):
        read()
        assert watch.read_secs == 0.5
        clock.advance(0.5)
    read()
    assert watch.expired() == [Expire("q/1", 1)]
