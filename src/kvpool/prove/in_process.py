"""Bytes of pages, compared inside a process that runs vLLM: what a connector brings must be what was computed.

It needs nothing of the connector. When a request ends, the pages of its prompt are still its own: they are read by a plain
copy. Those that vLLM computed are noted; those that came from a cache must be equal to one that was computed for the same
tokens, byte for byte. Connectors that compress pages with loss differ, of course.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvpool.errors import EndpointError, InvalidArgumentError
from kvpool.prove.trial import NOT_TESTED, RIGHT, WRONG

_PROMPTS: Final = 12
_TOKENS: Final = 400
_NEW: Final = 4
_BLOCKS: Final = 211  # of the device, some five prompts; a prime, so that no other axis of a tensor has this length
_NO_BLOCK: Final = 0  # vLLM's own block, which stands for what has left a window


class PageWatch:
    """Reads the pages of every request of one engine when it ends."""

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        self._config = self._scheduler.kv_cache_config
        self._layers = core.vllm_config.compilation_config.static_forward_context
        self._computed: dict[tuple[bytes, int], set[tuple[str, ...]]] = {}
        self.num_computed = self.num_found = 0
        self.wrong: list[str] = []
        self.stage = ""
        self._stats: dict[str, Any] = {}  # by live request: how much of it was cached
        add, free = self._scheduler.add_request, self._scheduler._free_request

        def adding(request: Any) -> None:
            self._stats[request.request_id] = request.prefill_stats
            add(request)

        def freeing(request: Any, *rest: Any, **options: Any) -> Any:
            self._read(request)
            return free(request, *rest, **options)

        self._scheduler.add_request, self._scheduler._free_request = adding, freeing

    def _read(self, request: Any) -> None:
        """Notes computed pages of a prompt, and compares found ones.

        Pages of an aborted request may be on their way, and those of a preempted one are computed or found a second time.
        """
        stats = self._stats.pop(request.request_id)
        if request.status.name == "FINISHED_ABORTED" or request.num_preemptions:
            return
        tokens, computed, found = list(request.prompt_token_ids), request.num_computed_tokens, stats.num_cached_tokens
        ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for number, (group, blocks) in enumerate(zip(self._config.kv_cache_groups, ids, strict=True)):
            size = group.kv_cache_spec.block_size
            for at, block in enumerate(blocks[: min(len(tokens), computed) // size]):
                if block == _NO_BLOCK:
                    continue
                content = repr((request.cache_salt, tokens[: (at + 1) * size])).encode()
                key = hashlib.sha256(content).digest(), number
                page = tuple(self._digest(name, block) for name in group.layer_names)
                if (at + 1) * size > found:
                    self.num_computed += 1
                    self._computed.setdefault(key, set()).add(page)
                    continue
                self.num_found += 1
                if page not in self._computed.get(key, ()):
                    self.wrong.append(self._told(request, number, at, page, self._computed.get(key, set())))

    def _told(self, request: Any, group: int, at: int, page: tuple[str, ...], right: set[tuple[str, ...]]) -> str:
        """A wrong page in words."""
        names = self._config.kv_cache_groups[group].layer_names
        differ = [name for place, name in enumerate(names) if all(page[place] != each[place] for each in right)]
        layers = f"{len(differ)} of {len(names)} layers" if right else "which nobody computed"
        return f"{self.stage}: block {at} of a prompt of {len(request.prompt_token_ids)} tokens, {layers}"

    def _digest(self, name: str, block: int) -> str:
        """Of what a layer keeps in a block."""
        kept = self._layers[name].kv_cache
        tensors = kept if isinstance(kept, (list, tuple)) else [kept]
        total = hashlib.sha256()
        for tensor in tensors:
            axis = next((at for at, length in enumerate(tensor.shape) if length == self._config.num_blocks), None)
            if axis is None:
                raise EndpointError(
                    f"the pages of {name} are {tuple(tensor.shape)}: no axis has one place for each block"
                )
            page = tensor.select(axis, block).contiguous().cpu()
            total.update(page.flatten().view(dtype=_bytes_type()).numpy().tobytes())
        return total.hexdigest()


def _bytes_type() -> Any:
    import torch

    return torch.uint8


def compare_pages(model: str, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Runs vLLM with these options on prompts of random tokens, pushes them out and asks for them again; what it saw."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from vllm import LLM
        from vllm.config import KVTransferConfig
    except ImportError as error:
        raise InvalidArgumentError(f"--in-process needs the Python of a vLLM: {error}") from error
    given = {"enforce_eager": True, "skip_tokenizer_init": True, "num_gpu_blocks_override": _BLOCKS, **options}
    if isinstance(given.get("kv_transfer_config"), dict):
        given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
    engine = LLM(model, **given)
    try:
        return _watched(engine, seed)
    finally:
        engine.llm_engine.engine_core.shutdown()


def _watched(engine: Any, seed: int) -> dict[str, Any]:
    """Asks one by one, then all at once beside some that are aborted, each time behind a reset of vLLM's own cache."""
    watch = PageWatch(engine.llm_engine.engine_core.engine_core)
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, 110) for _ in range(_TOKENS)] for _ in range(_PROMPTS)]
    others = [[rng.randrange(10, 110) for _ in range(_TOKENS)] for _ in range(_PROMPTS)]
    stages: dict[str, int] = {}

    def stage(name: str, asked: Sequence[Sequence[list[int]]], aborted: int = 0) -> None:
        watch.stage, before = name, watch.num_found
        for batch in asked:
            _run(engine, batch, aborted)
        stages[name] = watch.num_found - before

    stage("computed", [[prompt] for prompt in prompts])
    stage("asked again at once", [[prompt, prompt] for prompt in prompts])
    stage("behind other prompts", [[prompt] for prompt in [*others, *prompts]])
    engine.reset_prefix_cache()
    stage("behind a reset of vLLM's own cache", [[prompt] for prompt in prompts])
    engine.reset_prefix_cache()
    stage("all at once, some aborted", [[*prompts, *others]], aborted=5)
    stage("behind that", [[prompt] for prompt in prompts])
    verdict = WRONG if watch.wrong else RIGHT if watch.num_found else NOT_TESTED
    return {
        "verdict": verdict,
        "pages_computed": watch.num_computed,
        "pages_compared": watch.num_found,
        "by_stage": stages,
        "wrong": watch.wrong,
    }


def _run(engine: Any, prompts: Sequence[list[int]], aborted: int) -> None:
    """Steps until all prompts are answered. Every so many-th is aborted after a few steps."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=_NEW, detokenize=False, ignore_eos=True)
    inner = engine.llm_engine
    names = [f"prove-{random.getrandbits(64):x}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        inner.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
    if aborted:
        for _ in range(3):
            inner.step()
        inner.abort_request(names[::aborted])
    core = inner.engine_core.engine_core
    while inner.has_unfinished_requests() or core.scheduler.has_requests():
        inner.step()
