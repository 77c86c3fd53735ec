"""Decoding in the slots where states lie, through functions that modules of transformers call by name."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hybrids import HYBRIDS, hybrid_model

from kvpool.kernels.layout import SlotStates
from kvpool.model import slot_functions
from kvpool.model.hook import use_kvpool_attention
from kvpool.model.probing import run_probe
from kvpool.model.slot_functions import forward_on_slots
from kvpool.model.state_probing import use_kvpool_states
from kvpool.model.state_steps import StateStep, keeping_states
from kvpool.model.states import StateModule, state_specs
from kvpool.storage import StateSlots

ON_SLOTS = sorted(set(HYBRIDS) - {"inkling_text", "zaya"})
PACKED = sorted(
    set(ON_SLOTS) - {"falcon_mamba", "jamba", "mamba", "zamba"}
)  # transformers' scan of these forgets states
DELTA = {"kimi_linear", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}


def modules_of(model: Any) -> list[StateModule]:
    assert use_kvpool_attention(model)
    return use_kvpool_states(model, lambda: run_probe(model))


@pytest.fixture(scope="module", params=ON_SLOTS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def modules(family: str) -> list[StateModule]:
    return modules_of(hybrid_model(family))


def random_slots(modules: list[StateModule]) -> StateSlots:
    slots = StateSlots.allocate(state_specs(modules), 6)
    for states in slots.store.views(0).values():
        states.normal_(generator=torch.Generator().manual_seed(1))
    return slots


def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a decode step copied states")

    monkeypatch.setattr(StateSlots, "gather", refuse)
    monkeypatch.setattr(StateSlots, "scatter", refuse)


@pytest.mark.quick("bamba", "kimi_linear", "olmo_hybrid")
def test_a_decode_step_copies_no_state_and_gives_what_copies_give(
    modules: list[StateModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, copied = random_slots(modules), random_slots(modules)
    hidden = torch.randn(1, 3, 64)
    sources, targets = torch.tensor([0, 1, 2]), torch.tensor([3, 1, 4])
    assert modules[0].on_slots
    modules[0].on_slots = False
    with keeping_states(StateStep.decoding(copied, sources, targets)), torch.no_grad():
        expected = modules[0].module(hidden)
    modules[0].on_slots = True
    without_copies(monkeypatch)
    with keeping_states(StateStep.decoding(slots, sources, targets)), torch.no_grad():
        found = modules[0].module(hidden)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for place, states in slots.store.views(0).items():
        torch.testing.assert_close(states, copied.store.views(0)[place], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", PACKED, indirect=True)
def test_chunks_of_several_sequences_are_one_call_and_give_what_copies_give(
    modules: list[StateModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences decode; of the others one begins with a single token, and one leaves its old state where it is."""
    slots, copied = random_slots(modules), random_slots(modules)
    hidden = torch.randn(1, 18, 64)
    plan = [1, 9, 1, 1, 6], [3, -1, -1, 1, 0], [3, 2, 5, 1, 4]
    assert modules[0].packs
    modules[0].packs = False
    with keeping_states(StateStep.of(copied, *plan)), torch.no_grad():
        expected = modules[0].module(hidden)
    modules[0].packs = True
    without_copies(monkeypatch)
    calls: list[torch.Size] = []
    call = modules[0].compute_on_slots
    monkeypatch.setattr(
        modules[0],
        "compute_on_slots",
        lambda states, tokens, given: calls.append(tokens.shape) or call(states, tokens, given),
    )
    with keeping_states(StateStep.of(slots, *plan)), torch.no_grad():
        found = modules[0].module(hidden)
    assert calls == [(2, 1, 64), (1, 16, 64)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for place, states in slots.store.views(0).items():
        torch.testing.assert_close(states, copied.store.views(0)[place], rtol=1e-4, atol=1e-4)


def stepping(
    slots: StateSlots, lengths: list[int], sources: list[int], targets: list[int], kept: list[int]
) -> StateStep:
    """The step of a graph that has room for one sequence more."""
    starts = np.cumsum([0, *lengths, 0])
    ends = [*(starts[:-2] + kept), starts[-1]]
    given = (torch.tensor(array, device=slots.device) for array in ([*sources, 0], [*targets, 0], starts, ends))
    return StateStep.stepping(slots, *given)


@pytest.mark.parametrize("family", PACKED, indirect=True)
def test_a_step_in_a_graph_gives_what_it_gives_without_one_and_drafts_leave_no_state(
    modules: list[StateModule],
) -> None:
    """The third sequence has two drafts, of which its state knows nothing. The graph has two tokens too many."""
    slots, copied = random_slots(modules), random_slots(modules)
    hidden = torch.randn(1, 17, 64)
    plan = [1, 7, 6, 1], [3, -1, 1, 0], [3, 2, 1, 4], [1, 7, 4, 1]
    with keeping_states(StateStep.of(copied, *plan)), torch.no_grad():
        expected = modules[0].module(hidden[:, :15])
    with keeping_states(stepping(slots, *plan)), torch.no_grad():
        found = modules[0].module(hidden)
    torch.testing.assert_close(found[:, :15], expected, rtol=1e-4, atol=1e-4)
    for place, states in slots.store.views(0).items():
        torch.testing.assert_close(states, copied.store.views(0)[place], rtol=1e-4, atol=1e-4)


def test_drafts_leave_the_state_that_the_tokens_before_them_leave(modules: list[StateModule]) -> None:
    slots, alone = random_slots(modules), random_slots(modules)
    hidden = torch.randn(1, 9, 64)
    with keeping_states(StateStep.of(slots, [5, 4], [3, 1], [3, 2], [2, 1])), torch.no_grad():
        found = modules[0].module(hidden)
    with keeping_states(StateStep.of(alone, [2, 1], [3, 1], [3, 2])), torch.no_grad():
        expected = modules[0].module(hidden[:, [0, 1, 5]])
    torch.testing.assert_close(found[:, [0, 1, 5]], expected, rtol=1e-4, atol=1e-4)
    for place, states in slots.store.views(0).items():
        torch.testing.assert_close(states, alone.store.views(0)[place], rtol=1e-4, atol=1e-4)
    with keeping_states(StateStep.of(alone, [3, 3], [3, 2], [3, 2])), torch.no_grad():
        after = modules[0].module(hidden[:, [2, 3, 4, 6, 7, 8]])
    torch.testing.assert_close(found[:, [2, 3, 4, 6, 7, 8]], after, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", PACKED)
def test_a_step_in_a_graph_on_a_gpu(family: str) -> None:
    if importlib.util.find_spec("fla") is not None and family in DELTA:
        pytest.skip("transformers takes flash-linear-attention for itself, which has no float32")
    model = hybrid_model(family)
    modules = modules_of(model)
    expected_slots = random_slots(modules)
    data = {place: states.clone() for place, states in expected_slots.store.views(0).items()}
    hidden, plan = torch.randn(1, 15, 64), ([1, 7, 6, 1], [3, -1, 1, 0], [3, 2, 1, 4], [1, 7, 4, 1])
    with keeping_states(StateStep.of(expected_slots, *plan)), torch.no_grad():
        expected = modules[0].module(hidden)
    modules = modules_of(model.to("cuda"))
    slots = StateSlots.allocate(state_specs(modules), 6, "cuda")
    for place, states in slots.store.views(0).items():
        states.copy_(data[place])
    with keeping_states(stepping(slots, *plan)), torch.no_grad():
        found = modules[0].module(hidden.to("cuda")).cpu()
    assert (found - expected).norm() < 1e-3 * expected.norm()
    for place, states in slots.store.views(0).items():
        kept = expected_slots.store.views(0)[place]
        assert (states.cpu() - kept).norm() < 1e-3 * kept.norm()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of what flash-linear-attention imports
@pytest.mark.filterwarnings("ignore:Flash Attention is not installed:ImportWarning")
@pytest.mark.parametrize("family", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_of_several_sequences_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    """In 16 bits the delta rule goes through flash-linear-attention where that is installed."""
    if dtype is torch.float32 and importlib.util.find_spec("fla") is not None and family in DELTA:
        pytest.skip("transformers takes flash-linear-attention for itself, which has no float32")
    model = hybrid_model(family)
    modules = modules_of(model)
    expected_slots = random_slots(modules)
    data = {place: states.clone() for place, states in expected_slots.store.views(0).items()}
    hidden, plan = torch.randn(1, 108, 64), ([1, 99, 1, 1, 6], [3, -1, -1, 1, 0], [3, 2, 5, 1, 4])
    with keeping_states(StateStep.of(expected_slots, *plan)), torch.no_grad():
        expected = modules[0].module(hidden)
    modules = modules_of(model.to("cuda", dtype))
    slots = StateSlots.allocate(state_specs(modules), 6, "cuda")
    for place, states in slots.store.views(0).items():
        states.copy_(data[place])
    with keeping_states(StateStep.of(slots, *plan)), torch.no_grad():
        found = modules[0].module(hidden.to("cuda", dtype)).cpu().float()
    close = 1e-3 if dtype is torch.float32 else 0.05
    assert (found - expected).norm() < close * expected.norm()
    for place, states in slots.store.views(0).items():
        kept = expected_slots.store.views(0)[place]
        assert (states.cpu().float() - kept).norm() < close * kept.norm()


def test_a_query_for_several_heads_of_values_is_one_for_each() -> None:  # transformers 5.23 leaves that to the function
    generator = torch.Generator().manual_seed(0)
    few, values = (torch.randn(2, 1, heads, 8, generator=generator) for heads in (2, 4))
    rates, before = torch.rand(2, 1, 4, generator=generator), torch.randn(2, 4, 8, 8, generator=generator)

    def computed(queries: torch.Tensor) -> torch.Tensor:
        states = SlotStates(before.clone(), torch.arange(2), torch.arange(2))
        out, after = slot_functions._delta_rule(queries, queries, values, -rates, rates, states)
        return torch.cat([out.flatten(), after.stored.flatten()])

    torch.testing.assert_close(computed(few), computed(few.repeat_interleave(2, dim=2)))


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
def test_the_file_and_the_class_of_a_module_stay_as_they_are(family: str) -> None:
    model = hybrid_model(family)
    module = next(module for module in model.modules() if forward_on_slots(module) is not None)
    file = sys.modules[type(module).__module__]
    before, own = dict(vars(file)), type(module).forward
    modules = modules_of(model)
    assert modules[0].on_slots
    assert vars(file) == before
    assert type(module).forward is own


def test_a_module_that_does_something_else_with_its_state_gets_copies() -> None:
    assert not any(module.on_slots or module.packs for module in modules_of(hybrid_model("zaya")))


@pytest.mark.parametrize(("names", "way"), [("_OF_ONE_TOKEN", "on_slots"), ("_OF_PACKED_TOKENS", "packs")])
def test_a_function_with_other_results_is_not_used(names: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are the same: results alone must tell. They are small beside the states."""
    functions = getattr(slot_functions, names)
    name = "mamba2_selective_state_update" if way == "on_slots" else "mamba2_chunk_scan"
    own = functions[name]

    def other(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        return result * 1.1 if isinstance(result, torch.Tensor) else (result[0] * 1.1, result[1])

    monkeypatch.setattr(slot_functions, names, {**functions, name: other})
    model = hybrid_model("falcon_h1")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mamba.out_proj.weight.mul_(1e-4)
    modules = modules_of(model)
    assert not any(getattr(module, way) for module in modules)
    assert all(getattr(module, "packs" if way == "on_slots" else "on_slots") for module in modules)


def test_a_convolution_with_another_activation_gets_copies() -> None:
    modules = modules_of(hybrid_model("qwen3_next", hidden_act="gelu"))
    assert not any(module.on_slots or module.packs for module in modules)


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
    slots = StateSlots.allocate(state_specs(modules), 6, "cuda")
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
    for place, states in slots.store.views(0).items():
        torch.testing.assert_close(states.cpu(), expected_slots.store.views(0)[place], rtol=1e-3, atol=1e-4)
