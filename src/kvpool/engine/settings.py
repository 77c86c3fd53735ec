"""The settings of an Engine: each is defined here, once. Keywords, options of commands and keys of files follow from it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from kvpool.checks import check_int, check_number, show
from kvpool.errors import ConfigError
from kvpool.fields import setting
from kvpool.removed import instead_of
from kvpool.scheduling import SchedulerConfig
from kvpool.tiers import KeyedTier
from kvpool.tiers.settings import REQUEST_TIMEOUT, help_of

if TYPE_CHECKING:
    from kvpool.tiers.model_tiers import ModelTiers

_MOST_BYTES = 2**62


@dataclass(frozen=True)
class EngineSettings:
    """Everything about an `Engine` but its model. `Engine(model, **these)` takes them as keywords.

    Memory for keys and values: `kv_bytes`, or `kv_blocks`, or `memory_fraction` of what is free once the model is loaded
    (0.9 on a GPU, 0.25 on a CPU); `host_bytes` more to swap to.

    `draft_tokens` guesses up to so many tokens ahead, copied from the text before, and one step verifies them.

    `compile` lets torch.compile fuse the small operations of each layer, beside the first requests: faster steps. `cache`
    holds further fields of `KVCacheConfig`, `scheduler` the limits of a step. `record` writes a trace for `kvpool replay` to
    a file; nobody can read prompts from it. Where `SamplingParams` say nothing, the model's `generation_config.json` counts,
    unless `model_defaults=False`.

    A model that takes images gets them through `processor`, which is loaded with it where its directory has one. What its
    encoder makes of images is kept in up to `encoder_bytes` (256 MiB).

    Prefixes outlive the process in tiers: `disk` is a directory that holds up to `disk_bytes` (10 GiB), or an address like
    `disk:DIR?bytes=50GB&compress=zstd`; `remote` is the address of a store that many engines share (`redis://host`), `tiers`
    are `KeyedTier`s of your own. The engine asks them in the order `tiers`, `disk`, `remote`. A request waits for them
    `tier_timeout` seconds at most. A block is stored when `tier_min_uses` requests have used it, by default when it is full.

    `adapters` are directories of LoRA adapters by name, for `generate(adapter=NAME)`. At most `max_adapters` are on the
    device at once. With `language_adapters` what they add outside of the language part, as to an encoder of images, is left
    out: docs/adapters.md.

    `publish` is an address like `tcp://127.0.0.1:5557` at which routers hear what is cached; one port above they ask for what
    they missed: docs/cluster.md.
    """

    _: KW_ONLY
    tokenizer: Any = None
    device: Any = setting(None, "cpu, cuda, cuda:1; default: a GPU where there is one.")
    dtype: Any = setting(None, "Of the weights: float32, bfloat16, float16; default: the files'.")
    kv_dtype: Any = setting(None, "Of keys and values: also fp8_e4m3, int8, int4.")
    block_size: int = 16
    kv_bytes: int | None = setting(
        None, "For keys and values: 512MiB, 8GiB; default: a share of what is free.", option="memory"
    )
    kv_blocks: int | None = None
    memory_fraction: float | None = None
    host_bytes: int = 0
    attention: str = "auto"
    cuda_graphs: bool | None = None
    overlap: bool | None = None
    compile: bool = setting(
        False,
        "torch.compile each layer, beside the first requests: faster steps.",
        bool,
        option="compile_layers",
        key="compile",
        flag="--compile",
    )
    draft_tokens: int = setting(0, "Guess up to so many tokens ahead, from the text before; output unchanged.", int)
    processor: Any = None
    encoder_bytes: int = 2**28
    adapters: Mapping[str, str | Path] | None = None
    max_adapters: int = 16
    language_adapters: bool = False
    scheduler: SchedulerConfig | None = None
    cache: Mapping[str, Any] | None = None
    record: str | Path | None = setting(None, "Write a trace for `kvpool replay`; prompts cannot be read from it.")
    model_defaults: bool = True
    disk: str | Path | None = setting(None, help_of("disk"))
    disk_bytes: int | None = setting(None, help_of("disk_bytes"))
    remote: str | None = setting(None, help_of("remote"))
    tiers: Sequence[KeyedTier] | None = None
    tier_timeout: float = setting(REQUEST_TIMEOUT, help_of("timeout"), float)
    tier_min_uses: int = 1
    publish: str | None = setting(None, "Announce what is cached to routers at tcp://HOST:PORT and one port above.")

    def __post_init__(self) -> None:
        """Refuses wrong values, and settings that contradict each other, before a model is loaded."""
        self._check_memory()
        for name in ("cuda_graphs", "overlap", "compile", "model_defaults", "language_adapters"):
            value, may_be_none = getattr(self, name), name in ("cuda_graphs", "overlap")
            if not (isinstance(value, bool) or (value is None and may_be_none)):
                raise ConfigError(
                    f"{name} must be True or False{', or None to choose' * may_be_none}, got {show(value)}"
                )
        if self.overlap and self.draft_tokens:
            raise ConfigError(
                "overlap=True with draft_tokens: drafts follow tokens that an overlapped step does not know"
            )
        if not isinstance(self.attention, str):
            raise ConfigError(f"attention must be the name of a backend, got {show(self.attention)}")
        if self.record is not None and not isinstance(self.record, (str, os.PathLike)):
            raise ConfigError(f"record must be the path of a file, got {show(self.record)}")
        if isinstance(self.tokenizer, (str, Path)):
            raise ConfigError(
                f"tokenizer={show(str(self.tokenizer))} is a name; load it: AutoTokenizer.from_pretrained(...)"
            )
        if self.tokenizer is not None and not hasattr(self.tokenizer, "decode"):
            raise ConfigError(f"tokenizer={show(self.tokenizer)} has no decode(), so it is no tokenizer")
        check_int(self.max_adapters, "max_adapters", 1, 2**16)
        if self.adapters is not None and not isinstance(self.adapters, Mapping):
            raise ConfigError(f"adapters must be a mapping of names to directories, got {show(self.adapters)}")
        if self.adapters and self.compile:
            raise ConfigError("compile=True with adapters: compiled layers cannot take them; use compile=False")
        cache = self.cache
        if cache is not None and not (isinstance(cache, Mapping) and all(isinstance(name, str) for name in cache)):
            raise ConfigError(f"cache must be a mapping of fields of KVCacheConfig, got {show(cache)}")
        for name in {"layers", "block_size", "gpu_blocks", "gpu_bytes"}.intersection(cache or ()):
            raise ConfigError(
                f"cache={{{name!r}: ...}} is set by the engine: use its keywords block_size, kv_blocks or kv_bytes"
            )

    def _check_memory(self) -> None:
        if sum(value is not None for value in (self.kv_bytes, self.kv_blocks, self.memory_fraction)) > 1:
            raise ConfigError("give the memory of the cache once: kv_bytes, kv_blocks or memory_fraction")
        for name, low in (
            ("kv_bytes", 1),
            ("kv_blocks", 1),
            ("host_bytes", 0),
            ("block_size", 1),
            ("draft_tokens", 0),
            ("encoder_bytes", 0),
        ):
            value = getattr(self, name)
            if not (value is None and name in ("kv_bytes", "kv_blocks")):
                check_int(value, name, low, _MOST_BYTES)
        if self.memory_fraction is not None:
            share = "a number over 0, at most 1"
            if not 0 < check_number(self.memory_fraction, "memory_fraction", share) <= 1:
                raise ConfigError(f"memory_fraction={self.memory_fraction} must be {share}")

    def model_tiers(self) -> ModelTiers:
        """Which tiers it has, checked."""
        from kvpool.tiers.model_tiers import ModelTiers  # which imports torch

        keywords = ("tiers", "disk", "disk_bytes", "remote", "tier_timeout", "tier_min_uses")
        return ModelTiers.of(**{name: getattr(self, name) for name in keywords})

    def limits(self) -> SchedulerConfig:
        """The limits of a step, with room for the drafts."""
        given = self.scheduler
        if given is None:
            return SchedulerConfig(max_draft_tokens=self.draft_tokens)
        if not isinstance(given, SchedulerConfig):
            raise ConfigError(f"scheduler must be a SchedulerConfig, got {show(given)}")
        if given.max_draft_tokens and not self.draft_tokens:
            raise ConfigError(
                f"max_draft_tokens={given.max_draft_tokens} needs Engine(draft_tokens=...) to draft anything"
            )
        return replace(given, max_draft_tokens=self.draft_tokens)

    def cache_fields(self, max_positions: int | None) -> dict[str, Any]:
        """Fields of KVCacheConfig: those that were given, `max_seq_len` and host memory.

        `max_seq_len` is at most the number of positions of the model: beyond it, models compute something else or fail.
        """
        chosen: dict[str, Any] = {"max_seq_len": max_positions, **(self.cache or {})}
        longest = chosen["max_seq_len"]
        if max_positions is not None and (longest is None or (isinstance(longest, int) and longest > max_positions)):
            raise ConfigError(
                f"max_seq_len={show(longest)} is over the {max_positions} positions of the model; lower it"
            )
        if self.host_bytes:
            chosen["host_bytes"] = self.host_bytes
        return chosen


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineSettings` once more, so that type checkers know the keywords of `Engine`."""

    tokenizer: Any
    device: Any
    dtype: Any
    kv_dtype: Any
    block_size: int
    kv_bytes: int | None
    kv_blocks: int | None
    memory_fraction: float | None
    host_bytes: int
    attention: str
    cuda_graphs: bool | None
    overlap: bool | None
    compile: bool
    draft_tokens: int
    processor: Any
    encoder_bytes: int
    adapters: Mapping[str, str | Path] | None
    max_adapters: int
    language_adapters: bool
    scheduler: SchedulerConfig | None
    cache: Mapping[str, Any] | None
    record: str | Path | None
    model_defaults: bool
    disk: str | Path | None
    disk_bytes: int | None
    remote: str | None
    tiers: Sequence[KeyedTier] | None
    tier_timeout: float
    tier_min_uses: int
    publish: str | None


def as_settings(options: Mapping[str, Any]) -> EngineSettings:
    """Keywords of `Engine` as settings; raises if there is no such setting."""
    names = [each.name for each in fields(EngineSettings)]
    if unknown := options.keys() - set(names):
        if (words := instead_of(sorted(unknown))) is not None:
            raise ConfigError(words)
        raise ConfigError(f"Engine has no setting {min(unknown)!r}; it has {', '.join(names)}")
    return EngineSettings(**options)


def engine_signature() -> inspect.Signature:
    """What `Engine` takes, for `help` and editors: its model, and the settings by name."""
    settings = list(inspect.signature(EngineSettings).parameters.values())
    return inspect.Signature(
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
            *settings,
        ]
    )
