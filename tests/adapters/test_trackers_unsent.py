"""send_unsent, and the file that it reads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.adapters.trackers import TrackerHook, send_unsent
from aiohooks.hooks._line_file import LineFile
from tests.support.checks import invalid
from tests.support.sessions import run_session, train
from tests.support.trackers import ScriptedTracker, kept


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of unsent metrics."""
    return tmp_path / "unsent.jsonl"


def line(step: int, loss: float | str = 0.5) -> str:
    """Return the line of a step."""
    return json.dumps({"step": step, "time": 1.5, "metrics": {"loss": loss}}) + "\n"


def check_json(path: Path) -> None:
    """Check that each line is strict JSON, which has no NaN."""
    for text in path.read_text().splitlines():
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


async def test_what_was_kept_is_sent_and_the_file_removed(path: Path) -> None:
    """Values, steps and times are those of the run, numbers that are not finite included."""
    values = iter([1.5, math.inf, -math.inf, math.nan])

    async def step() -> dict[str, float]:
        return {"loss": next(values)}

    tracker = ScriptedTracker({0: ConnectionError("refused")})
    hook = TrackerHook(tracker, ["loss"], every=ah.Every(steps=1), unsent_path=path)
    await run_session(ah.AsyncMonitoredSession(step, [hook]), 4, ())
    check_json(path)
    later = ScriptedTracker()
    assert send_unsent(path, later) == 4
    assert [(step, metrics["loss"]) for step, metrics in later.metrics[:3]] == [
        (1, 1.5),
        (2, math.inf),
        (3, -math.inf),
    ]
    assert math.isnan(later.metrics[3][1]["loss"])
    assert later.times == sorted(later.times)
    assert later.calls == ["log 1", "log 2", "log 3", "log 4", "close"]
    assert later.closed == [None]
    assert kept(path) is None


def test_steps_are_sent_once_and_in_order(path: Path) -> None:
    """Of several lines of a step the last one counts, and none from before it was sent."""
    path.write_text(
        line(5, 1) + line(3) + line(5, 2) + line(4) + '{"sent": 4}\n{"sent": 9}\n' + line(9)
    )
    tracker = ScriptedTracker()
    assert send_unsent(path, tracker) == 3
    assert tracker.metrics == [(3, {"loss": 0.5}), (5, {"loss": 2.0}), (9, {"loss": 0.5})]


def test_what_cannot_be_sent_stays_in_the_file(path: Path) -> None:
    """The error says how far it came; the next attempt sends the rest."""
    path.write_text("".join(map(line, range(1, 6))))
    tracker, error = ScriptedTracker(), ConnectionError("refused")
    tracker.failures[3] = error
    with pytest.raises(ConnectionError) as caught:
        send_unsent(path, tracker)
    assert caught.value.__notes__ == [
        f"raised after 2 of the metrics in {path} were sent; the file has the others"
    ]
    assert tracker.closed == [error]
    later = ScriptedTracker()
    assert send_unsent(path, later) == 3
    assert (tracker.steps, later.steps) == ([1, 2], [3, 4, 5])


@pytest.mark.parametrize("torn", ['{"step": 7, "ti', "[]\n", '{"step": 7}\n', "\xff\n"])
def test_torn_lines_are_left_out(torn: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line that a crash has torn, and any other that has no metrics, is reported and left out."""
    path.write_bytes((line(1) + torn).encode("latin-1"))
    tracker = ScriptedTracker()
    assert send_unsent(path, tracker) == 1
    assert tracker.steps == [1]
    assert "line 2 is left out" in caplog.text


@pytest.mark.parametrize("text", ["", line(1) + line(2)[:-9]], ids=["no file", "a torn line"])
async def test_sessions_append_to_one_file(
    text: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later session leaves the lines of an earlier one as they are, nothing between them, and a
    torn one for itself.
    """
    if text:
        path.write_text(text)  # noqa: ASYNC240 - a test
    for start in (2, 4):
        tracker = ScriptedTracker({0: ConnectionError("refused")})
        await train(
            TrackerHook(tracker, ["loss"], every=ah.Every(steps=1), unsent_path=path),
            runs=2,
            start=start,
        )
    assert kept(path) == [*([1] if text else []), 3, 4, 5, 6]
    assert ("line 2 is left out" in caplog.text) == bool(text)
    assert "line 3 is left out" not in caplog.text


def test_a_file_that_a_session_writes_is_refused(path: Path) -> None:
    """Nothing is sent, nothing removed, and the tracker is not used."""
    path.write_text(line(1))
    writer = LineFile(str(path))
    writer.open()
    tracker = ScriptedTracker()
    try:
        with invalid(str(path), "is being written"):
            send_unsent(path, tracker)
    finally:
        writer.close()
    assert path.read_text() == line(1)
    assert not tracker.calls


def test_a_file_that_is_missing_is_an_error(path: Path) -> None:
    """It is not created."""
    with pytest.raises(FileNotFoundError):
        send_unsent(path, ScriptedTracker())
    assert not path.exists()
