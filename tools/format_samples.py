"""Writes samples of every format that outlives a process, as this kvpool makes them.

`python tools/format_samples.py VERSION`

They go to tests/formats/VERSION, once per release, and stay: tests/test_formats.py reads all of them from then on. What
readers must find in them stands in expected.json beside them.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.cluster.wire_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    WireEvent,
    decode_batch,
    encode_batch,
)
from kvpool.integrations.llama_states import StateBlob
from kvpool.recording import TraceRecorder
from kvpool.scheduling.cost_model import LinearCostModel, Measurement
from kvpool.scope import ReuseScope
from kvpool.tiers import CompressedTier, DiskTier, Fingerprint, KeyedTier, KeySpace, Outcome
from kvpool.tiers.compressed_tier import CODECS
from kvpool.tiers.envelope import seal
from kvpool.tiers.remote.redis import RedisTier
from kvpool.tiers.remote.s3 import object_path

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "formats"
COUNTERS = ("requests", "prompt_tokens", "hit_tokens", "blocks_allocated", "evictions", "forks", "rewinds")
TOKENS = list(range(100, 112))
SETTINGS = """format = 1

[tiers]
host_bytes = "8GB"
disk = "/var/cache/kvpool"
disk_bytes = "50GB"
remote = "redis://127.0.0.1:6379"
remote_ttl = 3600
"""


def sample(name: str, size: int) -> bytes:
    """Bytes that look random and are the same everywhere."""
    return hashlib.shake_256(name.encode()).digest(size)


def key_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def config() -> KVCacheConfig:
    layers = [LayerSpec(kv_heads=1, head_dim=8), LayerSpec(kv_heads=1, head_dim=8, window=8)]
    return KVCacheConfig(layers, block_size=4, gpu_blocks=24, host_blocks=8)


def write_disk(folder: Path) -> dict[str, Any]:
    """A directory with values as they are, of a known model and scope, and through every codec."""
    space = KeySpace(Fingerprint.of(config(), model="tiny", weights="v1"))
    keys = space.of_tokens(np.array(TOKENS, np.int32), ReuseScope(tenant="acme"))
    found: dict[str, Any] = {"description": space.fingerprint.describe(), "tenant": "acme", "tokens": TOKENS}
    found["keys"] = [key.hex() for key in keys]
    found["values"] = {}
    numbers = (np.frombuffer(sample("numbers", 512), np.uint8).astype(np.float32) / 256).view("<u4") >> 16
    data = numbers.astype("<u2").tobytes()  # bfloat16
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "disk")
        with DiskTier(path, 2**20) as tier:
            tier.introduce(space)
            for key in (*keys, key_of("longer")):
                value = sample(key.hex(), 9000 if key == key_of("longer") else 1000)
                assert tier.store([key], [value]) == [Outcome.OK]
                found["values"][key.hex()] = [len(value), hashlib.sha256(value).hexdigest()]
            found["compressed"] = {codec: _compressed(tier, codec, data) for codec in CODECS}
        _pack(path, folder / "disk.tar.gz")
    return found


def _compressed(tier: KeyedTier, codec: str, data: bytes) -> list[Any]:
    compressed = CompressedTier(tier, codec)
    assert compressed.store([key_of(codec)], [data]) == [Outcome.OK]
    out = bytearray(len(data))
    assert compressed.load([key_of(codec)], [out]) == [Outcome.OK]
    return [key_of(codec).hex(), len(data), hashlib.sha256(out).hexdigest()]


def _pack(path: Path, target: Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for file in sorted(path.iterdir()):
            archive.add(file, file.name, filter=_nobody)
    target.write_bytes(gzip.compress(content.getvalue(), mtime=0))


def _nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def write_stores(folder: Path) -> dict[str, Any]:
    """A value as Redis and S3 hold it."""
    key, value = key_of("store"), sample("store", 500)
    tier = RedisTier("redis://127.0.0.1:1?timeout=0.001")  # nobody listens there: it only says the names
    names = tier.names(key)
    tier.close()
    strings = dict(zip(names, (value, seal(key, memoryview(value))), strict=True))
    objects = {object_path(key): seal(key, memoryview(value)) + value}
    held = {"redis": strings, "s3": objects}
    text = {kind: {name: base64.b64encode(data).decode() for name, data in each.items()} for kind, each in held.items()}
    (folder / "stores.json").write_text(json.dumps(text, indent=1) + "\n")
    return {"key": key.hex(), "size": len(value), "sha256": hashlib.sha256(value).hexdigest()}


def write_recording(folder: Path) -> dict[str, Any]:
    """Requests that share prefixes, fork, go back, and evict."""
    manager = KVCacheManager(config())
    with TraceRecorder(folder / "recording.kvtrace").attach(manager):
        for number in range(12):
            prompt = [*range(9), *range(20 * (number % 4), 20 * (number % 4) + 7)]
            handle = manager.allocate(number, prompt, scope=ReuseScope(tenant="b" if number % 3 else ""))
            manager.commit(handle)
            manager.extend(handle, 2)
            manager.commit(handle, [500 + number, 7])
            manager.free_batch(manager.fork(handle, f"fork {number}"))
            manager.rewind(handle, 1)
            manager.free(handle)
    stats = manager.stats()
    return {name: getattr(stats, name) for name in COUNTERS}


def write_events(folder: Path) -> list[Any]:
    """One batch in vLLM's form of today."""
    events: list[WireEvent] = [
        BlockStored([1, 2], None, list(range(8)), 4, lora_name="adapter", group=0, kind="full"),
        BlockStored([3], 2, list(range(8, 12)), 4, medium="CPU", extra_keys=[["salt"]], session="s"),
        BlockRemoved([3], "CPU", 0),
        AllBlocksCleared(),
    ]
    (folder / "events.msgpack").write_bytes(encode_batch(12.5, events, 1))
    return [repr(event) for event in decode_batch((folder / "events.msgpack").read_bytes()).events]


