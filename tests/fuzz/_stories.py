"""What is saved in the checkpoint programmes, and the judge: what must be there after whatever happened."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aiohooks.checkpoint import KeepNewest
from aiohooks.checkpoint.checkpoint import Restored
from aiohooks.checkpoint.saver import CheckpointDirectory
from tests.fuzz._disk import WrongError

KEEP = 2
LATER = 900
"""Number of the save that must work afterwards."""
_TEMPORARY = re.compile(r"\.tmp-(drop-)?step-\d{12,}\.\d{6,}(-\d+)?")
FOREIGN: dict[str, bytes | None] = {
    "notes.txt": b"mine",
    ".tmp-upload": None,
    ".tmp-upload/part": b"of another programme",
    ".tmp-step-7": b"not quite a name of ours",
    "step-5": None,
    "step-5/model": b"of another library",
}
"""What else stands in the directory, and must stay."""


LEFTOVERS = (".tmp-step-000000000030.000003", ".tmp-drop-step-000000000001.000001-2")
"""What a writer left that was killed earlier."""


@dataclass(frozen=True, slots=True)
class Save:
    """One call of `save`; its number is also in its metrics, by which it is known again."""

    number: int
    step: int
    state: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        return {"number": float(self.number)}


@dataclass(frozen=True, slots=True)
class Story:
    """What is there, and what a writer then does that something happens to."""

    name: str
    before: tuple[Save, ...]
    then: tuple[Save, ...]
    leftovers: bool = False
    """A writer was killed here earlier."""
    spoilt: bool = False
    """The newest of `before` is damaged; the writer restores first, which sets it aside."""
    contended: bool = False
    """A second writer tries meanwhile."""


def make_save(number: int, *, step: int | None = None, size: int = 600, seed: int = 0) -> Save:
    """A save with something of most kinds in it, and an array of about `size` bytes."""
    rng = np.random.default_rng([seed, number])
    state = {
        "weights": rng.standard_normal((size // 8, 2)).astype(np.float32),
        "layers": [{"bias": np.array([-0.0, np.inf, np.frombuffer(b"\x01\0\0\0\0\0\xf8\x7f", np.float64)[0]]), "on": True}],
        "empty": np.zeros((0, 3), np.int16),
        "seen": (number, 2.5, None, b"\0\xff"),
        "größe": 2**70 + number,
    }
    return Save(number, 10 * number if step is None else step, state)


def make_stories(seed: int, size: int) -> list[Story]:
    """The stories that every programme tells: first save, overwrite, retention, sweep, a damaged one, two writers."""
    one, two, three, four, five = (make_save(number, size=size, seed=seed) for number in range(1, 6))
    again = make_save(6, step=two.step, size=size, seed=seed)
    return [
        Story("first save", (), (one, two)),
        Story("same step", (one, two), (again,)),
        Story("retention", (one, two), (three, four)),
        Story("sweep", (one, two), (three,), leftovers=True),
        Story("damaged", (one, two), (three,), spoilt=True),
        Story("two writers", (one, two, three, four), (five,), contended=True),
    ]


def directory(path: Path, fs: Any = None, *, read_only: bool = False) -> CheckpointDirectory:
    """The library's directory: what a Saver calls in its threads."""
    more = {} if fs is None else {"fs": fs}
    return CheckpointDirectory(path, keep=KeepNewest(KEEP), min_free_bytes=0, read_only=read_only, **more)


