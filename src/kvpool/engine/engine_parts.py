"""Puts an engine together: a model made ready, memory for its keys and values, and the loop that runs its steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpool.attention import create_backend
from kvpool.config import DType, KVCacheConfig, LayerSpec, StateSpec
from kvpool.engine.adapters import EngineAdapters
from kvpool.engine.eager_runner import rotates
from kvpool.engine.forgetting import Forgetting, WeightsWatch
from kvpool.engine.loop import EngineLoop
from kvpool.engine.pictures import StepPictures
from kvpool.engine.prompt_parts import PromptPooling, PromptScoring
from kvpool.engine.prompts import Prompts
from kvpool.engine.runner import ModelRunner
from kvpool.engine.scheduled_requests import ScheduledRequests
from kvpool.engine.settings import EngineSettings
from kvpool.engine.sizing import kv_budget, link_bytes_per_second
from kvpool.engine.speculation import PromptLookup
from kvpool.engine.starting import Start
from kvpool.engine.step_part import StepPart
from kvpool.engine.thread import Inbox
from kvpool.engine.tier_link import TierLink
from kvpool.engine.warm_up import WarmUp
from kvpool.kernels.layout import current, whole_device
from kvpool.manager import KVCacheManager
from kvpool.model.faster_layers import fuse_experts, fuse_norms, join_projections
from kvpool.model.private_copy import SharedWeights, private_copy, without_callers_state
from kvpool.model.probing import ModelShape, inspect_model, run_probe
from kvpool.model.vision import ImageEncoder
from kvpool.scheduling import LinearCostModel, Scheduler, SchedulerConfig
from kvpool.storage import DataPlane
from kvpool.tiers.model_tiers import ModelTiers, OpenedTiers

log = logging.getLogger("kvpool")


class Parts(NamedTuple):
    """What an engine is made of."""

    shape: ModelShape
    loop: EngineLoop
    inbox: Inbox
    prompts: Prompts
    tiers: TierLink | None
    pictures: StepPictures | None  # None: the model reads text only
    forgetting: Forgetting
    warm_up: WarmUp | None  # None: steps are as fast as they will be


def assemble(
    model: Any,
    settings: EngineSettings,
    limits: SchedulerConfig,
    model_tiers: ModelTiers,
    tokenizer: Any = None,
    processor: Any = None,
    start: Start | None = None,
) -> Parts:
    """The parts of an engine for a loaded model, warmed up. The engine changes and runs a copy of the model."""
    start = start or Start()
    start.stage("checking the model")
    where, own = model.device, private_copy(model)
    # One engine at a time, because each measures how much memory is free.
    with whole_device, current(where), without_callers_state(where):
        ready = _made_ready(own, settings)
        start.stage("allocating memory for keys and values")
        config = _cache_config(model, ready, settings, limits)
        manager = KVCacheManager(config)
        plane = DataPlane(manager, where, check_writes=False)
        start.stage("compiling kernels, and capturing CUDA graphs")
        runner = _runner(ready, plane, settings, limits)
        start.stage("opening tiers")
        link = {"transfer_bytes_per_second": link_bytes_per_second(plane)} if settings.host_bytes else {}
        scheduler = Scheduler(manager, limits, LinearCostModel(**link), reports_landings=where.type == "cuda")
        opened = _open_tiers(model_tiers, model, config)
        _warn_of_loss(config.layers)
        requests, inbox = ScheduledRequests(scheduler, ready.adapters), Inbox()
        tiers = None if opened is None else TierLink(opened, scheduler, plane, requests, inbox)
        pictures = None
        if ready.sees:
            pictures = StepPictures(ready.encoder, settings.encoder_bytes, where, requests.generations)
        encoded = None if pictures is None else pictures.cache
        forgetting = Forgetting(manager, encoded, None if tiers is None else tiers.invalidator)
        watch = WeightsWatch(SharedWeights(model), scheduler, forgetting)  # now: joining products has moved some
        warm_up = WarmUp(runner, inbox, start.seconds) if runner.can_get_faster else None
        ready.adapters.num_users = lambda adapter_id: (
            requests.num_users(adapter_id) + sum(request.scope.adapter == adapter_id for request in loop.held)
        )
        loop = EngineLoop(
            scheduler,
            requests,
            runner,
            ready.shape.vocab_size,
            parts=_step_parts(ready, settings, scheduler, requests, tiers, pictures, watch, warm_up),
            overlap=where.type == "cuda" and not settings.draft_tokens
            if settings.overlap is None
            else settings.overlap,
        )
    prompts = Prompts(tokenizer, processor, ready.shape.vocab_size, ready.encoder)
    return Parts(ready.shape, loop, inbox, prompts, tiers, pictures, forgetting, warm_up)


def _step_parts(
    ready: _Ready,
    settings: EngineSettings,
    scheduler: Scheduler,
    requests: ScheduledRequests,
    tiers: TierLink | None,
    pictures: StepPictures | None,
    watch: WeightsWatch,
    warm_up: WarmUp | None,
) -> list[StepPart]:
    """What takes part in steps, in the order in which each moment asks them. The only list of them."""
    of_requests = requests.generations
    parts: list[StepPart] = [watch, ready.adapters, PromptScoring(of_requests), PromptPooling(of_requests)]
    parts += [part for part in (tiers, requests, pictures, warm_up) if part is not None]
    if settings.draft_tokens:
        parts.append(PromptLookup(scheduler, of_requests, settings.draft_tokens))
    return parts


def _open_tiers(model_tiers: ModelTiers, model: Any, config: KVCacheConfig) -> OpenedTiers | None:
    """The tiers of a model."""
    are_rotated = any(rotates(layer)[0] for layer in config.layers if isinstance(layer, LayerSpec))
    return model_tiers.open(model, config, are_rotated=are_rotated)


def _warn_of_loss(layers: Sequence[LayerSpec | StateSpec]) -> None:
    """Names types of keys and values that change answers of real models more than int8 does."""
    attention = [layer for layer in layers if isinstance(layer, LayerSpec)]
    stored = {layer.parts[-1].dtype for layer in attention}  # that of values, where there are any
    for dtype in sorted(stored & {DType.INT4, DType.FP8_E4M3, DType.FP8_E5M2}):
        log.warning(
            f"keys and values in {dtype.value} change answers, more than in int8: docs/engine.md#types-of-keys-and-values"
        )


class _Ready(NamedTuple):
    """The engine's copy of a model, made ready for steps."""

    model: Any
    shape: ModelShape
    encoder: ImageEncoder
    adapters: EngineAdapters

    @property
    def sees(self) -> bool:
        return self.encoder.refusal is None


