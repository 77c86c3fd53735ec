"""What computing and moving tokens should cost on a GPU, by its data sheet. (Measured costs: `scheduling`.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpool.config import LayerSpec
from kvpool.config.model_config import layers_from_hf, without_states
from kvpool.replay.planning.gpus import find_gpu
from kvpool.replay.planning.weights import count_weights
from kvpool.scheduling import LinearCostModel


def costs_for(
    model: str | Path | Mapping[str, Any],
    gpu: str,
    kv_dtype: str | None = None,
    *,
    num_gpus: int = 1,
    weight_bytes: float | None = None,
) -> tuple[LinearCostModel, Sequence[LayerSpec]]:
    """Costs expected of a GPU: prefill bound by compute, decoding by memory bandwidth. And the model's layers."""
    device, weights = find_gpu(gpu), count_weights(model)
    per_parameter = weight_bytes or weights.bytes_per_parameter
    layers = without_states(layers_from_hf(model, dtype=kv_dtype))
    flops = device.flops(per_parameter) * num_gpus
    bandwidth = device.decode_bytes_per_second * num_gpus
    costs = LinearCostModel(
        prefill_seconds_per_token=2 * weights.active / flops,
        seconds_per_token_pair=4 * weights.hidden_size * weights.num_layers / flops,
        decode_seconds_per_step=weights.active * per_parameter / bandwidth,
        decode_seconds_per_sequence=2 * weights.active / flops,
        decode_seconds_per_context_token=sum(layer.bytes_per_token for layer in layers) / bandwidth,
        transfer_bytes_per_second=device.swap_bytes_per_second * num_gpus,
    )
    return costs, layers
