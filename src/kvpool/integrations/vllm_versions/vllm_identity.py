"""Which models of vLLM are supported, and what must be equal before one vLLM may use pages of another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpool.errors import ConfigError
from kvpool.integrations.connector.pages import EnginePages
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.tiers import Fingerprint, Shard
from kvpool.tiers.identity import OF_TRANSFORMERS, files_id, settings_id

# Derived kinds are not served: they keep their pages otherwise.
_SERVED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


def checked_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block. Raises an error of one line for models that this connector does not support."""
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError('KVPoolConnector needs "kv_load_failure_policy": "recompute" in --kv-transfer-config')
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("KVPoolConnector does not serve context parallelism: blocks are divided between ranks there")
    groups = kv_cache_config.kv_cache_groups
    refused = {reason for group in groups if (reason := _reason(group)) is not None} if groups else {"no layers"}
    if not refused and any(keeps_state(group) for group in groups):
        refused = _reasons_beside_states(groups, parallel)
    if refused:
        raise ConfigError(
            "KVPoolConnector serves layers with full attention, sliding windows and states; this model has "
            f"{' and '.join(sorted(refused))}. Leave --kv-transfer-config out for it"
        )
    sizes = {int(group.kv_cache_spec.block_size) for group in groups}
    if len(sizes) > 1:
        raise ConfigError(f"KVPoolConnector needs one block size for all layers; this model has {sorted(sizes)}")
    return sizes.pop()


def is_windowed(group: Any) -> bool:
    """Whether pages of this group are freed as the sequence grows."""
    return any(isinstance(spec, SlidingWindowSpec) for spec in _specs(group))


def keeps_state(group: Any) -> bool:
    """Whether its layers keep a state (Mamba, linear attention, short convolutions), right at one position."""
    return any(isinstance(spec, MambaSpec) for spec in _specs(group))


