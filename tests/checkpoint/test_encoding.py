"""A state comes back equal to the last bit, or is refused with a hint; files that no writer makes
are refused.
"""

from __future__ import annotations

import collections
import datetime
import enum
import gc
import json
import random
import re
import struct
import types
import weakref
from collections.abc import Callable
from io import BytesIO
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from aiohooks.checkpoint import _encoding
from aiohooks.checkpoint._format import DamagedError, damage_in
from aiohooks.checkpoint.stateful import HostMemory, snapshot
from aiohooks.errors import InvalidArgumentError
from tests.support.checkpoint_files import same


def encoded(state: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the two files of a state: its tree and its arrays."""
    contents = _encoding.encode(state)
    return b"".join(contents["state.msgpack"]), b"".join(contents["arrays.safetensors"])


def header_of(file: bytes) -> bytes:
    """Return the header of a file of arrays."""
    return file[8 : 8 + int.from_bytes(file[:8], "little")]


def there_and_back(state: dict[str, Any]) -> dict[str, Any]:
    """Encode and decode a state."""
    return decode(*encoded(state))


def loaded(file: bytes) -> dict[str, Any]:
    """Return the arrays of a file."""
    with damage_in("arrays.safetensors"):
        return _encoding.read_arrays(BytesIO(file), len(file))


def decode(data: bytes, file: bytes) -> dict[str, Any]:
    """Decode the two files of a state."""
    return _encoding.decode(data, loaded(file))


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
    npst.arrays(npst.floating_dtypes(endianness="<"), ())
    .map(lambda array: array[()])
    .filter(lambda scalar: scalar.dtype.itemsize < 9),
)
KEYS = st.one_of(
    st.text(),
    st.integers(min_value=-(2**63), max_value=2**64 - 1),
    st.sampled_from(["", "__metadata__", "a/b", "~1"]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)
    ),
    max_leaves=6,
)


# Whole trees are slow to generate, hence fewer examples.
@settings(max_examples=30, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=3))
def test_any_state_comes_back_the_same(state: dict[str, Any]) -> None:
    """Types, order of keys, NaN payloads, negative zeros, shapes and byte orders are all kept."""
    assert same(there_and_back(state), state)


BITS = np.array(
    [0x7FF8000000000001, 0xFFF800000000BEEF, 0x7FF0000000000001, 0x8000000000000000, 1], np.uint64
)
EXACTLY = {
    "NaN payloads": BITS.view(np.float64),
    "half NaN payloads": np.arange(2**16, dtype=np.uint16).view(np.float16),
    "big-endian NaN payloads": BITS.byteswap().view(">f8"),
    "complex NaN payloads": BITS[:4].view(np.complex128),
    "negative zero": np.array(-0.0),
    "no items of no width": np.ndarray((2,), "U0"),
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
    "keys": {
        1: "int",
        "1": "str",
        "": 0,
        -5: {"__metadata__": None},
        -(2**63): "least",
        2**64 - 1: "most",
    },
    "many tuples side by side": [((1,), (2,))] * 100,
    "the generator's state": np.random.default_rng(3).bit_generator.state,
    "the old generator's state": np.random.RandomState(3).get_state(),
    "random's state": random.Random(3).getstate(),
}


@pytest.mark.parametrize("what", EXACTLY)
def test_what_is_easily_lost_is_kept(what: str) -> None:
    """Each of these comes back equal to the last bit."""
    assert same(there_and_back({what: EXACTLY[what]}), {what: EXACTLY[what]})


def test_arrays_that_come_back_belong_to_the_caller() -> None:
    """They are writable, and share no memory with each other or with what was saved."""
    array = np.arange(3.0)
    array.flags.writeable = False
    back = there_and_back({"a": array, "b": array})
    back["a"][:] = 9
    assert back["b"].tolist() == array.tolist() == [0, 1, 2]


def test_what_comes_back_as_another_type(tmp_path: Any) -> None:
    """An OrderedDict and a mapping proxy keep their items and order; a `memmap` is an array whose
    memory is a file.
    """
    mapped = np.memmap(tmp_path / "raw", np.float32, "w+", shape=(5,))
    state = {
        "b": collections.OrderedDict(z=1, a=2),
        "a": types.MappingProxyType({"x": 1}),
        "c": mapped,
    }
    assert same(
        there_and_back(state), {"b": {"z": 1, "a": 2}, "a": {"x": 1}, "c": np.zeros(5, np.float32)}
    )


def test_arrays_are_named_by_their_place_in_the_state() -> None:
    """Names are JSON pointers; equal and reserved names get a number."""
    array = np.zeros(1)
    state = {
        "a": {"b": array, "c/d": array},
        "a/b": array,
        "e": [array, {0: array, "0": array}],
        "__metadata__": array,
        "": array,
        "x" * 5000: array,
    }
    _, file = encoded(state)
    found = json.loads(header_of(file))
    assert set(found) == {
        "a/b",
        "a/c~1d",
        "a~1b",
        "e/0",
        "e/1/0",
        "e/1/0~7",
        "__metadata__~8",
        "~9",
        "x" * 5000,
    }
    assert same(there_and_back(state), state)


class Colour(enum.IntEnum):
    """A subclass of int."""

    RED = 1


class Point(tuple[int, int]):
    """A subclass of tuple."""


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (
        np.array([None, {}], object),
        r"state\['a'\]\[0\] has the dtype object.*or a list",
    ),
    "fields": (np.zeros(2, [("x", "f4")]), "or a list or dict of its items"),
    "bare bytes": (np.zeros(2, "V2"), "or a list or dict of its items"),
    "a time without a unit": (np.zeros(2, "m8"), "times with a unit"),
    "long doubles": (np.zeros(2, np.longdouble), "astype"),
    "a mask": (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
    "a set": ({1, 2}, "give plain data"),
    "a bytearray": (bytearray(b"a"), "give plain data"),
    "a time": (datetime.datetime(2020, 1, 1), "give plain data"),
    "an enum": (Colour.RED, r"int\(\.\.\.\) of an enum"),
    "a named tuple": (Point((1, 2)), "give plain data"),
    "text of numpy": (np.str_("a"), "give plain data"),
    "an object": (object(), "state_dict"),
    "a function": (len, "state_dict"),
    "no text": ("\ud800", "give its bytes"),
    "no text in a tuple": (("\ud800",), r"\[0\] is .*; give its bytes"),
    # They would come back as another type.
    **{
        f"the key {key!r}": ({key: 1}, "has the key .*keys are str or int of 64 bits: give str")
        for key in (None, 1.0, (1,), True, b"a", 2**64, -(2**63) - 1, np.int64(1))
    },
    "a key that is no text": ({"\ud800": 1}, "is not valid text; give its bytes"),
    "a key of an array that is no text": ({"\ud800": np.zeros(2)}, "give its bytes"),
    "a key of 65 bits in a tuple": (({2**64: 1},), "keys are str or int of 64 bits"),
    "a counter of what is no text": (collections.Counter({"\ud800": 1}), "give its bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_exact_form_is_refused_with_a_hint(what: str) -> None:
    """The message names the place in the state, the type, and what to give instead."""
    value, message = REFUSED[what]
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        _encoding.encode({"a": [value]})
    assert "state['a'][0]" in str(caught.value)


@pytest.mark.parametrize("length", [400, 401])
def test_a_long_place_is_cut_in_a_message(length: int) -> None:
    """Of more than 400 characters; a message is for people."""
    place = "state['" + "a" * (length - 9) + "']"
    with pytest.raises(InvalidArgumentError) as caught:
        _encoding.encode({place[7:-2]: object()})
    assert str(caught.value).startswith(f"{place[:400]} is")


def test_the_metadata_of_a_module_has_a_place() -> None:
    """It is an attribute of the state of a module, and no key."""
    state: Any = collections.OrderedDict(v=1)
    state._metadata = {"v": object()}
    with pytest.raises(InvalidArgumentError, match=r"state\['m'\]\['_metadata'\]\['v'\] is"):
        _encoding.encode({"m": state})


def test_a_state_is_a_mapping() -> None:
    """A list is not a state."""
    for state in ([1], None):
        with pytest.raises(InvalidArgumentError, match="state"):
            _encoding.encode(state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrap", [lambda inner: [inner], lambda inner: {"k": inner}, lambda inner: (inner,)]
)
def test_the_depth_of_a_state_has_a_limit(wrap: Callable[[Any], Any]) -> None:
    """63 levels below the state come back; one more is refused, long before the stack is full, with
    its place.
    """
    value: Any = np.float32(1)
    for _ in range(63):
        value = wrap(value)
    assert there_and_back({"a": value}) == {"a": value}
    with pytest.raises(
        InvalidArgumentError,
        match=r"a.*\.\.\. is nested deeper than 64 levels, or in itself; flatten it",
    ):
        _encoding.encode({"a": wrap(value)})


def test_a_restored_state_is_freed_when_it_is_dropped() -> None:
    """Its memory, which may be most of the machine's, does not wait for the garbage collector."""
    state = there_and_back({"a": np.arange(1000), "b": (1, (2,))})
    array = weakref.ref(state["a"])
    gc.disable()
    try:
        del state
        assert array() is None
    finally:
        gc.enable()


def test_the_number_of_arrays_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkpoint can hold, it holds; a state with more arrays is refused before it is
    written.
    """
    state = {"a": np.arange(3), "b": np.arange(4)}
    longest = len(header_of(encoded(state)[1]))
    monkeypatch.setattr(_encoding, "_MAX_HEADER_BYTES", longest)
    assert there_and_back(state)["b"].tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(_encoding, "_MAX_HEADER_BYTES", longest - 1)
    with pytest.raises(
        InvalidArgumentError,
        match="the state has 2 arrays, more than a checkpoint can hold; join small ones",
    ):
        _encoding.encode(state)


# Files with the right checksums that no writer makes


def test_states_that_no_writer_makes_are_refused() -> None:
    """Checksums do not prove that a writer of ours made a file: every part of both files is
    checked.
    """
    data, good = encoded({"a": np.arange(4, dtype=np.int32)})
    assert decode(data, good)["a"].tolist() == [0, 1, 2, 3]

    def tree(value: Any) -> bytes:
        return msgspec.msgpack.encode({"x": value})

    def ext(code: int, *items: Any) -> bytes:
        return tree(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(list(items))))

    plain = msgspec.msgpack.Ext
    wrong = [
        b"",
        b"\xc1",
        data[:-1],
        data + b"\0",
        msgspec.msgpack.encode([1]),
        b"\x91" * 1_000_000,
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa1\xff\x00",
        b"\x81\x80\x00",
        tree(plain(99, b"")),
        ext(9, "a", "<i4", [4]),
        ext(9, "<i4", b"1234"),
        tree(plain(3, b"123")),
        ext(4, "a"),
        ext(4, "b", "<i4", [4]),
        ext(4, 5, "<i4", [4]),
        ext(4, "a", None, [4]),
        ext(5, "<i4", b"123"),
        ext(5, "<U1", b"1234"),
        ext(5, "<i4", "1234"),
        ext(5, "|O", b"12345678"),
    ]
    shapes: list[Any] = [
        [5],
        [-4],
        [True, 4],
        "4",
        [2**62, 2**62, 0],
        [1] * 100 + [4],
        [[4]],
        None,
    ]
    dtypes = [
        "|O",
        "O",
        "<i4,<i4",
        "|V16",
        "<i3",
        "=i4",
        "i4",
        "os.system",
        "<U" + "9" * 30,
        "<M8[foo]",
        "<M8",
    ]
    wrong += [ext(4, "a", "<i4", shape) for shape in shapes]
    wrong += [ext(4, "a", dtype, shape) for dtype in dtypes for shape in ([4], [1], [0])]
    for wrong_data in wrong:
        with pytest.raises(DamagedError, match=r"^state\.msgpack "):
            decode(wrong_data, good)
    for size in (-1, 2**63, 2.0, True, "2"):
        with pytest.raises(DamagedError, match=r"^state\.msgpack .*Expected `int`"):
            decode(ext(4, "a", "<i4", [size]), good)
    # The file has this array as plain bytes, so that only the tree states its shape.
    _, file = encoded({"a": np.arange(4, dtype=np.complex64)})
    with pytest.raises(DamagedError, match=r"state\.msgpack .*of length <= 64"):
        decode(ext(4, "a", "<c8", [1] * 100 + [4]), file)


def test_array_files_that_no_writer_makes_are_refused() -> None:
    """Of another form, shape or length; see below for arrays that do not follow each other."""
    data, good = encoded({"a": np.arange(4, dtype=np.int32)})

    def file(header: Any) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + good[-16:]

    def entry(begin: int, end: int) -> dict[str, Any]:
        return {"dtype": "I32", "shape": [4], "data_offsets": [begin, end]}

    wrong = [
        b"",
        good[:-1],
        good + b"\0",
        file(b"["),
        file(b"{" * 10_000),
        file({}),
        file({"b": entry(0, 16)}),
        file({"a": [1]}),
        file({"a": entry(-16, 0)}),
        file({"a": {**entry(0, 16), "data_offsets": [0, 16, 0]}}),
        good[:7],
        good[:20],
    ]
    for wrong_file in wrong:
        with pytest.raises(DamagedError, match=r"^(state\.msgpack|arrays\.safetensors) "):
            decode(data, wrong_file)


def _entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


FAULTS = {
    "a header of 2**63 bytes": (2**63, {}, "its header is too long"),
    "a header that is longer than the file": (100, {}, "its header is too long"),
    "arrays that overlap": (
        None,
        {"a": _entry(0, 4), "b": _entry(2, 6)},
        "its arrays overlap, or have gaps",
    ),
    "a gap": (None, {"a": _entry(0, 2), "b": _entry(4, 6)}, "its arrays overlap, or have gaps"),
    "an array that ends before it begins": (
        None,
        {"a": _entry(0, 6), "b": _entry(6, 2)},
        "its arrays overlap, or have gaps",
    ),
    "bytes that belong to no array": (
        None,
        {"a": _entry(0, 4)},
        "has 6 bytes of arrays, and 4 in its header",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_the_reason_why_an_array_file_is_refused(what: str) -> None:
    """It names the fault itself, and not what follows from reading on."""
    size, header, reason = FAULTS[what]
    text = json.dumps(header).encode()
    file = struct.pack("<Q", len(text) if size is None else size) + text + bytes(6)
    with pytest.raises(DamagedError, match=re.escape(reason)):
        loaded(file)


def test_arrays_of_one_name_are_told_apart() -> None:
    """Each gets the next number, without a search among the others: 30,000 of them take no longer
    than of different names.
    """
    rows: list[dict[Any, Any]] = [{1: np.ones(1), "1": np.zeros(1)}] * 15_000
    state = {
        "1": {key: row for key, row in enumerate(rows)},
        1: {str(key): row for key, row in enumerate(rows)},
    }
    _, file = encoded(cast("Any", state))
    header = json.loads(header_of(file))
    assert len(header) == 60_000


def in_itself() -> list[Any]:
    found: list[Any] = []
    found += [found, found]
    return found


def test_a_state_in_itself_is_refused() -> None:
    """It has no end; a snapshot of it, which seeks tensors, ends."""
    state = {"x": in_itself()}
    with pytest.raises(InvalidArgumentError, match="is nested deeper than 64 levels, or in itself"):
        _encoding.encode(state)
    snapshot(state, HostMemory())


@pytest.mark.parametrize("pair", [lambda x: [x, x], lambda x: (x, x), lambda x: {1: x, 2: x}])
def test_containers_that_share_each_other_are_counted(
    pair: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 of them would be written 2**60 times; the message says what to do instead."""
    monkeypatch.setattr(_encoding, "MAX_CONTAINERS", 1000)
    state: Any = 0
    for _ in range(60):
        state = pair(state)
    with pytest.raises(InvalidArgumentError, match=r"more than 1000 lists, tuples and dicts"):
        _encoding.encode({"x": state})


def test_a_state_that_is_too_deep_for_a_copy_is_refused() -> None:
    """The copy that is made of the states of hooks and tracked objects is no bare
    RecursionError.
    """
    state: Any = {}
    for _ in range(100_000):
        state = [state]
    with pytest.raises(InvalidArgumentError, match="nested deeper than 64 levels"):
        snapshot(state, HostMemory())
    while state:
        state = state.pop()  # or its end would be a recursion of the interpreter


@pytest.mark.parametrize("sizes", [[1] * 200_000, [2**62] * 200_000])
def test_a_forged_shape_is_damage(sizes: list[int]) -> None:
    """Of however many dimensions: it takes no time and no memory."""
    data, file = encoded({"x": np.zeros((0, 2), np.int8)})
    code = msgspec.msgpack.decode(data)["x"].code
    for number, content in (
        (code, ["x", "|i1", sizes]),
        (6, ["x", "int8", [1], sizes, 0]),
    ):
        forged = msgspec.msgpack.encode(
            {"x": msgspec.msgpack.Ext(number, msgspec.msgpack.encode(content))}
        )
        with pytest.raises(DamagedError):
            decode(forged, file)
