"""SGLang's HiCache storage on our tiers: what its cache controller does to a backend, without SGLang's GPU code.

`KVPOOL_SGLANG` names a directory with SGLang's sources (its wheel, unpacked): then its own classes are used. Otherwise the
few that a backend needs come from `fake_sglang`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import sys
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import (
    NAMESPACES,
    PAGE,
    PARALLEL,
    SERVER_ARGS,
    STORAGE,
    Config,
    HostPool,
    Parallel,
    ServerArgs,
    StandIn,
)

from kvpool.errors import ConfigError
from kvpool.tiers import Outcome

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The backend's class, made from SGLang's own or the stand-in."""
    sources = os.environ.get("KVPOOL_SGLANG")
    stand_ins: dict[str, dict[str, Any]] = {  # nothing of a server runs here, whoever's classes are used
        "sglang.srt.runtime_context": {
            "get_server_args": lambda: SERVER_ARGS,
            "get_parallel": lambda: PARALLEL,
        },
        "sglang.srt.arg_groups.arg_utils": {"namespace_of": lambda cls: NAMESPACES},
    }
    if sources:
        monkeypatch.syspath_prepend(sources)
    else:
        packages = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.arg_groups")
        stand_ins |= {**{name: {} for name in packages}, STORAGE: {"HiCacheStorage": StandIn}}
    for name, content in stand_ins.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvpool.integrations.sglang", raising=False)
    yield importlib.import_module("kvpool.integrations.sglang").KVPoolStorage
    sys.modules.pop("kvpool.integrations.sglang", None)


def opened(storage: Any, disk: Path, *, dtype: Any = torch.bfloat16, num_pages: int = 4, **config: Any) -> Any:
    extra = {"kvpool": {"disk": str(disk), "disk_bytes": "16MB", "model_id": "v1"}}
    backend = storage(Config(extra, **config), {})
    backend.register_mem_pool_host(HostPool(num_pages, dtype))
    return backend


def filled(backend: Any, seed: int = 1) -> Any:
    """Random pages in the host pool; a copy of them."""
    data = backend.mem_pool_host.data
    data[:] = torch.randn(data.shape, generator=torch.Generator().manual_seed(seed)).to(data.dtype)
    return data.clone()


def indices(*pages: int) -> Any:
    """Of all tokens of these pages, as SGLang gives them."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_given_pages_that_were_stored_when_another_process_loads_them_then_they_are_the_same(
    storage: Any, tmp_path: Path, dtype: Any
) -> None:
    first = opened(storage, tmp_path, dtype=dtype)
    data = filled(first)
    assert first.batch_set_v1(["a", "b", "c"], indices(0, 1, 2)) == [True] * 3
    first.close()
    second = opened(storage, tmp_path, dtype=dtype)
    assert second.batch_exists(["a", "b", "c", "d"]) == 3
    assert second.batch_get_v1(["a", "b", "c", "d"], indices(3, 2, 1, 0)) == [True, True, True, False]
    got = second.mem_pool_host.data
    assert torch.equal(got[12:16], data[0:4])
    assert torch.equal(got[4:8], data[8:12])
    assert not got[0:4].any()
    second.close()


def test_given_a_load_then_no_page_of_sglang_is_made_for_it(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(storage, tmp_path)
    data = filled(backend)
    backend.batch_set_v1(["a"], indices(0))
    monkeypatch.delattr(HostPool, "get_dummy_flat_data_page")  # it pins each page by itself, and fills it with zeros
    assert backend.batch_get_v1(["a"], indices(1)) == [True]
    assert backend.batch_get_v1([], indices(1)[:0]) == []
    assert torch.equal(backend.mem_pool_host.data[4:8], data[0:4])
    assert torch.equal(backend.get("a"), data[0:4].flatten())
    backend.close()


class SlowTiers:
    """Half a second a page, by a clock of its own; what is not done in time is not there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watched = [self]
        self.num_hung = 0

    def load_prefix(self, keys: list[bytes], rows: list[Any], due: float) -> int:
        done = min(len(keys), int(2 * (due - self.now)))
        self.now += done / 2
        return done

    def store(self, keys: list[bytes], pages: list[Any], timeout: float) -> list[Outcome]:
        done = self.load_prefix(keys, pages, self.now + timeout)
        return [Outcome.OK] * done + [Outcome.LATE] * (len(keys) - done)


