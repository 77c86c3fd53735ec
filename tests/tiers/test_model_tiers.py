"""Which model is this? Any number and any setting that reaches keys and values makes another one."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from models import tiny_model  # noqa: E402

from kvpool import KVCacheConfig, LayerSpec  # noqa: E402
from kvpool.errors import ConfigError  # noqa: E402
from kvpool.tiers import DiskTier, KeySpace, MemoryTier  # noqa: E402
from kvpool.tiers.identity import OF_TRANSFORMERS  # noqa: E402
from kvpool.tiers.model_tiers import ModelTiers, model_id, weights_id  # noqa: E402


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


def test_given_tensors_of_any_type_and_shape_then_they_have_the_digest_that_stored_values_are_known_by() -> None:
    def made(shape: tuple[int, ...], dtype: Any) -> Any:
        return (torch.arange(math.prod(shape)) % 100).reshape(shape).to(dtype)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = self.weight = torch.nn.Parameter(made((3, 5), torch.float32))
            self.register_buffer("kept", made((2, 3, 4), torch.bfloat16))
            self.register_buffer("passing", made((7,), torch.float64), persistent=False)
            self.register_buffer("bytes", made((2, 6), torch.uint8))
            self.register_buffer("turned", made((4, 6), torch.float16).T)
            self.register_buffer("large", made((2, 3), torch.complex128))
            self.register_buffer("nothing", made((0, 4), torch.float32))
            self.register_buffer("number", torch.tensor(5))

    assert weights_id(Model()) == "5c38b19aa2c352e510144cb48d7ec0cf0b98abfdf0e955790715edf7370dedc8"
    assert weights_id(torch.nn.Module()) == hashlib.sha256().hexdigest()


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
    del layer.active_adapters, layer.disable_adapters, layer.merged_adapters
    assert model_id(adapted) == model_id(model)


def test_given_a_number_of_a_module_when_it_changes_then_it_is_another_model_or_the_number_is_in_the_short_list(
    model: Any,
) -> None:
    changed, known = copy.deepcopy(model), model_id(model)
    changed.model.rotary_emb.attention_scaling *= 2
    changed.model.layers[0].self_attn.scaling *= 2
    found = {known, model_id(changed)}
    changed.model.rotary_emb.attention_scaling /= 2
    found.add(model_id(changed))
    changed.model.layers[0].self_attn.scaling /= 2
    assert len(found) == 3
    changed.train()
    changed.model.rotary_emb.max_seq_len_cached += 1
    changed.model.layers[0].gradient_checkpointing = True
    assert model_id(changed) == known


def test_given_a_hook_around_a_forward_then_tiers_are_refused_unless_it_follows_from_the_model(
    model: Any, tmp_path: Path
) -> None:
    config = KVCacheConfig([LayerSpec(kv_heads=2, head_dim=16)] * 4, block_size=8, gpu_blocks=8)
    steered, tiers = (
        copy.deepcopy(model),
        ModelTiers.of([MemoryTier(2**20)], None, None, tier_timeout=1.0, tier_min_uses=1),
    )
    layer = steered.model.layers[0]
    layer.register_forward_pre_hook(functools.partial(model_id))  # of kvpool
    layer.register_forward_hook(torch.nn.functional.silu)
    # By its configuration, before the first pass
    decompress = FunctionType((lambda *given: None).__code__, {"__name__": "compressed_tensors.compressors"})
    layer.register_forward_pre_hook(decompress)
    assert tiers.open(steered, config) is not None
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
        hook = register(lambda *given: None)
        with pytest.raises(ConfigError, match=r"LlamaForCausalLM has the forward hook, .*<function"):
            tiers.open(steered, config)
        hook.remove()
    assert replace(tiers, given=()).open(steered, config) is None


def steered(forward: Any, amount: float = 1.0) -> Any:
    """A forward that looks like the one that it stands for."""

    @functools.wraps(forward)
    def steer(*given: Any, **named: Any) -> Any:
        return forward(*given, **named) * amount

    return steer


def test_given_a_module_with_a_forward_of_its_own_then_tiers_are_refused_unless_it_comes_from_a_known_package(
    model: Any,
) -> None:
    config = KVCacheConfig([LayerSpec(kv_heads=2, head_dim=16)] * 4, block_size=8, gpu_blocks=8)
    tiers = ModelTiers.of([MemoryTier(2**20)], None, None, tier_timeout=1.0, tier_min_uses=1)
    changed = copy.deepcopy(model)
    mlp = changed.model.layers[0].mlp
    mlp.forward = functools.partial(torch.nn.functional.silu)
    assert tiers.open(changed, config) is not None
    mlp.forward = steered(type(mlp).forward)
    with pytest.raises(ConfigError, match=r"the forward of one module, <function LlamaMLP.forward"):
        tiers.open(changed, config)


class Wrapper(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        vars(self)["inner"] = inner  # no part of it, so that weights keep their names

    def forward(self, *given: Any) -> Any:
        return self.inner(*given) * 2


def test_given_another_activation_or_function_in_a_module_then_it_is_another_model(model: Any) -> None:
    changed = copy.deepcopy(model)
    mlp, ids = changed.model.layers[1].mlp, {model_id(model)}
    given: Any
    for given in (
        torch.nn.GELU(),
        torch.nn.GELU("tanh"),
        Wrapper(mlp.act_fn),
        torch.nn.functional.gelu,
        functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        lambda x: x,
        lambda x: x * 2,
        lambda x: x * 3,
        steered(torch.nn.functional.gelu),
        steered(torch.nn.functional.gelu, 2.0),
    ):
        vars(mlp)["act_fn"] = None
        mlp._modules.pop("act_fn", None)
        del mlp.act_fn
        mlp.act_fn = given
        ids.add(model_id(changed))
        assert model_id(copy.deepcopy(changed)) in ids
    assert len(ids) == 11


def test_given_a_string_of_a_module_when_it_changes_then_it_is_another_model(model: Any) -> None:
    changed = copy.deepcopy(model)
    changed.model.rotary_emb.rope_type = "dynamic"
    assert model_id(changed) != model_id(model)


@pytest.mark.parametrize("of", ["LlamaAttention", "LlamaRMSNorm", "GradientCheckpointingLayer", "Linear"])
def test_given_a_class_whose_function_was_replaced_then_it_is_another_model(
    model: Any, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {kind.__name__: kind for module in model.modules() for kind in type(module).__mro__}
    kind, ids = kinds[of], {model_id(model)}
    inner = kind.forward if hasattr(kind, "forward") else kind.__call__
    for amount in (2.0, 3.0):
        monkeypatch.setattr(kind, "forward", steered(inner, amount))
        ids.add(model_id(model))
    assert len(ids) == 3
    monkeypatch.undo()
    assert model_id(model) in ids


def test_given_another_version_of_transformers_then_it_is_another_model(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = model_id(model)
    monkeypatch.setattr("transformers.__version__", "4.0.0")
    assert model_id(model) != known


def test_given_weights_without_numbers_then_tiers_are_refused_by_name(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"the weight model.* of LlamaForCausalLM has no numbers that can be read"):
        weights_id(copy.deepcopy(model).to("meta"))

    class Packed(torch.nn.Module):
        def get_extra_state(self) -> tuple[int, ...]:
            return (1, 2)

    with pytest.raises(ConfigError, match=r"the weight _extra_state of Packed .* leave disk, remote and tiers out"):
        weights_id(Packed())


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 4)])
def test_given_a_tensor_of_any_type_and_shape_then_every_number_and_its_place_count(dtype: Any, shape: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer(
                "numbers", torch.arange(24)[: max(1, torch.Size(shape).numel())].reshape(shape).to(dtype)
            )

    model = Model()
    found = {weights_id(model)}
    flat = model.numbers.view(-1)
    for place in range(len(flat)):
        flat[place] += 1
        found.add(weights_id(model))
        flat[place] -= 1
    assert len(found) == len(flat) + 1
    if len(shape) > 1:
        for axis in range(len(shape)):
            model.numbers = model.numbers.flip(axis).contiguous()
            found.add(weights_id(model))
        assert len(found) == len(flat) + 1 + len(shape)
    model.numbers = model.numbers.reshape(-1, 1)
    found.add(weights_id(model))
    assert len(found) == len(flat) + 2 + (len(shape) if len(shape) > 1 else 0)


def test_given_several_tensors_then_each_counts_under_its_own_name() -> None:
    class Model(torch.nn.Module):
        def __init__(self, **tensors: Any) -> None:
            super().__init__()
            for name, tensor in tensors.items():
                self.register_buffer(name, tensor)

    one, other, third = torch.arange(6.0), torch.arange(6.0) + 1, torch.arange(6.0) + 2
    found = {
        weights_id(Model(a=one, b=other, c=third)),
        weights_id(Model(a=other, b=one, c=third)),
        weights_id(Model(a=one, b=third, c=other)),
        weights_id(Model(a=one, b=one, c=third)),  # tied
        weights_id(Model(a=one, b=other, d=third)),
        weights_id(Model(a=one, b=other)),
    }
    assert len(found) == 6
    assert weights_id(Model(a=one, b=one)) == weights_id(Model(a=one, b=one.clone()))


def test_given_a_model_without_tensors_then_it_has_an_id_too() -> None:
    assert weights_id(torch.nn.Module()) == weights_id(torch.nn.Identity())


CONFIG = KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=8)


class Introduced(MemoryTier):
    """Notes whose keys will come."""

    def __init__(self) -> None:
        super().__init__(2**20)
        self.prefixes: list[bytes] = []

    def introduce(self, space: KeySpace) -> None:
        self.prefixes.append(space.prefix)


def made(tiers: Any = None, disk: Any = None, disk_bytes: Any = None, **more: Any) -> ModelTiers:
    return ModelTiers.of(tiers, disk, disk_bytes, **{"tier_timeout": 2.0, "tier_min_uses": 1, **more})


def test_given_keywords_then_tiers_have_the_addresses_that_they_mean(tmp_path: Path) -> None:
    mine = MemoryTier(2**20)
    assert made([mine]) == ModelTiers((mine,), None, None, 2.0, 1)
    assert (
        made(None, tmp_path)
        == made(None, str(tmp_path))
        == ModelTiers((), f"disk:{tmp_path}?bytes={10 * 2**30}", None, 2.0, 1)
    )
    assert made((), "d", 2**21, remote="redis://h", tier_timeout=0.5, tier_min_uses=3) == ModelTiers(
        (), "disk:d?bytes=2097152", "redis://h", 0.5, 3
    )
    assert made((), "disk:d?bytes=5MB", remote="redis://h").disk == "disk:d?bytes=5MB"
    assert made((), "disk:d?bytes=5MB", remote="redis://h").remote == "redis://h"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tiers": "redis://h"}, "tiers must be a list of KeyedTier, fastest first, got 'redis://h'"),
        ({"tiers": MemoryTier(2**20)}, "tiers must be a list of KeyedTier, fastest first, got "),
        ({"tiers": [7]}, "tiers must be a list of KeyedTier, fastest first; 7 is no KeyedTier"),
        (
            {"disk": "disk:d", "disk_bytes": 5},
            "disk_bytes=5 beside the address of a disk tier: write ?bytes= in the address",
        ),
    ],
)
def test_given_wrong_keywords_then_they_are_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**given)
    assert str(caught.value).startswith(said)


def test_given_tiers_then_they_are_opened_in_order_and_hear_whose_keys_come(model: Any, tmp_path: Path) -> None:
    assert made().open(model, CONFIG) is None
    mine = Introduced()
    opened = made([mine], tmp_path / "d", 2**20, tier_timeout=0.5, tier_min_uses=3).open(model, CONFIG)
    assert opened is not None
    with opened.tiers[1] as disk:
        assert isinstance(disk, DiskTier)
        assert (list(opened.tiers), list(opened.owned)) == ([mine, disk], [disk])
        assert (opened.timeout, opened.min_uses) == (0.5, 3)
        prefix = opened.keys.space.prefix
        assert mine.prefixes == [prefix]
        described = disk.directory.descriptions()[prefix]
        assert (described["model"], described["weights"]) == (model_id(model), weights_id(model))
    uncached = KVCacheConfig(
        [LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=8, enable_prefix_caching=False
    )
    with pytest.raises(ConfigError, match="tiers need enable_prefix_caching, because loaded blocks are found"):
        made([mine]).open(model, uncached)


def test_given_a_rotation_then_keys_are_others(model: Any) -> None:
    mine = MemoryTier(2**20)

    def space(**how: Any) -> Any:
        found = made([mine]).open(model, CONFIG, **how)
        assert found is not None
        return found.keys.space

    plain, rotated = space(), space(are_rotated=True)
    assert rotated.fingerprint.model == f"{plain.fingerprint.model} with rotated keys and values"
    assert plain.prefix != rotated.prefix
