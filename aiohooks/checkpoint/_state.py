"""A state to and from the bytes of its two files: arrays, and the tree that they hang in. The one module that needs msgspec.

The tree is MessagePack. What that does not know is one of its extension types, each with a number of its own below;
no name in a file is ever looked up, and nothing in a file is ever run.
"""

from __future__ import annotations

import contextlib
import struct
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from aiohooks._errors import InvalidArgumentError
from aiohooks.checkpoint import _arrays
from aiohooks.checkpoint._errors import DamagedError

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


def encode(state: Mapping[str, Any]) -> tuple[bytes, _arrays.ArrayFile]:
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
        self.arrays = _arrays.ArrayFile()
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
        if _arrays.is_array(value):
            return self._extension(ARRAY, self.bytes_of(self.arrays.add(path, value, where(path))))
        if _arrays.is_scalar(value):
            return self._extension(SCALAR, self.bytes_of(_arrays.scalar_to_bytes(value, where(path))))
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
            self._arrays = _arrays.LoadedArrays(arrays)
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
                return _arrays.scalar_from_bytes(*items)
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
