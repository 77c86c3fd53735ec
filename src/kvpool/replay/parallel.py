"""What ranks cost: bytes on each, and all-reduces of a step; and on paper what stages and divided prompts would.

An all-reduce of b bytes between n ranks takes `latency + 2 (n - 1) / n * b / bandwidth`: a ring, with the bandwidth that
nccl-tests calls bus bandwidth. A layer has two of them, behind its attention and behind its feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.checks import check_int, check_number
from kvpool.config import LayerSpec, StateSpec
from kvpool.config.layers import MAX_HEADS
from kvpool.config.model_config import load_config
from kvpool.errors import InvalidArgumentError
from kvpool.replay.costs import TEXT_KEYS, costs_for, count_weights, find_gpu
from kvpool.scheduling import LinearCostModel

# Not measured: what an all-reduce reaches of the data sheet's one-way figure, and how long the smallest one takes in a CUDA
# graph. `--all-reduce-bandwidth` and `--all-reduce-latency` take measured values.
PEER_EFFICIENCY = 0.8
ALL_REDUCE_LATENCY = 15e-6
REDUCES_PER_LAYER = 2
Model = str | Path | Mapping[str, Any]


class Interconnect(NamedTuple):
    """How fast ranks add up their results, and where that is known from."""

    bytes_per_second: float
    latency: float
    source: str

    @classmethod
    def of(cls, gpu: str, gigabytes: float | None = None, microseconds: float | None = None) -> Interconnect:
        """Of GPUs of this name, unless measured values are given."""
        for name, value in (("--all-reduce-bandwidth", gigabytes), ("--all-reduce-latency", microseconds)):
            if value is not None and not check_number(value, name, "a number above 0") > 0:
                raise InvalidArgumentError(f"{name} is {value}; it must be above 0")
        peer = find_gpu(gpu).peer_bytes_per_second
        source = f"{PEER_EFFICIENCY:.0%} of the data sheet's {peer / 1e9:.0f} GB/s, not measured"
        speed = PEER_EFFICIENCY * peer if gigabytes is None else gigabytes * 1e9
        latency = ALL_REDUCE_LATENCY if microseconds is None else microseconds * 1e-6
        return cls(speed, latency, source if gigabytes is None else "as given")

    def all_reduce_seconds(self, num_bytes: float, ranks: int) -> float:
        """Until every rank has the sum of all."""
        return self.latency + 2 * (ranks - 1) / ranks * num_bytes / self.bytes_per_second

    def send_seconds(self, num_bytes: float) -> float:
        """From one rank to another."""
        return self.latency + num_bytes / self.bytes_per_second


class RankShape(NamedTuple):
    """The part of a model that each rank has."""

    ranks: int
    layers: tuple[LayerSpec, ...]  # with the KV heads of one rank
    attention: float  # the part of all attention that one rank computes
    words: str

    @classmethod
    def of(cls, model: Model, layers: Sequence[LayerSpec | StateSpec], ranks: int) -> RankShape:
        """Of these layers of a model; raises if its heads cannot be divided so."""
        outer = load_config(model)
        text = next((outer[key] for key in TEXT_KEYS if isinstance(outer.get(key), Mapping)), outer)
        heads = check_int(text.get("num_attention_heads", text.get("n_head")), "num_attention_heads", 1, MAX_HEADS)
        attending = tuple(layer for layer in layers if isinstance(layer, LayerSpec))
        if len(attending) < len(layers):
            raise InvalidArgumentError(f"--tensor-parallel {ranks}: some layers keep a state, which is not divided")
        if attending[0].k_only:
            return cls(ranks, attending, 1.0, "one latent for all heads: every rank keeps all K and V")
        if heads % ranks:
            raise InvalidArgumentError(
                f"--tensor-parallel {ranks} does not divide the {heads} attention heads; use a divisor of {heads}"
            )
        own = tuple(replace(layer, kv_heads=_kv_heads(layer.kv_heads, ranks)) for layer in attending)
        most = max(layer.kv_heads for layer in attending)
        words = f"{heads // ranks} of {heads} query heads and {_kv_heads(most, ranks)} of {most} KV heads each"
        if ranks > most:
            words += f"; {ranks // most} ranks keep the same one"
        return cls(ranks, own, 1 / ranks, words)

    @property
    def token_bytes(self) -> int:
        """K and V of a token on one rank."""
        return sum(layer.bytes_per_token for layer in self.layers)


def _kv_heads(heads: int, ranks: int) -> int:
    if heads % ranks and ranks % heads:
        raise InvalidArgumentError(
            f"--tensor-parallel {ranks} is neither a divisor nor a multiple of the {heads} KV heads; use one of them"
        )
    return max(1, heads // ranks)


class RankCosts(NamedTuple):
    """What steps cost on one GPU, and on ranks with their all-reduces."""

    alone: LinearCostModel
    divided: LinearCostModel
    shape: RankShape
    link: Interconnect
    activation_bytes: int  # of a token between two layers
    token_bytes: int  # K and V of a token, of all ranks without copies

    @classmethod
    def of(
        cls,
        model: Model,
        gpu: str,
        ranks: int,
        link: Interconnect,
        kv_dtype: str | None = None,
        weight_bytes: float | None = None,
    ) -> RankCosts:
        """Of a model on `ranks` GPUs: compute, weights and heads are divided, KV heads may be copied."""
        alone, layers = costs_for(model, gpu, kv_dtype, weight_bytes=weight_bytes)
        shape, weights = RankShape.of(model, layers, ranks), count_weights(model)
        whole = sum(layer.bytes_per_token for layer in layers if isinstance(layer, LayerSpec))
        activation = weights.hidden_size * (4 if weights.bytes_per_parameter >= 4 else 2)
        reduces = REDUCES_PER_LAYER * len(shape.layers)
        added = reduces * (link.all_reduce_seconds(activation, ranks) - link.latency)
        divided = LinearCostModel(
            prefill_seconds_per_token=alone.prefill_seconds_per_token / ranks + added,
            seconds_per_token_pair=alone.seconds_per_token_pair * shape.attention,
            decode_seconds_per_step=alone.decode_seconds_per_step / ranks + reduces * link.latency,
            decode_seconds_per_sequence=alone.decode_seconds_per_sequence / ranks + added,
            decode_seconds_per_context_token=alone.decode_seconds_per_context_token * shape.token_bytes / whole,
            transfer_bytes_per_second=alone.transfer_bytes_per_second,
        )
        return cls(alone, divided, shape, link, activation, whole)

    @property
    def num_reduces(self) -> int:
        """All-reduces of a step."""
        return REDUCES_PER_LAYER * len(self.shape.layers)

    def all_reduce_seconds(self, num_tokens: int) -> float:
        """All of them in a step with so many tokens."""
        return self.num_reduces * self.link.all_reduce_seconds(num_tokens * self.activation_bytes, self.shape.ranks)

    def pipeline_seconds(self, num_sequences: int, context: int) -> float:
        """A token for each sequence from as many stages as ranks, each busy with another part of the sequences.

        Every part passes all stages: all weights are read for each part, one after the other. K and V are divided by layers.
        """
        stages = self.shape.ranks
        sends = stages * self.link.send_seconds(num_sequences / stages * self.activation_bytes)
        alone = self.alone
        tokens = num_sequences * (alone.decode_seconds_per_sequence + context * alone.decode_seconds_per_context_token)
        return alone.decode_seconds_per_step + tokens / stages + sends

    def context_seconds(self, num_tokens: int) -> float:
        """A prompt whose tokens are divided between ranks, each with all weights; K and V go round once."""
        ranks = self.shape.ranks
        moved = len(self.shape.layers) * self.link.latency * (ranks - 1)
        moved += (ranks - 1) / ranks * num_tokens * self.token_bytes / self.link.bytes_per_second
        return self.alone.prefill_seconds(num_tokens, 0) / ranks + moved
