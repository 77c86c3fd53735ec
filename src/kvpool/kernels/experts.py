"""The products of a mixture of experts: each token with the weights of the few experts that were chosen for it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpool.kernels.layout import current


@torch.library.custom_op(  # compiled layers call it as it is
    "kvpool::expert_product",
    mutates_args=(),
    schema="(Tensor x, Tensor weights, Tensor? bias, Tensor experts, Tensor? scales=None) -> Tensor",
)
def expert_product(
    x: Tensor, weights: Tensor, bias: Tensor | None, experts: Tensor, scales: Tensor | None = None
) -> Tensor:
    """What `expert_product_reference` gives, on a GPU by a kernel, which may be captured in a graph.

    No token chooses an expert twice, and all tokens together choose at most `MOST_CHOICES`.
    """
    if x.device.type != "cuda":
        return expert_product_reference(x, weights, bias, experts, scales)
    from kvpool.kernels.experts_triton import expert_product_triton

    with current(x.device):
        return expert_product_triton(x, weights, bias, experts, scales)


@expert_product.register_fake
def _shape(x: Tensor, weights: Tensor, bias: Tensor | None, experts: Tensor, scales: Tensor | None = None) -> Tensor:
    return x.new_empty(experts.numel(), weights.shape[1])


def expert_product_reference(
    x: Tensor, weights: Tensor, bias: Tensor | None, experts: Tensor, scales: Tensor | None = None
) -> Tensor:
    """`scale * (weights[expert] @ x + bias[expert])` for each choice of an expert, in torch: [choice, out].

    `experts` and `scales` are [token, choices of it]. `x` has a row for each token, or one for each choice. `weights` are
    [expert, out, in] with any strides, `bias` is [expert, out]. It computes in float32 and rounds once.
    """
    chosen = experts.flatten()
    rows = x if len(x) == len(chosen) else x.repeat_interleave(experts.shape[1], dim=0)
    out = torch.empty(len(chosen), weights.shape[1], dtype=x.dtype, device=x.device)
    for expert in set(chosen.tolist()):
        at = (chosen == expert).nonzero().flatten()
        product = rows[at].float() @ weights[expert].float().t()
        if bias is not None:
            product += bias[expert].float()
        if scales is not None:
            product *= scales.flatten()[at, None].float()
        out[at] = product.to(x.dtype)
    return out