def write_state(folder: Path) -> dict[str, Any]:
    """A state of llama.cpp and the signpost to it."""
    state = sample("state", 700)
    blob = StateBlob.of(np.array(TOKENS, np.int32), len(state))
    blob.state[:] = np.frombuffer(state, np.uint8)
    blob.seal()
    content = b"".join([blob.signpost.packed(), *(piece.tobytes() for piece in blob.pieces)])
    (folder / "llama.bin.gz").write_bytes(gzip.compress(content, mtime=0))
    return {"tokens": TOKENS, "sha256": hashlib.sha256(state).hexdigest()}


def write_costs(folder: Path) -> dict[str, Any]:
    """A measurement of `kvpool bench`."""
    costs = LinearCostModel(prefill_seconds_per_token=2e-4, decode_seconds_per_step=4e-3)
    found = Measurement("a machine", 10**9, "tiny", 10**6, (LayerSpec(2, 64),), costs, {"prefill": 0.1})
    (folder / "costs.json").write_text(json.dumps({"runs": [], "measurement": found.to_dict()}) + "\n")
    return found.to_dict()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(str(__doc__))
    target = FOLDER / sys.argv[1]
    if target.exists():
        sys.exit(f"{target} is there already: samples stay as they were made")
    with tempfile.TemporaryDirectory() as temporary:
        write_all(Path(temporary))
        shutil.copytree(temporary, target)
    print("\n".join(f"{path.stat().st_size:7} {path.name}" for path in sorted(target.iterdir())))


def write_all(folder: Path) -> None:
    """All samples, and what is expected of them."""
    expected = {
        "disk": write_disk(folder),
        "stores": write_stores(folder),
        "recording": write_recording(folder),
        "events": write_events(folder),
        "llama": write_state(folder),
        "costs": write_costs(folder),
    }
    (folder / "settings.toml").write_text(SETTINGS)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