def _specs(group: Any) -> list[Any]:
    """The kinds of the layers of a group. What they keep of a token may differ, as latents and an indexer's keys do."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if type(spec) is UniformTypeKVCacheSpecs else [spec]


def _reasons_beside_states(groups: Sequence[Any], parallel: Any) -> set[str]:
    """What cannot be served together with layers that keep a state."""
    refused = set()
    if all(keeps_state(group) for group in groups):
        refused.add("only layers with a state, and no attention whose blocks it could be found with")
    if any(is_windowed(group) for group in groups):
        refused.add("layers with a state beside sliding windows, whose pages are gone where the next state is kept")
    if parallel.pipeline_parallel_size > 1:
        refused.add("layers with a state in several pipeline stages, of which each has other layers")
    return refused


def _reason(group: Any) -> str | None:
    """Why a group of layers cannot be served; None if it can."""
    if getattr(group, "host_resident", False):
        return "layers that vLLM keeps on the host itself"
    return next((reason for spec in _specs(group) if (reason := _reason_of(spec)) is not None), None)


def _reason_of(spec: Any) -> str | None:
    if type(spec) is MambaSpec:
        if spec.mamba_cache_mode != "align":
            return "layers with a state that vLLM keeps nowhere but at the end, as without --enable-prefix-caching"
        if spec.num_speculative_blocks:
            return "layers with a state beside speculative decoding, which rewrites states after a step"
        return None
    if type(spec) not in _SERVED:
        return f"layers of the kind {type(spec).__name__}"
    if getattr(spec, "non_causal", False):
        return "layers that attend to later tokens, so that a block depends on more than what is before it"
    return None


IRRELEVANT = frozenset(
    {
        # Scheduling, logging and transport. The shard and the layout say which part a rank holds.
        *("parallel_config", "scheduler_config", "offload_config", "compilation_config", "optimization_level"),
        *("performance_mode", "kv_transfer_config", "kv_events_config", "ec_transfer_config", "ec_manager_config"),
        *("weight_transfer_config", "observability_config", "logging_config", "profiler_config", "aux_output_config"),
        *("instance_id", "shutdown_timeout", "fault_tolerance_config", "watchdog_config"),
        # What is done with logits.
        *("structured_outputs_config", "reasoning_config", "watermark_config"),
        *(
            f"model_config.{name}"
            for name in (
                *(
                    "seed",
                    "max_logprobs",
                    "logprobs_mode",
                    "return_sampling_mask",
                    "use_fp64_gumbel",
                    "enable_trace_replay",
                ),
                *("generation_config", "override_generation_config", "logits_processors"),
                # Names, and what turns a request into tokens. The content of files counts, not their names.
                *("model", "model_weights", "revision", "served_model_name", "hf_token"),
                *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "io_processor_plugin"),
                *("allowed_local_media_path", "allowed_media_domains", "renderer_num_workers", "enforce_eager"),
                *("multimodal_config.limit_per_prompt", "multimodal_config.mm_processor_cache_gb"),
                *(f"{config}.{name}" for config in ("hf_config", "hf_text_config") for name in OF_TRANSFORMERS),
            )
        ),
        "quant_config",  # made from settings and files that count
        # Sizes of vLLM's own cache, and how it finds blocks.
        *(
            f"cache_config.{name}"
            for name in (
                *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "num_gpu_blocks"),
                *(
                    "num_cpu_blocks",
                    "kv_cache_size_tokens",
                    "kv_cache_max_concurrency",
                    "effective_attention_block_size",
                ),
                *("enable_prefix_caching", "prefix_caching_hash_algo", "prefix_cache_retention_interval"),
                *("prefix_match_unit", "hash_block_size", "cache_hit_alignment_tokens"),
                *("user_specified_block_size", "_block_size_resolved", "kv_offloading_size", "kv_offloading_backend"),
            )
        ),
        *(
            "lora_config.max_loras",
            "lora_config.max_cpu_loras",
            "load_config.download_dir",
            "load_config.use_tqdm_on_load",
        ),
        "load_config.safetensors_load_strategy",
    }
)
"""Settings of vLLM that reach no key or value; any other makes another fingerprint."""


def fingerprint(
    vllm_config: Any, settings: ConnectorSettings, block_size: int, pages: EnginePages, states: EnginePages | None
) -> Fingerprint:
    """The fingerprint of the pages of one worker; `states` are those of layers that keep a state."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    groups = tuple(
        f"{each.row_bytes} bytes" + (f" in {each.num_groups} groups" if each.num_groups > 1 else "")
        for each in (pages, states)
        if each is not None
    )
    layout = pages.layout if states is None else f"{pages.layout} {states.layout}"
    divided = f"{parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size}"
    return Fingerprint(
        model=f"{' '.join(model.architectures)} {settings_id(vllm_config, IRRELEVANT)}",
        weights=weights_name(vllm_config, settings),
        block_size=block_size,
        groups=groups,
        layout=f"vllm {vllm.__version__} {divided} {layout}",
        shard=Shard(parallel.rank, parallel.world_size),
    )


def weights_name(vllm_config: Any, settings: ConnectorSettings) -> str:
    """A digest of the weights of the model, and of its draft model, whose pages are stored, too.

    Raises an error of one line where no name would be right for as long as the engine lives.
    """
    if settings.has_tiers and vllm_config.weight_transfer_config is not None:
        raise ConfigError(
            "KVPoolConnector stores nothing below the host where weights change in place (weight_transfer_config): no key "
            "could say which ones a block was computed with. Leave disk and remote out of kv_connector_extra_config"
        )
    if settings.model_id is not None:
        return settings.model_id
    if not settings.has_tiers:
        return "in memory only"
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError(
            "the weights are in no file (load_format is dummy); name them with model_id in kv_connector_extra_config, or "
            "leave disk and remote out"
        )
    model = vllm_config.model_config
    drafting = getattr(vllm_config.speculative_config, "draft_model_config", None)
    models = [model] if drafting is None or drafting.model == model.model else [model, drafting]
    return " ".join(files_id(_model_path(each)) for each in models)


def _model_path(model_config: Any) -> str:
    """The directory of the weights: the named one, or vLLM's download of it."""
    if os.path.exists(model_config.model):
        return str(model_config.model)
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    except Exception as error:
        raise ConfigError(
            f"the files of {model_config.model} were not found ({type(error).__name__}); name the weights with model_id in "
            "kv_connector_extra_config, so that their blocks in tiers cannot be taken for another model's"
        ) from None