@pytest.mark.parametrize(("pages_a_piece", "expected"), [(2, 8), (8, 4)], ids=["pieces", "one piece"])
def test_given_a_batch_that_takes_longer_than_the_timeout_then_its_pieces_have_one_each(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages_a_piece: int, expected: int
) -> None:
    module = sys.modules[storage.__module__]
    backend = opened(storage, tmp_path, num_pages=8)  # its timeout is two seconds
    tiers = SlowTiers()
    monkeypatch.setattr(backend._store, "_tiers", tiers)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: tiers.now))
    monkeypatch.setattr(module, "PIECE_BYTES", pages_a_piece * backend._page_bytes)
    keys, answer = [*"abcdefgh"], [True] * expected + [False] * (8 - expected)
    assert backend.batch_set_v1(keys, indices(*range(8))) == answer
    assert backend.batch_get_v1(keys, indices(*range(8))) == answer
    flat = [backend.mem_pool_host.get_data_page(number * PAGE) for number in range(8)]
    assert backend.batch_set(keys, flat) == (expected == 8)
    assert [page is not None for page in backend.batch_get(keys)] == answer
    monkeypatch.undo()
    backend.close()


def test_given_pieces_of_one_page_then_each_page_comes_back_to_its_place(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[storage.__module__], "PIECE_BYTES", 1)
    backend = opened(storage, tmp_path)
    data = filled(backend)
    assert backend.batch_set_v1(["a", "b", "c"], indices(2, 0, 1)) == [True] * 3
    backend.mem_pool_host.data.zero_()
    assert backend.batch_get_v1(["a", "b", "?", "c"], indices(0, 1, 2, 3)) == [True, True, False, False]
    assert torch.equal(backend.mem_pool_host.data[:8], torch.cat([data[8:12], data[:4]]))
    assert not backend.mem_pool_host.data[8:].any()
    backend.close()


def test_given_flat_pages_then_get_and_set_bring_them_back(storage: Any, tmp_path: Path) -> None:
    backend = opened(storage, tmp_path)
    filled(backend)
    page = backend.mem_pool_host.get_data_page(0)
    assert backend.set("a", page)
    assert backend.exists("a")
    assert not backend.exists("b")
    assert torch.equal(backend.get("a"), page)
    assert backend.get("b") is None
    target = backend.mem_pool_host.get_dummy_flat_data_page()
    strided = torch.zeros(len(target), 2, dtype=target.dtype)[:, 0]
    assert torch.equal(backend.get("a", strided), backend.get("a"))
    assert torch.equal(strided, backend.get("a"))
    found, missing = backend.batch_get(["a", "b"], [target, target.clone()])
    assert found is target
    assert torch.equal(found, page)
    assert missing is None
    backend.close()


