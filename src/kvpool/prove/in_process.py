"""Bytes of pages, compared inside a process that runs vLLM: what a connector brings must be what was computed.

It needs nothing of the connector. When a request ends, the pages of its prompt are still its own: they are read by a plain
copy. Those that vLLM computed are noted; those that came from a cache must be equal to one that was computed for the same
tokens, byte for byte. Connectors that compress pages with loss differ, of course. Some loads are spoiled and reported as
failed, as a worker reports them: what vLLM then computes must be what it computed first, but for rounding.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kvpool.errors import EndpointError, InvalidArgumentError
from kvpool.prove.trial import NOT_TESTED, RIGHT, WRONG

_PROMPTS: Final = 12
_BROKEN: Final = 4  # prompts of which a load fails
_TOKENS: Final = 400
_NEW: Final = 4
_BLOCKS: Final = 211  # of the device, some five prompts; a prime, so that no other axis of a tensor has this length
_NO_BLOCK: Final = 0  # vLLM's own block, which stands for what has left a window
_ROUNDING: Final = 0.05  # of the norm of a page: a page computed behind another prefix is rounded otherwise

_Key = tuple[bytes, int]  # the tokens up to the end of a block, and the group of layers


@dataclass
class Pages:
    """What was seen of pages, in one engine or in several, one after the other."""

    computed: dict[_Key, set[tuple[str, ...]]] = field(default_factory=dict)
    kept: dict[_Key, tuple[Any, ...]] = field(default_factory=dict)  # whole pages, of prompts whose loads will fail
    num_computed: int = 0
    num_found: int = 0
    num_recomputed: int = 0
    wrong: list[str] = field(default_factory=list)
    stage: str = ""
    keeps: bool = False


@dataclass
class _Live:
    """A request that runs. `broken_from` is the block from which on its load was called failed."""

    stats: Any
    broken_from: int | None = None


class PageWatch:
    """Reads the pages of every request of one engine when it ends. `breaks` lets loads fail in their second half."""

    def __init__(self, core: Any, pages: Pages) -> None:
        self.pages = pages
        self.breaks = False
        self._scheduler = scheduler = core.scheduler
        self._config = scheduler.kv_cache_config
        self._layers = core.vllm_config.compilation_config.static_forward_context
        self._live: dict[str, _Live] = {}
        self._broken: dict[str, list[int]] = {}  # blocks of loads that are on their way
        _before(scheduler, "add_request", self._add)
        _before(scheduler, "_free_request", self._read)
        _before(scheduler, "update_from_output", self._break)
        if scheduler.connector is not None:
            _before(scheduler.connector, "update_state_after_alloc", self._load)

    @property
    def can_break(self) -> bool:
        """Whether vLLM computes again what a connector failed to load, block by block."""
        scheduler = self._scheduler
        is_asked = scheduler.connector is not None and scheduler.recompute_kv_load_failures
        return is_asked and len(self._config.kv_cache_groups) == 1

    def _add(self, request: Any) -> None:
        self._live[request.request_id] = _Live(request.prefill_stats)

    def _load(self, request: Any, blocks: Any, num_external: int) -> None:
        """Chooses what of a load shall fail."""
        if not self.breaks or not num_external:
            return
        live, (ids,) = self._live[request.request_id], blocks.get_block_ids()
        size, found = self._config.kv_cache_groups[0].kv_cache_spec.block_size, live.stats.num_cached_tokens
        live.broken_from = (found - num_external // 2) // size
        self._broken[request.request_id] = ids[live.broken_from : found // size]

    def _break(self, scheduled: Any, output: Any) -> None:
        """Spoils what has arrived of these loads, and reports it as a worker does."""
        told = output.kv_connector_output
        arrived = {*scheduled.num_scheduled_tokens, *((told and told.finished_recving) or ())}
        for name in arrived & self._broken.keys() if told else ():
            ids = self._broken.pop(name)
            for layer in self._config.kv_cache_groups[0].layer_names:
                for block in ids:
                    for page in self._parts(layer, block):
                        page.zero_()
            told.invalid_block_ids = {*(told.invalid_block_ids or ()), *ids}

    def _read(self, request: Any) -> None:
        """Notes computed pages of a prompt, and compares found ones.

        Pages of an aborted request may be on their way, and those of a preempted one are computed or found a second time.
        """
        live = self._live.pop(request.request_id)
        if request.status.name in ("FINISHED_ABORTED", "FINISHED_ERROR") or request.num_preemptions:
            return
        tokens, computed, found = (
            list(request.prompt_token_ids),
            request.num_computed_tokens,
            live.stats.num_cached_tokens,
        )
        ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for number, (group, blocks) in enumerate(zip(self._config.kv_cache_groups, ids, strict=True)):
            size = group.kv_cache_spec.block_size
            num_found = found // size if live.broken_from is None else live.broken_from
            for at, block in enumerate(blocks[: min(len(tokens), computed) // size]):
                if block == _NO_BLOCK:
                    continue
                content = repr((request.cache_salt, tokens[: (at + 1) * size])).encode()
                key = hashlib.sha256(content).digest(), number
                where = f"block {at} of a prompt of {len(tokens)} tokens"
                if at < num_found:
                    self._compare(key, group.layer_names, block, where)
                elif live.broken_from is not None:
                    self._compare_again(key, group.layer_names, block, where)
                else:
                    self._note(key, group.layer_names, block)

    def _note(self, key: _Key, names: Sequence[str], block: int) -> None:
        """A page that was computed."""
        self.pages.num_computed += 1
        self.pages.computed.setdefault(key, set()).add(self._digests(names, block))
        if self.pages.keeps:
            self.pages.kept[key] = tuple(part.clone() for name in names for part in self._parts(name, block))

    def _compare(self, key: _Key, names: Sequence[str], block: int, where: str) -> None:
        """A page that came from a cache."""
        self.pages.num_found += 1
        page, right = self._digests(names, block), self.pages.computed.get(key, set())
        if page not in right:
            differ = [name for place, name in enumerate(names) if all(page[place] != each[place] for each in right)]
            layers = f"{len(differ)} of {len(names)} layers" if right else "which nobody computed"
            self.pages.wrong.append(f"{self.pages.stage}: {where}, {layers}")

    def _compare_again(self, key: _Key, names: Sequence[str], block: int, where: str) -> None:
        """A page that was computed because its load failed: like the first time, but for rounding."""
        self.pages.num_recomputed += 1
        parts = [part.float() for name in names for part in self._parts(name, block)]
        first = [part.float() for part in self.pages.kept[key]]
        far = [(now - then).norm() > _ROUNDING * then.norm() for now, then in zip(parts, first, strict=True)]
        if any(far):
            self.pages.wrong.append(f"{self.pages.stage}: {where}, {sum(map(bool, far))} of {len(far)} tensors")
        else:
            self.pages.computed.setdefault(key, set()).add(self._digests(names, block))

    def _digests(self, names: Sequence[str], block: int) -> tuple[str, ...]:
        """Of what each layer keeps in a block."""
        import torch

        digests = []
        for name in names:
            total = hashlib.sha256()
            for part in self._parts(name, block):
                total.update(part.contiguous().cpu().flatten().view(dtype=torch.uint8).numpy().tobytes())
            digests.append(total.hexdigest())
        return tuple(digests)

    def _parts(self, name: str, block: int) -> Iterator[Any]:
        """What a layer keeps in a block: views of its tensors."""
        kept = self._layers[name].kv_cache
        for tensor in kept if isinstance(kept, (list, tuple)) else [kept]:
            axis = next((at for at, length in enumerate(tensor.shape) if length == self._config.num_blocks), None)
            if axis is None:
                raise EndpointError(
                    f"the pages of {name} are {tuple(tensor.shape)}: no axis has one place for each block"
                )
            yield tensor.select(axis, block)


def _before(owner: Any, name: str, hook: Callable[..., None]) -> None:
    """Lets something happen before each call of a method, with the arguments that the hook takes."""
    method, count = getattr(owner, name), len(inspect.signature(hook).parameters)

    def both(*arguments: Any, **options: Any) -> Any:
        hook(*arguments[:count])
        return method(*arguments, **options)

    setattr(owner, name, both)


def compare_pages(model: str, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Runs vLLM with these options on prompts of random tokens, pushes them out and asks for them again; what it saw."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    rng = random.Random(seed)
    prompts, others = (
        [[rng.randrange(10, 110) for _ in range(_TOKENS)] for _ in range(_PROMPTS)] for _ in ("asked again", "others")
    )
    pages = Pages()
    stages: dict[str, int] = {}
    with _life(model, options) as engine:
        _first_life(_Stages(engine, pages, stages), prompts, others)
    with _life(model, options) as engine:
        _Stages(engine, pages, stages).ask("after a restart", [[prompt] for prompt in prompts])
    return {
        "verdict": WRONG if pages.wrong else RIGHT if pages.num_found else NOT_TESTED,
        "pages_computed": pages.num_computed,
        "pages_compared": pages.num_found,
        "pages_recomputed": pages.num_recomputed,
        "by_stage": stages,
        "wrong": pages.wrong,
    }


@contextmanager
def _life(model: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """A vLLM in this process, until it is shut down."""
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
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


class _Stages:
    """Asks one engine, stage by stage, and counts how many pages each one compared."""

    def __init__(self, engine: Any, pages: Pages, stages: dict[str, int]) -> None:
        self.engine, self.pages, self.stages = engine, pages, stages
        self.watch = PageWatch(engine.llm_engine.engine_core.engine_core, pages)

    def ask(self, name: str, batches: Sequence[Sequence[list[int]]], aborted: int = 0) -> None:
        """Batch after batch, whose prompts are asked at the same time."""
        self.pages.stage, before = name, self.pages.num_found + self.pages.num_recomputed
        for batch in batches:
            _run(self.engine, batch, aborted)
        seen = self.pages.num_found + self.pages.num_recomputed - before
        self.stages[name] = self.stages.get(name, 0) + seen


def _first_life(stages: _Stages, prompts: Sequence[list[int]], others: Sequence[list[int]]) -> None:
    """Asks one by one, then all at once beside some that are aborted, each time behind a reset of vLLM's own cache."""
    pages, alone = stages.pages, [[prompt] for prompt in prompts]
    pages.keeps = True
    stages.ask("computed", alone[:_BROKEN])
    pages.keeps = False
    stages.ask("computed", alone[_BROKEN:])
    stages.ask("asked again at once", [[prompt, prompt] for prompt in prompts])
    stages.ask("behind other prompts", [[prompt] for prompt in [*others, *prompts]])
    stages.engine.reset_prefix_cache()
    stages.ask("behind a reset of vLLM's own cache", alone)
    stages.engine.reset_prefix_cache()
    stages.ask("all at once, some aborted", [[*prompts, *others]], aborted=5)
    stages.ask("behind that", alone)
    if stages.watch.can_break:
        stages.engine.reset_prefix_cache()
        stages.watch.breaks = True
        stages.ask("loads that fail and are computed", alone[:_BROKEN])
        stages.watch.breaks = False
        stages.ask("behind these", alone[:_BROKEN])


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
