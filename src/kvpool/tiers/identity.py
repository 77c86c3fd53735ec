"""Digests of the settings and files on which keys and values depend, for `Fingerprint` in keys.py.

Every setting counts, except for the few that an engine lists because they do not change keys and values. So an unknown
setting gives another fingerprint. That costs a miss; ignoring it could give a wrong answer.

Of files with weights every tensor counts: small ones in full, large ones with the first 4 KiB of each mebibyte.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from kvpool.errors import ConfigError

OF_TRANSFORMERS = frozenset(
    {
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "tokenizer_class"),  # names
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),  # what a call returns
        *("id2label", "label2id", "problem_type"),  # of classifiers
        *("_attn_implementation", "attn_implementation", "chunk_size_feed_forward"),  # the same in other steps
    }
)
"""Fields of a configuration of transformers that change no key or value."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Files beside the weights that change no key or value: texts, what turns text into tokens, weights for other frameworks.
_UNREAD = (
    *(".*", "*.md", "LICENSE*", "tokenizer*", "chat_template*", "generation_config.json"),
    *("*.h5", "*.msgpack", "*.ot", "*.onnx", "*.tflite"),
)
LONGEST_HEADER = 2**27  # of a safetensors file, in bytes
_STEP = 2**20
_SAMPLE = 4096
_SMALL = 256 * 2**10


# --- settings --------------------------------------------------------------------------------------------------------


def settings_id(settings: Any, without: Collection[str] = ()) -> str:
    """A digest of all settings in a configuration and its nested ones, without the paths in `without`.

    >>> one, other = {"rope": {"theta": 1}, "port": 80}, {"rope": {"theta": 1}, "port": 81}
    >>> settings_id(one) == settings_id(other), settings_id(one, {"port"}) == settings_id(other, {"port"})
    (False, True)
    """
    text = json.dumps(_plain(settings, frozenset(without)), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any, without: frozenset[str], path: str = "", above: tuple[int, ...] = ()) -> Any:
    """A value as JSON can hold it, the same in every process. `above` are the objects that contain it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if id(value) in above:
        return "within itself"
    if isinstance(value, (list, tuple)):
        return [_plain(each, without, path, (*above, id(value))) for each in value]
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(each, without, path, (*above, id(value))), sort_keys=True) for each in value)
    fields = _fields(value)
    if fields is None:
        return _named(value)
    found = {}
    for name, each in fields.items():
        place = f"{path}.{name}" if path else str(name)
        if place not in without:
            found[str(name)] = _plain(each, without, place, (*above, id(value)))
    return found


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """The fields of an object; None if its name says all."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (type, enum.Enum)) or callable(value):
        return None
    if hasattr(value, "to_dict"):  # of transformers: it may hold more than its class declares
        described: Mapping[Any, Any] = value.to_dict()
        return described
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    if hasattr(value, "_fields_"):  # of ctypes
        return {name: getattr(value, name) for name, *_ in value._fields_}
    if hasattr(value, "__struct_fields__"):  # of msgspec
        return {name: getattr(value, name) for name in value.__struct_fields__}
    return vars(value) if hasattr(value, "__dict__") else None


def _named(value: Any) -> str:
    """The name of a function, class or dtype, without its address in memory, which differs between processes."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


# --- files -----------------------------------------------------------------------------------------------------------


def files_id(path: str | Path) -> str:
    """A digest of a file with weights, or of all files of a directory that keys and values may depend on."""
    root = Path(path)
    try:
        files = read_files(root)
        if not any(file.suffix in _WEIGHTS for file in files):
            raise ConfigError(
                f"{root} holds no files with weights ({', '.join(_WEIGHTS)}), so that its blocks in tiers could not be "
                "told from another model's; name it with model_id"
            )
        digest = hashlib.blake2b(digest_size=32)
        for file in files:
            with file.open("rb") as stream:
                size = stream.seek(0, 2)
                digest.update(json.dumps([file.name if root.is_dir() else "", size]).encode())
                for begin, end in _samples(stream, size):
                    stream.seek(begin)
                    digest.update(stream.read(end - begin))
    except OSError as error:
        raise ConfigError(f"cannot read the weights in {root}: {error.strerror or error}") from None
    return digest.hexdigest()


def read_files(root: Path) -> list[Path]:
    """The files that count: the named file, or those of the named directory."""
    if root.is_file():
        return [root]
    return sorted(
        each for each in root.iterdir() if each.is_file() and not any(fnmatch(each.name, name) for name in _UNREAD)
    )


def _samples(stream: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """The bytes of a file that count: its head, every small tensor, and some of each large tensor."""
    head, cuts = _tensors(stream, size)
    yield from _pieces(0, head)
    for begin, end in pairwise(sorted({head, *cuts, size})):
        if end - begin <= _SMALL:
            yield begin, end
        else:
            for start in range(begin, end, _STEP):
                yield start, min(start + _SAMPLE, end)
            yield max(begin, end - _SAMPLE), end


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, _STEP):
        yield start, min(start + _STEP, end)


def _tensors(stream: BinaryIO, size: int) -> tuple[int, Sequence[int]]:
    """The length of the head of a file, and where tensors begin or end. A file of an unknown kind is all head."""
    for read in (_safetensors, gguf_offsets, _torch_archive):
        stream.seek(0)
        try:
            head, cuts = read(stream)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError, zipfile.BadZipFile):
            continue
        if 0 <= head <= min(cuts, default=size) and max(cuts, default=head) <= size:
            return head, cuts
    return size, ()


def _safetensors(stream: BinaryIO) -> tuple[int, Sequence[int]]:
    length = int.from_bytes(stream.read(8), "little")
    if length > LONGEST_HEADER:
        raise ValueError("no header of safetensors is that long")
    described = json.loads(stream.read(length))
    head = 8 + length
    return head, [head + int(each["data_offsets"][1]) for name, each in described.items() if name != "__metadata__"]


def _torch_archive(stream: BinaryIO) -> tuple[int, Sequence[int]]:
    with zipfile.ZipFile(stream) as archive:
        return 0, [each.header_offset for each in archive.infolist()]


# --- GGUF files: where their tensors begin ---------------------------------------------------------------------------


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MOST = 2**32  # of anything that a head counts


def gguf_offsets(stream: BinaryIO) -> tuple[int, Sequence[int]]:
    """The length of the head and where tensors begin, in bytes; raises ValueError if it is no GGUF file."""
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
