"""Which model is this, down to its numbers? Blocks of one model must never reach another.

Reading all weights takes a fraction of a second: every tensor is summed as integers, which is exact and the same in any
order and on any device, and a sample of its elements says where they stand.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

_SAMPLE = 64
# Fields of a configuration that change no key or value: names, versions, and what is in the weights themselves.
_IRRELEVANT = frozenset({
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"),
    *("_attn_implementation", "attn_implementation", "_commit_hash", "output_attentions", "output_hidden_states"),
    *("return_dict", "id2label", "label2id", "problem_type", "tokenizer_class", "chunk_size_feed_forward"),
})  # fmt: skip
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_id(model: Any) -> str:
    """The class of a model and a digest of its configuration: positions, norms and scales are nowhere else."""
    fields = {name: value for name, value in model.config.to_dict().items() if name not in _IRRELEVANT}
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{type(model).__name__} {hashlib.sha256(text.encode()).hexdigest()}"


@torch.no_grad()
def weights_id(model: Any) -> str:
    """A digest of all parameters and buffers that belong to a model: names, shapes, types and contents."""
    tensors = sorted(model.state_dict().items())
    read: dict[tuple[int, torch.Size], int] = {}  # tied weights are read once
    sums: list[Tensor] = []
    for _, tensor in tensors:
        place = tensor.data_ptr(), tensor.shape
        if place not in read:
            read[place] = len(sums)
            sums.append(_content(tensor))
    contents = torch.stack(sums).cpu().tolist() if sums else []
    digest = hashlib.sha256()
    for name, tensor in tensors:
        content = contents[read[tensor.data_ptr(), tensor.shape]]
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype), content]).encode())
    return digest.hexdigest()


def _content(tensor: Tensor) -> Tensor:
    """int64 [1 + sample]: the sum of a tensor's words, and some of them."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()]) if flat.element_size() in _WORDS else flat.view(torch.uint8)
    found = torch.zeros(1 + _SAMPLE, dtype=torch.int64, device=tensor.device)
    if len(words):
        found[0] = words.sum(dtype=torch.int64)
        step = max(1, len(words) // _SAMPLE)
        sample = words[::step][:_SAMPLE].to(torch.int64)
        found[1 : 1 + len(sample)] = sample
    return found
