"""Decoding in the slots where states lie, through functions that modules of transformers call by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hybrids import HYBRIDS, hybrid_model

from kvpool.model.hook import use_kvpool_attention
from kvpool.model.probing import run_probe
from kvpool.model.slot_functions import forward_on_slots
from kvpool.model.states import StateModule, StateStep, keeping_states, state_specs, use_kvpool_states
from kvpool.storage import StateSlots

ON_SLOTS = sorted(set(HYBRIDS) - {"inkling_text", "zaya"})


def modules_of(model: Any) -> list[StateModule]:
    assert use_kvpool_attention(model)
    return use_kvpool_states(model, lambda: run_probe(model))


def random_slots(modules: list[StateModule]) -> StateSlots:
    slots = StateSlots.allocate(state_specs(modules), 5)
    for states in slots.store.states(0).values():
        states.normal_(generator=torch.Generator().manual_seed(1))
    return slots


def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a decode step copied states")

    monkeypatch.setattr(StateSlots, "gather", refuse)
    monkeypatch.setattr(StateSlots, "scatter", refuse)


@pytest.mark.parametrize("family", ON_SLOTS)
def test_a_decode_step_copies_no_state_and_gives_what_copies_give(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = modules_of(hybrid_model(family))
    slots, copied = random_slots(modules), random_slots(modules)
    hidden = torch.randn(1, 3, 64)
    sources, targets = torch.tensor([0, 1, 2]), torch.tensor([3, 1, 4])
    on_slots = modules[0].on_slots
    modules[0].on_slots = None
    with keeping_states(StateStep.decoding(copied, sources, targets)), torch.no_grad():
        expected = modules[0].module(hidden)
    modules[0].on_slots = on_slots
    without_copies(monkeypatch)
    with keeping_states(StateStep.decoding(slots, sources, targets)), torch.no_grad():
        found = modules[0].module(hidden)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for place, states in slots.store.states(0).items():
        torch.testing.assert_close(states, copied.store.states(0)[place], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
def test_the_file_and_the_class_of_a_module_stay_as_they_are(family: str) -> None:
    model = hybrid_model(family)
    module = next(module for module in model.modules() if forward_on_slots(module) is not None)
    file = sys.modules[type(module).__module__]
    before, own = dict(vars(file)), type(module).forward
    modules = modules_of(model)
    assert modules[0].on_slots is not None
    assert vars(file) == before
    assert type(module).forward is own


def test_a_module_that_does_something_else_with_its_state_gets_copies() -> None:
    assert {module.on_slots for module in modules_of(hybrid_model("zaya"))} == {None}


def test_a_convolution_with_another_activation_gets_copies() -> None:
    assert {module.on_slots for module in modules_of(hybrid_model("qwen3_next", hidden_act="gelu"))} == {None}


def test_a_module_whose_weights_are_moved_by_hooks_is_called_with_them() -> None:
    model = hybrid_model("lfm2")
    module = next(module for module in model.modules() if forward_on_slots(module) is not None)
    module.conv._hf_hook = object()
    assert forward_on_slots(module) is None


@pytest.mark.gpu
@pytest.mark.parametrize("family", ON_SLOTS)
def test_a_decode_step_in_a_graph_follows_its_slots(family: str) -> None:
    """The graph is captured with other slots, and none of them is the one that its rows read and write later."""
    model = hybrid_model(family)
    modules = modules_of(model)
    module = modules[0].module
    expected_slots = random_slots(modules)
    data = expected_slots.store.data.clone()
    hidden = torch.randn(1, 2, 64)
    with keeping_states(StateStep.of(expected_slots, [1, 1], [0, 1], [3, 1])), torch.no_grad():
        expected = module(hidden)
    model.cuda()
    slots = StateSlots.allocate(state_specs(modules), 5, "cuda")
    hidden = hidden.cuda()
    sources = torch.full((2,), 4, device="cuda")
    targets = sources.clone()
    with keeping_states(StateStep.decoding(slots, sources, targets)), torch.no_grad():
        module(hidden)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = module(hidden)
    slots.store.data.copy_(data)
    sources.copy_(torch.tensor([0, 1]))
    targets.copy_(torch.tensor([3, 1]))
    graph.replay()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)
    for place, states in slots.store.states(0).items():
        torch.testing.assert_close(states.cpu(), expected_slots.store.states(0)[place], rtol=1e-3, atol=1e-4)
