"""Norms that are one operation: exactly those that are RMS norms, whatever they are called."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fusing import check_logits_stay  # noqa: E402
from models import SUPPORTED, tiny_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from kvpool.model.faster_layers import fuse_norms  # noqa: E402

# Two norms in each of two layers and one behind them, unless a model has others.
EXPECTED = {
    "llama": 5,
    "mistral": 5,
    "mixtral": 5,
    "qwen2": 5,
    "phi3": 5,
    "gpt_oss": 5,
    "granite": 5,
    "smollm3": 5,
    "qwen3": 9,  # and of each head's queries and keys
    "qwen3_moe": 9,
    "gemma2": 0,  # 1 is added to their weights
    "gemma3_text": 0,
    "gpt2": 0,  # the others have means too, or biases
    "gpt_neox": 0,
    "opt": 0,
    "stablelm": 0,
    "starcoder2": 0,
    "cohere2": 0,
    "nemotron": 0,
    "olmo2": 9,
    "glm4": 9,
    "deepseek_v3": 9,
}


@pytest.mark.quick("llama", "gemma2", "stablelm", "smollm3")
@pytest.mark.parametrize("family", SUPPORTED)
def test_given_a_model_when_its_norms_are_fused_then_its_logits_stay(family: str) -> None:
    model = tiny_model(family)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.mul_(torch.linspace(0.5, 1.5, weight.numel()).view(weight.shape))
    names = list(model.state_dict())
    check_logits_stay(model, fuse_norms, EXPECTED.get(family))
    assert list(model.state_dict()) == names


class Norm(nn.Module):
    """An RMS norm; `shift` is added to the weight."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 16), requires_grad=False)
        self.eps = 1e-5
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return (
            (self.weight + self.shift) * x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype)
        )


def test_given_a_norm_then_copies_of_it_have_weights_of_their_own() -> None:
    norm = Norm()
    assert fuse_norms(norm) == 1
    x = torch.linspace(-3, 3, 32).view(2, 16)
    other = copy.deepcopy(norm)
    other.weight.mul_(2)
    torch.testing.assert_close(other(x), 2 * norm(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(norm))(x), norm(x))


@pytest.mark.parametrize(
    "module", [Norm(shift=1.0), nn.LayerNorm(16, bias=False), nn.Linear(16, 1), nn.Embedding(4, 16)]
)
def test_given_anything_else_then_it_is_left_alone(module: nn.Module) -> None:
    assert fuse_norms(module.requires_grad_(False)) == 0
    assert "forward" not in vars(module)


class GatedNorm(Norm):
    """A norm that may be given a gate, as Mamba 2 has it: without one it is a plain norm."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states if gate is None else hidden_states * gate)


def test_given_a_norm_that_takes_a_gate_then_it_is_left_alone() -> None:
    assert fuse_norms(Norm()) == 1
    assert fuse_norms(GatedNorm()) == 0


def test_given_a_norm_that_is_hooked_then_it_is_left_alone() -> None:
    norm = Norm()
    norm.register_forward_hook(lambda *_: None)
    assert fuse_norms(norm) == 0
