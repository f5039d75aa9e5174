"""The pauses between attempts."""

from __future__ import annotations

from aiohooks._core.waits import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    """The first attempt waits for `initial_secs`; a long series of attempts stays at `max_secs`."""
    backoff = Backoff(0.5, 5.0, jitter=False)
    assert [backoff.pause_secs(attempt) for attempt in (1, 2, 3, 4, 5, 10**6)] == [
        0.5,
        1.0,
        2.0,
        4.0,
        5.0,
        5.0,
    ]


def test_a_random_part_of_each_pause() -> None:
    """With `jitter`, pauses differ and none is longer than without."""
    backoff = Backoff(1.0, 4.0)
    pauses = [backoff.pause_secs(3) for _ in range(50)]
    assert len(set(pauses)) > 1
    assert all(0 <= pause <= 4 for pause in pauses)
    assert Backoff(0, 0).pause_secs(1) == 0
