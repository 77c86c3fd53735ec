"""Puts an engine together: a model made ready, memory for its keys and values, and the loop that runs its steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvpool.attention import create_backend
from kvpool.config import DType, KVCacheConfig, LayerSpec, StateSpec, Tier
from kvpool.engine.adapters import EngineAdapters
from kvpool.engine.background_layers import BackgroundLayers
from kvpool.engine.drafts import HEAD_STEPS, DraftModel
from kvpool.engine.eager_runner import rotates
from kvpool.engine.inbox import Inbox
from kvpool.engine.loop import EngineLoop
from kvpool.engine.pictures import StepPictures
from kvpool.engine.prompts import Prompts
from kvpool.engine.runner import ModelRunner
from kvpool.engine.scheduled_requests import ScheduledRequests
from kvpool.engine.settings import DRAFT_HEADS, MTP, EngineSettings
from kvpool.engine.sizing import kv_budget, link_bytes_per_second, step_bytes
from kvpool.engine.speculation import HiddenStates
from kvpool.engine.starting import Start
from kvpool.engine.tier_link import TierLink
from kvpool.errors import ConfigError, UnsupportedModelError
from kvpool.kernels.layout import current, whole_device
from kvpool.manager import KVCacheManager
from kvpool.model.faster_layers import fuse_experts, fuse_norms, join_projections
from kvpool.model.loading import LoadedModel, load_model
from kvpool.model.private_copy import SharedWeights, private_copy, without_callers_state
from kvpool.model.probing import ModelShape, inspect_model, run_probe
from kvpool.model.vision import ImageEncoder
from kvpool.scheduling import LinearCostModel, Scheduler, SchedulerConfig
from kvpool.storage import BlockStore, DataPlane
from kvpool.tiers.model_tiers import ModelTiers, OpenedTiers

log = logging.getLogger("kvpool")


class Parts(NamedTuple):
    """What an engine is made of."""

    shape: ModelShape
    loop: EngineLoop
    inbox: Inbox
    prompts: Prompts


def load_draft(settings: EngineSettings, loaded: LoadedModel) -> LoadedModel | None:
    """What guesses tokens for a model that was loaded; None: nothing, or the text before."""
    if settings.draft == MTP:
        from kvpool.model.mtp import load_mtp

        return load_mtp(loaded)
    if settings.draft is None:
        return None
    return load_model(settings.draft, device=loaded.model.device, dtype=settings.dtype)


def assemble(
    model: Any,
    settings: EngineSettings,
    limits: SchedulerConfig,
    model_tiers: ModelTiers,
    draft: LoadedModel | None = None,
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
        ready = _made_ready(own, settings, draft, tokenizer)
        start.stage("allocating memory for keys and values")
        config = _cache_config(model, ready, settings, limits)
        manager = KVCacheManager(config)
        plane = DataPlane(manager, where, check_writes=False)
        start.stage("compiling kernels, and capturing CUDA graphs")
        runner, drafting, hidden = _runners(ready, plane, settings, limits)
        start.stage("opening tiers")
        link = {"transfer_bytes_per_second": link_bytes_per_second(plane)} if settings.host_bytes else {}
        scheduler = Scheduler(manager, limits, LinearCostModel(**link), reports_landings=where.type == "cuda")
        opened = _open_tiers(model_tiers, model, config, draft)
        _warn_of_loss(config.layers)
        requests, inbox = ScheduledRequests(scheduler, ready.adapters), Inbox()
        tiers = None if opened is None else TierLink(opened, scheduler, plane, requests, inbox)
        vocab_size, generations, num_bytes = ready.shape.vocab_size, requests.generations, settings.encoder_bytes
        drafts = None
        if ready.draft is not None:
            told = limits, generations, scheduler.token_ids, hidden
            drafts = DraftModel(drafting, ready.draft.shapes[0], vocab_size, *told)
        loop = EngineLoop(
            scheduler,
            requests,
            runner,
            vocab_size,
            BackgroundLayers([runner, *drafting], inbox, start.seconds),
            num_draft_tokens=settings.num_drafts,
            drafts=drafts,
            overlap=settings.overlap,
            tiers=tiers,
            pictures=StepPictures(ready.encoder, num_bytes, where, generations) if ready.sees else None,
            # Now: joining products has moved some
            weights=[SharedWeights(each) for each in (model, *(() if draft is None else [draft.model]))],
        )
    prompts = Prompts(tokenizer, processor, vocab_size, ready.encoder)
    return Parts(ready.shape, loop, inbox, prompts)


def _open_tiers(
    model_tiers: ModelTiers, model: Any, config: KVCacheConfig, draft: LoadedModel | None
) -> OpenedTiers | None:
    """The tiers of a model."""
    are_rotated = any(rotates(layer)[0] for layer in config.layers if isinstance(layer, LayerSpec))
    drafted = None if draft is None else draft.model
    return model_tiers.open(model, config, drafted, are_rotated=are_rotated)


def _warn_of_loss(layers: Sequence[LayerSpec | StateSpec]) -> None:
    """Names types of keys and values that change answers of real models more than int8 does."""
    attention = [layer for layer in layers if isinstance(layer, LayerSpec)]
    stored = {layer.dtype.of_keys if layer.k_only else layer.dtype for layer in attention}
    for dtype in sorted(stored & {DType.INT4, DType.FP8_E4M3, DType.FP8_E5M2}):
        log.warning(
            f"keys and values in {dtype.value} change answers, more than in int8: docs/engine.md#types-of-keys-and-values"
        )


class _Draft(NamedTuple):
    """The engine's copy of a draft model, or of MTP layers, which are a model each."""

    models: Sequence[Any]
    shapes: Sequence[ModelShape]
    are_heads: bool


