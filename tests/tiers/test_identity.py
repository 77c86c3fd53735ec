"""What decides bytes decides keys: every setting that is not known to be irrelevant, and every tensor."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import KVCacheConfig, LayerSpec
from kvpool.config import DType, LayerGroup
from kvpool.errors import ConfigError
from kvpool.tiers import Fingerprint
from kvpool.tiers.identity import OF_TRANSFORMERS, _samples, files_id, gguf_offsets, settings_id

LARGE = 80 * 2**20


# --- settings ------------------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    A = 1
    B = 2


class Plain:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@dataclasses.dataclass
class Inner:
    theta: float = 1.0
    kind: Kind = Kind.A


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    names: tuple[str, ...] = ("a", "b")
    some: frozenset[int] = frozenset({1, 2, 3})
    more: Any = None
    port: int = 80


def other(value: Any) -> Any:
    """Another value of the same kind, as far as there is one."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}~"
    if isinstance(value, Mapping):
        return {**value, "another": 1}
    if isinstance(value, (list, tuple)):
        return [*value, "another"]
    return "another"


@pytest.mark.parametrize(
    "changed",
    [
        Outer(inner=Inner(theta=2.0)),
        Outer(inner=Inner(kind=Kind.B)),
        Outer(names=("b", "a")),
        Outer(some=frozenset({1, 2})),
        Outer(more={"a": [{"b": 1}]}),
        Outer(more=Plain(a=1)),
        Outer(more=len),
        Outer(port=81),
    ],
)
def test_given_a_setting_at_any_depth_then_it_counts(changed: Outer) -> None:
    assert settings_id(changed) != settings_id(Outer())


def test_given_the_same_settings_in_other_objects_then_the_digest_is_the_same() -> None:
    def made() -> Outer:
        return Outer(more={"object": Plain(z=1, a=Plain()), "nothing": object(), "function": made, "set": {"x", "y"}})

    assert settings_id(made()) == settings_id(made())
    assert settings_id(Outer(some=frozenset({3, 2, 1}))) == settings_id(Outer())


def test_given_a_path_that_is_known_not_to_matter_then_that_and_nothing_else_is_left_out() -> None:
    without = {"port", "inner.theta", "theta"}
    assert settings_id(Outer(port=81, inner=Inner(theta=3.0)), without) == settings_id(Outer(), without)
    assert settings_id(Outer(inner=Inner(kind=Kind.B)), without) != settings_id(Outer(), without)
    assert settings_id(Outer(more={"port": 1}), without) != settings_id(Outer(more={"port": 2}), without)


def test_given_an_object_that_holds_itself_then_there_is_a_digest() -> None:
    ring = Plain(a=1)
    ring.ring = ring
    assert settings_id(ring) == settings_id({"a": 1, "ring": "within itself"})
    assert settings_id([ring, ring]) == settings_id(2 * [{"a": 1, "ring": "within itself"}])


def test_given_any_object_then_its_digest_is_that_of_its_fields_in_json() -> None:
    plain = {"b": "x", "a": [1, None, True, 0.5, {"c": 2}]}
    digest = hashlib.sha256(b'{"a": [1, null, true, 0.5, {"c": 2}], "b": "x"}').hexdigest()
    assert settings_id(plain) == settings_id(Plain(b="x", a=(1, None, True, 0.5, Plain(c=2)))) == digest
    made = Outer(inner=Inner(theta=2.0), more={1: {"y", "x"}})
    fields = {"inner": {"theta": 2.0, "kind": "Kind.A"}, "names": ["a", "b"], "some": ["1", "2", "3"], "port": 80}
    assert settings_id(made) == settings_id({**fields, "more": {"1": ['"x"', '"y"']}})
    assert settings_id(made, {"more", "inner.theta"}) == settings_id({**fields, "inner": {"kind": "Kind.A"}})


def models() -> Iterator[Any]:
    transformers = pytest.importorskip("transformers")
    for name in ("LlamaConfig", "Phi3Config", "Gemma2Config", "Qwen3Config", "MixtralConfig", "DeepseekV3Config"):
        yield getattr(transformers, name)()


def test_given_any_field_of_a_model_when_it_changes_then_the_digest_does_or_it_is_in_the_short_list() -> None:
    num_fields = 0
    for config in models():
        fields = config.to_dict()
        known = settings_id(config, OF_TRANSFORMERS)
        assert settings_id(fields, OF_TRANSFORMERS) == known
        for name, value in fields.items():
            changed = settings_id({**fields, name: other(value)}, OF_TRANSFORMERS)
            assert (changed != known) == (name not in OF_TRANSFORMERS), name
            num_fields += 1
        assert settings_id({**fields, "a_new_field": 1}, OF_TRANSFORMERS) != known
    assert num_fields > 150


