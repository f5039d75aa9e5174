"""PrometheusHook: a session in a registry, read back as Prometheus does."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import aiohooks as ah
from aiohooks._core.waits import to_thread
from aiohooks.adapters.prometheus import PrometheusHook
from aiohooks.errors import InvalidArgumentError
from aiohooks.testing import ManualClock
from tests.support.sessions import doubling, make_runs

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of its own."""
    return CollectorRegistry()


def parsed(text: str) -> Series:
    """Return the value of each series, which there is once."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} came twice"
            found[key] = sample.value
    return found


def scraped(registry: CollectorRegistry) -> Series:
    """Return what Prometheus reads in a registry."""
    return parsed(generate_latest(registry).decode())


def values(series: Series, *names: str, **labels: str) -> list[float | None]:
    """Return the values of series of the session "trainer", where they are there."""
    found = frozenset({"session": "trainer", **labels}.items())
    return [series.get((f"aiohooks_{name}", found)) for name in names]


def shown(registry: CollectorRegistry, *hooks: Any, **options: Any) -> ah.AsyncMonitoredSession:
    """Make a session that is shown, with other hooks."""
    metrics = PrometheusHook(registry=registry)
    return doubling(metrics, *hooks, **{"name": "trainer", **options})


class Slow(ah.SessionRunHook):
    """Takes seconds of the test's clock in `before_run`."""

    def __init__(self, clock: ManualClock, *secs: float) -> None:
        self.clock, self.secs = clock, list(secs)

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        self.clock.advance(self.secs.pop(0))


async def test_steps_and_their_durations(clock: ManualClock, registry: CollectorRegistry) -> None:
    """Runs and step are those of the session, and the durations of its runs are a histogram."""
    store = ah.MemoryStepStore(7)
    async with shown(registry, Slow(clock, 0.25, 0.25, 2.5), global_step=store) as session:
        await make_runs(session, 3, "loss")
        series = scraped(registry)
    assert values(series, "runs_total", "global_step") == [3, 10]
    assert values(series, "step_seconds_count", "step_seconds_sum") == [3, 3.0]
    bounds = ("0.1", "0.5", "1.0", "5.0", "+Inf")
    assert [values(series, "step_seconds_bucket", le=bound) for bound in bounds] == [
        [0],
        [2],
        [2],
        [3],
        [3],
    ]


async def test_what_has_become_of_the_calls_of_hooks(registry: CollectorRegistry) -> None:
    """Failures and drops are counters of each hook; what is pending and disabled are
    gauges.
    """

    class Down(ah.SessionRunHook):
        async def after_run(self, *_: object) -> None:
            raise ConnectionError("down")

    async with shown(registry, ah.configure(Down(), on_error="log", disable_after=2)) as session:
        await make_runs(session, 5, "loss")
        series = scraped(registry)
    names = (
        "hook_failures_total",
        "hook_dropped_total",
        "hook_pending",
        "hook_disabled",
    )
    assert values(series, *names, hook="Down") == [2, 3, 0, 1]
    assert values(series, "hook_failures_total", hook="PrometheusHook") == [0]


async def test_checkpoints(clock: ManualClock, registry: CollectorRegistry, tmp_path: Path) -> None:
    """Age and step are those of the last checkpoint that was written; before it there are none."""
    saver = ah.CheckpointSaverHook(
        tmp_path, every=ah.Every(steps=2), save_on_begin=False, background=False
    )
    async with shown(registry, saver) as session:
        await session.run("loss")
        assert values(scraped(registry), "checkpoints_saved_total", "checkpoint_age_seconds") == [
            0,
            None,
        ]
        await session.run("loss")
        clock.advance(30.0)
        await session.run("loss")
        series = scraped(registry)
    names = ("checkpoints_saved_total", "checkpoint_age_seconds", "checkpoint_step")
    assert values(series, *names) == [1, 30.0, 2]


async def test_sessions_share_a_registry(registry: CollectorRegistry) -> None:
    """Each session has series of its own from its creation to its end; a second one of the same
    name is refused.
    """
    Counter("requests", "Another metric.", registry=registry)
    hook = PrometheusHook(registry=registry)
    for _ in range(2):  # a hook may be used again
        async with doubling(hook, name="trainer") as session:
            async with shown(registry, name="other") as other:
                await session.run("loss")
                await other.run("loss")
                await other.run("loss")
                series = scraped(registry)
                assert values(series, "runs_total") + values(
                    series, "runs_total", session="other"
                ) == [1, 2]
                with pytest.raises(InvalidArgumentError, match="named 'trainer' already"):
                    await shown(registry).__aenter__()
            series = scraped(registry)
            assert values(series, "runs_total") + values(series, "runs_total", session="other") == [
                1,
                None,
            ]
        assert [
            name for name, labels in scraped(registry) if ("session", "trainer") in labels
        ] == []
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Counter("aiohooks_runs", "The name is taken.", registry=registry)


async def test_a_failure_stays_in_the_registry(registry: CollectorRegistry) -> None:
    """The state of a failed session stays until the next one of its name, and the count for good;
    a cancellation is no failure.
    """

    async def end_with(error: BaseException) -> None:
        async with shown(registry) as session:
            await session.run("loss")
            raise error

    def states() -> dict[str, float | None]:
        series = scraped(registry)
        return {
            state: value
            for state in ("opening", "open", "closing", "failed")
            for value in values(series, "session_state", state=state)
        }

    with pytest.raises(ZeroDivisionError):
        await end_with(ZeroDivisionError())
    failed = {"opening": 0, "open": 0, "closing": 0, "failed": 1}
    assert states() == failed
    assert values(scraped(registry), "runs_total") == [None]
    async with shown(registry):
        assert states() == {**failed, "open": 1, "failed": 0}
    assert set(states().values()) == {None}
    with pytest.raises(asyncio.CancelledError):
        await end_with(asyncio.CancelledError())
    assert set(states().values()) == {None}
    with pytest.raises(ZeroDivisionError):
        await end_with(ZeroDivisionError())
    series = scraped(registry)
    assert values(series, "session_failures_total", error="ZeroDivisionError") == [2]
    assert values(series, "session_failures_total", error="CancelledError") == [None]


async def test_a_scrape_in_another_thread_reads_in_the_event_loop(
    registry: CollectorRegistry,
) -> None:
    """A scrape of another thread waits for the loop, and one of a loop that has been closed goes
    without the session.
    """
    async with shown(registry) as session:
        await session.run("loss")
        assert values(await to_thread(scraped, registry), "runs_total") == [1]

    async def show() -> None:
        hook = PrometheusHook(registry=registry)
        await hook.begin()
        await hook.after_create_session(ah.Session(ah.Graph()), ah.Coordinator())

    def show_and_end() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(show())
        loop.close()

    await to_thread(show_and_end)
    assert not scraped(registry)


@pytest.mark.slow
async def test_a_scrape_goes_without_the_session_of_a_blocked_loop(
    registry: CollectorRegistry,
) -> None:
    """A scrape of another thread ends without the series of a loop that does not answer; the next
    one has them again.
    """
    async with shown(registry):
        with ThreadPoolExecutor(1) as pool:
            assert values(pool.submit(scraped, registry).result(), "runs_total") == [
                None
            ]  # blocks the event loop meanwhile
        assert values(await to_thread(scraped, registry), "runs_total") == [0]


@pytest.mark.parametrize("wrong", [{"registry": 5}], ids=str)
def test_invalid_arguments_are_refused(wrong: dict[str, Any]) -> None:
    """The error names the argument and what to give."""
    with pytest.raises(InvalidArgumentError, match="give"):
        PrometheusHook(**wrong)