def prepare(story: Story, path: Path) -> None:
    """Puts down what is there when a story begins; nothing at all for a first save."""
    if not story.before:
        return
    with_saves = directory(path)
    for save in story.before:
        with_saves.save(save.state, save.step, save.metrics)
    with_saves.close()
    for name, data in FOREIGN.items():
        if data is None:
            (path / name).mkdir()
        else:
            (path / name).write_bytes(data)
    newest = max(path.glob("step-*.*"))
    if story.leftovers:
        for name in LEFTOVERS:
            (path / name).mkdir()
            (path / name / "arrays.safetensors").write_bytes((newest / "arrays.safetensors").read_bytes()[:100])
    if story.spoilt:
        changed = bytearray((newest / "state.msgpack").read_bytes())
        changed[len(changed) // 2] ^= 4
        (newest / "state.msgpack").write_bytes(changed)


def act(story: Story, path: Path, fs: Any, acknowledge: Callable[[int], None]) -> None:
    """What the writer does; says after each save how many have returned."""
    there = directory(path, fs)
    try:
        if story.spoilt:
            there.restore(None)
        for number, save in enumerate(story.then, 1):
            there.save(save.state, save.step, save.metrics)
            acknowledge(number)
    finally:
        there.close()


def judge(story: Story, path: Path, acknowledged: int, *, later: bool = True, in_flight: bool = True) -> None:
    """Looks at what is left.

    Args:
        story: what was done.
        path: the checkpoint directory.
        acknowledged: so many saves of the writer returned.
        later: whether to try a save on top.
        in_flight: whether the save after these may be there too.

    Raises:
        WrongError: something is lost, torn or left over.
    """
    before = story.before[:-1] if story.spoilt else story.before
    done = [*before, *story.then[:acknowledged]]
    coming = story.then[acknowledged : acknowledged + 1] if in_flight else ()
    spoilt = story.before[-1].step if story.spoilt else None
    good = _good(path, spoilt)
    if coming and coming[0].number in good:
        done.append(coming[0])
    expected = {each.number for each in kept(done)}
    if not expected <= good:
        raise WrongError(f"lost: saves {sorted(expected - good)} of {sorted(expected)}")

    writer = directory(path)
    found = writer.restore(None)
    check_restored(found, done[-1] if done else None)
    if found is not None and found.set_aside and not (spoilt is not None and len(found.set_aside) == 1):
        raise WrongError(f"passed over {found.set_aside}")
    if later:
        last = make_save(LATER, size=40)
        writer.save(last.state, last.step, last.metrics)
        writer.close()
        _check_later(story, path, kept([*done, last]))
    writer.close()


def _good(path: Path, spoilt: int | None) -> set[int]:
    """Numbers of the checkpoints that verify. One that does not, under the name of a finished one, is a violation."""
    good: set[int] = set()
    for each in directory(path, read_only=True).verify():
        if each.reason is None and each.manifest is not None:
            good.add(int(each.manifest.metrics["number"]))
        elif each.name.step != spoilt:
            raise WrongError(f"torn under a final name: {each.path.name}: {each.reason}")
    return good


def _check_later(story: Story, path: Path, expected: Sequence[Save]) -> None:
    good = _good(path, story.before[-1].step if story.spoilt else None)
    if good != {each.number for each in expected}:
        raise WrongError(f"after a later save {sorted(good)} are there, not {sorted(each.number for each in expected)}")
    names = sorted(each.name for each in path.iterdir())
    if left := [name for name in names if _TEMPORARY.fullmatch(name)]:
        raise WrongError(f"not swept: {left}")
    if story.spoilt != any(name.startswith("damaged-") for name in names):
        raise WrongError(f"set aside: {names}")
    for name, data in FOREIGN.items() if story.before else ():
        there = path / name
        if not (there.is_dir() if data is None else there.is_file() and there.read_bytes() == data):
            raise WrongError(f"{name}, which is not ours, was touched")
    check_restored(directory(path, read_only=True).restore(None), expected[-1])


def kept(saves: Sequence[Save]) -> list[Save]:
    """What the policy keeps: the last saves with a step of their own, the newest last."""
    found: list[Save] = []
    for save in reversed(saves):
        if len(found) < KEEP and all(save.step != each.step for each in found):
            found.append(save)
    return found[::-1]


def check_restored(found: Restored | None, save: Save | None) -> None:
    """Raises `WrongError` unless it is exactly this save."""
    if found is None or save is None:
        if found is not save:
            raise WrongError(f"restored {found and found.checkpoint}, not save {save and save.number}")
    elif found.checkpoint.step != save.step or dict(found.checkpoint.metrics) != save.metrics:
        raise WrongError(f"restored {found.checkpoint}, not save {save.number} of step {save.step}")
    elif not same(found.state, save.state):
        raise WrongError(f"save {save.number} came back changed")


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the last bit, types and order of keys included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return bool(one == other)