@pytest.mark.parametrize(
    "other",
    [dict(dtype=torch.float16), dict(model_name="other"), dict(tp_rank=1, tp_size=2)],
    ids=["type", "model", "rank"],
)
def test_given_another_model_type_or_rank_then_nothing_is_found(
    storage: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    first = opened(storage, tmp_path)
    filled(first)
    first.batch_set_v1(["a"], indices(0))
    first.close()
    second = opened(storage, tmp_path, **other)
    assert second.batch_exists(["a"]) == 0
    second.close()


def space(storage: Any, tmp_path: Path, **config: Any) -> bytes:
    """The first bytes of all keys."""
    backend = opened(storage, tmp_path, **config)
    prefix: bytes = backend._store._space.prefix
    backend.close()
    return prefix


@pytest.mark.parametrize("name", [each.name for each in fields(ServerArgs)])
def test_given_any_setting_of_sglang_when_it_changes_then_the_keys_do_or_its_namespace_is_in_the_short_list(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    irrelevant = sys.modules[storage.__module__].IRRELEVANT
    place = NAMESPACES.get(name, "").partition(".")[0]
    known = space(storage, tmp_path)
    monkeypatch.setattr(SERVER_ARGS, name, "another")
    counts = name == "forward_hooks" or (place not in irrelevant and f"{place}.{name}" not in irrelevant)
    assert (space(storage, tmp_path) != known) == counts
    assert counts == (name not in ("model_path", "tp_size", "port", "log_level"))


def test_given_an_sglang_whose_settings_cannot_be_read_then_one_line_says_so(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", None)
    with pytest.raises(ConfigError, match=r"does not know SGLang .*use SGLang 0\.5\.17 to 0\.5\.23"):
        opened(storage, tmp_path)


def test_given_a_model_whose_ranks_have_the_same_bytes_then_one_writes_and_all_read(
    storage: Any, tmp_path: Path
) -> None:
    writer = opened(storage, tmp_path, is_mla_model=True, tp_size=2)
    reader = opened(storage, tmp_path, is_mla_model=True, tp_size=2, tp_rank=1)
    data = filled(writer)
    assert writer.batch_set_v1(["a"], indices(0)) == [True]
    assert reader.batch_set_v1(["b"], indices(0)) == [False]
    assert reader.batch_get_v1(["a"], indices(1)) == [True]
    assert torch.equal(reader.mem_pool_host.data[4:8], data[0:4])
    reader.close()
    writer.close()


def test_given_replicas_of_attention_then_each_writes_to_a_directory_of_its_own(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(storage, tmp_path)
    monkeypatch.setattr(PARALLEL, "attn_dp_rank", 1)
    second = opened(storage, tmp_path)
    filled(first)
    for backend in (first, second):
        assert backend.batch_set_v1(["a"], indices(0)) == [True]
        backend.close()


def test_given_a_context_that_ranks_decode_together_then_one_line_says_that_it_is_not_served(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PARALLEL, "attn_dcp_size", 2)
    with pytest.raises(ConfigError, match="context parallelism"):
        opened(storage, tmp_path)


@pytest.mark.skipif(not os.environ.get("KVPOOL_SGLANG"), reason="needs SGLang's sources in KVPOOL_SGLANG")
def test_given_sglangs_own_storage_configuration_then_it_has_the_fields_that_a_backend_reads(storage: Any) -> None:
    theirs = {each.name for each in fields(importlib.import_module(STORAGE).HiCacheStorageConfig)}
    assert {each.name for each in fields(Config)} <= theirs
    source = (Path(os.environ["KVPOOL_SGLANG"]) / "sglang/srt/runtime_context.py").read_text()
    assert all(f'"{each.name}"' in source for each in fields(Parallel))


def test_given_a_flipped_byte_then_the_page_is_a_miss(storage: Any, tmp_path: Path) -> None:
    first = opened(storage, tmp_path)
    data = filled(first)
    first.batch_set_v1(["a", "b"], indices(0, 1))
    first.close()
    (slab,) = tmp_path.glob("*.kvslab")
    content = bytearray(slab.read_bytes())
    content[content.index(data[4:8].view(torch.uint8).numpy().tobytes())] ^= 1
    slab.write_bytes(content)
    second = opened(storage, tmp_path)
    assert second.batch_get_v1(["a", "b"], indices(0, 1)) == [True, False]
    second.close()


def test_given_a_clear_then_nothing_is_found(storage: Any, tmp_path: Path) -> None:
    backend = opened(storage, tmp_path)
    filled(backend)
    backend.batch_set_v1(["a"], indices(0))
    backend.clear()
    assert backend.batch_exists(["a"]) == 0
    assert backend.batch_set_v1(["a"], indices(0)) == [True]
    assert backend.batch_exists(["a"]) == 1
    backend.close()


@pytest.mark.parametrize(
    ("extra", "config", "message"),
    [
        ({}, {}, "needs .*disk"),
        ({"kvpool": {"disc": "/x"}}, {}, "did you mean disk"),
        ({"kvpool": {"disk": "/x"}}, {"attn_cp_size": 2}, "context parallelism"),
        ({"kvpool": {"disk": "/x", "host_bytes": "1GB", "quotas": {}}}, {}, "host_bytes, quotas: .*SGLang's own"),
    ],
)
def test_given_settings_that_cannot_work_then_one_line_says_so(
    storage: Any, extra: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        storage(Config(extra, **config), {})


def test_given_a_model_with_other_pools_then_one_line_says_that_it_is_not_served(storage: Any, tmp_path: Path) -> None:
    backend = opened(storage, tmp_path)
    pool = backend.mem_pool_host
    backend.register_mem_host_pool_v2(pool, "kv")  # the unified tree names this one for every model
    assert backend.registered_pools == {"kv": pool}
    with pytest.raises(ConfigError, match="keeps a pool 'swa' beside its keys and values"):
        backend.register_mem_host_pool_v2(pool, "swa")
    backend.close()


def test_given_a_model_without_files_and_without_a_name_then_one_line_says_so(storage: Any, tmp_path: Path) -> None:
    backend = storage(Config({"kvpool": {"disk": str(tmp_path)}}), {})
    with pytest.raises(ConfigError, match="name the weights"):
        backend.register_mem_pool_host(HostPool(1, torch.float32))


@pytest.mark.skipif(not os.environ.get("KVPOOL_SGLANG"), reason="needs SGLang's sources in KVPOOL_SGLANG")
def test_given_sglangs_own_classes_then_our_methods_take_what_theirs_take(storage: Any) -> None:
    base = importlib.import_module(STORAGE).HiCacheStorage
    assert issubclass(storage, base)
    ours = [name for name in vars(storage) if not name.startswith("_") and hasattr(base, name)]
    assert {*base.__abstractmethods__, "batch_get_v1", "batch_set_v1", "batch_exists"} <= {*ours}
    for name in ours:
        expected, taken = (list(inspect.signature(getattr(each, name)).parameters) for each in (base, storage))
        assert taken == expected, name


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="a node needs Linux")
def test_given_a_node_then_engines_share_it_and_find_their_own_pages(storage: Any) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiers"))
    from nodes import node_folder, node_thread

    def of_node(folder: Path, **config: Any) -> Any:
        extra = {"kvpool": {"remote": f"node:{folder}?timeout=30", "timeout": 30, "model_id": "v1"}}
        backend = storage(Config(extra, **config), {})
        backend.register_mem_pool_host(HostPool(4, torch.bfloat16))
        return backend

    with node_folder() as folder, node_thread(folder) as server:
        first, second, other = of_node(folder), of_node(folder), of_node(folder, tp_rank=1, tp_size=2)
        data = filled(first)
        assert first.batch_set_v1(["a", "b"], indices(0, 1)) == [True] * 2
        assert second.batch_exists(["a", "b", "c"]) == 2
        assert second.batch_get_v1(["a", "b"], indices(3, 2)) == [True] * 2
        assert torch.equal(second.mem_pool_host.data[12:16], data[0:4])
        assert torch.equal(second.mem_pool_host.data[8:12], data[4:8])
        assert second.batch_set_v1(["a", "b"], indices(3, 2)) == [True] * 2
        assert other.batch_exists(["a", "b"]) == 0
        assert server.call(server.stats, 30)["num_values"] == 2
        for backend in (first, second, other):
            backend.close()