# What a manager does with blocks, and not what is in them.
MANAGING = {
    *("gpu_blocks", "gpu_bytes", "gpu_fraction", "free_gpu_bytes", "max_gpu_tokens", "host_blocks", "host_bytes"),
    *("disk_blocks", "disk_bytes", "plan_tokens", "pool_shares", "plan_cross_tokens", "max_seq_len"),
    *("enable_prefix_caching", "partial_match", "copy_on_partial_reuse", "cache_unfilled_blocks", "offload_on_evict"),
    *("offload_min_priority", "host_write", "watermark", "eviction_policy", "objective", "depth_cost", "default_ttl"),
    "checkpoint_every",
    *("max_pinned_tokens", "pressure_levels", "event_buffer_size", "remembered_blocks"),
}


def test_given_the_fields_of_a_cache_then_each_counts_or_is_about_managing_blocks() -> None:
    fields = {each.name for each in dataclasses.fields(KVCacheConfig) if each.init}
    assert fields == MANAGING | {"layers", "block_size"}


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(LayerSpec)])
def test_given_any_field_of_a_layer_when_it_changes_then_the_fingerprint_does(name: str) -> None:
    spec = LayerSpec(kv_heads=2, head_dim=8, v_head_dim=8, window=16)
    config = KVCacheConfig([spec], 4, gpu_blocks=8)
    changed = dataclasses.replace(spec)
    object.__setattr__(changed, name, DType.FLOAT16 if name == "dtype" else 5)
    moved = KVCacheConfig([spec], 4, gpu_blocks=8)
    group = moved.groups[0]
    object.__setattr__(moved, "groups", (_with(group, changed),))
    assert Fingerprint.of(moved, "m", "w").digest != Fingerprint.of(config, "m", "w").digest


def _with(group: LayerGroup, spec: LayerSpec) -> LayerGroup:
    changed = dataclasses.replace(group)
    object.__setattr__(changed, "spec", spec)
    return changed


# --- files ---------------------------------------------------------------------------------------------------------------


def safetensors(path: Path, norm: bytes = bytes(1152), **sizes: int) -> Path:
    """A file as large as a model: a large tensor, a small one, a large one. What is zero takes no room on the disk."""
    header, end = {}, 0
    for name, size in {"embed": sizes.get("embed", LARGE), "norm": len(norm), "head": LARGE}.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        begin = file.tell()
        file.seek(begin + header["norm"]["data_offsets"][0])  # type: ignore[index]
        file.write(norm)
        file.truncate(begin + end)
    return path


