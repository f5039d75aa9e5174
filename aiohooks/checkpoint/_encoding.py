"""A state to and from the bytes of its two files: arrays, and the tree that they hang in. The one module that needs msgspec.

The tree is MessagePack. What that does not know is one of its extension types, each with a number of its own below;
no name in a file is ever looked up, and nothing in a file is ever run.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from aiohooks.checkpoint._files import DamagedError
from aiohooks.errors import InvalidArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray


try:
    import numpy as np
    import safetensors
except ImportError as error:
    raise ImportError("checkpoints need numpy, safetensors and msgspec: pip install 'aiohooks[checkpoint]'") from error


Array: TypeAlias = "NDArray[Any]"

PIECE = 1 << 20
"""Bytes of one write."""
# What the safetensors library takes.
_LARGEST_HEADER = 100_000_000

# The types that safetensors has a name for. Everything else (complex numbers, times, fixed-width text and bytes) is put down
# as plain bytes; what it was stands in the state beside it.
_NATIVE = {
    "b1": "BOOL", "i1": "I8", "u1": "U8", "i2": "I16", "u2": "U16", "i4": "I32", "u4": "U32", "i8": "I64", "u8": "U64",
    "f2": "F16", "f4": "F32", "f8": "F64",
}  # fmt: skip
_SUPPORTED = re.compile(r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[mM]8\[[0-9]*[a-zA-Z]+\]|U[0-9]+|S[0-9]+)", re.ASCII)


def check_dtype(dtype: np.dtype[Any], where: str) -> str:
    """What a type is called in a checkpoint.

    Raises:
        InvalidArgumentError: it has no exact form on disk.
    """
    # Structured types and those of other packages (bfloat16) also call themselves plain bytes: hence the look at the kind.
    if dtype.kind in "biufcmMUS" and _SUPPORTED.fullmatch(dtype.str):
        return dtype.str
    if dtype.kind == "O":
        way_out = "give a list of its items, or an array of numbers"
    elif dtype.names is not None:
        way_out = "give a dict of its fields"
    elif dtype.kind in "mM":
        way_out = f"give it a unit, such as .astype('{dtype.kind}8[ns]')"
    elif dtype.kind == "V":
        way_out = "give its bits, as .view(numpy.uint8) or .view(numpy.uint16)"
    else:
        way_out = "give it as a type of fixed size that is the same on every machine, such as .astype(numpy.float64)"
    raise InvalidArgumentError(f"{where} has the dtype {dtype}, which a checkpoint cannot hold exactly; {way_out}")


class ArrayFile:
    """The arrays of a state as they will lie in the file. They are not copied: their memory is written as it is.

    Only an array with gaps between its items, in another order than C or big-endian needs a copy, one array at a time.
    """

    def __init__(self) -> None:
        """Starts without arrays."""
        self._arrays: dict[str, tuple[Array, str]] = {}
        self._header: bytes | None = None

    def add(self, path: tuple[str | int, ...], array: Array, where: str) -> tuple[str, str, list[int]]:
        """Takes an array up; returns name, dtype and shape, by which `LoadedArrays.take` gives it back."""
        dtype = check_dtype(array.dtype, where)
        name = self._name(path)
        self._arrays[name] = (array, dtype)
        return name, dtype, list(array.shape)

    def _name(self, path: tuple[str | int, ...]) -> str:
        # As a JSON pointer, so that other readers of the file find their way. `~` with anything but 0 or 1 behind it
        # does not come out of the escaping: it tells apart what would have the same name.
        name = "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in path)
        if name in ("", "__metadata__"):
            name += "~2"
        number, plain = 2, name
        while name in self._arrays:
            number += 1
            name = f"{plain}~{number}"
        return name

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header()) + sum(array.nbytes for array, _ in self._arrays.values())

    def _in_order(self) -> list[tuple[str, Array, str]]:
        # The widest first, so that each begins at a multiple of its own width.
        found = [(name, array, dtype) for name, (array, dtype) in self._arrays.items()]
        return sorted(found, key=lambda each: -_NATIVE_WIDTH.get(each[2][1:], 1))

    def header(self) -> bytes:
        """What stands before the arrays: how they are called and where they lie."""
        if self._header is None:
            entries: dict[str, Any] = {}
            offset = 0
            for name, array, dtype in self._in_order():
                native = _NATIVE.get(dtype[1:])
                entries[name] = {
                    "dtype": native or "U8",
                    "shape": list(array.shape) if native else [array.nbytes],
                    "data_offsets": [offset, offset + array.nbytes],
                }
                offset += array.nbytes
            text = json.dumps(entries, separators=(",", ":")).encode("ascii")
            text += b" " * (-len(text) % 8)
            if len(text) > _LARGEST_HEADER:
                raise InvalidArgumentError(f"the state has {len(entries)} arrays, more than a checkpoint holds; join small ones")
            self._header = len(text).to_bytes(8, "little") + text
        return self._header

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The whole file, piece by piece."""
        yield self.header()
        for _, array, dtype in self._in_order():
            if array.nbytes:
                data = _memory(array, dtype)
                for start in range(0, len(data), PIECE):
                    yield data[start : start + PIECE]


