"""A state to the bytes of its two files and back: the arrays, and the tree that contains them.

The tree is MessagePack. Types that MessagePack does not have are extension types with the numbers
below. No name in a file is ever looked up, and nothing in a file is ever executed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, cast

from aiohooks.checkpoint._format import (
    ARRAYS,
    DTYPES,
    MAX_INT,
    STATE,
    VERSION,
    DamagedError,
    damage_in,
)
from aiohooks.checkpoint.stateful import MAX_DEPTH, tensors_in, torch_support
from aiohooks.errors import InvalidArgumentError, missing_extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

try:
    import msgspec
    import numpy as np
except ImportError as error:
    raise missing_extra("aiohooks.checkpoint", "checkpoint") from error

Array: TypeAlias = "NDArray[Any]"
_Path: TypeAlias = tuple[str | int, ...]
"""Keys and indexes that lead to a value in the state."""

CHUNK_BYTES = 1 << 20
"""The size of one write."""
_ALIGNMENT = 64
_MOST_BUFFERS = 1000
"""How many arrays one read fills; systems allow 1024."""
# The limit of the safetensors library.
_MAX_HEADER_BYTES = 100_000_000

# The types that safetensors has a name for. All others (complex numbers, times, fixed-width text
# and bytes) are stored as plain bytes; the tree has their dtype.
_KINDS = {name: np.dtype(each.array) for name, each in DTYPES.items()}
_NATIVE = {
    each.array[1:]: each.native
    for name, each in DTYPES.items()
    if each.native and _KINDS[name].name == name
}
_SUPPORTED = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[mM]8\[[0-9]*[a-zA-Z]+\]|U[0-9]+|S[0-9]+)", re.ASCII
)


def _check_dtype(dtype: np.dtype[Any], place: str) -> str:
    """Return the name of a type in a checkpoint.

    Raises:
        InvalidArgumentError: it has no exact form on disk.
    """
    # The kind is checked too because structured types and those of other packages (bfloat16) have
    # the name of plain bytes.
    if dtype.kind in "biufcmMUS" and _SUPPORTED.fullmatch(dtype.str):
        return dtype.str
    if dtype.kind == "O":
        hint = "give a list of its items, or an array of numbers"
    elif dtype.names is not None:
        hint = "give a dict of its fields"
    elif dtype.kind in "mM":
        hint = f"give it a unit, such as .astype('{dtype.kind}8[ns]')"
    elif dtype.kind == "V":
        hint = "give its bits, as .view(numpy.uint8) or .view(numpy.uint16)"
    else:
        hint = (
            "give it as a type of fixed size that is the same on every machine, such as"
            " .astype(numpy.float64)"
        )
    raise InvalidArgumentError(
        f"{place} has the dtype {dtype}, which a checkpoint cannot hold exactly; {hint}"
    )


class _Stored(NamedTuple):
    """An array of the file: its entry in the header, and where its bytes come from when they are
    written.
    """

    native: str | None
    """The name that safetensors has for its dtype; without one, plain bytes are stored."""
    shape: list[int]
    nbytes: int
    alignment: int
    data: Callable[[], memoryview]


class ArrayFile:
    """The arrays of a state, to be written to a safetensors file from their own memory.

    Only an array that is not C-contiguous or is big-endian is copied, one array at a time; likewise
    a tensor on a device.
    """

    def __init__(self, arrays: Mapping[str, _Stored], version: int) -> None:
        self.version = version
        """The version of the format that has all of what the state has."""
        # The widest first, so that each array begins at a multiple of its item size.
        in_order = sorted(arrays.items(), key=lambda each: -each[1].alignment)
        entries: dict[str, Any] = {}
        offset = 0
        for name, stored in in_order:
            entries[name] = {
                "dtype": stored.native or "U8",
                "shape": stored.shape if stored.native else [stored.nbytes],
                "data_offsets": [offset, offset + stored.nbytes],
            }
            offset += stored.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode("ascii")
        text += b" " * (-len(text) % 8)
        if len(text) > _MAX_HEADER_BYTES:
            raise InvalidArgumentError(
                f"the state has {len(entries)} arrays, more than a checkpoint can hold; join small"
                " ones"
            )
        self._in_order = [stored for _, stored in in_order]
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + offset

    def chunks(self) -> Iterator[bytes | memoryview]:
        yield self.header
        for stored in self._in_order:
            if stored.nbytes:
                data = stored.data()
                for start in range(0, len(data), CHUNK_BYTES):
                    yield data[start : start + CHUNK_BYTES]


def _little_endian_bytes(array: Array, dtype: str) -> memoryview:
    if dtype.startswith(">"):
        array = array.byteswap()
    return memoryview(cast("Any", np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An array in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_OTHER_ARRAY = "has another dtype or shape of an array than the other file"
_read_header = msgspec.json.Decoder(dict[str, _Entry]).decode


def _aligned_memory(sizes: Sequence[int]) -> list[Array]:
    """Return parts of one new memory, aligned as torch aligns its own: the last bits of a matrix
    product may depend on it.
    """
    offsets = list(
        itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    )
    memory = np.empty(offsets[-1] + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return [
        memory[first + offset : first + offset + size]
        for offset, size in zip(offsets, sizes, strict=False)
    ]


class LoadedArrays:
    """The arrays of a file, to be taken one by one.

    The safetensors library copies all of them in one call that holds the interpreter's lock, so
    that the event loop would stop for a second for each GiB. Here they are read into the memory
    that the caller gets. Small ones share some.
    """

    def __init__(self, read_into: Callable[[list[memoryview]], None], size: int) -> None:
        """Read a file of `size` bytes by `read_into`, which fills arrays with what follows in the
        file.

        Raises:
            DamagedError: it is not a safetensors file, or its arrays do not follow each other.
        """
        start = bytearray(8)
        read_into([memoryview(start)])
        header_size = int.from_bytes(start, "little")
        if header_size > min(_MAX_HEADER_BYTES, size - 8):
            raise DamagedError("is not a safetensors file (its header is too long)")
        header = bytearray(header_size)
        read_into([memoryview(header)])
        try:
            entries = _read_header(header)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DamagedError(f"is not a safetensors file ({type(error).__name__})") from None
        in_order = sorted((*entry.data_offsets, name) for name, entry in entries.items())
        place = 0
        for begin, end, _ in in_order:
            if begin != place or end < begin:
                raise DamagedError("is not a safetensors file (its arrays overlap, or have gaps)")
            place = end
        if place != size - 8 - header_size:
            raise DamagedError(
                f"has {size - 8 - header_size} bytes of arrays, and {place} in its header"
            )
        self._arrays: dict[str, tuple[_Entry, Array]] = {}
        first = 0
        for number, (_, end, _) in enumerate(in_order, 1):
            if (
                number == len(in_order)
                or in_order[number][1] - in_order[first][0] > CHUNK_BYTES
                or number - first == _MOST_BUFFERS
            ):
                group, first = in_order[first:number], number
                arrays = _aligned_memory([end - begin for begin, end, _ in group])
                read_into([memoryview(cast("Any", each)) for each in arrays])
                for (_, _, name), array in zip(group, arrays, strict=True):
                    self._arrays[name] = entries[name], array

    def take(self, name: str, dtype: str, sizes: list[int]) -> Array:
        """Return the array of that name, once. It belongs to the caller and is writable.

        Raises:
            DamagedError: there is none, or it has another dtype or shape.
        """
        kind = _parse_dtype(dtype)
        data = self.take_bytes(name, _NATIVE.get(dtype[1:]), sizes)
        if math.prod(sizes) * kind.itemsize != len(data):
            raise DamagedError(_OTHER_ARRAY)
        return _make_array(kind, sizes, data)

    def take_bytes(self, name: str, native: str | None, sizes: list[int]) -> Array:
        """Return the bytes of the array of that name, once.

        Raises:
            DamagedError: there is none, or its header has not that dtype and shape, or plain bytes
                for a dtype without a name.
        """
        found = self._arrays.pop(name, None)
        if found is None:
            raise DamagedError("refers to an array that is not in the other file")
        entry, data = found
        if (entry.dtype, entry.shape) != (native or "U8", sizes if native else [len(data)]):
            raise DamagedError(_OTHER_ARRAY)
        return data

    def check_all_taken(self) -> None:
        """Raise `DamagedError` if there are arrays that the tree does not refer to."""
        if self._arrays:
            raise DamagedError(f"has {len(self._arrays)} arrays that the state does not refer to")


def _bytes_of_block(block: Any) -> memoryview:
    data: Array = block.on_device().cpu().numpy()  # its own memory if that is the host's
    if block.has_gaps:  # what lies there is no part of the state, and may be different each time
        data, used = data.copy(), np.zeros(len(data), np.bool_)
        for member in block.members:
            _mark(used, *member)
        data[~used] = 0
    return memoryview(cast("Any", data))


def _mark(
    used: Array, offset: int, shape: Sequence[int], strides: Sequence[int], item_size: int
) -> None:
    """Mark the bytes of a tensor in its block, in a time that depends on the block and not on the
    tensor, which may be larger.
    """
    if math.prod(shape) * item_size <= len(used):
        np.ndarray((*shape, item_size), np.bool_, cast("Any", used), offset, (*strides, 1))[...] = (
            True
        )
        return
    own = np.zeros(len(used) - offset, np.bool_)
    own[:item_size] = True
    for size, stride in zip(shape, strides, strict=True):
        done = 1 if stride else size
        while done < size:  # one, two, four elements ...
            more = min(done, size - done)
            own[more * stride :] |= own[: len(own) - more * stride].copy()
            done += more
    used[offset:] |= own


def _make_array(kind: np.dtype[Any], shape: list[int], data: Array) -> Array:
    """Return an array in the memory of `data`."""
    try:
        array: Array = np.ndarray(shape, kind, data if len(data) else None)
    except (ValueError, TypeError, OverflowError):  # too many dimensions, or too large
        raise DamagedError("has an invalid array shape") from None
    if kind.byteorder == ">":
        flat = array.reshape(-1)
        for start in range(0, flat.size, CHUNK_BYTES):
            flat[start : start + CHUNK_BYTES].byteswap(inplace=True)
    return array


@functools.lru_cache(1024)
def _parse_dtype(text: str) -> np.dtype[Any]:
    if len(text) <= 40 and _SUPPORTED.fullmatch(text):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found: np.dtype[Any] = np.dtype(text)
            if found.str == text:
                return found
    raise DamagedError("has an unknown dtype")


_TUPLE, _INT, _COMPLEX, _ARRAY, _SCALAR, _TENSOR, _COUNTER, _MODULE = 1, 2, 3, 4, 5, 6, 7, 8
"""Numbers of the extension types, which are part of the format; from `_TENSOR` on of its version
2.
"""

_MOST_REPEATED = 2_000_000
"""How many items there may be in lists and dicts that the state has already."""

_HINTS = {
    "set": "give sorted(...) of it",
    "frozenset": "give sorted(...) of it",
    "bytearray": "give bytes(...) of it",
    "memoryview": "give bytes(...) of it",
    "deque": "give list(...) of it",
    "datetime": "give its .isoformat() or .timestamp()",
}


def encode(state: Mapping[str, Any]) -> tuple[bytes, ArrayFile]:
    """Return the bytes of the tree, and the arrays, which are not copied.

    Raises:
        InvalidArgumentError: something in it has no exact form on disk; the message says where it
            is and what to give.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(f"state is a {type(state).__name__}; give a mapping")
    try:
        encoder = _Encoder(state)
        data = _write_tree(encoder.tree(dict(state), ()))
    except (ValueError, OverflowError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(
            f"state has a value that is too large for a checkpoint: {error}"
        ) from error
    return data, ArrayFile(encoder.arrays, encoder.version)


def decode(data: bytes, arrays: LoadedArrays) -> dict[str, Any]:
    """Return the state in the bytes of the tree, and the arrays.

    Raises:
        DamagedError: they are not what `encode` makes; the message begins with the name of the
            file.
    """
    return _Decoder(arrays).state(data)


_read_tree = msgspec.msgpack.Decoder().decode
_write_tree = msgspec.msgpack.Encoder().encode


class _Encoder:
    def __init__(self, state: Mapping[str, Any]) -> None:
        self.arrays: dict[str, _Stored] = {}
        self.version = 1
        self._numbers: dict[str, int] = {}
        """The next number for arrays of one name."""
        self._torch = torch_support()
        self._names_of_blocks: dict[Any, str] = {}
        self._met: set[int] = set()
        self._repeated = 0
        if self._torch is not None:
            tensors = {id(tensor): tensor for tensor in tensors_in(state, self._torch)}
            self._places = self._torch.place(tensors)

    def _add(self, path: _Path, stored: _Stored) -> str:
        """Add an array under its path; return its name in the file."""
        # A JSON pointer, for other readers of the file. Escaping gives only `~0` and `~1`, so `~`
        # with another number can make equal names different.
        name = "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in path)
        if name in ("", "__metadata__"):
            name += "~2"
        if name in self.arrays:
            number = self._numbers.get(name, 3)
            self._numbers[name] = number + 1
            name = f"{name}~{number}"
        self.arrays[name] = stored
        return name

    def tree(self, value: Any, path: _Path) -> Any:
        """Return what represents a value in MessagePack."""
        kind = cast("object", type(value))
        if value is None or kind is bool or kind is float or kind is bytes:
            return value
        if kind is str:
            return self._text(value, path)
        if kind is int:
            return (
                value
                if -(2**63) <= value < 2**64
                else msgspec.msgpack.Ext(_INT, _int_to_bytes(value))
            )
        if kind is complex:
            return msgspec.msgpack.Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))
        if kind is OrderedDict and hasattr(
            value, "_metadata"
        ):  # the state of a module, which has its versions there
            return self._later(
                _MODULE, [self._dict(value, path), self.tree(value._metadata, (*path, "_metadata"))]
            )
        if kind is dict or kind is OrderedDict or kind is MappingProxyType:
            return self._dict(value, path)
        if kind is Counter:
            return self._later(_COUNTER, [self._dict(value, path)])
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return msgspec.msgpack.Ext(_TUPLE, _write_tree(self._items(value, path)))
        if (
            kind is np.ndarray or kind is np.memmap
        ):  # other subclasses have more (a mask, a unit) than would be kept
            return self._array(value, path)
        if issubclass(type(value), np.generic) and not issubclass(
            type(value), np.flexible
        ):  # which lose zeros at their end
            array: Array = np.asarray(value)
            dtype = _check_dtype(array.dtype, _text_of(path))
            return msgspec.msgpack.Ext(
                _SCALAR, _write_tree([dtype, bytes(_little_endian_bytes(array, dtype))])
            )
        if self._torch is not None and self._torch.is_tensor(value):
            return self._tensor(value, path)
        raise self._refused(value, path)

    def _later(self, code: int, items: list[Any]) -> msgspec.msgpack.Ext:
        """Return a value that the first version of the format does not have."""
        self.version = VERSION
        return msgspec.msgpack.Ext(code, _write_tree(items))

    def _array(self, array: Array, path: _Path) -> msgspec.msgpack.Ext:
        dtype, shape = _check_dtype(array.dtype, _text_of(path)), list(array.shape)
        native, data = _NATIVE.get(dtype[1:]), functools.partial(_little_endian_bytes, array, dtype)
        name = self._add(
            path, _Stored(native, shape, array.nbytes, array.itemsize if native else 1, data)
        )
        return msgspec.msgpack.Ext(_ARRAY, _write_tree([name, dtype, shape]))

    def _tensor(self, tensor: Any, path: _Path) -> msgspec.msgpack.Ext:
        reason = self._torch.refusal(tensor)
        if reason is not None:
            raise InvalidArgumentError(f"{_text_of(path)} {reason}")
        place, dtype = self._places[id(tensor)], self._torch.dtype_name(tensor)
        shape, strides, width = list(place.shape), list(place.strides), _KINDS[dtype].itemsize
        is_whole = strides == _contiguous(shape) and math.prod(shape) * width == place.block.nbytes
        name = self._names_of_blocks.get(place.block)
        if (
            name is None
        ):  # the first of the tensors in this memory decides how other programs see it
            native, data = (
                DTYPES[dtype].native if is_whole else None,
                functools.partial(_bytes_of_block, place.block),
            )
            name = self._add(path, _Stored(native, shape, place.block.nbytes, width, data))
            self._names_of_blocks[place.block] = name
        return self._later(
            _TENSOR, [name, dtype, shape, *([] if is_whole else [strides, place.offset])]
        )

    def _text(self, value: str, path: _Path) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                f"{_text_of(path)} is {value!r}, which is not valid text; give its bytes"
            ) from None
        return value

    def _items(self, items: list[Any] | tuple[Any, ...], path: _Path) -> list[Any]:
        self._check_nesting(items, path)
        return [self.tree(item, (*path, index)) for index, item in enumerate(items)]

    def _dict(self, items: Mapping[Any, Any], path: _Path) -> dict[Any, Any]:
        self._check_nesting(items, path)
        found: dict[Any, Any] = {}
        for key, value in items.items():
            if type(key) is int and -(2**63) <= key < 2**64:
                found[key] = self.tree(value, (*path, key))
            elif type(key) is str:
                found[self._text(key, path)] = self.tree(value, (*path, key))
            else:
                raise InvalidArgumentError(
                    f"{_text_of(path)} has the key {key!r} of type {type(key).__name__}; keys are"
                    " str or int of 64 bits: give str(...) of it"
                )
        return found

    def _check_nesting(self, container: Sized, path: _Path) -> None:
        if id(container) not in self._met:
            self._met.add(id(container))
        else:
            self._repeated += 1 + len(container)
        if self._repeated > _MOST_REPEATED:  # sixty lists, each twice in the next, are 2**60
            raise InvalidArgumentError(
                f"{_text_of(path[:4])}... has the same lists or dicts again and again, and each of"
                f" their more than {_MOST_REPEATED} items would be written; give them once"
            )
        if len(path) >= MAX_DEPTH:
            raise InvalidArgumentError(
                f"{_text_of(path[:4])}... is nested deeper than {MAX_DEPTH} levels, or in itself;"
                " flatten it"
            )

    def _refused(self, value: object, path: _Path) -> InvalidArgumentError:
        kind = type(value)
        hint = _HINTS.get(kind.__name__)
        if hint is None:
            near = next(
                (
                    each
                    for each in kind.__mro__[1:]
                    if each in (int, float, str, bytes, tuple, list, dict)
                ),
                None,
            )
            hint = (
                f"give {near.__name__}(...) of it"
                if near is not None
                else "give plain data, or what its state_dict() returns"
            )
        return InvalidArgumentError(
            f"{_text_of(path)} is of the type {kind.__module__}.{kind.__qualname__}, which a"
            f" checkpoint cannot hold; {hint}"
        )


