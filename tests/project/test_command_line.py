"""`python -m aiohooks`: each command as a user runs it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import aiohooks as ah
from tests.support.sessions import counting_graph

pytestmark = [pytest.mark.every_python, pytest.mark.slow]


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command; standard output and error are kept apart."""
    return subprocess.run([sys.executable, "-m", "aiohooks", *map(str, arguments)], capture_output=True, text=True, timeout=120)


async def saved(directory: Path, runs: int) -> None:
    """A job that saved at its beginning and at its end."""
    creator = ah.ChiefSessionCreator(counting_graph(), checkpoint_dir=directory)
    async with ah.AsyncMonitoredSession(creator, [ah.CheckpointSaverHook()]) as session:
        for _ in range(runs):
            await session.run("train")


async def test_checkpoints_are_listed_and_explained(tmp_path: Path) -> None:
    """It lists all, says what is wrong with a damaged one, and which one a restore would take; it changes nothing."""
    await saved(tmp_path, 3)
    newest = max(path.name for path in tmp_path.glob("step-*"))  # noqa: ASYNC240 - a test
    good = command("checkpoints", tmp_path)
    assert good.returncode == 0, good.stderr
    assert good.stderr == ""
    assert [word in good.stdout for word in ("good", newest, "restore would read")] == [True] * 3
    state = tmp_path / newest / "state.msgpack"
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    damaged = command("checkpoints", tmp_path)
    assert damaged.returncode == 1
    assert "checksum" in damaged.stdout
    assert state.exists()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """It is named, with exit code 1, and not made."""
    missing = tmp_path / "missing"
    done = command("checkpoints", missing)
    assert done.returncode == 1
    assert str(missing) in done.stdout + done.stderr
    assert not missing.exists()


def test_a_run_is_drawn(tmp_path: Path) -> None:
    """A run in JSON lines becomes a PNG beside it, or at the given path."""
    run = tmp_path / "run.jsonl"
    run.write_text("".join(f'{{"step": {step}, "time": {step}.5, "loss": {1 / step}}}\n' for step in range(1, 20)))
    assert command("plot", run).returncode == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert command("plot", run, "-o", tmp_path / "other.png").returncode == 0
    assert (tmp_path / "other.png").stat().st_size > 1000
    missing = command("plot", tmp_path / "none.csv")
    assert missing.returncode == 1
    assert "none.csv" in missing.stderr


async def test_a_trace_is_drawn(tmp_path: Path) -> None:
    """A trace becomes a PNG, or text; a file that is none is named, with exit code 1."""
    trace = tmp_path / "trace.json"
    async with ah.AsyncMonitoredSession(counting_graph(), [ah.TimelineHook(trace)]) as session:
        for _ in range(4):
            await session.run("train")
    assert command("plot", trace).returncode == 0
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    text = command("plot", trace, "--terminal", "--steps", "2")
    assert (text.returncode, text.stderr) == (0, "")
    assert "step 3 to step 4" in text.stdout.splitlines()[0]
    other = tmp_path / "other.json"
    other.write_text("{}")
    for more in ((), ("--terminal",)):
        done = command("plot", other, *more)
        assert (done.returncode, done.stdout) == (1, "")
        assert "other.json: this is no trace" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("checkpoints",), ("plot", "x.json", "--steps", "0")], ids=str)
def test_what_is_not_understood(arguments: tuple[str, ...]) -> None:
    """It says how it is used, with exit code 2."""
    done = command(*arguments)
    assert done.returncode == 2
    assert "usage: python -m aiohooks" in done.stderr
