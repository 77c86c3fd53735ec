"""Projections that read the same input are computed as one product, and the model says what it said before."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import SUPPORTED, tiny_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from kvpool.model.faster_layers import JoinedProduct, ProjectionPart, join_projections  # noqa: E402
from kvpool.model.probing import inspect_model, run_probe  # noqa: E402


class Gated(nn.Module):
    """gate and up of one input, and a third product of another."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 6, bias=bias), nn.Linear(8, 10, bias=bias)
        self.down = nn.Linear(8, 6, bias=bias)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x).sum(-1, keepdim=True) if self.training else 0 * x[..., :1]
        return self.gate(x) * self.up(x).mean(-1, keepdim=True) + self.down(x + 1) + wide


X = torch.linspace(-1, 1, 24).view(3, 8)


@pytest.mark.quick("llama", "gemma2", "stablelm", "smollm3")
@pytest.mark.parametrize("family", SUPPORTED)
def test_given_a_model_when_its_projections_are_joined_then_its_logits_stay(family: str) -> None:
    model = tiny_model(family)
    inspect_model(model)
    before, _ = run_probe(model)
    names = {name: value.clone() for name, value in model.state_dict().items()}
    joined = join_projections(model, lambda: run_probe(model))
    after, _ = run_probe(model)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert names.keys() == model.state_dict().keys()
    assert all(torch.equal(value, names[name]) for name, value in model.state_dict().items())
    assert joined == EXPECTED.get(family, 6)


# Of two layers: Q, K and V are three products of one input (two are saved), gate and up are two (one is saved).
EXPECTED = {
    "phi3": 0,  # joined in the model's own code
    "gpt2": 0,
    "gpt_neox": 0,
    "mixtral": 4,  # experts are no Linear modules
    "qwen3_moe": 4,
    "gpt_oss": 4,
    "granitemoe": 4,
    "phimoe": 4,
    "opt": 4,
    "starcoder2": 4,
    "nemotron": 4,
    "glm4": 4,
    "deepseek_v3": 2,  # its Q and KV projections do not follow each other
}


@pytest.mark.parametrize("bias", [False, True])
def test_given_two_products_of_one_input_then_their_weights_are_views_of_one_matrix(bias: bool) -> None:
    model = Gated(bias).eval()
    expected = model(X)
    assert join_projections(model, lambda: model(X)) == 1
    torch.testing.assert_close(model(X), expected)
    assert isinstance(model.gate, ProjectionPart)
    assert type(model.down) is nn.Linear
    assert model.gate.weight.untyped_storage().data_ptr() == model.up.weight.untyped_storage().data_ptr()


def test_given_a_joined_product_then_nothing_of_a_forward_outlives_it() -> None:
    model = Gated().eval()
    join_projections(model, lambda: model(X))
    model(X)
    (joined,) = {module for module in model.modules() if isinstance(module, JoinedProduct)}
    assert joined._shared._latest is None


def test_given_two_forwards_that_meet_then_neither_gets_parts_of_the_others_product() -> None:
    model = Gated().eval()
    wanted = [(model.gate(x), model.up(x)) for x in (X, 2 * X)]
    join_projections(model, lambda: model(X))
    other = 2 * X
    gates = model.gate(X), model.gate(other)  # two threads, one layer
    ups = model.up(X), model.up(other)
    torch.testing.assert_close(list(zip(gates, ups, strict=True)), wanted)


def test_given_a_joined_model_that_is_trained_then_every_parameter_gets_its_gradient() -> None:
    model = Gated(bias=True).eval()
    join_projections(model, lambda: model(X))
    model.requires_grad_(True)
    model(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        model.up.weight.zero_()  # what training changes is what the product is made of
        assert not model.up(X).sub(model.up.bias).any()


def test_given_weights_that_were_joined_before_then_another_copy_of_the_model_shares_their_matrix() -> None:
    model, other = Gated(bias=True).eval(), Gated(bias=True).eval()
    other.load_state_dict(model.state_dict())
    for name in ("gate", "up"):
        getattr(other, name).weight = getattr(model, name).weight
        getattr(other, name).bias = getattr(model, name).bias
    expected = model(X)
    join_projections(model, lambda: model(X))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert join_projections(other, lambda: other(X)) == 1
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert other.gate.joined.weight.data_ptr() == model.gate.joined.weight.data_ptr()
    torch.testing.assert_close(other(X), expected)


def test_given_another_input_than_the_first_members_then_a_product_is_computed_by_itself() -> None:
    model = Gated().eval()
    want = nn.functional.linear(2 * X, model.up.weight.clone())
    join_projections(model, lambda: model(X))
    model.gate(X)
    torch.testing.assert_close(model.up(2 * X), want)


def test_given_modules_that_are_not_plain_then_they_are_left_alone() -> None:
    def joined(change: Any) -> int:
        model = Gated().eval()
        change(model)
        return join_projections(model, lambda: model(X))

    def share(model: Gated) -> None:
        model.down.weight = model.gate.weight

    assert joined(lambda model: None) == 1
    assert joined(lambda model: model.train()) == 0  # `up` is called twice
    assert joined(share) == 0
    assert joined(lambda model: model.gate.register_forward_hook(lambda *_: None)) == 0
    assert joined(lambda model: setattr(model.gate, "bias", nn.Parameter(torch.zeros(6)))) == 0
    assert joined(lambda model: setattr(model.gate, "forward", model.gate.forward)) == 0


def test_given_a_model_that_is_joined_already_then_joining_it_again_changes_nothing() -> None:
    model = Gated().eval()
    join_projections(model, lambda: model(X))
    assert join_projections(model, lambda: model(X)) == 0


def test_given_compiled_layers_then_joined_products_need_no_graph_break_and_serve_all_layers() -> None:
    layers = nn.ModuleList([Gated().eval() for _ in range(3)])
    wanted = [layer(X) for layer in layers]
    join_projections(layers, lambda: [layer(X) for layer in layers])
    torch._dynamo.reset()
    graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for layer in layers:
        layer.compile(backend=count, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for layer, want in zip(layers, wanted, strict=True):
            torch.testing.assert_close(layer(X), want)
            torch.testing.assert_close(layer(X[:2]), want[:2])
    assert graphs == 1
