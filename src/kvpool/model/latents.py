"""Multi-head latent attention (MLA): the cache keeps what the model compresses keys and values to, once for all heads.

Such a module makes a latent of each token (`kv_lora_rank` numbers, normed) and one rotary key (`qk_rope_head_dim`). Its
`expand_kv` makes the keys and values of every head of them, by the weights of `kv_b_proj`. Instead, those of keys go into
the queries here, and those of values into the results: then all heads attend over one key, the latent with the rotary key
behind it, and one value, the latent. The products are of views of the model's own weights, so nothing is kept of these.

A module is recognised by what it has, and by what its `expand_kv` gives for random latents. Any other attends as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpool.model.faster_layers import is_unchanged

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_SAMPLES, _TOLERANCE = 3, 1e-3  # tokens that are compared; how far they may differ, as a share of the largest number
_TOLERANCE_16_BITS = 0.05


class Folds(NamedTuple):
    """The weights of one module, by query heads, as views of its `kv_b_proj`."""

    keys: Tensor  # [head, element of a key without position, element of the latent]
    values: Tensor  # [head, element of a value, element of the latent]

    @classmethod
    def of(cls, module: Any) -> Folds:
        by_head = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
        return cls(by_head[:, : module.qk_nope_head_dim], by_head[:, module.qk_nope_head_dim :])

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [1, head, token, dim] as they attend over latents: [1, head, token, latent and rotary key]."""
        plain, rotary = torch.split(query, [self.keys.shape[1], query.shape[-1] - self.keys.shape[1]], dim=-1)
        return torch.cat((torch.matmul(plain, self.keys), rotary), dim=-1)

    def expand(self, result: Tensor) -> Tensor:
        """What attention over latents gave, [1, token, head, latent], as what it gives over values."""
        return torch.matmul(result.transpose(1, 2), self.values.transpose(1, 2)).transpose(1, 2)


def keep_latents(model: Any, name: str) -> None:
    """From now on modules with latents hand these to attention, while the attention of the model is called `name`."""
    for module in _with_latents(model):
        if _is_as_expected(module):
            module.expand_kv = partial(_joined, module, name)


def own_expansion(model: Any) -> None:
    """Gives the modules of a model their own `expand_kv` back."""
    for module in model.modules():
        if _is_kept(module):
            del module.expand_kv


def folds_of(module: Any) -> Folds | None:
    """The weights to fold into queries and results of a module that hands latents to attention; None for any other."""
    return Folds.of(module) if _is_kept(module) else None


def folded_weights(model: Any) -> Iterator[str]:
    """The names of the linear layers whose weights are folded."""
    for name, module in model.named_modules():
        if _is_kept(module):
            yield f"{name}.kv_b_proj"


def _is_kept(module: Any) -> bool:
    return getattr(vars(module).get("expand_kv"), "func", None) is _joined


def _joined(module: Any, name: str, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `expand_kv`: the key of all heads, [1, 1, token, element], and the value, which is a part of it."""
    if module.config._attn_implementation != name:
        expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, rotary)
        return expanded
    keys = torch.cat((latent, rotary), dim=-1)
    return keys, keys[..., : latent.shape[-1]]


def _with_latents(model: Any) -> Iterator[Any]:
    for module in model.modules():
        sizes = [getattr(module, size, None) for size in _SIZES]
        if callable(getattr(type(module), "expand_kv", None)) and all(type(size) is int for size in sizes):
            yield module


@torch.no_grad()
def _is_as_expected(module: Any) -> bool:
    """Whether `expand_kv` multiplies latents by the weights of `kv_b_proj`, and does nothing else."""
    product = getattr(module, "kv_b_proj", None)
    if not isinstance(product, torch.nn.Linear) or not is_unchanged(product) or product.bias is not None:
        return False
    rank, plain, rotary, v_dim = (getattr(module, size) for size in _SIZES)
    if product.in_features != rank or product.out_features % (plain + v_dim) or not product.weight.is_floating_point():
        return False
    generator = torch.Generator().manual_seed(0)
    latent, rotary_key = (
        torch.randn(1, 1, _SAMPLES, width, generator=generator).to(product.weight) for width in (rank, rotary)
    )
    folds = Folds.of(module)
    heads = len(folds.keys)
    keys = torch.cat((torch.matmul(latent, folds.keys.transpose(1, 2)), rotary_key.expand(-1, heads, -1, -1)), dim=-1)
    values = torch.matmul(latent, folds.values.transpose(1, 2))
    given = type(module).expand_kv(module, latent, rotary_key)
    return all(map(_are_close, given, (keys, values)))


def _are_close(given: Tensor, wanted: Tensor) -> bool:
    if given.shape != wanted.shape:
        return False
    tolerance = _TOLERANCE if wanted.dtype == torch.float32 else _TOLERANCE_16_BITS
    difference = (given.float() - wanted.float()).abs().max()
    return bool(difference <= tolerance * wanted.float().abs().max())
