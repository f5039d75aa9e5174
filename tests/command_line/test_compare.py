"""`python -m aiohooks compare`: files and checkpoints that hooks have written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.__main__ import main
from aiohooks.checkpoint import Saver
from tests.support.commands import run_command


async def recorded(directory: Path, factor: float, runs: int) -> None:
    """Write records in both formats, and a trace."""

    async def step(value: float) -> dict[str, Any]:
        return {"loss": factor * value if value > 1 else value, "note": f"a {value}", "bad": float("nan"), "good": value > 2}

    directory.mkdir()  # noqa: ASYNC240 - a test
    values = ["loss", "note", "bad", "good"]
    hooks = [
        ah.CSVHook(directory / "run.csv", values),
        ah.JSONLinesHook(directory / "run.jsonl", values),
        ah.TimelineHook(directory / "trace.json"),
    ]
    async with ah.AsyncMonitoredSession(step, hooks) as session:
        for number in range(runs):
            await session.run("loss", {"value": float(number)})


def compared(capsys: pytest.CaptureFixture[str], a: Path, b: Path) -> tuple[int, list[str]]:
    """Return the exit code and the lines of a comparison, or what is wrong with it."""
    code = main(["compare", str(a), str(b)])
    shown = capsys.readouterr()
    return code, (shown.out or shown.err).splitlines()


async def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same values are the same in both formats; otherwise each tag has its first difference, last and mean values."""
    await recorded(tmp_path / "a", 1.0, 4)
    await recorded(tmp_path / "b", 2.0, 5)
    assert compared(capsys, tmp_path / "a/run.csv", tmp_path / "a/run.jsonl") == (0, ["no difference: the records are the same"])
    code, lines = compared(capsys, tmp_path / "a/run.csv", tmp_path / "b/run.jsonl")
    assert code == 1
    assert lines == [
        "loss: first differs at step 3: 2 and 4; 4 values, last 3, mean 1.5 and 5 values, last 8, mean 3.8",
        "note: first differs at step 5: nothing and a 4.0; 4 values, last a 3.0 and 5 values, last a 4.0",
        "bad: first differs at step 5: nothing and NaN; 4 values, last NaN and 5 values, last NaN",
        "good: first differs at step 5: nothing and 1; 4 values, last 1, mean 0.25 and 5 values, last 1, mean 0.4",
    ]


def test_records_of_other_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tag that one file lacks is named; nested values have a path, and lists are compared, too."""
    records = [{"step": 1, "time": 2.0, "loss": {"main": 1, "extra": [1, 2]}}, {"step": 2, "time": 3.0, "text": "\x1b[31m"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    records[0]["loss"] = {"main": 1, "extra": [1, 3]}
    (tmp_path / "b.jsonl").write_text(json.dumps(records[0]) + '\n{"step": 2, "ti')  # with a torn last line
    code, lines = compared(capsys, tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert code == 1
    assert lines == [
        "loss.extra[1]: first differs at step 1: 2 and 3; 1 values, last 2, mean 2 and 1 values, last 3, mean 3",
        f"text: only in {tmp_path / 'a.jsonl'}",
    ]


async def test_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each lane has its seconds in both; a trace does not differ from itself."""
    await recorded(tmp_path / "a", 1.0, 4)
    trace = tmp_path / "a/trace.json"
    assert compared(capsys, trace, trace) == (0, ["no difference: the traces are the same"])
    content = json.loads(trace.read_text())
    for name, factor in (("slow", 2), ("instant", 0)):
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                event["ts"] *= factor
                event["dur"] *= factor
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    for file, ending in ((trace, "[0-9.e-]+ s in 4 activities, 2 times as long"), (tmp_path / "instant.json", "4 activities")):
        code, lines = compared(capsys, file, tmp_path / "slow.json")
        assert code == 1
        assert any(re.fullmatch(rf"steps: [0-9][0-9.e-]* s in 4, and .*{ending}", line) for line in lines), lines


async def saved(directory: Path, step: int, **state: Any) -> Path:
    """Save a checkpoint, and return its path."""
    async with Saver(directory) as saver:
        return (await saver.save({"weights": np.arange(6.0).reshape(2, 3), **state}, step)).path