def gguf(path: Path, norm: bytes = bytes(1152), eps: float = 1e-5) -> Path:
    """The same as a GGUF file, with some of what its head may hold."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    values = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    values += text("llama.eps") + struct.pack("<If", 6, eps)
    values += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    values += text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 2) + bytes(8)
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    for kind, letter in numbers.items():  # every one that the format has
        values += text(f"number.{kind}") + struct.pack(f"<I{letter}", kind, 1)
    values += text("general.alignment") + struct.pack("<II", 4, 64)
    places, end = b"", 0
    starts = {}
    for name, size in {"embed": LARGE, "norm": len(norm), "head": LARGE}.items():
        places += text(name) + struct.pack("<IQIQ", 1, size, 24, end)
        starts[name] = end
        end = -(-(end + size) // 64) * 64
    head = b"GGUF" + struct.pack("<IQQ", 3, 3, 5 + len(numbers)) + values + places
    begin = -(-len(head) // 64) * 64
    with path.open("wb") as file:
        file.write(head)
        file.seek(begin + starts["norm"])
        file.write(norm)
        file.truncate(begin + end)
    return path


def archive(path: Path, norm: bytes = bytes(1152)) -> Path:
    """The same as torch writes it."""
    with zipfile.ZipFile(path, "w") as file:
        for name, data in {
            "data.pkl": b"pickle",
            "data/0": bytes(2**21),
            "data/1": norm,
            "data/2": bytes(2**21),
        }.items():
            file.writestr(zipfile.ZipInfo(f"archive/{name}"), data)  # without the time, as torch does
    return path


@pytest.mark.parametrize(("write", "name"), [(safetensors, "a.safetensors"), (gguf, "a.gguf"), (archive, "a.bin")])
def test_given_a_model_when_one_number_of_one_small_tensor_changes_then_the_digest_does(
    tmp_path: Path, write: Any, name: str
) -> None:
    known = files_id(write(tmp_path / name))
    assert files_id(write(tmp_path / f"same-{name}")) == known
    for place in (0, 1, 700, 1151):
        norm = bytearray(1152)
        norm[place] = 1
        assert files_id(write(tmp_path / name, bytes(norm))) != known


def test_given_a_model_when_its_head_or_a_large_tensor_changes_then_the_digest_does(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors")
    known = files_id(path)
    assert files_id(safetensors(path, embed=LARGE + 8)) != known
    safetensors(path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    assert files_id(path) != known
    assert files_id(gguf(tmp_path / "b.gguf", eps=1e-6)) != files_id(gguf(tmp_path / "c.gguf"))


def test_given_a_large_tensor_then_its_samples_are_those_that_stored_values_are_known_by(tmp_path: Path) -> None:
    path, size = tmp_path / "model.safetensors", 3 * 2**20 + 777
    text = json.dumps({"embed": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + hashlib.shake_256(b"weights").digest(size))
    assert files_id(path) == "e58c80991ad65179f14120513ecec952858b9f7095cae672603e5d6cfdef18fe"


KIB, MIB = 2**10, 2**20
SIZES_AND_SAMPLES = [  # of a tensor: all of a small one, else 4 KiB of each mebibyte and at the end
    (256 * KIB, [(0, 256 * KIB)]),
    (256 * KIB + 1, [(0, 4 * KIB), (252 * KIB + 1, 256 * KIB + 1)]),
    (2 * MIB, [(0, 4 * KIB), (MIB, MIB + 4 * KIB), (2 * MIB - 4 * KIB, 2 * MIB)]),
    (MIB + 9, [(0, 4 * KIB), (MIB, MIB + 9), (MIB + 9 - 4 * KIB, MIB + 9)]),
    (0, []),
    (1, [(0, 1)]),
]


def samples_of(content: bytes) -> list[tuple[int, int]]:
    return list(_samples(io.BytesIO(content), len(content)))


def moved(samples: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(begin + by, end + by) for begin, end in samples]


def test_given_tensors_of_any_size_then_exactly_these_bytes_count() -> None:
    tensors: dict[str, Any] = {}
    expected, end = [], 0
    for number, (size, samples) in enumerate(SIZES_AND_SAMPLES):
        tensors[str(number)] = {"data_offsets": [end, end + size]}
        expected += moved(samples, end)
        end += size
    tensors["__metadata__"] = {"about": "x" * (2 * MIB)}
    text = json.dumps(tensors).encode()
    head = 8 + len(text)
    pieces = [(0, MIB), (MIB, 2 * MIB), (2 * MIB, head)]
    assert samples_of(struct.pack("<Q", len(text)) + text + bytes(end)) == pieces + moved(expected, head)


@pytest.mark.parametrize("end", [-1, 2**20 + 1])
def test_given_a_tensor_that_lies_outside_of_its_file_then_every_byte_of_the_file_counts(end: int) -> None:
    text = json.dumps({"a": {"data_offsets": [0, 5]}, "b": {"data_offsets": [5, end]}}).encode()
    size = 8 + len(text) + 2**20
    assert samples_of(struct.pack("<Q", len(text)) + text + bytes(2**20)) == [(0, 2**20), (2**20, size)]


def test_given_an_archive_of_torch_then_its_members_count_as_tensors_do() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("small", bytes(1000))
        file.writestr("large", bytes(2 * MIB))
    large, end = file.infolist()[1].header_offset, len(stream.getvalue())
    assert samples_of(stream.getvalue()) == [
        (0, large),
        (large, large + 4 * KIB),
        (large + MIB, large + MIB + 4 * KIB),
        (large + 2 * MIB, end),
        (end - 4 * KIB, end),
    ]


def test_given_a_large_model_then_little_of_it_is_read(tmp_path: Path) -> None:
    for write, name in ((safetensors, "a.safetensors"), (gguf, "a.gguf")):
        path = write(tmp_path / name)
        with path.open("rb") as file:
            read = sum(end - begin for begin, end in _samples(file, path.stat().st_size))
        assert read < path.stat().st_size // 200


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60),
        bytes(5000),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2**60),
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 2**62),
    ],
)
def test_given_a_file_that_is_no_model_then_every_byte_counts(tmp_path: Path, wrong: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(wrong)
    known = files_id(path)
    path.write_bytes(wrong + b"\0")
    longer = files_id(path)
    path.write_bytes(wrong + b"\1")
    assert len({known, longer, files_id(path)}) == 3


@pytest.mark.parametrize(
    ("alignment", "head"), [(1, 61), (32, 64), (50, 100), (61, 61), (2**32, 2**32), (0, None), (2**32 + 1, None)]
)
def test_given_a_gguf_file_then_its_head_ends_at_a_multiple_of_its_alignment(alignment: int, head: int | None) -> None:
    name = b"general.alignment"
    value = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 10, alignment)
    stream = io.BytesIO(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value)
    assert stream.getbuffer().nbytes == 61
    if head is None:
        with pytest.raises(ValueError, match=f"an alignment of {alignment}"):
            gguf_offsets(stream)
    else:
        assert gguf_offsets(stream) == (head, [])


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "modeling.py", "preprocessor.json", "more.bin"])
def test_given_a_directory_then_what_stands_beside_the_weights_counts(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    alone = files_id(tmp_path)
    (tmp_path / name).write_text('{"lora_alpha": 16}')
    known = files_id(tmp_path)
    (tmp_path / name).write_text('{"lora_alpha": 64}')
    assert len({alone, known, files_id(tmp_path)}) == 3


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "tokenizer.json", ".gitattributes", "generation_config.json"])
def test_given_a_directory_then_what_no_number_depends_on_does_not_count(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    known = files_id(tmp_path)
    (tmp_path / name).write_text("anything")
    assert files_id(tmp_path) == known


def test_given_weights_then_their_content_decides_and_not_their_place(tmp_path: Path) -> None:
    for name, last in (("one", 1), ("copy", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(5000) + bytes([last]))
    one, copy, different = (files_id(tmp_path / name) for name in ("one", "copy", "other"))
    assert one == copy != different
    assert files_id(tmp_path / "one" / "model.safetensors") == files_id(tmp_path / "copy" / "model.safetensors")


def test_given_no_weights_then_one_line_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no files with weights.*model_id"):
        files_id(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the weights"):
        files_id(tmp_path / "nowhere")


SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of each type of GGUF
TEXTS = st.binary(max_size=20)


def gguf_value(kind: int) -> st.SearchStrategy[bytes]:
    if kind == 8:
        return TEXTS.map(gguf_text)
    if kind != 9:
        return st.binary(min_size=SCALARS[kind], max_size=SCALARS[kind])
    inner = st.sampled_from([0, 3, 5, 8, 12])
    return inner.flatmap(
        lambda of: st.lists(gguf_value(of), max_size=4).map(
            lambda values: struct.pack("<IQ", of, len(values)) + b"".join(values)
        )
    )


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


FIELDS = st.sampled_from([*SCALARS, 8, 9]).flatmap(
    lambda kind: st.tuples(TEXTS, gguf_value(kind)).map(
        lambda pair: gguf_text(pair[0]) + struct.pack("<I", kind) + pair[1]
    )
)
TENSORS = st.tuples(TEXTS, st.lists(st.integers(0, 2**40), max_size=4), st.integers(0, 2**40))


@given(
    st.lists(FIELDS, max_size=6), st.lists(TENSORS, max_size=4), st.sampled_from([None, 1, 8, 64, 4096]), st.booleans()
)
def test_given_any_head_of_a_gguf_file_then_the_offsets_of_its_tensors_are_found_and_half_a_head_is_refused(
    fields: list[bytes], tensors: list[tuple[bytes, list[int], int]], alignment: int | None, is_new: bool
) -> None:
    if alignment is not None:
        fields = [*fields, gguf_text(b"general.alignment") + struct.pack("<II", 4, alignment)]
    head = b"GGUF" + struct.pack("<IQQ", 2 + is_new, len(tensors), len(fields)) + b"".join(fields)
    for name, shape, offset in tensors:
        head += gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 7, offset)
    size = alignment or 32
    start = (len(head) + size - 1) // size * size
    assert gguf_offsets(io.BytesIO(head)) == (start, [start + offset for _, _, offset in tensors])
    if tensors:
        with pytest.raises(ValueError, match="the file ends in its head"):
            gguf_offsets(io.BytesIO(head[:-1]))


class Slotted:
    """Has no fields that could be listed; its text may hold an address in memory."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Dims(ctypes.Structure):
    _fields_ = (("heads", ctypes.c_int), ("size", ctypes.c_int))


class Struct:
    """As msgspec makes them."""

    __struct_fields__ = ("heads",)
    __slots__ = ("heads",)

    def __init__(self, heads: int) -> None:
        self.heads = heads


def test_given_objects_without_a_dictionary_then_their_fields_or_their_text_count_and_no_address_does() -> None:
    told = [Slotted("float16"), Slotted("float32"), Dims(1, 2), Dims(1, 3), Dims(2, 2), Struct(1), Struct(2), Plain]
    assert len({settings_id({"a": each}) for each in told}) == len(told)
    assert settings_id({"a": Slotted("<x at 0x7f01>")}) == settings_id({"a": Slotted("<x at 0x7f02>")})
    assert settings_id({"a": Slotted("<x at 0x7f01>")}) == settings_id({"a": "Slotted"})
    assert settings_id({"a": Dims(1, 2)}) == settings_id({"a": {"heads": 1, "size": 2}})
    assert settings_id({"a": Struct(4)}) == settings_id({"a": {"heads": 4}})
    assert settings_id({"a": Kind.A}) == settings_id({"a": "Kind.A"})
    assert settings_id({"a": len}) == settings_id({"a": "builtins.len"})
