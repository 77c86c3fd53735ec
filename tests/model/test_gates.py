"""Gated MLPs with one operation between their products: exactly those that are, whatever their class is called."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fusing import check_logits_stay  # noqa: E402
from models import tiny_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from kvpool.model.faster_layers import fuse_gates  # noqa: E402

# One in each of two layers, unless a model has others.
EXPECTED = {"llama": 2, "qwen3": 2, "gemma2": 2, "gpt2": 0, "phi3": 0, "mixtral": 0}


@pytest.mark.parametrize("family", EXPECTED)
def test_given_a_model_when_its_gates_are_fused_then_its_logits_stay(family: str) -> None:
    check_logits_stay(tiny_model(family), fuse_gates, EXPECTED[family])


class Gated(nn.Module):
    """A gated MLP, or one that does something else."""

    def __init__(self, kind: str = "silu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = nn.Linear(16, 40, dtype=dtype), nn.Linear(16, 40, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(40, 16, dtype=dtype)
        self.kind = kind
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.kind == "swapped":
            gate, up = up, gate
        gate = functional.gelu(gate) if self.kind == "exact gelu" else functional.silu(gate)
        scale, more = 0.97 if self.kind == "less" else 1.0, 1e-3 if self.kind == "more" else 0.0
        return scale * self.down_proj(gate * up) + more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_a_gated_mlp_then_it_gives_the_same(dtype: torch.dtype) -> None:
    module, x = Gated(dtype=dtype), torch.linspace(-3, 3, 64, dtype=dtype).view(1, 4, 16)
    before = module(x)

    assert fuse_gates(module) == 1

    with torch.inference_mode():
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(module(x), before, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["swapped", "exact gelu", "less", "more", "hooked", "hooked part", "all zero"])
def test_given_anything_else_then_it_is_left_alone(kind: str, dtype: torch.dtype) -> None:
    module = Gated(kind, dtype)
    if kind == "all zero":  # any activation gives this
        module.gate_proj.weight.zero_()
        module.gate_proj.bias.zero_()
    if kind.startswith("hooked"):
        (module if kind == "hooked" else module.gate_proj).register_forward_hook(lambda *_: None)

    assert fuse_gates(module) == 0
    assert "forward" not in vars(module)
