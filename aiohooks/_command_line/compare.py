"""`aiohooks compare A B`: what differs between records, traces or checkpoints of two runs, but for the time that they took."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from aiohooks.errors import InvalidArgumentError, printable

Content = tuple[str, Mapping[str | None, Any]]
"""The path of what was read, and what it has by tag, lane or place; by None the step of a checkpoint."""
Series = list[tuple[int, Any]]


def compare(a: str, b: str) -> int:
    """Print what differs between two files or directories; their content says of which kind they are.

    Returns:
        The exit code: 0 if nothing differs, otherwise 1.

    Raises:
        InvalidArgumentError: they cannot be compared: they are of different kinds, or one cannot be read.
    """
    try:
        kinds = _kind(a), _kind(b)
        if kinds[0] != kinds[1]:
            raise InvalidArgumentError(f"{a} has {kinds[0]}, and {b} has {kinds[1]}; give two of one kind")
        read, difference = _KINDS[kinds[0]]
        differences = list(_differences(read(a), read(b), difference))
    except OSError as error:
        raise InvalidArgumentError(f"cannot compare {a} and {b}: {error}") from error
    print("\n".join(differences) if differences else f"no difference: the {kinds[0]} are the same")
    return int(bool(differences))


def _kind(path: str) -> str:
    from aiohooks.hooks._lanes import is_trace

    if os.path.isdir(path):
        return "checkpoints"
    return "traces" if is_trace(path) else "records"


def _differences(one: Content, other: Content, difference: Callable[[Any, Any], str | None]) -> Iterator[str]:
    (a, ours), (b, theirs) = one, other
    for key in dict.fromkeys((*ours, *theirs)):
        name = "step" if key is None else printable(key)
        if key not in ours or key not in theirs:
            yield f"{name}: only in {b if key not in ours else a}"
        elif (found := difference(ours[key], theirs[key])) is not None:
            yield f"{name}: {found}"


# Records.


def _read_records(path: str) -> Content:
    """Return the steps and values by tag; numbers and texts are the same in both formats, and so is every NaN."""
    from aiohooks.hooks._record_files import read_records

    found: dict[str | None, Series] = {}
    for record in read_records(path):
        for tag, value in _leaves(record.values, ""):
            if value is not None and value != "":  # an empty cell
                found.setdefault(tag, []).append((record.step, _canonical(value)))
    return path, found


def _series_difference(ours: Series, theirs: Series) -> str | None:
    for one, other in itertools.zip_longest(ours, theirs):
        if one != other:
            step = min(each[0] for each in (one, other) if each is not None)
            found = " and ".join(_shown(each[1]) if each and each[0] == step else "nothing" for each in (one, other))
            return f"first differs at step {step}: {found}; {_summary(ours)} and {_summary(theirs)}"
    return None


def _canonical(value: Any) -> Any:
    if value in ("True", "False"):
        value = value == "True"
    try:
        number = float(value)
    except (TypeError, ValueError):  # a text, or an empty list
        return str(value)
    return "NaN" if math.isnan(number) else number  # a NaN differs from itself


def _summary(values: Series) -> str:
    numbers = [value for _, value in values if isinstance(value, float)]
    mean = f", mean {_shown(math.fsum(numbers) / len(numbers))}" if numbers and all(map(math.isfinite, numbers)) else ""
    return f"{len(values)} values, last {_shown(values[-1][1])}{mean}"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))


# Traces.


def _read_trace(path: str) -> Content:
    """Return the seconds and the number of activities by lane."""
    from aiohooks.hooks._lanes import read_trace

    lanes = read_trace(path)
    found: dict[str | None, tuple[float, int]] = {}
    for lane in lanes.lanes:
        secs, count = found.get(lane.name, (0.0, 0))
        found[lane.name] = round(secs + lane.busy_secs(lanes.end), 9), count + len(lane.bars)
    return path, found


def _lane_difference(one: tuple[float, int], other: tuple[float, int]) -> str | None:
    if one == other:
        return None
    ratio = f", {other[0] / one[0]:.3g} times as long" if one[0] else ""
    return f"{one[0]:.6g} s in {one[1]}, and {other[0]:.6g} s in {other[1]} activities{ratio}"


# Checkpoints.


def _read_checkpoint(path: str) -> Content:
    """Return the step and the state of a checkpoint, or of the newest good one in a directory of them."""
    from aiohooks.checkpoint._format import parse_name
    from aiohooks.checkpoint.saver import CheckpointDirectory

    where = Path(os.path.abspath(path))
    name = parse_name(where.name)
    directory = CheckpointDirectory(where.parent if name else where, read_only=True)
    if name is not None:
        step, state = name.step, directory.read(name)
    else:
        restored = directory.restore(None)
        if restored is None:
            raise InvalidArgumentError(f"{path} has no checkpoints; give a directory that has, or one checkpoint of it")
        path, step, state = str(restored.checkpoint.path), restored.checkpoint.step, restored.state
    # Without how long ago a hook was due, which differs between any two runs.
    places: dict[str | None, Any] = {
        place: value for place, value in _leaves(state, "") if not (place.startswith("hooks.") and place.endswith("secs"))
    }
    return path, {None: step, **places}


def _difference(one: Any, other: Any) -> str | None:
    """Return what differs between two leaves of states, or None."""
    kinds = _type_name(one), _type_name(other)
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} and {kinds[1]}"
    if not hasattr(one, "dtype"):
        both_nan = one != one and other != other
        return None if one == other or both_nan else f"{printable(repr(one))} and {printable(repr(other))}"
    if tuple(one.shape) != tuple(other.shape):
        return f"{kinds[0]} of the shapes {tuple(one.shape)} and {tuple(other.shape)}"
    return _array_difference(_as_array(one), _as_array(other), kinds[0])


def _type_name(value: Any) -> str:
    return str(value.dtype) if hasattr(value, "dtype") else type(value).__name__


def _as_array(value: Any) -> Any:
    """Return a tensor as an array; bfloat16 and the like as float32, which holds each of their values."""
    if not hasattr(value, "detach"):
        return value
    try:
        return value.detach().numpy()
    except TypeError:
        return value.detach().float().numpy()


def _array_difference(one: Any, other: Any, kind: str) -> str | None:
    differs = (one != other) & ((one == one) | (other == other))  # a NaN differs from itself
    count = int(differs.sum())
    if not count:
        return None
    shape = f"{kind} {tuple(one.shape)}"
    text = f"{shape}: {count} of {differs.size} elements differ"
    if one.dtype.kind not in "iufc":
        return text
    one, other = one[differs], other[differs]
    wide = "c16" if one.dtype.kind == "c" else "f8"
    largest = _largest_difference(one, other, wide) or _largest_difference(one, other, "O")  # large integers, as Python's
    return f"{text}, by {largest:.6g} at most"


def _largest_difference(one: Any, other: Any, dtype: str) -> float:
    return float(abs(one.astype(dtype) - other.astype(dtype)).max())


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what is in nested mappings and sequences, each with its path; an empty one is there, too."""
    if isinstance(value, Mapping) and value:
        mapping: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        for key, item in mapping.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for number, item in enumerate(cast("Sequence[Any]", value)):
            yield from _leaves(item, f"{path}[{number}]")
    else:
        yield path, value


_KINDS: dict[str, tuple[Callable[[str], Content], Callable[[Any, Any], str | None]]] = {
    "records": (_read_records, _series_difference),
    "traces": (_read_trace, _lane_difference),
    "checkpoints": (_read_checkpoint, _difference),
}
