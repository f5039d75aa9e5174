"""A state to the bytes of its two files and back: the arrays, and the tree that contains them.

The tree is MessagePack. Types that MessagePack does not have are extension types with the numbers
below. No name in a file is ever looked up, and nothing in a file is ever executed.

tree        the state without the bytes of arrays: it has the name, dtype and shape of each array
native      the name of a dtype in the safetensors format, which does not have all dtypes
storage     the memory of a tensor, which several tensors may share
containers  lists, tuples and dicts
"""

from __future__ import annotations

import functools
import io
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, cast

from aiohooks.checkpoint._format import (
    ARRAYS,
    MALFORMED,
    MAX_INT,
    SAFETENSORS_NAMES,
    STATE,
    DamagedError,
    damage_in,
)
from aiohooks.checkpoint.stateful import MAX_DEPTH, torch_support
from aiohooks.errors import InvalidArgumentError, missing_extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

try:
    import msgspec
    import numpy as np
except ImportError as error:
    raise missing_extra("aiohooks.checkpoint", "checkpoint") from error

Array: TypeAlias = "NDArray[Any]"
Ext = msgspec.msgpack.Ext
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
_Sizes: TypeAlias = Annotated[list[_Size], msgspec.Meta(max_length=64)]

MAX_CONTAINERS = 5_000_000
"""How many lists, tuples and dicts a state may have."""
CHUNK_BYTES = 1 << 20
"""The size of one write."""
_ALIGNMENT = 64
# The safetensors library rejects a longer header.
_MAX_HEADER_BYTES = 100_000_000

# Numbers of the extension types, which are part of the format.
_TUPLE = 1
_INT = 2
_COMPLEX = 3
_ARRAY = 4
_SCALAR = 5
_TENSOR = 6
_COUNTER = 7
_MODULE = 8

# The names of numpy's dtypes that have an exact form on disk: bool, integers, floats, complex
# numbers, times with a unit, and text and bytes of a fixed width.
_SUPPORTED = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[mM]8\[[0-9]*[a-zA-Z]+\]|U[0-9]+|S[0-9]+)",
    re.ASCII,
)


# Arrays


class _Stored(NamedTuple):
    """An array of the file: its entry in the header, and where its bytes come from."""

    native: str | None
    """The name that safetensors has for its dtype, or None: then it is stored as plain bytes."""
    shape: list[int]
    nbytes: int
    alignment: int
    """The size of an item in bytes: the array begins at a multiple of it."""
    data: Callable[[], memoryview]
    """Returns the bytes. It is called when they are written, because it may copy the array, for
    example from a device, and only one such copy must be in memory at a time.
    """


