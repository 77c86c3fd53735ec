"""Where does each tensor of a GGUF file begin? Its head is walked through without its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MOST = 2**32  # of anything that a head counts


def gguf_offsets(stream: BinaryIO) -> tuple[int, Sequence[int]]:
    """How long the head is, and where tensors begin, in bytes; ValueError if it is no GGUF file."""
    if stream.read(4) != b"GGUF" or _number(stream, 4) not in (2, 3):
        raise ValueError("no GGUF file")
    num_tensors, num_values, alignment = _number(stream), _number(stream), 32
    for _ in range(num_values):
        name, kind = _text(stream), _number(stream, 4)
        if name == b"general.alignment" and _SIZES.get(kind):
            alignment = _number(stream, _SIZES[kind])
        else:
            _skip(stream, kind)
    offsets = []
    for _ in range(num_tensors):
        _text(stream)
        stream.seek(8 * _number(stream, 4) + 4, 1)  # dimensions and type
        offsets.append(_number(stream))
    if not 0 < alignment <= _MOST:
        raise ValueError(f"an alignment of {alignment}")
    head = -(-stream.tell() // alignment) * alignment
    return head, [head + offset for offset in offsets]


def _number(stream: BinaryIO, size: int = 8) -> int:
    data = stream.read(size)
    if len(data) < size:
        raise ValueError("the file ends in its head")
    return int.from_bytes(data, "little")


def _text(stream: BinaryIO) -> bytes:
    return stream.read(_length(stream))


def _length(stream: BinaryIO) -> int:
    length = _number(stream)
    if length > _MOST:
        raise ValueError(f"a text of {length} bytes")
    return length


def _skip(stream: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        stream.seek(_length(stream), 1)
    elif kind == _ARRAY:
        kind, number = _number(stream, 4), _length(stream)
        if kind in _SIZES:
            stream.seek(number * _SIZES[kind], 1)
        else:
            for _ in range(number):
                _skip(stream, kind)
    else:
        stream.seek(_SIZES[kind], 1)