_NATIVE_WIDTH = {dtype: int(dtype[1:]) for dtype in _NATIVE}


def _memory(array: Array, dtype: str) -> memoryview:
    if dtype.startswith(">"):
        array = array.byteswap()
    return memoryview(cast("Any", np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


class LoadedArrays:
    """The arrays of a file that was read, to be taken one by one."""

    def __init__(self, data: bytes) -> None:
        """Takes the file apart.

        Raises:
            DamagedError: it is not such a file.
        """
        try:
            self._entries: dict[str, dict[str, Any]] = dict(cast("Any", safetensors).deserialize(data))
        except (safetensors.SafetensorError, ValueError, OverflowError) as error:
            raise DamagedError(f"is not a safetensors file ({type(error).__name__})") from None

    def take(self, name: object, dtype: object, shape: object) -> Array:
        """The array that was put down so; it may be written to, and belongs to the caller.

        Raises:
            DamagedError: there is none, or not of that type and shape.
        """
        entry = self._entries.pop(name, None) if isinstance(name, str) else None
        if entry is None:
            raise DamagedError("speaks of an array that is not in the other file")
        kind, sizes = _dtype(dtype), _shape(shape)
        data: bytearray = entry["data"]
        native = _NATIVE.get(kind.str[1:])
        if math.prod(sizes) * kind.itemsize != len(data) or (entry["dtype"], list(entry["shape"])) != (
            native or "U8",
            sizes if native else [len(data)],
        ):
            raise DamagedError("speaks of an array as of another type or shape than it has")
        return _array(kind, sizes, data)

    def check_all_taken(self) -> None:
        """Raises `DamagedError` if there are arrays that the state does not speak of."""
        if self._entries:
            raise DamagedError(f"has {len(self._entries)} arrays that the state does not speak of")


def _array(kind: np.dtype[Any], shape: list[int], data: bytearray) -> Array:
    try:
        if not data:
            return np.ndarray(shape, kind)
        array: Array = np.ndarray(shape, kind, buffer=data)
    except (ValueError, TypeError, OverflowError):  # more dimensions or a larger shape than there can be
        raise DamagedError("speaks of an array of a shape that cannot be") from None
    return array.byteswap(inplace=True) if kind.str.startswith(">") else array


def _dtype(text: object) -> np.dtype[Any]:
    if not isinstance(text, str) or not _SUPPORTED.fullmatch(text) or len(text) > 40:
        raise DamagedError("speaks of an array of an unknown type")
    try:
        found: np.dtype[Any] = np.dtype(text)
    except (TypeError, ValueError, OverflowError):
        raise DamagedError("speaks of an array of an unknown type") from None
    if found.str != text:
        raise DamagedError("speaks of an array of an unknown type")
    return found


def _shape(value: object) -> list[int]:
    sizes = list(cast("Sequence[Any]", value)) if isinstance(value, list) else [-1]
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise DamagedError("speaks of an array of a shape that cannot be")
    return sizes


# What the state has of numpy besides whole arrays.


def is_array(value: object) -> bool:
    """Whether this is a plain array; subclasses have more to them (a mask, a unit) than would be kept."""
    return type(value) in (np.ndarray, np.memmap)


def is_scalar(value: object) -> bool:
    """Whether this is one number of numpy; its text and bytes types lose zeros at their ends."""
    return isinstance(value, np.generic) and not isinstance(value, np.flexible)


def scalar_to_bytes(value: Any, where: str) -> tuple[str, bytes]:
    """Type and bytes of a number of numpy."""
    array = np.asarray(value)
    dtype = check_dtype(array.dtype, where)
    return dtype, bytes(_memory(array, dtype))


def scalar_from_bytes(dtype: object, data: object) -> Any:
    """The number of numpy that was put down so."""
    kind = _dtype(dtype)
    if not isinstance(data, bytes) or len(data) != kind.itemsize or kind.kind in "US":
        raise DamagedError("has a number of another size than its type")
    return _array(kind, [], bytearray(data))[()]


try:
    import msgspec
except ImportError as error:
    raise ImportError("checkpoints need numpy, safetensors and msgspec: pip install 'aiohooks[checkpoint]'") from error

TUPLE, INT, COMPLEX, ARRAY, SCALAR = 1, 2, 3, 4, 5
DEEPEST = 64

_Path = tuple[str | int, ...]
_WAYS_OUT = {
    "set": "give sorted(...) of it",
    "frozenset": "give sorted(...) of it",
    "bytearray": "give bytes(...) of it",
    "memoryview": "give bytes(...) of it",
    "deque": "give list(...) of it",
    "datetime": "give its .isoformat() or .timestamp()",
    "Tensor": "give its .numpy()",
}


def encode(state: Mapping[str, Any]) -> tuple[bytes, ArrayFile]:
    """The bytes of the tree, and the arrays, which are not copied.

    Raises:
        InvalidArgumentError: something in it has no exact form on disk; the message has where it is and the way out.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(f"state is a {type(state).__name__}; give a mapping")
    encoder = _Encoder()
    try:
        data = encoder.bytes_of(encoder.tree(dict(state), ()))
    except RecursionError:
        raise InvalidArgumentError(f"state is nested deeper than {DEEPEST} levels; flatten it") from None
    except (ValueError, OverflowError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"state has something that is too large for a checkpoint: {error}") from error
    encoder.arrays.header()  # refuses too many of them before anything is written
    return data, encoder.arrays


def decode(data: bytes, arrays: bytes) -> dict[str, Any]:
    """The state that was put down in these two files.

    Raises:
        DamagedError: they are not what `encode` makes; the message begins with the file's name.
    """
    return _Decoder(arrays).state(data)


class _Encoder:
    def __init__(self) -> None:
        self.arrays = ArrayFile()
        self.bytes_of = msgspec.msgpack.Encoder().encode

    def tree(self, value: Any, path: _Path) -> Any:
        """What to give to MessagePack in place of a value."""
        kind = cast("object", type(value))
        if value is None or kind is bool or kind is float or kind is bytes:
            return value
        if kind is str:
            return self._text(value, path)
        if kind is int:
            return value if -(2**63) <= value < 2**64 else self._extension(INT, _int_to_bytes(value))
        if kind is complex:
            return self._extension(COMPLEX, struct.pack("<dd", value.real, value.imag))
        if kind is dict or kind is OrderedDict or kind is MappingProxyType:
            return self._dict(value, path)
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return self._extension(TUPLE, self.bytes_of(self._items(value, path)))
        if is_array(value):
            return self._extension(ARRAY, self.bytes_of(self.arrays.add(path, value, where(path))))
        if is_scalar(value):
            return self._extension(SCALAR, self.bytes_of(scalar_to_bytes(value, where(path))))
        raise self._refused(value, path)

    def _extension(self, code: int, data: bytes) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, data)

    def _text(self, value: str, path: _Path) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(f"{where(path)} is {value!r}, which is not text; give its bytes") from None
        return value

    def _items(self, items: list[Any] | tuple[Any, ...], path: _Path) -> list[Any]:
        self._check_depth(path)
        return [self.tree(item, (*path, index)) for index, item in enumerate(items)]

    def _dict(self, items: Mapping[Any, Any], path: _Path) -> dict[Any, Any]:
        self._check_depth(path)
        found: dict[Any, Any] = {}
        for key, value in items.items():
            if type(key) is int and -(2**63) <= key < 2**64:
                found[key] = self.tree(value, (*path, key))
            elif type(key) is str:
                found[self._text(key, path)] = self.tree(value, (*path, key))
            else:
                raise InvalidArgumentError(
                    f"{where(path)} has the key {key!r} of type {type(key).__name__}; a checkpoint holds keys that are str "
                    "or int of 64 bits: give str(...) of it"
                )
        return found

    def _check_depth(self, path: _Path) -> None:
        if len(path) >= DEEPEST:
            raise InvalidArgumentError(f"{where(path[:4])}... is nested deeper than {DEEPEST} levels, or in itself; flatten it")

    def _refused(self, value: object, path: _Path) -> InvalidArgumentError:
        kind = type(value)
        way_out = _WAYS_OUT.get(kind.__name__)
        if way_out is None:
            near = next((each for each in kind.__mro__[1:] if each in (int, float, str, bytes, tuple, list, dict)), None)
            way_out = (
                f"give {near.__name__}(...) of it" if near is not None else "give plain data, or what its state_dict() returns"
            )
        return InvalidArgumentError(
            f"{where(path)} is of the type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; {way_out}"
        )


class _Decoder:
    def __init__(self, arrays: bytes) -> None:
        with _in_file("arrays.safetensors"):
            self._arrays = LoadedArrays(arrays)
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode
        self._depth = 0

    def state(self, data: bytes) -> dict[str, Any]:
        with _in_file("state.msgpack"):
            try:
                found = self._decode(data)
            except DamagedError:
                raise
            except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
                raise DamagedError(f"is not the state of a checkpoint ({type(error).__name__})") from None
            if not isinstance(found, dict):
                raise DamagedError("is not the state of a checkpoint")
        with _in_file("arrays.safetensors"):
            self._arrays.check_all_taken()
        return cast("dict[str, Any]", found)

    def _extension(self, code: int, data: memoryview) -> Any:
        if code == INT:
            return _int_from_bytes(bytes(data))
        if code == COMPLEX:
            return complex(*struct.unpack("<dd", data))
        self._depth += 1
        if self._depth > DEEPEST:
            raise DamagedError(f"is nested deeper than {DEEPEST}")
        inner = self._decode(data)
        self._depth -= 1
        if isinstance(inner, list):
            items = list(cast("Sequence[Any]", inner))
            if code == TUPLE:
                return tuple(items)
            if code == ARRAY and len(items) == 3:
                return self._arrays.take(*items)
            if code == SCALAR and len(items) == 2:
                return scalar_from_bytes(*items)
        raise DamagedError(f"has something of the unknown type {code}")


@contextlib.contextmanager
def _in_file(name: str) -> Generator[None]:
    """Puts the name of a file before what is wrong with it."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{name} {error}") from error.__cause__


def where(path: _Path) -> str:
    """How a place in the state is written."""
    text = "state" + "".join(f"[{part!r}]" for part in path)
    return text if len(text) <= 400 else text[:400] + "..."


def _int_to_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _int_from_bytes(data: bytes) -> int:
    value = int.from_bytes(data, "little", signed=True)
    if _int_to_bytes(value) != data:
        raise DamagedError("has a number that is not written in the one way")
    return value
