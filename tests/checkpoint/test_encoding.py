"""What is saved comes back the same to the last bit, or is refused with the way out."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import random
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from aiohooks.checkpoint import _encoding
from aiohooks.errors import InvalidArgumentError
from tests.support.checkpoint_files import same


def there_and_back(state: dict[str, Any]) -> dict[str, Any]:
    """Through the bytes of both files."""
    data, arrays = _encoding.encode(state)
    file = b"".join(map(bytes, arrays.chunks()))
    assert len(file) == arrays.size
    return _encoding.decode(data, file)


DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="<"),
    npst.integer_dtypes(endianness=">"),
    npst.unsigned_integer_dtypes(endianness=">"),
    npst.unsigned_integer_dtypes(endianness="<"),
    npst.floating_dtypes(endianness="<", sizes=(16, 32, 64)),
    npst.floating_dtypes(endianness=">", sizes=(16, 32, 64)),
    npst.complex_number_dtypes(endianness="<", sizes=(64, 128)),
    npst.complex_number_dtypes(endianness=">", sizes=(64, 128)),
    npst.datetime64_dtypes(endianness="<"),
    npst.timedelta64_dtypes(endianness=">"),
    npst.unicode_string_dtypes(endianness="<", max_len=5),
    npst.unicode_string_dtypes(endianness=">", max_len=5),
    npst.byte_string_dtypes(max_len=5),
)
ARRAYS = npst.arrays(DTYPES, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**200), max_value=2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    ARRAYS,
    npst.arrays(npst.floating_dtypes(endianness="<"), ()).map(lambda array: array[()]).filter(lambda one: one.dtype.itemsize < 9),
)
KEYS = st.one_of(
    st.text(), st.integers(min_value=-(2**63), max_value=2**64 - 1), st.sampled_from(["", "__metadata__", "a/b", "~1"])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)),
    max_leaves=6,
)


# The whole tree is slow to make up; the quick part looks at fewer.
@settings(max_examples=30, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=3))
def test_any_state_comes_back_the_same(state: dict[str, Any]) -> None:
    """Types, order of keys, NaN payloads, negative zeros, shapes and byte orders are all kept."""
    assert same(there_and_back(state), state)


@settings(deadline=None)
@given(ARRAYS)
def test_any_array_comes_back_the_same(array: np.ndarray[Any, Any]) -> None:
    """Of every type, byte order and shape."""
    assert same(there_and_back({"a": array})["a"], array)


BITS = np.array([0x7FF8000000000001, 0xFFF800000000BEEF, 0x7FF0000000000001, 0x8000000000000000, 1], np.uint64)
EXACTLY = {
    "NaN payloads": BITS.view(np.float64),
    "half NaN payloads": np.arange(2**16, dtype=np.uint16).view(np.float16),
    "big-endian NaN payloads": BITS.byteswap().view(">f8"),
    "complex NaN payloads": BITS[:4].view(np.complex128),
    "negative zero": np.array(-0.0),
    "no items": np.zeros((0, 3), np.float32),
    "no items of no width": np.ndarray((2,), "U0"),
    "no dimension": np.array(7, ">i4"),
    "many dimensions": np.zeros((1,) * 32, np.int8),
    "bytes that are no bool": np.array([0, 1, 2, 255], np.uint8).view(np.bool_),
    "another stride": np.arange(24).reshape(2, 3, 4)[::-1, :, ::2],
    "repeated by stride": np.broadcast_to(np.float32(2.5), (3, 4)),
    "Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian and strided": np.arange(10, dtype=">u2")[::3],
    "a time that is none": np.array(["NaT", "2020-02-29"], "M8[25us]"),
    "text with zeros at its end": np.array(["ab", "c", ""], "U4"),
    "bytes with zeros inside": np.array([b"a\0b", b"", b"\xff"], "S3"),
    "several pieces": np.arange(_encoding.CHUNK_BYTES // 4 + 7, dtype=np.int64),
    "a read-only one": np.frombuffer(b"12345678", np.int16),
    "a number of numpy": np.float16("nan"),
    "a time of numpy": np.timedelta64(-3, "ns"),
    "a long int": -(2**200),
    "an int at the edge": [2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 255, -128, 2**127],
    "floats": [float("nan"), float("inf"), -0.0, 5e-324, 1.7976931348623157e308],
    "a complex one": complex(-0.0, float("nan")),
    "tuples": ((), ((),), [(1, [(2,)])]),
    "keys": {1: "int", "1": "str", "": 0, -5: {"__metadata__": None}},
    "the generator's state": np.random.default_rng(3).bit_generator.state,
    "the old generator's state": np.random.RandomState(3).get_state(),
    "random's state": random.Random(3).getstate(),
}


@pytest.mark.parametrize("what", EXACTLY)
def test_what_is_easily_lost_is_kept(what: str) -> None:
    """Each of these comes back the same to the last bit."""
    assert same(there_and_back({what: EXACTLY[what]}), {what: EXACTLY[what]})


def test_arrays_that_come_back_belong_to_the_caller() -> None:
    """They can be written to, and do not share memory with each other or with what was saved."""
    one = np.arange(3.0)
    one.flags.writeable = False
    back = there_and_back({"a": one, "b": one})
    back["a"][:] = 9
    assert back["b"].tolist() == one.tolist() == [0, 1, 2]


def test_an_ordered_dict_comes_back_as_a_dict() -> None:
    """Other mappings that are plain underneath keep their items and order; the docstring of `save` says so."""
    state = {"b": collections.OrderedDict(z=1, a=2), "a": types.MappingProxyType({"x": 1})}
    assert same(there_and_back(state), {"b": {"z": 1, "a": 2}, "a": {"x": 1}})


def test_a_file_mapped_into_memory_comes_back_as_an_array(tmp_path: Any) -> None:
    """A `memmap` is an array whose memory is a file."""
    mapped = np.memmap(tmp_path / "raw", np.float32, "w+", shape=(5,))
    assert same(there_and_back({"a": mapped})["a"], np.zeros(5, np.float32))


def test_arrays_are_found_by_their_place_in_the_state() -> None:
    """Names are JSON pointers; what would have the same name, or a reserved one, gets a number."""
    one = np.zeros(1)
    state = {
        "a": {"b": one, "c/d": one},
        "a/b": one,
        "e": [one, {0: one, "0": one}],
        "__metadata__": one,
        "": one,
        "x" * 5000: one,
    }
    _, arrays = _encoding.encode(state)
    found = json.loads(arrays.header()[8:])
    assert set(found) == {
        "a/b", "a/c~1d", "a~1b", "e/0", "e/1/0", "e/1/0~3", "__metadata__~2", "~2", "x" * 5000,
    }  # fmt: skip
    assert same(there_and_back(state), state)


def test_each_array_begins_at_a_multiple_of_its_width() -> None:
    """The widest come first, so a reader may map the file into memory."""
    state = {name: np.ones(3, name) for name in ("u1", "f8", "f2", "i4", "c16", "b1", "i8")}
    _, arrays = _encoding.encode(state)
    header = json.loads(arrays.header()[8:])
    assert len(arrays.header()) % 8 == 0
    for name in ("f8", "f2", "i4", "i8"):
        assert header[name]["data_offsets"][0] % int(name[1:]) == 0


class Colour(enum.IntEnum):
    """An int that is more than an int."""

    RED = 1


class Point(tuple[int, int]):
    """A tuple that is more than a tuple."""


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([None, {}], object), r"state\['a'\]\[0\] has the dtype object.*give a list"),
    "fields": (np.zeros(2, [("x", "f4")]), "give a dict of its fields"),
    "bare bytes": (np.zeros(2, "V2"), "give its bits"),
    "long doubles": (np.zeros(2, np.longdouble), "astype"),
    "a mask": (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
    "a set": ({1, 2}, "sorted"),
    "a bytearray": (bytearray(b"a"), "give bytes"),
    "a time": (datetime.datetime(2020, 1, 1), "isoformat"),
    "an enum": (Colour.RED, r"give int\(\.\.\.\)"),
    "a named tuple": (Point((1, 2)), r"give tuple\(\.\.\.\)"),
    "text of numpy": (np.str_("a"), r"give str\(\.\.\.\)"),
    "an object": (object(), "state_dict"),
    "a function": (len, "state_dict"),
    "no text": ("\ud800", "give its bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_exact_form_is_refused_with_the_way_out(what: str) -> None:
    """The message names the place in the state, the type, and what to give instead."""
    value, message = REFUSED[what]
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        _encoding.encode({"a": [value]})
    assert "state['a'][0]" in str(caught.value)


@pytest.mark.parametrize("key", [None, 1.0, (1,), True, b"a", 2**64, np.int64(1), "\ud800"])
def test_keys_are_text_or_ints(key: Any) -> None:
    """Other keys would come back as something else."""
    with pytest.raises(InvalidArgumentError, match="state"):
        _encoding.encode({"a": {key: 1}})


def test_a_state_is_a_mapping_of_finite_depth() -> None:
    """A list is no state, and one that contains itself does not end."""
    loop: list[Any] = []
    loop.append(loop)
    for state in ([1], None, {"a": loop}):
        with pytest.raises(InvalidArgumentError, match="state"):
            _encoding.encode(state)  # type: ignore[arg-type]


def test_the_same_state_gives_the_same_bytes() -> None:
    """Nothing of the moment is in a checkpoint: no time, no address, no order of a hash."""
    parts = [_encoding.encode({"a": np.arange(3), "b": {"c": (1, 2**99)}}) for _ in range(2)]
    assert parts[0][0] == parts[1][0]
    assert [*map(bytes, parts[0][1].chunks())] == [*map(bytes, parts[1][1].chunks())]