def _made_ready(own: Any, settings: EngineSettings) -> _Ready:
    """Inspects the engine's copy of a model, and reads its adapters."""
    shape = _prepared(own, settings.compile)
    encoder = ImageEncoder(own)
    adapters = EngineAdapters(own, settings.max_adapters, settings.language_adapters)
    for name, path in (settings.adapters or {}).items():
        adapters.add(name, path, adapters.read(name, path))
    return _Ready(own, shape, encoder, adapters)


def _cache_config(model: Any, ready: _Ready, settings: EngineSettings, limits: SchedulerConfig) -> KVCacheConfig:
    """What the cache of a model holds, and how much of it."""
    own, shape = ready.model, ready.shape
    layers: list[LayerSpec | StateSpec] = [*shape.layer_specs(settings.kv_dtype), *shape.states.values()]
    kv_bytes = settings.kv_bytes
    if settings.kv_blocks is None and kv_bytes is None:
        # As much as for the features again is for the work of the encoder.
        beside = 2 * settings.encoder_bytes if ready.sees else 0
        kv_bytes = kv_budget(own, shape, own.device, settings.memory_fraction, limits, beside)
    fields = settings.cache_fields(shape.max_positions)
    if fields.get("objective") == "seconds":
        fields.setdefault("depth_cost", shape.depth_cost(sum(part.numel() for part in model.parameters())))
    return KVCacheConfig(layers, settings.block_size, gpu_blocks=settings.kv_blocks, gpu_bytes=kv_bytes, **fields)


def _runner(ready: _Ready, plane: DataPlane, settings: EngineSettings, limits: SchedulerConfig) -> ModelRunner:
    """What runs the model, warmed up."""
    runner = ModelRunner(
        ready.model,
        ready.shape,
        plane,
        create_backend(settings.attention, plane.device),
        adapters=ready.adapters,
        cuda_graphs=settings.cuda_graphs,
        max_sequences=limits.max_sequences,
        max_tokens=limits.max_tokens_per_step,
        compile_layers=settings.compile,
        num_axes=ready.encoder.num_axes,
        max_drafts=settings.draft_tokens,
    )
    runner.warm_up()
    return runner


def _prepared(model: Any, compile: bool) -> ModelShape:
    """Inspects the model and makes its layers faster on a GPU: fewer operations."""
    shape = inspect_model(model, with_states=True)
    if model.device.type == "cuda":
        join_projections(model, lambda: run_probe(model))
        fuse_experts(model)
        if not compile:  # torch.compile needs the model's own code, and fuses more than the norms
            fuse_norms(model)
    return shape
