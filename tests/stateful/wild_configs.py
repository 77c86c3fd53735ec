"""Draws configurations that nobody would choose: every mixture of layer groups, pools, tiers and switches that is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from item_codes import KINDS, code_of

import kvpool.replay.policies  # noqa: F401  # known by name, also in programs that run without pytest
from kvpool import DType, KVCacheConfig, LayerSpec, ReuseScope, StatePart, StateSpec, Tier

BLOCK_SIZES = (1, 1, 2, 2, 2, 3, 4, 4, 5, 7, 8, 16)
HEAD_DIMS = (8, 8, 8, 16, 32)  # equal block bytes share a pool, others get their own
TENANTS = ("", "a", "b")
POLICIES = (
    "2q",
    "adaptive",
    "arc",
    "clock",
    "cost",
    "fifo",
    "lfu",
    "lru",
    "priority",
    "s3fifo",
    "sieve",
)


@dataclass
class Setting:
    """One world for the machine: a configuration, what is done to it before the first request, and what prompts look like."""

    config: KVCacheConfig
    listens: bool
    records: bool  # a recording is made, played back at the end, and compared
    cuts: list[tuple[int, Tier, int]]  # (pool, tier, blocks): lower tiers resized to what no configuration may say
    scopes: list[ReuseScope]
    documents: list[list[int]]  # codes that prompts begin with, so that they share blocks of any size
    num_tokens: int  # the longest prompt
    keeps_prompts: bool  # prompts are named by `Prompt`s that stay, not by their tokens


def draw_setting(rng: Random) -> Setting:
    size = rng.choice(BLOCK_SIZES)
    layers = draw_layers(rng, size)
    config = draw_config(rng, layers, size)
    lower = [(pool, tier) for pool in config.pools for tier in (Tier.HOST, Tier.DISK) if pool.num_blocks[tier]]
    cuts = [(pool.index, tier, rng.randrange(pool.num_blocks[tier])) for pool, tier in lower if rng.random() < 0.1]
    num_tokens = size * rng.choice((2, 3, 4, 6)) + rng.randrange(size + 1)
    if config.max_seq_len is not None:
        num_tokens = min(num_tokens, config.max_seq_len + 1)
    root = [rng.randrange(2) for _ in range(num_tokens)]
    documents = [root]
    for _ in range(rng.randrange(1, 4)):
        common = rng.randrange(num_tokens)
        documents.append(root[:common] + [rng.randrange(3) for _ in range(num_tokens - common)])
    if rng.random() < 0.5:
        documents = [with_items(rng, document) for document in documents]
    scopes = [
        ReuseScope(),
        *(ReuseScope(tenant=t, adapter=rng.choice(("", "lora"))) for t in TENANTS[: rng.randrange(4)]),
    ]
    listens = bool(config.event_buffer_size) and rng.random() < 0.5
    return Setting(config, listens, rng.random() < 0.5, cuts, scopes, documents, num_tokens, rng.random() < 0.7)


def with_items(rng: Random, document: list[int]) -> list[int]:
    """Some tokens of a document become placeholders of images; each says by a code of which (see `item_codes`)."""
    codes, at = document[:], rng.randrange(len(document))
    for kind in rng.choices(range(len(KINDS)), k=rng.randrange(1, 4)):
        length = KINDS[kind][1]
        if at + length <= len(codes):
            token = rng.randrange(3)
            for offset in range(length):
                codes[at + offset] = code_of(kind, offset, token if rng.random() < 0.9 else rng.randrange(3))
        at += length + rng.choice((0, 0, 1, 4))
    return codes


def draw_layers(rng: Random, size: int) -> list[LayerSpec | StateSpec]:
    """One to five groups; at least one is no cross-attention. Sometimes there are states, seldom nothing else."""
    layers: list[LayerSpec | StateSpec]
    layers = [draw_layer(rng, size) for _ in range(rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5)))]
    if rng.random() < 0.3:
        state = StateSpec((StatePart("recurrent", (rng.choice((8, 16, 24)),), DType.FLOAT32),))
        layers = [state, state] if rng.random() < 0.15 else [*layers[:4], state]
    if rng.random() < 0.15:
        layers.append(LayerSpec(1, rng.choice(HEAD_DIMS), cross_attention=True))
    return layers


def draw_layer(rng: Random, size: int) -> LayerSpec:
    dim, kind = rng.choice(HEAD_DIMS), rng.random()
    if kind < 0.4:
        return LayerSpec(1, dim, k_only=rng.random() < 0.1)
    reach = rng.randrange(1, 3 * size + 3)
    if kind < 0.6:
        return LayerSpec(1, dim, window=reach)
    if kind < 0.8:
        return LayerSpec(1, dim, window=reach, sink_tokens=rng.randrange(1, 2 * size + 1))
    return LayerSpec(1, dim, chunk=reach)


def draw_config(rng: Random, layers: list[LayerSpec | StateSpec], size: int) -> KVCacheConfig:
    groups = [len(pool.groups) for pool in KVCacheConfig(layers, size, gpu_blocks=len(layers)).pools]
    roomy = rng.random() < 0.1
    gpu = [n * rng.randrange(20, 40) if roomy else n * rng.randrange(2, 8) + rng.randrange(4) for n in groups]
    spare = rng.choice((1, 3, 8, 8))
    caching = rng.random() < 0.95
    partial = rng.random() < 0.75
    offload = rng.random() < 0.8
    has_states = any(isinstance(layer, StateSpec) for layer in layers)
    return KVCacheConfig(
        layers,
        size,
        gpu_blocks=gpu,
        host_blocks=[n + rng.randrange(spare) for n in groups] if rng.random() < 0.65 else None,
        disk_blocks=[n + rng.randrange(spare) for n in groups] if rng.random() < 0.35 else None,
        max_seq_len=rng.randrange(2 * size, 6 * size + 1) if rng.random() < 0.15 else None,
        enable_prefix_caching=caching,
        partial_match=partial,
        copy_on_partial_reuse=not partial or rng.random() < 0.7,
        cache_unfilled_blocks=caching and partial and not has_states and rng.random() < 0.6,
        checkpoint_every=size * rng.randrange(1, 4) if has_states and rng.random() < 0.5 else None,
        offload_on_evict=offload,
        host_write=rng.choice(("back", "through")) if offload else "back",
        watermark=rng.choice((0.0, 0.0, 0.0, 0.01, 0.1, 0.3)),
        eviction_policy=rng.choice(POLICIES),
        default_ttl=rng.choice((0.75, 8.0)) if caching and rng.random() < 0.1 else None,
        max_pinned_tokens=rng.choice((None, None, 0, 2 * size, 8 * size)),
        event_buffer_size=0 if rng.random() < 0.05 else 4096,
    )
