"""The settings of an Engine, checked before a model is loaded: wrong kinds, contradictions, what belongs elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpool.config.layers import check_int, check_number, show
from kvpool.errors import ConfigError
from kvpool.scheduling import SchedulerConfig

_MOST_BYTES = 2**62


def check_settings(cache: object, tokenizer: object, record: object, **given: Any) -> None:
    """Refuses settings of a wrong kind, and such that contradict each other."""
    if sum(given[name] is not None for name in ("kv_bytes", "kv_blocks", "memory_fraction")) > 1:
        raise ConfigError("give the memory of the cache once: kv_bytes, kv_blocks or memory_fraction")
    for name, low in (("kv_bytes", 1), ("kv_blocks", 1), ("host_bytes", 0), ("block_size", 1), ("draft_tokens", 0)):
        if not (given[name] is None and name in ("kv_bytes", "kv_blocks")):
            check_int(name, given[name], low, _MOST_BYTES)
    if given["memory_fraction"] is not None:
        share = "a number over 0, at most 1"
        if not 0 < check_number("memory_fraction", given["memory_fraction"], share) <= 1:
            raise ConfigError(f"memory_fraction={given['memory_fraction']} must be {share}")
    for name in ("cuda_graphs", "overlap", "compile", "model_defaults"):
        may_be_none = name in ("cuda_graphs", "overlap")
        if not (isinstance(given[name], bool) or (given[name] is None and may_be_none)):
            raise ConfigError(f"{name} must be True or False{', or None to choose' * may_be_none}, got {show(given[name])}")
    if given["overlap"] and given["draft_tokens"]:
        raise ConfigError("overlap=True with draft_tokens: drafts follow tokens that an overlapped step does not know")
    if not isinstance(given["attention"], str):
        raise ConfigError(f"attention must be the name of a backend, got {show(given['attention'])}")
    if record is not None and not isinstance(record, (str, os.PathLike)):
        raise ConfigError(f"record must be the path of a file, got {show(record)}")
    if isinstance(tokenizer, (str, Path)):
        raise ConfigError(f"tokenizer={show(str(tokenizer))} is a name; load it: AutoTokenizer.from_pretrained(...)")
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise ConfigError(f"tokenizer={show(tokenizer)} has no decode, so it is none")
    if cache is not None and not (isinstance(cache, Mapping) and all(isinstance(name, str) for name in cache)):
        raise ConfigError(f"cache must be a mapping of fields of KVCacheConfig, got {show(cache)}")
    for name in {"layers", "block_size", "gpu_blocks", "gpu_bytes"}.intersection(cache or ()):
        raise ConfigError(f"cache={{{name!r}: ...}} is for the engine to say: give it block_size, kv_blocks or kv_bytes")


def scheduler_config(given: SchedulerConfig | None, draft_tokens: int) -> SchedulerConfig:
    """The limits of a step, with room for the drafts."""
    if given is None:
        return SchedulerConfig(max_draft_tokens=draft_tokens)
    if not isinstance(given, SchedulerConfig):
        raise ConfigError(f"scheduler must be a SchedulerConfig, got {show(given)}")
    if given.max_draft_tokens and not draft_tokens:
        raise ConfigError(f"max_draft_tokens={given.max_draft_tokens} needs Engine(draft_tokens=...) to draft anything")
    return replace(given, max_draft_tokens=draft_tokens)


def cache_fields(cache: Mapping[str, Any] | None, max_positions: int | None, host_bytes: int) -> dict[str, Any]:
    """Fields of KVCacheConfig: those that were given, sequences as long as the model's positions, and memory on the host.

    Beyond its positions a model's frequencies may change, its windows act, its tables end: they bound `max_seq_len`.
    """
    fields: dict[str, Any] = {"max_seq_len": max_positions, **(cache or {})}
    longest = fields["max_seq_len"]
    if max_positions is not None and (longest is None or (isinstance(longest, int) and longest > max_positions)):
        raise ConfigError(f"max_seq_len={show(longest)} is over the {max_positions} positions of the model; lower it")
    if host_bytes:
        fields["host_bytes"] = host_bytes
    return fields