def _array_file(arrays: Mapping[str, _Stored]) -> Iterator[bytes | memoryview]:
    """Return the chunks of a safetensors file: its header, and the arrays from their own memory."""
    # The arrays with the widest items come first. All sizes of items are powers of 2, so each array
    # begins at a multiple of its item size.
    in_order = sorted(
        arrays.items(),
        key=lambda item: item[1].alignment,
        reverse=True,
    )
    entries: dict[str, Any] = {}
    offset = 0
    for name, stored in in_order:
        end = offset + stored.nbytes
        entries[name] = {
            "dtype": stored.native or "U8",
            "shape": stored.shape if stored.native else [stored.nbytes],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    # The arrays begin after the header, which is filled up to a multiple of 8 for their alignment.
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise InvalidArgumentError(
            f"the state has {len(entries)} arrays, more than a checkpoint can hold; join small ones"
        )
    header = len(text).to_bytes(8, "little") + text
    return _chunks(header, [stored for _, stored in in_order if stored.nbytes])


def _chunks(header: bytes, arrays: list[_Stored]) -> Iterator[bytes | memoryview]:
    """Yield the header, and then the bytes of each array in pieces.

    It is a generator of its own, so that `_array_file` raises its errors before the first chunk.
    """
    yield header
    for stored in arrays:
        data = stored.data()
        for start in range(0, stored.nbytes, CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


class _Entry(msgspec.Struct, gc=False):
    """An array in the header of a safetensors file. The tree has its dtype and shape."""

    data_offsets: tuple[int, int]


_read_header = msgspec.json.Decoder(dict[str, _Entry]).decode


def read_arrays(file: io.BufferedIOBase, size: int) -> dict[str, Array]:
    """Return the bytes of each array of a file of `size` bytes, in memory of their own.

    This does not use the safetensors library. That copies all arrays in one call, which holds the
    interpreter's lock, and would stop the event loop for a second for each GiB.

    Raises:
        DamagedError: it is not a safetensors file, or its arrays do not follow each other in the
            order of the header.
    """
    header_size = int.from_bytes(file.read(8), "little")
    if header_size > min(_MAX_HEADER_BYTES, size - 8):
        raise DamagedError("is not a safetensors file (its header is too long)")
    try:
        entries = _read_header(file.read(header_size))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedError(f"is not a safetensors file ({type(error).__name__})") from None
    data_size = size - 8 - header_size
    arrays: dict[str, Array] = {}
    position = 0
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        # This also limits the memory that a forged header can take: the arrays follow each other
        # within the bytes of the file.
        if begin != position or not begin <= end <= data_size:
            raise DamagedError("is not a safetensors file (its arrays overlap, or have gaps)")
        arrays[name] = _new_memory(end - begin)
        file.readinto(cast("Any", arrays[name]))
        position = end
    if position != data_size:
        raise DamagedError(f"has {data_size} bytes of arrays, and {position} in its header")
    return arrays


def _new_memory(size: int) -> Array:
    """Return memory for the bytes of an array, aligned as torch aligns its own.

    The last bits of a matrix product may depend on the alignment, and a restore must not change it.
    """
    # Take more than needed, and leave out the bytes before the first aligned address.
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


# Writing


def encode(state: Mapping[str, Any]) -> dict[str, Iterable[bytes | memoryview]]:
    """Return the chunks of two files by name: the tree of the state, and its arrays.

    The first chunk of the arrays is a header with their sizes. The others are the memory of the
    arrays themselves. An array is only copied, when its chunks are taken, if it is not C-contiguous
    or is in the memory of a device.

    Raises:
        InvalidArgumentError: a value has no exact form on disk. The message says where it is and
            what to give.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(f"state is {state!r}; give a mapping")
    encoder = _Encoder()
    # This also collects the arrays of the state in `encoder.arrays`.
    data = _write_tree(encoder.mapping(state))
    return {
        ARRAYS: _array_file(encoder.arrays),
        STATE: [data],
    }


_write_tree = msgspec.msgpack.Encoder().encode


def _extension(code: int, parts: list[Any]) -> Ext:
    return Ext(code, _write_tree(parts))


class _Encoder:
    """Converts values to MessagePack's types, and collects the arrays."""

    def __init__(self) -> None:
        self.arrays: dict[str, _Stored] = {}
        # The keys and indexes that lead to the value that is being converted.
        self._path: list[str | int] = []
        # How many containers were converted.
        self._containers = 0
        # The module `_torch`, or None if the program has not imported torch.
        self._torch: Any = torch_support()
        # The names of the arrays that have the memory of tensors, by the address of the memory.
        self._storage_names: dict[Any, str] = {}

    def value(self, value: Any) -> Any:
        """Return the representation of a value in MessagePack."""
        kind = cast("Any", type(value))
        if kind in _PLAIN:
            return value
        convert = _CONVERTERS.get(kind)
        if convert is not None:
            return convert(self, value)
        # A scalar of numpy. Scalars of flexible size (text, bytes) are rejected below, because they
        # lose zeros at their end. So are subclasses of ndarray, which have more than an array, such
        # as a mask or a unit, that would be lost.
        is_scalar = issubclass(kind, np.generic)
        if is_scalar and not issubclass(kind, np.flexible):
            dtype = self._checked_dtype(value.dtype)
            return _extension(_SCALAR, [dtype, value.tobytes()])
        if self._torch is not None and self._torch.is_tensor(value):
            return self._tensor(value)
        raise self._rejected(
            f"is of the type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold;"
            " give plain data, such as int(...) of an enum, or what its state_dict() returns"
        )

    def text(self, value: str) -> str:
        """Return a text. Reject one that has no UTF-8, such as a lone surrogate."""
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self._rejected(
                f"is {value!r}, which is not valid text; give its bytes",
            ) from None
        return value

    def integer(self, value: int) -> int | Ext:
        """Return an int, or an extension type if it has more than 64 bits."""
        if value in _PLAIN_INTS:
            return value
        # The number of bytes, rounded up, with room for the sign bit.
        size = value.bit_length() // 8 + 1
        return Ext(_INT, value.to_bytes(size, "little", signed=True))

    def items(self, values: Sequence[Any]) -> list[Any]:
        return [value for _, value in self._converted(enumerate(values))]

    def mapping(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Convert a mapping whose keys are str, or int of 64 bits. Reject other keys."""
        for key in values:
            if type(key) is str:
                self.text(key)
            elif type(key) is not int or key not in _PLAIN_INTS:
                raise self._rejected(
                    f"has the key {key!r} of type {type(key).__name__}; keys are str or int of 64"
                    " bits: give str(...) of it"
                )
        return dict(self._converted(values.items()))

    def _converted(self, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the keys of a container with the representations of its values."""
        if len(self._path) >= MAX_DEPTH:
            raise InvalidArgumentError(
                f"{_place(self._path[:4])}... is nested deeper than {MAX_DEPTH} levels, or in"
                " itself; flatten it"
            )
        # A container that is in the state several times is written each time. So a few containers
        # that contain each other several times could take memory without end.
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise InvalidArgumentError(
                f"the state has more than {MAX_CONTAINERS} lists, tuples and dicts, of which one"
                " that is there several times counts as often; put numbers into arrays, and shared"
                " containers into the state once"
            )
        # The last item of the path is the key of the value that is being converted.
        self._path.append("")
        for key, value in items:
            self._path[-1] = key
            yield key, self.value(value)
        self._path.pop()

    def ordered_mapping(self, values: Mapping[Any, Any]) -> dict[Any, Any] | Ext:
        """Convert an OrderedDict to a dict, or with `_metadata` to the state of a torch module."""
        converted = self.mapping(values)
        metadata = getattr(values, "_metadata", None)
        if metadata is None:
            return converted
        self._path.append("_metadata")
        converted_metadata = self.value(metadata)
        self._path.pop()
        return _extension(_MODULE, [converted, converted_metadata])

    def array(self, array: Array) -> Ext:
        """Add an array to the file of the arrays. Return its entry in the tree."""
        dtype = self._checked_dtype(array.dtype)
        shape = list(array.shape)
        # The name of the dtype in safetensors. Without a name, the array is stored as raw bytes,
        # which need no alignment. There are no big-endian numbers, which numpy marks by ">".
        native = None
        if not dtype.startswith(">"):
            native = SAFETENSORS_NAMES.get(array.dtype.name)
        alignment = array.itemsize if native else 1
        # `_bytes_of` may copy the array, so it is called when the bytes are written.
        data = functools.partial(_bytes_of, array)
        name = self._add(_Stored(native, shape, array.nbytes, alignment, data))
        return _extension(_ARRAY, [name, dtype, shape])

    def _tensor(self, value: Any) -> Ext:
        """Add the memory of a tensor to the file, once. Return the entry of the tensor in the tree.

        Tensors that share memory share it after a restore as well.
        """
        reason = self._torch.refusal(value)
        if reason is not None:
            raise self._rejected(reason)
        tensor = self._torch.as_stored(value)
        dtype = self._torch.NAMES[tensor.dtype]
        shape = list(tensor.shape)
        address = self._torch.storage_address(tensor)
        name = self._storage_names.get(address)
        if name is None:
            # The dtype and shape in the header are for other programs. If several tensors share the
            # memory, they are those of the first tensor, if it fills the memory.
            storage = tensor.untyped_storage()
            native = None
            if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                native = SAFETENSORS_NAMES.get(dtype)
            data = functools.partial(self._torch.host_bytes, storage)
            name = self._add(
                _Stored(
                    native,
                    shape,
                    storage.nbytes(),
                    tensor.element_size(),
                    data,
                ),
            )
            self._storage_names[address] = name
        strides = list(tensor.stride())
        offset = tensor.storage_offset()
        return _extension(_TENSOR, [name, dtype, shape, strides, offset])

    def _add(self, stored: _Stored) -> str:
        """Add an array under its path. Return its name in the file."""
        # The name is a JSON pointer to the array in the state, for other readers of the file. In a
        # pointer, `~` is followed by 0 or 1 only. So `~` with a higher number at the end makes a
        # name that no other array has.
        name = "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in self._path)
        if name in ("", "__metadata__") or name in self.arrays:
            name += f"~{len(self.arrays) + 2}"
        self.arrays[name] = stored
        return name

    def _checked_dtype(self, dtype: np.dtype[Any]) -> str:
        """Return the name of a dtype, if it has an exact form on disk."""
        # The kind is checked too because structured types and those of other packages (bfloat16)
        # have the name of plain bytes.
        if dtype.kind in "biufcmMUS" and _SUPPORTED.fullmatch(dtype.str):
            return dtype.str
        raise self._rejected(
            f"has the dtype {dtype}, which a checkpoint cannot hold exactly; give numbers, such as"
            " .astype(numpy.float64), times with a unit, or a list or dict of its items"
        )

    def _rejected(self, reason: str) -> InvalidArgumentError:
        """Return the error for the value that is being converted. `reason` follows its place."""
        return InvalidArgumentError(f"{_place(self._path)} {reason}")


# Values of these types are written as they are.
_PLAIN = {type(None), bool, float, bytes}
_PLAIN_INTS = range(-(2**63), 2**64)
_CONVERTERS: dict[type, Callable[[_Encoder, Any], Any]] = {
    str: _Encoder.text,
    int: _Encoder.integer,
    complex: lambda _, value: Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag)),
    list: _Encoder.items,
    tuple: lambda encoder, values: _extension(_TUPLE, encoder.items(values)),
    dict: _Encoder.mapping,
    MappingProxyType: _Encoder.mapping,
    OrderedDict: _Encoder.ordered_mapping,
    Counter: lambda encoder, values: _extension(_COUNTER, [encoder.mapping(values)]),
    np.ndarray: _Encoder.array,
    np.memmap: _Encoder.array,
}


def _bytes_of(array: Array) -> memoryview:
    """Return the bytes of an array: its own memory if it is C-contiguous, otherwise a copy."""
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat.view(np.uint8))


