"""Files as a broken disk, a hasty script or an attacker leaves them: seeded mutations of valid files of every format.

`python tests/replay/broken_files.py [SECONDS] [SEED]` reads such files for so long, with 4 GiB of memory, and prints every
exception that is not one of `kvpool.errors`; the tests read a fixed number of them.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import zstandard
from llama_config import LLAMA

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, ReuseScope
from kvpool.config import Tier
from kvpool.errors import KVPoolError
from kvpool.recording.playback import play_recording
from kvpool.replay import ReplayConfig, TraceRecorder, read_trace, write_trace
from kvpool.replay.bounds import INFINITE, OPTIMUM
from kvpool.replay.capacity_plan import PlanRequest, make_plan
from kvpool.replay.formats import FORMATS
from kvpool.replay.runs import run_all
from kvpool.replay.synth import fit, synthesise
from kvpool.replay.trace import summary, working_set
from kvpool.scheduling.cost_model import COSTS, read_costs
from kvpool.scope import Retention, TokenRange

HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63,
    -(2**63),
    2**64,
    10**400,
    -(10**400),
    0.5,
    -0.0,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "é",
    "[/red]",
    "\ud800",
    "12",
    "AAAA",
    "AAA",
    "////",
    [],
    [[]],
    {},
    [0],
    [-1],
    [1, 1],
    [2**31],
    [None],
    ["x"],
    {"a": 1},
    {"ranges": []},
    {"end": 3},
    [0, 0, ""],
    [1, 10**9, ""],
]
DEEP = ("[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000, "[" * 900 + "]" * 900)
TEXTS = (
    "NaN",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 5_000,
    "-9" + "9" * 400,
    "0x10",
    "1_0",
    "01",
    "''",
    "\\ud800",
    *DEEP,
)


def mooncake() -> bytes:
    """Requests with block ids."""
    lines = [
        {"timestamp": n * 300, "input_length": 1000 + n, "output_length": 7 + n, "hash_ids": [1, 2, n]}
        for n in range(3, 11)
    ]
    lines[4] |= {"session": "s", "tenant": "t"}
    return _lines(lines)


def tokens() -> bytes:
    """Requests with tokens."""
    return _lines([{"timestamp": n * 0.5, "tokens": list(range(n, n + 20)), "output_length": 3} for n in range(8)])


def azure() -> bytes:
    """Requests with lengths only."""
    rows = [f"2023-11-16 18:15:{second:02}.6805900,{300 + second},44" for second in range(10, 18)]
    rows.append("2023-11-16 18:16:10,7,1")
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]).encode()


def zoned() -> bytes:
    """Requests with lengths only, whose times name their zones."""
    rows = [f"2024-05-10 00:00:{second:02}.009930+0{second % 3}:00,{300 + second},44" for second in range(10, 18)]
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]).encode()


def recording() -> bytes:
    """Every operation that a recorder writes."""
    layers = [LayerSpec(kv_heads=1, head_dim=16), LayerSpec(kv_heads=1, head_dim=16, window=8)]
    manager = KVCacheManager(KVCacheConfig(layers, 4, gpu_blocks=64, host_blocks=32, default_ttl=100.0))
    with tempfile.TemporaryDirectory() as folder:
        with TraceRecorder(Path(folder) / "r").attach(manager):
            _drive(manager)
        return (Path(folder) / "r").read_bytes()


def _drive(manager: KVCacheManager) -> None:
    manager.cache.set_quota("t", guaranteed=2, maximum=60)
    retention = Retention([TokenRange(0, 8, 90, duration=5.0)], decode_priority=10)
    a = manager.allocate(
        "a", range(20), scope=ReuseScope(tenant="t"), session="s", retention=retention, ttl=9.0, reserve=8
    )
    manager.mark_written(a, 8)
    manager.slot_mapping([a], [0], [8])
    manager.extend(a, 12)
    manager.commit(a, 20)
    b = manager.allocate("b", [*range(18), 77, 78, 79], lookahead=2)
    c = manager.allocate("c", num_tokens=5)
    manager.commit(b)
    manager.store_last_logits(b, object())
    batch = manager.batch([a, b])
    manager.extend_batch(batch, [2, 1])
    manager.commit_batch(batch, [5, 6, 7], [2, 1])
    manager.extend_batch(batch)
    manager.commit_batch(batch, [8, 9])
    manager.rewind(a, 1)
    (d,) = manager.fork(b, "d")
    manager.swap_out(a)
    manager.swap_in(a)
    pins = [manager.cache.pin(b, ttl=50.0), manager.cache.pin(list(range(8)), ReuseScope(tenant="t"))]
    manager.cache.unpin(pins[0])
    manager.free_batch([b, d])
    manager.free(c, keep=False)
    manager.cache.offload(3)
    manager.cache.onboard(range(18))
    manager.cache.evict(2)
    manager.cache.invalidate(range(4))
    manager.cache.invalidate(session="s")
    manager.free(a)
    manager.cache.resize(60)
    manager.cache.defragment(Tier.GPU)
    manager.cache.reset()


def costs() -> bytes:
    """What `kvpool bench --json` writes."""
    layer = {"kv_heads": 8, "head_dim": 128, "dtype": "float16"}
    measured = {
        "machine": "m",
        "memory_bytes": 80 * 2**30,
        "model": "llama",
        "parameters": 8_030_000_000,
        "layers": [layer] * 2,
        "costs": dict.fromkeys(COSTS, 1e-5) | {"transfer_bytes_per_second": 2e10},
        "errors": {"prefill": 0.1, "decode": 0.2},
    }
    return json.dumps({"settings": {}, "runs": [], "measurement": measured}, indent=1).encode()


def config() -> bytes:
    """The config.json of a model."""
    plain = {
        **LLAMA,
        "quantization_config": {"quant_method": "gptq", "bits": 4},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 512,
        "n_shared_experts": 1,
        "head_dim": 128,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "q_lora_rank": 64,
        "tie_word_embeddings": True,
        "multi_query": False,
        "decoder_sparse_step": 1,
    }
    return json.dumps(plain, indent=1).encode()


def _lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


SAMPLES: dict[str, bytes] = {
    make.__name__: make() for make in (mooncake, tokens, azure, zoned, recording, costs, config)
}


# --- mutations --------------------------------------------------------------------------------------------------------


def mutate(chance: random.Random, name: str, data: bytes) -> bytes:
    """A valid file after one or more accidents."""
    whole = name in ("costs", "config")
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        data = chance.choice((_bytes, _values, _values, _values, _texts, _texts, _layout))(chance, data, whole)
    return chance.choice((_plain, _plain, _gzip, _zstd, _several))(chance, data)


def _bytes(chance: random.Random, data: bytes, whole: bool) -> bytes:
    if not data:
        return data
    at, end = sorted((chance.randrange(len(data)), chance.randrange(len(data))))
    kind = chance.randrange(6)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]
    if kind == 3:
        return data[:at] + data[at : at + 50] + data[at:]
    if kind == 4:
        return data[:at] + data[min(end, at + 50) :]
    odd = (b"\xff\xfe", b"\xc3\x28", b"\x00", b"\xed\xa0\x80", b"\n", b"\n\n \n", b"\r")
    return data[:at] + chance.choice(odd) + data[at:]


def _values(chance: random.Random, data: bytes, whole: bool) -> bytes:
    """Another value somewhere in a JSON value, or one more or less."""
    parts = [data] if whole else data.splitlines(keepends=True)
    if not parts:
        return data
    at = chance.randrange(len(parts))
    try:
        tree = json.loads(parts[at])
    except (ValueError, RecursionError):
        return data
    place, holder, key = [tree], [tree], 0
    while isinstance(holder[key], (dict, list)) and holder[key] and (holder is place or chance.random() < 0.8):
        inner = holder[key]
        holder, key = inner, chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    kind = chance.randrange(5)
    if kind == 0 and holder is not place:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[chance.choice(("unknown", "", "source", "session", "_", "timestamp"))] = chance.choice(HOSTILE)
    elif kind == 1 and isinstance(holder, list):
        holder.insert(int(key), chance.choice(HOSTILE))
    else:
        holder[key] = chance.choice(HOSTILE)
    parts[at] = json.dumps(place[0]).encode() + b"\n"
    return b"".join(parts)


def _texts(chance: random.Random, data: bytes, whole: bool) -> bytes:
    """Another text in the place of a number or a word."""
    found = list(re.finditer(rb"-?[0-9.]+|\"[^\"]*\"|true|null", data))
    if not found:
        return data
    word = chance.choice(found)
    return data[: word.start()] + chance.choice(TEXTS).encode() + data[word.end() :]


def _layout(chance: random.Random, data: bytes, whole: bool) -> bytes:
    parts = data.splitlines(keepends=True)
    kind = chance.randrange(8)
    if kind == 0:
        return data.replace(b"\n", b"\r\n")
    if kind == 1:
        return b"\xef\xbb\xbf" + data
    if kind == 2:
        return data.decode("utf-8", "replace").encode("utf-16")
    if kind == 3:
        return chance.choice((b"", b"\n", b"\x00" * 100, b" ", b"{}", b"[]", b"1", b'"x"', b"null"))
    if kind == 4 and parts:
        return b"".join(parts) + chance.choice(parts)
    if kind == 5 and parts:
        del parts[chance.randrange(len(parts))]
        return b"".join(parts)
    if kind == 6:
        return data.replace(b"+01:00", b"").replace(b":10.680", b":10.68+05:00")
    chance.shuffle(parts)
    return b"".join(parts)


def _plain(chance: random.Random, data: bytes) -> bytes:
    return data


def _gzip(chance: random.Random, data: bytes) -> bytes:
    return _damaged(chance, gzip.compress(data, 1))


def _zstd(chance: random.Random, data: bytes) -> bytes:
    options = {"write_checksum": chance.random() < 0.5, "write_content_size": chance.random() < 0.5}
    return _damaged(chance, zstandard.ZstdCompressor(**options).compress(data))


def _several(chance: random.Random, data: bytes) -> bytes:
    """Two members behind each other, perhaps with something that is none."""
    half = len(data) // 2
    make = chance.choice((gzip.compress, zstandard.ZstdCompressor().compress))
    return make(data[:half]) + make(data[half:]) + chance.choice((b"", b"", b"\x00" * 9, b"junk", b"\x1f\x8b"))


def _damaged(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    kind = chance.randrange(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[: -chance.randrange(1, 9)]
    return data


# --- what is done with a file -----------------------------------------------------------------------------------------


def use(path: Path, name: str, chance: random.Random) -> None:
    """Reads a file as its format and as any other, and does with it what the commands do."""
    model = path.with_name("model")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_bytes(SAMPLES["config"])
    if name == "costs":
        measured = read_costs(path)
        make_plan(PlanRequest(str(model), measured=measured, concurrency=2, host_bytes=2**30))
    elif name == "config":
        make_plan(PlanRequest(str(path), "h200"))
    elif name == "recording" and chance.random() < 0.7:
        play_recording(path, chance.choice((None, "lru")))
    else:
        _use_trace(path, chance)


def _use_trace(path: Path, chance: random.Random) -> None:
    format = chance.choice(("auto", "auto", "auto", *FORMATS))
    trace = read_trace(path, format=format, max_errors=chance.choice((0, 10, 1000)))
    trace.problems.sentences()
    summary(trace)
    if not len(trace):
        return
    synthesise(fit(trace), 10)
    if trace.reuse_known:
        write_trace(trace, path.with_suffix(".again"))
        again = read_trace(path.with_suffix(".again"), block_size=trace.unit)
        assert again.ids.tolist() == trace.ids.tolist()
        assert again.offsets.tolist() == trace.offsets.tolist()
        run_all(trace, [ReplayConfig(policy, 8) for policy in ("lru", INFINITE, OPTIMUM)], workers=1)
        if span := trace.duration:
            working_set(trace, span / 10)


def broken_file(seed: int) -> tuple[str, bytes]:
    """The file of a seed: what it was, and what is left of it."""
    chance = random.Random(seed)
    name = chance.choice(list(SAMPLES))
    return name, mutate(chance, name, SAMPLES[name])


def check(seed: int, folder: Path) -> None:
    """Uses the file of a seed: it works, or raises an error that kvpool raises on purpose."""
    name, data = broken_file(seed)
    path = folder / f"{seed}.{name}"
    path.write_bytes(data)
    message = ""
    try:
        use(path, name, random.Random(seed))
    except KVPoolError as error:
        message = str(error)
    finally:
        path.unlink()
    assert len(message) < 2000, "the message is too long to read"


def main(seconds: float, first: int) -> int:
    """Fuzzes for so long; prints each kind of failure once, with a seed that shows it."""
    resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
    warnings.simplefilter("error")
    shown: Counter[str] = Counter()
    end, seed = time.monotonic() + seconds, first
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            try:
                check(seed, Path(folder))
            except Exception as error:
                where = [at for at in traceback.extract_tb(error.__traceback__) if "/replay/" in at.filename][-1]
                kind = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
                if not shown[kind]:
                    print(f"seed {seed} ({broken_file(seed)[0]}): {kind}: {str(error)[:150]}", flush=True)
                shown[kind] += 1
            seed += 1
    print(
        f"{seed - first} files, {sum(shown.values())} raw exceptions of {len(shown)} kinds: {dict(shown.most_common())}"
    )
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main(*(kind(word) for kind, word in zip((float, int), [*sys.argv[1:], "60", "0"][:2], strict=True))))