class _Ready(NamedTuple):
    """The engine's copy of a model, made ready for steps, with what runs beside it."""

    model: Any
    shape: ModelShape
    encoder: ImageEncoder
    adapters: EngineAdapters
    draft: _Draft | None

    @property
    def sees(self) -> bool:
        return self.encoder.refusal is None


def _made_ready(own: Any, settings: EngineSettings, draft: LoadedModel | None, tokenizer: Any) -> _Ready:
    """Inspects the engine's copy of a model, and reads its adapters and its draft."""
    shape = _prepared(own, settings.compile)
    encoder = ImageEncoder(own)
    adapters = EngineAdapters(own, settings.max_adapters)
    for name, path in (settings.adapters or {}).items():
        adapters.add(name, path, adapters.read(name, path), lambda adapter_id: 0)
    drafting = None
    if draft is not None:
        drafting = _inspected_draft(draft, settings.compile, settings.draft == MTP)
        if not drafting.are_heads:
            check_vocabulary(draft, drafting.shapes[0].vocab_size, tokenizer, shape.vocab_size)
    return _Ready(own, shape, encoder, adapters, drafting)


def _cache_config(model: Any, ready: _Ready, settings: EngineSettings, limits: SchedulerConfig) -> KVCacheConfig:
    """What the cache of a model holds, and how much of it."""
    own, shape, draft = ready.model, ready.shape, ready.draft
    layers: list[LayerSpec | StateSpec] = [*shape.layer_specs(settings.kv_dtype), *shape.states.values()]
    if draft is not None:  # a window would take what the draft computes again out of its sight
        specs = [spec for each in draft.shapes for spec in each.layer_specs(settings.kv_dtype)]
        layers += [replace(spec, window=None, chunk=None) for spec in specs]
    kv_bytes = settings.kv_bytes
    if settings.kv_blocks is None and kv_bytes is None:
        # As much as for the features again is for the work of the encoder.
        beside = 2 * settings.encoder_bytes if ready.sees else 0
        if draft is not None and own.device.type == "cuda":
            beside += step_bytes(draft.models[0], draft.shapes[0], own.device, limits)
        kv_bytes = kv_budget(own, shape, own.device, settings.memory_fraction, limits, beside)
    fields = settings.cache_fields(shape.max_positions)
    if draft is not None:
        _check_positions(draft.shapes[0].max_positions, fields["max_seq_len"])
    if fields.get("objective") == "seconds":
        fields.setdefault("depth_cost", shape.depth_cost(sum(part.numel() for part in model.parameters())))
    return KVCacheConfig(layers, settings.block_size, gpu_blocks=settings.kv_blocks, gpu_bytes=kv_bytes, **fields)


def _runners(
    ready: _Ready, plane: DataPlane, settings: EngineSettings, limits: SchedulerConfig
) -> tuple[ModelRunner, list[ModelRunner], HiddenStates | None]:
    """What runs the model, and its draft, warmed up, and the states that MTP layers read."""
    options: dict[str, Any] = {
        "max_drafts": settings.num_drafts,
        "cuda_graphs": settings.cuda_graphs,
        "max_sequences": limits.max_sequences,
        "max_tokens": limits.max_tokens_per_step,
        "compile_layers": settings.compile,
    }
    backend = create_backend(settings.attention, plane.device)
    runner = ModelRunner(
        ready.model,
        ready.shape,
        plane,
        backend,
        adapters=ready.adapters,
        num_axes=ready.encoder.num_axes,
        **options,
    )
    drafting, hidden = [], None
    if ready.draft is not None:
        drafting = _draft_runners(ready.draft, runner, limits, options)
        hidden = _hidden_states(runner, drafting, limits) if ready.draft.are_heads else None
    for each in (runner, *drafting):
        each.warm_up()
    return runner, drafting, hidden