async def test_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What differs has its path, with types, shapes and the largest difference; NaNs and empty parts are compared as well."""
    state: dict[str, Any] = {
        "nan": float("nan"),
        "nans": np.array([np.nan, 1.0]),
        "name": "x",
        "parts": [1, {"deep": (2, 3)}],
        "count": np.int64(2**60),
        "mask": np.array([True, False]),
        "kind": np.zeros(2, np.float32),
        "shape": np.zeros(2),
        "empty": {},
    }
    a = await saved(tmp_path / "a", 5, **state)
    b = await saved(tmp_path / "b", 5, **state)
    assert compared(capsys, tmp_path / "a", tmp_path / "b") == (0, ["no difference: the checkpoints are the same"])
    timed = [await saved(tmp_path / f"secs {secs}", 5, hooks={"LoggingHook": {"step": 5, "secs": secs}}) for secs in (1.0, 2.0)]
    assert compared(capsys, *timed)[0] == 0  # how long ago hooks were due is no difference
    assert compared(capsys, a, tmp_path / "b")[0] == compared(capsys, a, b)[0] == 0
    state.update(
        nans=np.array([np.nan, 1.5]),
        name="y",
        parts=[1, {"deep": (2, 4)}],
        count=np.int64(2**60 + 1),
        mask=np.array([True, True]),
        kind=np.zeros(2, np.float64),
        shape=np.zeros((2, 1)),
        empty={"b": 1},
        more=1,
    )
    c = await saved(tmp_path / "b", 7, **state)
    code, lines = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert lines == [
        "step: 5 and 7",
        "nans: float64 (2,): 1 of 2 elements differ, by 0.5 at most",
        "name: 'x' and 'y'",
        "parts[1].deep[1]: 3 and 4",
        "count: int64 (): 1 of 1 elements differ, by 1 at most",
        "mask: bool (2,): 1 of 2 elements differ",
        "kind: float32 and float64",
        "shape: float64 of the shapes (2,) and (2, 1)",
        f"empty: only in {a}",
        f"empty.b: only in {c}",
        f"more: only in {c}",
    ]
    assert compared(capsys, b, tmp_path / "b")[1] == [line.replace(str(a), str(b)) for line in lines]


async def test_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors of PyTorch are compared as arrays are, also of types that numpy has not."""
    import torch

    weights = torch.arange(4, dtype=torch.bfloat16)
    await saved(tmp_path / "a", 1, half=weights, plain=torch.ones(2))
    await saved(tmp_path / "b", 1, half=weights + torch.tensor([0, 0, 0, 1], dtype=torch.bfloat16), plain=torch.ones(2))
    code, lines = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert (code, lines) == (1, ["half: torch.bfloat16 (4,): 1 of 4 elements differ, by 1 at most"])


async def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said why, with exit code 2 as that of `cmp`; a damaged checkpoint stays where it is."""
    (tmp_path / "a.csv").write_text("step,time,loss\n1,2.0,3\n")
    (tmp_path / "bad.csv").write_text("no,columns\n")
    (tmp_path / "empty").mkdir()
    checkpoint = await saved(tmp_path / "model", 3)
    for a, b, message in [
        ("a.csv", "model", "a.csv has records, and"),
        ("a.csv", "none.csv", "No such file"),
        ("a.csv", "bad.csv", "is not a file of CSVHook or JSONLinesHook: line 1"),
        ("empty", "model", "has no checkpoints"),
    ]:
        code, lines = compared(capsys, tmp_path / a, tmp_path / b)
        assert (code, len(lines)) == (2, 1)
        assert message in lines[0]
    state = checkpoint / "state.msgpack"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    for path in (checkpoint, tmp_path / "model"):
        code, lines = compared(capsys, path, checkpoint)
        assert code == 2
        assert "state.msgpack" in lines[-1]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before


@pytest.mark.slow
async def test_as_a_user_runs_it(tmp_path: Path) -> None:
    """The process has the exit codes of `cmp`."""
    (tmp_path / "a.csv").write_text("step,time,loss\n1,2.0,3\n")
    (tmp_path / "b.csv").write_text("step,time,loss\n1,2.0,4\n")
    done = [await run_command("compare", "a.csv", other, cwd=tmp_path) for other in ("a.csv", "b.csv", "c.csv")]
    assert [one.returncode for one in done] == [0, 1, 2]