def _place(path: Sequence[str | int]) -> str:
    """Return the text for a place in the state, such as `state['a'][0]`."""
    text = "state" + "".join(f"[{key!r}]" for key in path)
    return text[:400]


# Reading


def decode(data: bytes, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return a state from the bytes of the tree and the bytes of the arrays.

    The arrays of the state use the memory of `arrays`, and do not copy it.

    Raises:
        DamagedError: it is not what `encode` gives.
    """
    with damage_in(STATE):
        try:
            state = _Decoder(arrays).tree(data)
        except (*MALFORMED, msgspec.MsgspecError, struct.error) as error:
            raise DamagedError(
                f"is not the state of a checkpoint ({type(error).__name__}: {error})",
            ) from None
        if not isinstance(state, dict):
            raise DamagedError("is not the state of a checkpoint")
        return cast("dict[str, Any]", state)


_read_array = msgspec.msgpack.Decoder(tuple[str, str, _Sizes]).decode
_read_scalar = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_read_tensor = msgspec.msgpack.Decoder(tuple[str, str, _Sizes, _Sizes, _Size]).decode


class _Decoder:
    """Converts the extension types of a tree to values."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._torch: Any = torch_support()
        # The storages of tensors by the name of their array, so that tensors share them again.
        self._storages: dict[str, Any] = {}

    def tree(self, data: bytes) -> Any:
        """Return the value of some MessagePack: of the whole tree, or of an extension type."""
        # A `Decoder` of msgspec in an attribute would refer to this object, and this object to it.
        # Such a cycle would keep the arrays in memory until the garbage collector finds it.
        return msgspec.msgpack.decode(data, ext_hook=self._extension)

    def _extension(self, code: int, data: memoryview) -> Any:
        convert = _EXTENSIONS.get(code)
        if convert is None:
            raise DamagedError(f"has the unknown type {code}")
        return convert(self, bytes(data))

    def counter(self, data: bytes) -> Counter[Any]:
        (items,) = self.tree(data)
        return Counter(items)

    def module_state(self, data: bytes) -> Any:
        items, metadata = self.tree(data)
        state: Any = OrderedDict(items)
        state._metadata = metadata
        return state

    def scalar(self, data: bytes) -> Any:
        text, content = _read_scalar(data)
        dtype = _parse_dtype(text)
        # A state has no such scalars (see `_Encoder.value`), and numpy does not check that the
        # bytes are valid text.
        if dtype.kind in "US":
            raise DamagedError("has a number with the dtype of a text")
        return np.frombuffer(content, dtype, 1)[0]

    def array(self, data: bytes) -> Array:
        name, text, shape = _read_array(data)
        dtype = _parse_dtype(text)
        memory: Any = self._arrays[name]
        if math.prod(shape) * dtype.itemsize != len(memory):
            raise DamagedError("has another dtype or shape of an array than the other file")
        # numpy rejects a buffer of no bytes, so an empty array gets no buffer.
        return np.ndarray(shape, dtype, memory if len(memory) else None)

    def tensor(self, data: bytes) -> Any:
        """Return a tensor, or the bytes of its memory if the program has not imported torch."""
        name, dtype, shape, strides, offset = _read_tensor(data)
        memory: Any = self._arrays[name]
        if self._torch is None:
            return memory
        storage = self._storages.get(name)
        if storage is None:
            storage = self._torch.storage_of(memory)
            self._storages[name] = storage
        return self._torch.tensor_in(storage, dtype, offset, shape, strides)


_EXTENSIONS: dict[int, Callable[[_Decoder, bytes], Any]] = {
    _TUPLE: lambda decoder, data: tuple(decoder.tree(data)),
    _INT: lambda decoder, data: int.from_bytes(data, "little", signed=True),
    _COMPLEX: lambda decoder, data: complex(*struct.unpack("<dd", data)),
    _ARRAY: _Decoder.array,
    _SCALAR: _Decoder.scalar,
    _TENSOR: _Decoder.tensor,
    _COUNTER: _Decoder.counter,
    _MODULE: _Decoder.module_state,
}


@functools.lru_cache(1024)
def _parse_dtype(text: str) -> np.dtype[Any]:
    """Return the dtype of a name in a file. Raise `DamagedError` if the format does not have it."""
    # Only names that were checked get to numpy, whose parser accepts much more.
    if len(text) > 40 or not _SUPPORTED.fullmatch(text):
        raise DamagedError("has an unknown dtype")
    return np.dtype(text)
