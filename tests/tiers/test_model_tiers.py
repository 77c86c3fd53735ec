"""Which model is this? Any number and any setting that reaches keys and values makes another one."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from models import tiny_model  # noqa: E402

from kvpool.tiers.identity import OF_TRANSFORMERS  # noqa: E402
from kvpool.tiers.model_tiers import model_id, weights_id  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def test_given_a_copy_then_it_is_the_same_model(model: Any) -> None:
    assert weights_id(copy.deepcopy(model)) == weights_id(model)
    assert model_id(copy.deepcopy(model)) == model_id(model)


def test_given_any_tensor_when_one_number_changes_or_two_change_places_then_it_is_another_model(model: Any) -> None:
    known = weights_id(model)
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    assert any("inv_freq" in name for name in tensors)  # which is not saved with the model
    for name, tensor in tensors.items():
        flat, before = tensor.view(-1), tensor.clone().view(-1)
        for place in (0, len(flat) // 2, len(flat) - 1):
            flat[place] += 1
            assert weights_id(model) != known, name
            flat.copy_(before)
        for one, other in ((0, 1), (0, tensor.shape[-1]), (0, len(flat) - 1)):  # neighbours in a row and in a column
            if other < len(flat) and before[one] != before[other]:
                flat[one], flat[other] = before[other], before[one]
                assert weights_id(model) != known, name
                flat.copy_(before)
    assert weights_id(model) == known


def test_given_any_field_of_the_configuration_when_it_changes_then_it_is_another_model_or_the_field_is_in_the_short_list(
    model: Any,
) -> None:
    changed, known = copy.deepcopy(model), model_id(model)
    fields = {name for name in changed.config.to_dict() if name in vars(changed.config)}
    assert len(fields) > 15
    for name in sorted(fields):
        value = getattr(changed.config, name)
        changed.config.__dict__[name] = "another"
        assert (model_id(changed) != known) == (name not in OF_TRANSFORMERS), name
        changed.config.__dict__[name] = value
    assert model_id(changed) == known


def test_given_adapters_in_the_layers_of_a_model_then_which_are_active_and_how_they_are_scaled_is_part_of_its_name(
    model: Any,
) -> None:
    adapted = copy.deepcopy(model)
    layer = next(module for name, module in adapted.named_modules() if name.endswith("q_proj"))
    found = {model_id(model)}
    for active, off, merged, scaling in (
        (["a"], False, [], {"a": 1.0}),
        (["b"], False, [], {"a": 1.0}),
        (["a"], True, [], {"a": 1.0}),
        (["a"], False, ["a"], {"a": 1.0}),
        (["a"], False, [], {"a": 2.0}),
    ):
        layer.active_adapters, layer.disable_adapters, layer.merged_adapters = active, off, merged
        layer.scaling = scaling
        found.add(model_id(adapted))
    assert len(found) == 6
    del layer.merged_adapters
    assert model_id(adapted) == model_id(model)
