"""Several lives of a real vLLM in one process, run by the Python that has it: `python vllm_lives.py '{"checks": […], …}'`.

A life is an engine with a small random model that ends before the next begins, in the same process, so that a start costs
a few seconds. Each check is a function below and returns what it saw; the last line of the output is all of that as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

sys.path.insert(0, str(Path(__file__).parent))

import tiny_models
from toy import AlwaysLoads

BLOCK = 32
CHECKS: dict[str, Callable[[Path], Any]] = {}


def check(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Registers a check under its name."""
    CHECKS[function.__name__] = function
    return function


class Life:
    """One engine, from its start to its end."""

    def __init__(self, model: str, extra: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = options.pop("connector", "KVPoolConnector")
        module = options.pop("module", "kvpool.integrations.vllm")
        if extra is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector=connector,
                kv_connector_module_path=module,
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        given = {"max_model_len": 2048, "num_gpu_blocks_override": 256, "disable_log_stats": False, **options}
        given = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "block_size": BLOCK, **given}
        self.engine = LLM(model, **given)
        side = getattr(getattr(self.core.scheduler, "connector", None), "_scheduler", None)
        loader = getattr(getattr(side, "host", None), "_loader", None)
        if loader is not None:  # so small a model may be faster than any tier
            loader.decider = AlwaysLoads(len(loader.decider.speeds))

    @property
    def connector(self) -> Any:
        """The connector beside the scheduler."""
        return self.core.scheduler.connector

    @property
    def side(self) -> Any:
        """kvpool's half of it."""
        return self.connector._scheduler

    def answers(self, prompts: Sequence[Sequence[int]], *, num_new: int = 8, **options: Any) -> list[list[int]]:
        """The tokens that the engine generates behind each prompt, all of them asked at once."""
        return [each[0] for each in self.asked(prompts, num_new=num_new, **options)]

    def asked(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_new: int = 8,
        salt: str | None = None,
        params: Any = None,
        adapter: Any = None,
    ) -> list[tuple[list[int], int]]:
        """The same, and how many tokens of each prompt were cached."""
        from vllm import SamplingParams

        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_new, detokenize=False, ignore_eos=True, extra_args=extra
        )
        given = [{"prompt_token_ids": list(prompt), **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        outputs = self.engine.generate(given, sampling, use_tqdm=False, lora_request=adapter)
        return [(list(each.outputs[0].token_ids), each.num_cached_tokens or 0) for each in outputs]

    def submit(self, prompts: Sequence[Sequence[int]], *, num_new: int = 8) -> list[str]:
        """Asks, and does not wait for the answers; the names of the requests."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=num_new, detokenize=False, ignore_eos=True)
        names = [f"submitted {number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return names

    def finished(self, seconds: float = 120.0) -> dict[str, list[int]]:
        """The answers to all that was submitted, by name; steps until nobody waits for anything."""
        answers, due = {}, time.monotonic() + seconds
        while self.core.scheduler.has_requests():
            assert time.monotonic() < due, "requests never end"
            for output in self.engine.llm_engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        return answers

    @property
    def core(self) -> Any:
        """vLLM's engine."""
        return self.engine.llm_engine.engine_core.engine_core

    def forget(self) -> None:
        """Empties vLLM's own cache, and not the connector's."""
        self.engine.reset_prefix_cache()

    def settle(self, seconds: float = 20.0) -> None:
        """Steps without requests, until nothing is on its way to the tiers."""
        core = self.core
        due = time.monotonic() + seconds
        while self.connector.has_pending_push_work() and time.monotonic() < due:
            core.step_fn()
        for worker in workers():
            if worker._storer is not None:
                worker._storer.flush(seconds)

    def end(self) -> None:
        """Shuts the engine down."""
        self.engine.llm_engine.engine_core.shutdown()
        self.engine = None
        gc.collect()


def workers() -> list[Any]:
    """kvpool's half in the workers of this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker
    return [] if worker is None else [worker]


@contextmanager
def life(model: str, extra: dict[str, Any] | None = None, **options: Any) -> Iterator[Life]:
    """An engine that is ended whatever happens."""
    alive = Life(model, extra, **options)
    try:
        yield alive
    finally:
        alive.end()


def prompts(seed: int, number: int, length: int) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(3, tiny_models.VOCABULARY) for _ in range(length)] for _ in range(number)]


def model(kind: str, folder: Path) -> str:
    """A model of a kind, written once."""
    directory = folder / kind
    return str(directory) if directory.exists() else tiny_models.write(kind, directory)


def damage(disk: Path) -> None:
    """Flips one byte in every tenth of what a disk tier holds."""
    for slab in disk.glob("*.kvslab"):
        data = bytearray(slab.read_bytes())
        for place in range(len(data) // 20, len(data), max(1, len(data) // 10)):
            data[place] ^= 0x40
        slab.write_bytes(data)


HOST = {"host_bytes": "64MB", "host_write": "through"}  # everything is on the host when vLLM forgets it
PROMPTS = prompts(1, 3, 450)
WHOLE = 448  # tokens of whole blocks in each of them


@check
def plain_and_host(folder: Path) -> Any:
    """vLLM alone, then with the connector: cold, from the host, and what it counted."""
    llama = model("llama", folder)
    with life(llama) as alone:
        expected = alone.answers(PROMPTS)
    with life(llama, HOST) as with_host:
        cold = with_host.asked(PROMPTS)
        with_host.forget()
        host = with_host.asked(PROMPTS)
        metrics = {
            each.name: each.value
            for each in with_host.engine.get_metrics()
            if each.name.startswith("vllm:kvpool_") and each.value
        }
    return {
        "differ": len({tuple(answer) for answer in expected}),
        "cold": [answer for answer, _ in cold] == expected,
        "host": [answer for answer, _ in host] == expected,
        "cached": [cached for _, cached in host],
        "metrics": metrics,
    }


@check
def write_back(folder: Path) -> Any:
    """More prompts than vLLM keeps, three times: the host gets what vLLM gives up, and nothing before."""
    llama, asked = model("llama", folder), prompts(4, 12, 450)
    with life(llama) as alone:
        expected = [alone.answers([prompt]) for prompt in asked]
    seen: dict[str, Any] = {}
    for name, options in (("large steps", {}), ("small steps", {"max_num_batched_tokens": 128})):
        with life(llama, {"host_bytes": "64MB"}, max_model_len=1024, num_gpu_blocks_override=60, **options) as each:
            each.answers([asked[0]])
            first = each.side.stats()["stored"]
            found = [each.asked([prompt]) for prompt in asked * 3]
            seen[name] = {
                "right": sum(
                    [one[0] for one in answer] == right for answer, right in zip(found, expected * 3, strict=True)
                ),
                "cached": [one[1] for answer in found for one in answer][-12:],
                "stored at first": first,
                "failed": each.side.stats()["failed"],
            }
            each.engine.reset_prefix_cache(reset_connector=True)
            seen[name]["behind a reset"] = each.asked([asked[-1]])[0][1]
    return seen


@check
def poisoned(folder: Path) -> Any:
    """A connector that brings zeros: the answers must differ, or the other checks prove nothing."""
    llama = model("llama", folder)
    with life(llama, HOST, connector="Poisoned", module="poisoned") as each:
        cold = each.answers(PROMPTS)
        each.forget()
        loaded = each.asked(PROMPTS)
    return {
        "cached": [cached for _, cached in loaded],
        "same": sum(answer == right for (answer, _), right in zip(loaded, cold, strict=True)),
    }


@check
def wishes(folder: Path) -> Any:
    """Requests that are not to be stored, that have a salt, and a reset that is final."""
    with life(model("llama", folder), HOST) as each:

        def cached(prompt: list[int], **options: Any) -> int:
            number = each.asked([prompt], **options)[0][1]
            each.forget()
            return number

        no_store = [cached(PROMPTS[0], params={"kvpool": {"no_store": True}}), cached(PROMPTS[0]), cached(PROMPTS[0])]
        salted = [cached(PROMPTS[0], salt="ada"), cached(PROMPTS[0], salt="bob"), cached(PROMPTS[0], salt="ada")]
        wrong = [cached(PROMPTS[1], params={"kvpool": {"ttl": -1}}), cached(PROMPTS[1])]
        each.engine.reset_prefix_cache(reset_connector=True)
        return {"no_store": no_store, "salted": salted, "wrong": wrong, "reset": cached(PROMPTS[0])}


@check
def keeping(folder: Path) -> Any:
    """Quotas by salt, times to live, pins and priorities, on a host of four prompts; then vLLM's count of sources."""
    many, llama = prompts(9, 5, 450), model("llama", folder)
    quotas = {"ada": {"maximum": 14}, "eve": {"guaranteed": 14}}
    seen: dict[str, Any] = {}
    with life(llama, {"host_blocks": 56, "policy": "lru", "quotas": quotas}) as each:
        now = [1000.0]
        each.side.host._clock._clock = lambda: now[0]

        def cached(*asked: list[int], **options: Any) -> list[int]:
            numbers = [each.asked([prompt], **options)[0][1] for prompt in asked]
            each.forget()
            return numbers

        cached(*many[:2], salt="ada")
        seen["most"] = cached(many[1], many[0], salt="ada")
        cached(PROMPTS[0], salt="eve")
        cached(*many)
        seen["least"] = cached(PROMPTS[0], salt="eve")
        cached(PROMPTS[1], params={"kvpool": {"pin": 3600}})
        cached(*many)
        pinned = cached(PROMPTS[1], params={"kvpool": {"pin": 0}})
        cached(*many)
        seen["pin"] = pinned + cached(PROMPTS[1])
        cached(*PROMPTS[1:], params={"kvpool": {"ttl": 60}})
        living = cached(PROMPTS[1])
        now[0] += 61
        seen["ttl"] = living + cached(PROMPTS[2])
        each.side.host.check()
    with life(llama, {"host_blocks": 56, "policy": "priority"}) as each:
        cached(PROMPTS[0], params={"kvpool": {"priority": 90}})
        cached(*many, params={"kvpool": {"priority": 5}})
        seen["priority"] = cached(PROMPTS[0])
    extra = {"host_bytes": "64MB", "disk": str(folder / "sources"), "disk_bytes": "64MB"}
    with life(llama, extra) as each:
        each.answers(PROMPTS)
        each.settle()
    with life(llama, extra) as each:
        cached(*PROMPTS)
        cached(*PROMPTS)
        seen["sources"] = {
            one.labels["source"]: one.value
            for one in each.engine.get_metrics()
            if one.name == "vllm:prompt_tokens_cached_by_source" and one.value
        }
    seen["counts sources"] = hasattr(connector_base(), "get_external_cache_hit_sources")
    return seen


def connector_base() -> Any:
    """What connectors of the installed vLLM derive from."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return KVConnectorBase_V1


@check
def adapters(folder: Path) -> Any:
    """The same prompt with two LoRA adapters and without: each gets its own blocks back, and nobody else's."""
    from vllm.lora.request import LoRARequest

    llama = model("llama", folder)
    chosen: list[Any] = [None]
    for number in (1, 2):
        path = tiny_models.write_adapter(folder / f"adapter {number}", seed=number)
        chosen.append(LoRARequest(f"adapter {number}", number, path))
    options: dict[str, Any] = dict(enable_lora=True, max_lora_rank=8, max_loras=2)

    def asked(each: Life) -> list[tuple[list[int], int]]:
        return [each.asked(PROMPTS[:1], adapter=adapter)[0] for adapter in chosen]

    with life(llama, **options) as alone:
        expected = [answer for answer, _ in asked(alone)]
    with life(llama, HOST, **options) as each:
        cold = asked(each)
        each.forget()
        host = asked(each)
    return {
        "differ": len({tuple(answer) for answer in expected}),
        "right": [[answer for answer, _ in got] == expected for got in (cold, host)],
        "cached": [[cached for _, cached in got] for got in (cold, host)],
    }


@check
def identity(folder: Path) -> Any:
    """A disk, and a restart with another setting or another adapter that decides what is in blocks: nothing is found."""
    from vllm.lora.request import LoRARequest

    phi, llama, asked = model("phi3", folder), model("llama", folder), prompts(12, 2, 200)
    extra = {"host_bytes": "64MB", "disk": str(folder / "identity"), "disk_bytes": "64MB"}
    seen: dict[str, Any] = {}
    with life(phi, max_model_len=256) as alone:
        expected = alone.answers(asked)
    with life(phi, extra, max_model_len=512) as first:
        seen["lengths differ"] = first.answers(asked) != expected
        first.settle()
    with life(phi, extra, max_model_len=256) as second:
        seen["shorter"] = _seen(second.asked(asked), expected)
        second.settle()
    with life(phi, extra, max_model_len=256, seed=5, max_num_seqs=3) as third:
        seen["the same"] = _seen(third.asked(asked), expected)

    path = str(folder / "alpha")
    options: dict[str, Any] = dict(enable_lora=True, max_lora_rank=8)

    def with_adapter(each: Life) -> list[tuple[list[int], int]]:
        return each.asked(asked, adapter=LoRARequest("alpha", 1, path))

    tiny_models.write_adapter(Path(path), seed=3, alpha=64)
    with life(llama, **options) as alone:
        expected = [answer for answer, _ in with_adapter(alone)]
    tiny_models.write_adapter(Path(path), seed=3, alpha=16)
    with life(llama, extra, **options) as first:
        seen["alphas differ"] = [answer for answer, _ in with_adapter(first)] != expected
        first.settle()
        first.forget()
        seen["adapter"] = [cached for _, cached in with_adapter(first)]
        tiny_models.write_adapter(Path(path), seed=3, alpha=64)  # vLLM keeps what it has loaded
        first.forget()
        seen["adapter replaced"] = [cached for _, cached in with_adapter(first)]
    with life(llama, extra, **options) as second:
        seen["another adapter"] = _seen(with_adapter(second), expected)
    return seen


def _seen(got: list[tuple[list[int], int]], expected: list[list[int]]) -> Any:
    """Whether the answers are right, and how many tokens were cached."""
    return [[answer for answer, _ in got] == expected, [cached for _, cached in got]]


@check
def settings(folder: Path) -> Any:
    """Every setting of vLLM, changed in turn: which ones change the fingerprint?"""
    from dataclasses import fields, is_dataclass

    from vllm.engine.arg_utils import EngineArgs

    from kvpool.integrations.vllm_versions.vllm_identity import IRRELEVANT
    from kvpool.tiers.identity import settings_id

    config = EngineArgs(model("llama", folder), dtype="float32", enable_lora=True).create_engine_config()
    for name in ("hf_config", "hf_text_config"):
        setattr(config.model_config, name, getattr(config.model_config, name).to_dict())
    known, seen = settings_id(config, IRRELEVANT), {"counted": 0, "left out": 0, "wrongly": []}
    again = EngineArgs(model("llama", folder), dtype="float32", enable_lora=True).create_engine_config()

    def names(owner: Any) -> list[str]:
        return list(owner) if isinstance(owner, dict) else [each.name for each in fields(owner)]

    def walk(owner: Any, place: str, is_out: bool) -> None:
        values = owner if isinstance(owner, dict) else owner.__dict__
        for name in names(owner):
            path = f"{place}.{name}" if place else name
            out, old = is_out or path in IRRELEVANT, values.get(name)
            if is_dataclass(old) or (isinstance(old, dict) and path.endswith("_config")):
                walk(old, path, out)
            values[name] = "another"
            differs = settings_id(config, IRRELEVANT) != known
            values[name] = old
            seen["left out" if out else "counted"] += 1
            if differs == out:
                seen["wrongly"].append(path)

    walk(config, "", False)
    return {**seen, "stable": settings_id(again, IRRELEVANT) == settings_id(config, IRRELEVANT) == known}


@check
def new_weights(folder: Path) -> Any:
    """Weights that change in place, while vLLM sleeps or behind a reset of its own cache; and where that is refused."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from kvpool.integrations.connector.settings import ConnectorSettings
    from kvpool.integrations.vllm_versions.vllm_identity import weights_name

    llama, host = model("llama", folder), HOST
    seen: dict[str, Any] = {}

    def changed(worker: Any) -> None:
        embedding = worker.model_runner.model.model.embed_tokens.weight.data
        embedding.copy_(embedding.roll(1, 0))

    with life(llama) as alone:
        before = alone.answers(PROMPTS)
        alone.engine.collective_rpc(changed)
        alone.forget()
        expected = alone.answers(PROMPTS)
    seen["differ"] = before != expected
    disk = {**host, "disk": str(folder / "asleep")}
    for level in (1, 2):
        with life(llama, disk) as each:
            awake = _seen(each.asked(PROMPTS), before)
            each.settle()
            each.engine.sleep(level)
            each.engine.collective_rpc(changed)
            each.engine.wake_up()
            woken = _seen(each.asked(PROMPTS), expected)
            each.forget()
            seen[f"asleep {level}"] = [awake, woken, _seen(each.asked(PROMPTS), expected)]
    with life(llama, disk) as each:
        seen["another life"] = _seen(each.asked(PROMPTS), before)
    trainer = WeightTransferConfig(backend="ipc")
    with life(llama, host, weight_transfer_config=trainer) as each:
        seen["sent"] = [_seen(each.asked(PROMPTS), before)]
        each.engine.collective_rpc(changed)
        each.forget()
        seen["sent"].append(_seen(each.asked(PROMPTS), expected))
    settings = ConnectorSettings.of({**disk, "model_id": "mine"})
    sent = EngineArgs(llama, weight_transfer_config=trainer).create_engine_config()
    seen["sent, with a disk"] = _answer(lambda: weights_name(sent, settings))
    dummy = EngineArgs(llama, load_format="dummy").create_engine_config()
    seen["in no file"] = _answer(lambda: weights_name(dummy, ConnectorSettings.of(disk)))
    seen["named"] = weights_name(dummy, settings)
    return seen


@check
def among_others(folder: Path) -> Any:
    """vLLM's MultiConnector, with a connector that shakes hands as NIXL's does behind ours and before it."""
    import neighbour

    llama = model("llama", folder)
    with life(llama) as alone:
        expected = alone.answers(PROMPTS)
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    ours = {"kv_connector": "KVPoolConnector", "kv_connector_module_path": "kvpool.integrations.vllm", **common}
    ours["kv_connector_extra_config"] = {"host_bytes": "64MB", "disk": str(folder / "among"), "disk_bytes": "64MB"}
    other = {"kv_connector": "Neighbour", "kv_connector_module_path": "neighbour", **common}
    seen: dict[str, Any] = {}
    for name, order in (("first", [ours, other]), ("second", [other, ours])):
        neighbour.seen.clear()
        with life(llama, {"connectors": order}, connector="MultiConnector", module=None) as each:
            cold = each.asked(PROMPTS)
            each.forget()
            host = each.asked(PROMPTS)
        seen[name] = [_seen(cold, expected)[0], _seen(host, expected), neighbour.seen[:]]
    return seen


@check
def fp8(folder: Path) -> Any:
    """vLLM keeps keys and values in 8 bits: cold, from the host, and from the disk, where other types find nothing."""
    llama, options = model("llama", folder), {"kv_cache_dtype": "fp8"}
    extra = {"host_bytes": "64MB", "disk": str(folder / "fp8"), "disk_bytes": "64MB"}
    with life(llama, **options) as alone:
        expected = alone.answers(PROMPTS)
    with life(llama, extra, **options) as first:
        cold = first.asked(PROMPTS)
        first.forget()
        host = first.asked(PROMPTS)
        first.settle()
    with life(llama, extra, **options) as second:
        disk = second.asked(PROMPTS)
    with life(llama, extra) as third:
        other = [cached for _, cached in third.asked(PROMPTS)]
    return [_seen(got, expected) for got in (cold, host, disk)], other


@check
def reader(folder: Path) -> Any:
    """A directory that another process writes to: refused without `read_only`, and read with it."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    from kvpool.tiers import DiskTier

    llama, extra = model("llama", folder), {"host_bytes": "64MB", "disk": str(folder / "reader"), "disk_bytes": "64MB"}
    with life(llama, extra) as first:
        expected = first.answers(PROMPTS[:2])
        first.settle()
    with DiskTier(folder / "reader", 64 * 2**20) as writer:
        refused = _answer(lambda: Life(llama, extra))
        ensure_kv_transfer_shutdown()  # what did not start has left its worker's half behind
        with life(llama, {**extra, "read_only": True}) as second:
            got = second.asked(PROMPTS[:2])
            second.answers(PROMPTS[2:])
            second.settle()
            second.forget()
            host = [cached for _, cached in second.asked(PROMPTS[2:])]
        num_values = writer.stats().num_values
    return {"refused": refused, "got": _seen(got, expected), "host": host, "values": num_values}


@check
def events(folder: Path) -> Any:
    """KV events of the host and the disk, as they would go to subscribers, under the hashes of vLLM's own events."""
    from vllm.config import KVEventsConfig

    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    extra = {"host_bytes": "64MB", "disk": str(folder / "events"), "disk_bytes": "64MB"}
    with life(model("llama", folder), extra, kv_events_config=config) as each:
        taken: list[Any] = []
        publisher = each.engine.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher
        publisher.publish = lambda batch: taken.extend(batch.events)
        each.asked(PROMPTS)
        each.settle()
        each.asked([[5, 6, 7]])
    names: dict[str, set[Any]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
    for event in taken:
        if type(event).__name__ == "BlockStored":
            names[event.medium] |= {*event.block_hashes}
    whole = {hash for event in taken if getattr(event, "medium", "") == "GPU" for hash in event.block_hashes}
    return {
        "blocks": {medium: len(held) for medium, held in names.items()},
        "same names": names["CPU"] <= whole and names["STORAGE"] == names["CPU"],
        "tokens": sorted({len(event.token_ids) // len(event.block_hashes) for event in taken}),
    }


@check
def hybrid(folder: Path) -> Any:
    """Layers with sliding windows beside others: cold, from the host, in chunks, after decoding, and from the disk."""
    gemma = model("gemma2", folder)
    extra = {"host_bytes": "64MB", "disk": str(folder / "hybrid"), "disk_bytes": "64MB"}
    with life(gemma) as alone:
        expected = alone.answers(PROMPTS, num_new=100)
        longer = [[*prompt, *answer, 7] for prompt, answer in zip(PROMPTS, expected, strict=True)]
        forth = alone.answers(longer)
    with life(gemma, extra, max_num_batched_tokens=128) as first:
        cold = first.answers(PROMPTS, num_new=100)
        first.forget()
        host = first.asked(PROMPTS, num_new=100)
        first.forget()
        further = first.asked(longer)
        first.settle()
        counts = first.side.stats()
    with life(gemma, extra) as second:
        disk = second.asked(PROMPTS, num_new=100)
    damage(folder / "hybrid")
    with life(gemma, extra) as third:
        damaged = third.answers(PROMPTS, num_new=100)
        lost = third.side.stats()["failed"]
    with life(gemma, HOST, connector="Poisoned", module="poisoned") as poison:
        poison.answers(PROMPTS, num_new=100)
        poison.forget()
        wrong = poison.answers(PROMPTS, num_new=100)
    return {
        "differ": len({tuple(answer) for answer in expected}),
        "cold": cold == expected,
        "host": [answer for answer, _ in host] == expected,
        "further": [answer for answer, _ in further] == forth,
        "disk": [answer for answer, _ in disk] == expected,
        "cached": [[cached for _, cached in asked] for asked in (host, further, disk)],
        "damaged": damaged == expected,
        "failed": [counts["failed"], lost > 0],
        "poisoned": sum(answer == right for answer, right in zip(wrong, expected, strict=True)),
    }


@check
def states(folder: Path) -> Any:
    """Layers that keep a state: cold and in chunks, from the host, behind an answer, from disk, from a damaged disk.

    One request at a time: vLLM 0.32 itself answers otherwise on a CPU when it computes several prompts of LFM2 at once.
    """
    lfm2, alone_at_once = model("lfm2", folder), {"max_num_seqs": 1, "prefix_cache_retention_interval": BLOCK}
    # What lies in the middle comes from the disk, however busy the machine is.
    extra = {"host_bytes": "64MB", "disk": str(folder / "states"), "disk_bytes": "64MB", "timeout": 60}
    with life(lfm2, **alone_at_once) as alone:
        expected = alone.answers(PROMPTS, num_new=40)
        longer = [[*prompt, *answer, 7] for prompt, answer in zip(PROMPTS, expected, strict=True)]
        forth = alone.answers(longer)
        halves = [[*prompt[:300], 5, 6, 7] for prompt in PROMPTS]
        middle = alone.answers(halves)
    seen: dict[str, Any] = {"differ": len({tuple(answer) for answer in expected})}
    with life(lfm2, extra, **alone_at_once, max_num_batched_tokens=128) as first:
        seen["cold"] = _seen(first.asked(PROMPTS, num_new=40), expected)
        first.forget()
        seen["host"] = _seen(first.asked(PROMPTS, num_new=40), expected)
        first.forget()
        seen["behind an answer"] = _seen(first.asked(longer), forth)
        first.forget()
        seen["in the middle"] = _seen(first.asked(halves), middle)
        first.settle()
        first.side.host.check()
        counts = first.side.stats()
        seen["failed"] = [counts["failed"], counts["no_room"]]
    with life(lfm2, extra, **alone_at_once) as second:
        seen["disk"] = _seen(second.asked(PROMPTS, num_new=40), expected)
        seen["from tiers"] = second.side.stats()["from_tiers"]
        pool = second.core.scheduler.kv_cache_manager.block_pool
        second.forget()
        seen["used"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    damage(folder / "states")
    with life(lfm2, extra, **alone_at_once) as third:
        seen["damaged"] = _seen(third.asked(PROMPTS, num_new=40), expected)[0]
        seen["lost"] = third.side.stats()["failed"] > 0
    for name in ("Poisoned", "PoisonedStates"):
        with life(lfm2, HOST, connector=name, module="poisoned", **alone_at_once) as poison:
            poison.answers(PROMPTS, num_new=40)
            poison.forget()
            wrong = poison.asked(PROMPTS, num_new=40)
            seen[name] = [sum(got == right for (got, _), right in zip(wrong, expected, strict=True)), wrong[0][1]]
    return seen


@check
def delta_rule(folder: Path) -> Any:
    """Three groups of layers whose states have two parts beside attention, in 16 bits, as vLLM computes them on a CPU."""
    qwen = model("qwen3_next", folder)
    options: dict[str, Any] = {"max_num_seqs": 1, "dtype": "bfloat16"}
    extra = {"host_bytes": "64MB", "disk": str(folder / "delta"), "disk_bytes": "64MB"}
    seen: dict[str, Any] = {}
    with life(qwen, **options) as alone:
        block = alone.core.scheduler.block_size  # vLLM's choice, which is not the same on every processor
        whole = WHOLE // block * block
        asked = [prompt[: whole + 2] for prompt in PROMPTS]  # so few tokens behind it do not outlive a wrong state
        expected = alone.answers(asked)
        seen["differ"] = len({tuple(answer) for answer in expected})
        seen["groups"] = len(alone.core.scheduler.kv_cache_config.kv_cache_groups)

    def cached_as(got: list[tuple[list[int], int]], num_tokens: int) -> bool:
        return got == [(answer, num_tokens) for answer in expected]

    with life(qwen, extra, **options) as first:
        seen["cold"] = cached_as(first.asked(asked), 0)
        first.forget()
        seen["host"] = cached_as(first.asked(asked), whole)
        first.settle()
    with life(qwen, extra, **options) as second:
        seen["disk"] = cached_as(second.asked(asked), whole)
    with life(qwen, HOST, connector="PoisonedStates", module="poisoned", **options) as poison:
        poison.answers(asked)
        poison.forget()
        seen["poisoned"] = sum(got == right for got, right in zip(poison.answers(asked), expected, strict=True))
    return seen


@check
def refused(folder: Path) -> Any:
    """Kinds of layers: what is served, and what the line says where one is not; then without prefix caching, for real."""
    from dataclasses import replace
    from types import SimpleNamespace

    import torch
    from vllm.v1 import kv_cache_interface as kinds

    from kvpool.integrations.vllm_versions.vllm_identity import checked_block_size

    shape: dict[str, Any] = dict(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    full, window = kinds.FullAttentionSpec(**shape), kinds.SlidingWindowSpec(**shape, sliding_window=64)
    state = kinds.MambaSpec(block_size=16, shapes=((3, 64),), dtypes=(torch.float32,), mamba_cache_mode="align")
    models = {
        "full": [full],
        "latent": [kinds.MLAAttentionSpec(**{**shape, "num_kv_heads": 1})],
        "latents beside an indexer's keys": [
            kinds.UniformTypeKVCacheSpecs.from_specs(
                {
                    "layer": kinds.MLAAttentionSpec(**{**shape, "num_kv_heads": 1, "head_size": 576}),
                    "indexer": kinds.MLAAttentionSpec(
                        **{**shape, "num_kv_heads": 1, "head_size": 132, "dtype": torch.uint8}
                    ),
                }
            )
        ],
        "windows": [full, window],
        "states": [full, state],
        "states without prefix caching": [full, replace(state, mamba_cache_mode="none")],
        "states and drafts": [full, replace(state, num_speculative_blocks=2)],
        "states and windows": [full, window, state],
        "nothing but states": [state],
        "reference windows": [kinds.RSWASpec(**shape, rswa_window=64)],
        "chunks": [full, kinds.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64)],
        "both ways": [kinds.FullAttentionSpec(**shape, non_causal=True)],
        "sizes": [full, kinds.SlidingWindowSpec(**{**shape, "block_size": 32}, sliding_window=64)],
    }
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
        ),
    )
    seen: dict[str, Any] = {}
    for name, specs in models.items():
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        seen[name] = _answer(lambda groups=groups: checked_block_size(config, SimpleNamespace(kv_cache_groups=groups)))
    config.parallel_config.pipeline_parallel_size = 2
    both = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in (full, state)])
    seen["states in stages"] = _answer(lambda: checked_block_size(config, both))
    config.kv_transfer_config.kv_load_failure_policy = "fail"  # which is vLLM's default
    seen["policy"] = _answer(lambda: checked_block_size(config, SimpleNamespace(kv_cache_groups=[])))
    lfm2 = model("lfm2", folder)
    seen["for real"] = _answer(lambda: Life(lfm2, HOST, enable_prefix_caching=False))
    return seen


def _answer(ask: Callable[[], Any]) -> Any:
    """What it returns, or what it says instead."""
    try:
        return ask()
    except Exception as error:
        return str(error)


@check
def ranks(folder: Path) -> Any:
    """What two ranks report, joined by vLLM: jobs that one of them has done, did badly, and does a step later."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from kvpool.integrations.connector.orders import JobProgress, Report
    from kvpool.integrations.vllm_versions.connector import WorkerMetadata

    def said(jobs: dict[int, int], **more: Any) -> ModelRunnerOutput:
        report = Report({job: JobProgress(1, num_blocks) for job, num_blocks in jobs.items()})
        output = KVConnectorOutput(kv_connector_worker_meta=WorkerMetadata(report) if jobs else None, **more)
        return copy(ModelRunnerOutput.with_kv_conn_output_only(output))  # one without news is vLLM's only one

    aggregator, seen = KVOutputAggregator(2), []
    for step in (
        [said({1: 4, 2: 4}), said({1: 2}, invalid_block_ids={7, 8})],
        [said({}), said({2: 4})],
        [said({}, finished_recving={"a"}, failed_recving={"a"}), said({3: 1})],
        [said({3: 1}), said({}, finished_recving={"a"})],
    ):
        joined = aggregator.aggregate(step).kv_connector_output
        meta = joined.kv_connector_worker_meta
        jobs = {} if meta is None else {job: [p.num_workers, p.num_blocks] for job, p in meta.report.jobs.items()}
        seen.append([jobs, sorted(joined.invalid_block_ids), sorted(joined.failed_recving or ())])
    return seen


@check
def redis(folder: Path) -> Any:
    """One engine fills a Redis, another finds everything there, a third is asked the same by eight at once."""
    llama, extra = model("llama", folder), {"host_bytes": "64MB", "remote": os.environ["KVPOOL_TEST_REDIS"]}
    with life(llama, extra) as first:
        expected = first.answers(PROMPTS)
        first.settle()
    with life(llama, extra) as second:
        got = second.asked(PROMPTS)
    with life(llama, extra) as third:
        same = third.answers([PROMPTS[0]] * 8)
        loaded = third.side.stats()["from_tiers"]
    return {
        "right": [answer for answer, _ in got] == expected,
        "cached": [cached for _, cached in got],
        "of eight": same == [expected[0]] * 8,
        "loaded for eight": loaded,
    }


@check
def random_requests(folder: Path) -> Any:
    """300 requests with random common beginnings, many at once, through a pool that preempts and a host that evicts."""
    rng = random.Random(4)
    begins = prompts(5, 12, 320)
    asked = [
        rng.choice(begins)[: rng.randrange(40, 320)] + prompts(number, 1, rng.randrange(1, 60))[0]
        for number in range(300)
    ]
    llama = model("llama", folder)
    options = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 256, "max_model_len": 1024}
    with life(llama, **options) as alone:
        expected = [answer for part in parts(asked, 30) for answer in alone.answers(part, num_new=40)]
    extra = {"host_blocks": 90, "disk": str(folder / "random"), "disk_bytes": "8MB"}
    with life(llama, extra, **options) as each:
        got = [answer for part in parts(asked, 30) for answer in each.answers(part, num_new=40)]
        each.side.host.check()
        counts = each.side.stats()
        preempted = sum(one.value for one in each.engine.get_metrics() if one.name == "vllm:num_preemptions")
    return {
        "wrong": sum(one != other for one, other in zip(got, expected, strict=True)),
        "preempted": preempted > 0,
        "from": {name: counts[name] > 0 for name in ("from_host", "from_tiers", "stored")},
    }


def parts(asked: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """So many at a time."""
    for start in range(0, len(asked), size):
        yield asked[start : start + size]


@check
def damaged_disks(folder: Path) -> Any:
    """A disk that was killed in the middle of work, then with swapped, cut and flipped contents: right answers, misses."""
    llama, disk = model("llama", folder), folder / "killed"
    task = json.dumps({"checks": ["_die"], "folder": str(folder)})
    killed = subprocess.run([sys.executable, __file__, task], stdout=subprocess.DEVNULL, check=False).returncode
    seen: dict[str, Any] = {"killed": killed == -signal.SIGKILL}
    expected = None
    for name, harm in (("restart", None), ("swapped", swap), ("cut", cut), ("flipped", damage)):
        copy = folder / f"disk {name}"
        shutil.copytree(disk, copy)
        if harm is not None:
            harm(copy)
        with life(llama, {"host_bytes": "64MB", "disk": str(copy), "disk_bytes": "64MB"}) as each:
            got = each.asked(PROMPTS)
            counts = each.side.stats()
        if expected is None:
            with life(llama) as alone:
                expected = alone.answers(PROMPTS)
        seen[name] = {"right": [answer for answer, _ in got] == expected, "from_tiers": counts["from_tiers"]}
    return seen


@check
def _die(folder: Path) -> Any:
    """Answers, and is killed when the disk has everything."""
    extra = {"host_bytes": "64MB", "disk": str(folder / "killed"), "disk_bytes": "64MB"}
    alive = Life(model("llama", folder), extra)
    alive.answers(PROMPTS)
    alive.settle()
    os.kill(os.getpid(), signal.SIGKILL)


def swap(disk: Path) -> None:
    """Exchanges the halves of what a disk holds: every value lies where another prompt's was."""
    (slab,) = disk.glob("*.kvslab")
    data = slab.read_bytes()
    used = len(data.rstrip(b"\0")) // 8192 * 4096
    slab.write_bytes(data[used : 2 * used] + data[:used] + data[2 * used :])


def cut(disk: Path) -> None:
    """Cuts the last third off."""
    (slab,) = disk.glob("*.kvslab")
    size = len(slab.read_bytes().rstrip(b"\0"))
    with slab.open("r+b") as file:
        file.truncate(size * 2 // 3)


@check
def broken_loads(folder: Path) -> Any:
    """A tier that fails in the middle of a load, and one that hangs: right answers, and the next request is served."""
    llama, disk = model("llama", folder), folder / "broken"
    extra = {"host_bytes": "64MB", "disk": str(disk), "disk_bytes": "64MB", "timeout": 0.5}
    with life(llama, extra) as first:
        expected = first.answers(PROMPTS)
        first.settle()
    seen: dict[str, Any] = {}
    for name in ("dies", "hangs"):
        with life(llama, extra) as each:
            (worker,) = workers()
            tier, gate = worker._tiers.watched[0].tier, threading.Event()
            load = tier._load

            def broken(keys: Any, out: Any, *rest: Any, name: str = name, gate: Any = gate) -> Any:
                for row in out[: len(out) // 2]:
                    place = memoryview(row).cast("B")
                    place[:] = b"\x5a" * len(place)  # half of it was written already
                if name == "hangs":
                    gate.wait(30)
                raise OSError("the disk is gone")

            tier._load = broken
            got = each.answers(PROMPTS)
            tier._load = load
            gate.set()
            each.forget()
            again = each.asked(PROMPTS)
            seen[name] = {
                "right": got == expected and [answer for answer, _ in again] == expected,
                "failed": each.side.stats()["failed"],
                "again": [cached for _, cached in again],
            }
    return seen


@check
def interrupted(folder: Path) -> Any:
    """Requests that are aborted, and a reset, while a disk is being read: all pages come back, and answers are right."""
    llama, extra = model("llama", folder), {"host_bytes": "64MB", "disk": str(folder / "interrupted"), "timeout": 60}
    with life(llama, extra) as first:
        expected = first.answers(PROMPTS)
        first.settle()
    seen: dict[str, Any] = {}
    for name in ("abort", "reset"):
        with life(llama, extra) as each:
            (worker,) = workers()
            tier, gate, begun = worker._tiers.watched[0].tier, threading.Event(), threading.Event()
            load = tier._load
            tier._load = lambda *given, load=load, gate=gate, begun=begun: (begun.set(), gate.wait(60), load(*given))[2]
            engine, names = each.engine.llm_engine, each.submit(PROMPTS)
            while not begun.is_set():
                engine.step()
            if name == "abort":
                engine.abort_request(names)
            else:
                each.engine.reset_prefix_cache(reset_connector=True)
            gate.set()
            answers = each.finished()
            tier._load = load
            each.forget()
            again = each.asked(PROMPTS)
            pool = each.core.scheduler.kv_cache_manager.block_pool
            each.forget()
            seen[name] = {
                "answers": [answers.get(each) for each in names] == expected if answers else "none",
                "again": [answer for answer, _ in again] == expected,
                "cached": [cached for _, cached in again],
                "used": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one block is vLLM's own
                "tracked": len(each.side._requests),
            }
    return seen


@check
def slow_stores(folder: Path) -> Any:
    """A disk that takes nothing while requests come: they are answered, from the host too, and it gets them later."""
    llama, asked = model("llama", folder), prompts(11, 6, 450)
    extra = {"host_bytes": "64MB", "disk": str(folder / "slow"), "disk_bytes": "64MB"}
    with life(llama) as alone:
        expected = alone.answers(asked)
    with life(llama, extra) as each:
        (worker,) = workers()
        tier, gate = worker._tiers.watched[0].tier, threading.Event()
        store = tier._store
        tier._store = lambda *given: (gate.wait(600), store(*given))[1]
        cold = each.answers(asked)
        each.forget()
        host = each.asked(asked)
        gate.set()
        each.settle()
    with life(llama, extra) as second:
        disk = second.asked(asked)
    return {
        "right": [cold == expected, *([answer for answer, _ in got] == expected for got in (host, disk))],
        "cached": [[cached for _, cached in got] for got in (host, disk)],
    }


def main() -> None:
    """Runs the checks that were named and prints what they saw."""
    task = json.loads(sys.argv[1])
    seen: dict[str, Any] = {}
    for name in task["checks"]:
        started = time.monotonic()
        try:
            seen[name] = CHECKS[name](Path(task["folder"]))
        except Exception:
            seen[name] = {"error": traceback.format_exc()[-3000:]}
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    print(json.dumps(seen), flush=True)
    os._exit(0)  # whatever an engine left behind must not keep the process


if __name__ == "__main__":
    main()