_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


class _Tensor(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A tensor in the tree; strides and offset, in elements and bytes, only if it is not all of its
    array.
    """

    name: str
    dtype: str
    shape: list[_Size]
    strides: list[_Size] | None = None
    offset: _Size = 0


_read_array = msgspec.msgpack.Decoder(tuple[str, str, list[_Size]]).decode
_read_scalar = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_read_tensor = msgspec.msgpack.Decoder(_Tensor).decode
_PLAIN_TYPES: frozenset[object] = frozenset((type(None), bool, int, float, str, bytes))
"""The types of MessagePack that stand for themselves; timestamps are not among them."""


class _Decoder:
    def __init__(self, arrays: LoadedArrays) -> None:
        self._arrays = arrays
        self._depth = 0
        self._torch: Any = torch_support()
        self._blocks: dict[str, tuple[Array, Any]] = {}
        """The bytes that tensors refer to by the name of an array, and their storage in torch."""

    def state(self, data: bytes) -> dict[str, Any]:
        with damage_in(STATE):
            try:
                found = self._tree(data)
            except DamagedError:
                raise
            except msgspec.ValidationError:
                raise DamagedError("has an invalid array shape, name or dtype") from None
            except (
                msgspec.MsgspecError,
                ValueError,
                TypeError,
                OverflowError,
                RuntimeError,
                struct.error,
            ) as error:
                raise DamagedError(
                    f"is not the state of a checkpoint ({type(error).__name__})"
                ) from None
            if not isinstance(found, dict):
                raise DamagedError("is not the state of a checkpoint")
        with damage_in(ARRAYS):
            self._arrays.check_all_taken()
        return cast("dict[str, Any]", found)

    def _tree(self, data: bytes) -> Any:
        """Return what is represented in MessagePack, if `_Encoder` can have written it."""
        plain = _read_tree(data)
        self._check_canonical(plain, data)
        return self._value(plain)

    def _check_canonical(self, plain: Any, data: bytes) -> None:
        if len(_write_tree(plain)) != len(data):  # of two equal keys only one was read
            raise DamagedError("has a key twice, or is not in canonical form")

    def _value(self, plain: Any) -> Any:
        kind = cast("object", type(plain))
        if kind is dict:
            for key, value in plain.items():
                if type(key) is not str and type(key) is not int:
                    raise DamagedError(f"has a key of type {type(key).__name__}")
                if type(value) not in _PLAIN_TYPES:
                    plain[key] = self._value(value)
        elif kind is list:
            plain[:] = map(self._value, plain)
        elif kind is msgspec.msgpack.Ext:
            return self._extension(plain.code, bytes(plain.data))
        elif kind not in _PLAIN_TYPES:
            raise DamagedError(f"has a value of type {type(plain).__name__}")
        return plain

    def _extension(self, code: int, data: bytes) -> Any:
        if code == _INT:
            number = int.from_bytes(data, "little", signed=True)
            if _int_to_bytes(number) != data:
                raise DamagedError("has a number that is not in canonical form")
            return number
        if code == _COMPLEX:
            return complex(*struct.unpack("<dd", data))
        if code == _ARRAY:
            name, dtype, shape = _read_array(data)
            self._check_canonical((name, dtype, shape), data)
            return self._arrays.take(name, dtype, shape)
        if code == _SCALAR:
            dtype, content = _read_scalar(data)
            kind = _parse_dtype(dtype)
            self._check_canonical((dtype, content), data)
            if len(content) != kind.itemsize or kind.kind in "US":
                raise DamagedError("has a number whose size is not that of its dtype")
            return _make_array(kind, [], np.array(bytearray(content), np.uint8))[()]
        if code == _TENSOR:
            tensor = _read_tensor(data)
            whole = (tensor.name, tensor.dtype, tensor.shape)
            self._check_canonical(whole if tensor.strides is None else tensor, data)
            return self._tensor(tensor)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise DamagedError(f"is nested deeper than {MAX_DEPTH}")
        inner = self._tree(data)
        self._depth -= 1
        if isinstance(inner, list):
            items = list(cast("Sequence[Any]", inner))
            if code == _TUPLE:
                return tuple(items)
            if code == _COUNTER and len(items) == 1 and isinstance(items[0], dict):
                return Counter(cast("Mapping[Any, Any]", items[0]))
            if code == _MODULE and len(items) == 2 and isinstance(items[0], dict):
                found = OrderedDict(cast("Mapping[Any, Any]", items[0]))
                cast("Any", found)._metadata = items[1]
                return found
        raise DamagedError(f"has the unknown type {code}")

    def _tensor(self, tensor: _Tensor) -> Any:
        """Return a tensor, or an array where the program has not imported torch."""
        if tensor.dtype not in DTYPES:
            raise DamagedError("has a tensor of an unknown dtype")
        form, name, sizes, start = DTYPES[tensor.dtype], tensor.name, tensor.shape, tensor.offset
        kind, is_whole = _KINDS[tensor.dtype], tensor.strides is None
        steps = _contiguous(sizes) if tensor.strides is None else tensor.strides
        if steps is None:
            raise DamagedError("has an invalid array shape")
        if name not in self._blocks:
            data = self._arrays.take_bytes(name, form.native if is_whole else None, sizes)
            self._blocks[name] = data, None if self._torch is None else self._torch.storage_of(data)
        data, storage = self._blocks[name]
        count = (
            0
            if 0 in sizes
            else 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        )
        if start % kind.itemsize or start + count * kind.itemsize > len(data):
            raise DamagedError("has a tensor that is not in its array")
        if storage is None:
            return np.ndarray(
                sizes,
                kind,
                cast("Any", data) if count else None,
                start,
                [step * kind.itemsize for step in steps],
            )
        return cast("Any", self._torch).tensor_in(storage, tensor.dtype, start, sizes, steps)


def _contiguous(sizes: list[int]) -> list[int] | None:
    """Return the strides that torch gives a new tensor, in elements; None for sizes for which it
    makes none.
    """
    found, step = sizes[:], 1
    for place in range(len(sizes) - 1, -1, -1):
        found[place], step = step, step * max(sizes[place], 1)
        if step > MAX_INT:
            return None
    return found


def _text_of(path: _Path) -> str:
    """Return the text for a place in the state, such as `state['a'][0]`."""
    text = "state" + "".join(f"[{part!r}]" for part in path)
    return text if len(text) <= 400 else text[:400] + "..."


def _int_to_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