def _inspected_draft(draft: LoadedModel, compile: bool, are_heads: bool) -> _Draft:
    own = private_copy(draft.model)
    try:
        models = _heads_of(own) if are_heads else [own]
        for name in () if are_heads else own.config.architectures or ():
            # transformers loads a head as a model of its own, without its weights
            if any(head in name.lower() for head in DRAFT_HEADS):
                raise UnsupportedModelError(f"{name} is the head of another model; give a smaller model")
        shapes = [_prepared(model, compile) for model in models]
        if any(shape.states for shape in shapes):
            raise UnsupportedModelError("its layers keep a state, which cannot be rewound to an accepted draft")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{draft.info.name} cannot draft: {error}") from error
    return _Draft(models, shapes, are_heads)


def _heads_of(layers: Any) -> Sequence[Any]:
    from kvpool.model.mtp import mtp_heads

    return mtp_heads(layers)


def _draft_runners(
    draft: _Draft, model: ModelRunner, limits: SchedulerConfig, options: Mapping[str, Any]
) -> list[ModelRunner]:
    """What runs the draft, on the last layers of the cache."""
    plane = model.plane
    if plane.device.type == "cuda":  # elsewhere new memory is zero: a draft may read tokens that it has not computed
        for (_, tier), store in plane.stores.items():
            if tier is Tier.GPU and isinstance(store, BlockStore):
                store.data.zero_()
    first = len(plane.config.layers) - sum(len(shape.layers) for shape in draft.shapes)
    # The first step that guesses may compute two tokens of each sequence
    sizes = {"max_sequences": 2 * limits.max_sequences, "max_drafts": 0}
    runners = []
    for each in zip(draft.models, draft.shapes, strict=True):
        runners.append(ModelRunner(*each, plane, model.backend, first_layer=first, **{**options, **sizes}))
        first += len(each[1].layers)
    return runners


def _hidden_states(model: ModelRunner, heads: Sequence[ModelRunner], limits: SchedulerConfig) -> HiddenStates:
    """Memory for what the model, and each MTP layer, computes for tokens, and for what the layers read."""
    weights = model.model.get_output_embeddings().weight
    size, lanes, behind = weights.shape[1], limits.max_sequences, limits.max_draft_tokens + len(heads)
    num_tokens = max(limits.max_tokens_per_step, 2 * lanes)
    hidden = HiddenStates(lanes, HEAD_STEPS + 2 * behind, num_tokens, size, weights)
    model.keep_hidden(hidden.step)
    rows = max(num_tokens + len(heads) * lanes, (1 + behind) * lanes)
    for head in heads:
        head.keep_hidden(weights.new_zeros(rows + 1, size), weights.new_zeros(rows, size))
    return hidden


def check_vocabulary(draft: LoadedModel, draft_size: int, tokenizer: Any, vocab_size: int) -> None:
    """Refuses a draft whose token ids mean something else than the model's.

    Models of one family often pad the same vocabulary to different sizes; then the tokenizers must be equal.
    """
    if hasattr(draft.tokenizer, "get_vocab") and hasattr(tokenizer, "get_vocab"):
        if draft.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"the draft {draft.info.name} has another vocabulary than the model; use one with the same tokenizer"
            )
    elif draft_size != vocab_size:
        raise ConfigError(
            f"the draft {draft.info.name} has {draft_size} tokens, the model {vocab_size}; use one with the same vocabulary"
        )


def _check_positions(max_positions: int | None, longest: int | None) -> None:
    """Refuses a draft whose context is shorter than the engine's sequences may be."""
    if max_positions is not None and (longest is None or longest > max_positions):
        raise ConfigError(
            f"the draft has {max_positions} positions, sequences of this engine up to {longest}; "
            f"set cache={{'max_seq_len': {max_positions}}}, or use another draft"
        )


def _prepared(model: Any, compile: bool) -> ModelShape:
    """Inspects the model and makes its layers faster on a GPU: fewer operations."""
    shape = inspect_model(model, with_states=True)
    if model.device.type == "cuda":
        join_projections(model, lambda: run_probe(model))
        fuse_experts(model)
        if not compile:  # torch.compile needs the model's own code, and fuses more than the norms
            fuse_norms(model)
    return shape
