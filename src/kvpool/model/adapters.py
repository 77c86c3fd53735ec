"""LoRA adapters: read from the files that peft writes, and stacked in slots of the device beside the model's own weights.

A step names the slot of every token's adapter (`AdapterStep`). Projections that adapters target then add the products of
these adapters to their own. The weights of the model stay as they are, and tokens without an adapter get the model's own
results.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvpool.checks import show
from kvpool.errors import ConfigError, InvalidArgumentError, StorageMemoryError, UnsupportedModelError
from kvpool.files import parse_json, read_plain
from kvpool.kernels.layout import LoraWeights
from kvpool.kernels.lora import empty_weights, padded_rank, start_lora
from kvpool.model.adapter_steps import current_step
from kvpool.model.expert_adapters import (
    ExpertAdapters,
    ExpertStack,
    Override,
    ParameterSizes,
    RouterProduct,
    empty_stack,
    parameter_sizes,
)
from kvpool.model.faster_layers import JoinedProduct, ProjectionPart
from kvpool.model.latents import folded_weights

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Fields of adapter_config.json that change no result, or that are read here. Any other field must be empty.
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the weights tell
        "target_parameters",
        *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
        *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
    }
)
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # others also change the model's own weights
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")


class LoraPair(NamedTuple):
    """What an adapter adds to one projection: `scale * b @ a @ x`."""

    a: Tensor  # [rank, in]; of experts [expert, rank, in]
    b: Tensor  # [out, rank]; of experts [expert, out, rank]
    scale: float


class Adapter(NamedTuple):
    """An adapter in the memory of the host. Its `id` is a digest of everything that results depend on."""

    id: str
    pairs: Mapping[str, LoraPair]  # by the name of the projection in the model, or of the parameter of experts

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(pair.a.shape[-2] for pair in self.pairs.values())


def read_adapter(
    path: str | os.PathLike[str], sizes_of: Callable[[str], Mapping[str, ParameterSizes]] = lambda name: {}
) -> Adapter:
    """Reads the directory of an adapter that peft saved. Raises ConfigError for what cannot be served.

    `sizes_of` gives the parameters of a module of the model, if it is no linear layer: `AdapterStacks.parameter_sizes`.
    """
    directory = Path(path).expanduser()
    config = _read_config(directory / CONFIG_FILE)
    file = directory / WEIGHTS_FILE
    try:
        from safetensors.torch import load

        tensors = load(read_plain(file))
    except OSError as error:
        raise ConfigError(
            f"the adapter in {directory} cannot be read: {error.strerror or error}: {file.name}"
        ) from None
    except Exception as error:
        raise ConfigError(f"{file} is no file of safetensors: {error}") from None
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.ndim != 2 or not tensor.is_floating_point():
            raise ConfigError(f"{file} holds {key}; served are lora_A and lora_B of linear layers")
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise ConfigError(f"{file} holds no weights")
    pairs: dict[str, LoraPair] = {}
    for name, halves in sorted(found.items()):
        module = re.sub(r"(\.base_layer)+$", "", name)  # around a module, peft has one layer for each parameter
        sizes = sizes_of(module)
        if not sizes:
            pairs[name] = _pair(file, name, halves, config)
            if config.get("target_parameters") and pairs[name] != _pair(file, f"{name}.weight", halves, config):
                raise ConfigError(
                    f"{file}: patterns say one thing of {name} and another of its weight; this is not served"
                )
            continue
        target = _target(file, name, halves, sizes)
        pair = _pair(file, f"{module}.{target}", halves, config, sizes[target].num_experts)
        key = f"{module}.{target}" if pair.a.ndim == 3 else module
        if key in pairs:
            raise ConfigError(f"{file} holds weights for {key} twice")
        pairs[key] = pair
    return Adapter(_digest(pairs), pairs)


def _target(file: Path, name: str, halves: Mapping[str, Tensor], sizes: Mapping[str, ParameterSizes]) -> str:
    """The parameter that halves are for. Their names do not tell, but no two of a module have the same shape."""
    shapes = {half: tuple(tensor.shape) for half, tensor in halves.items()}
    given = (shapes["A"][1], shapes["B"][0]) if shapes.keys() == {"A", "B"} else None
    fits = [target for target, of in sizes.items() if (of.inputs, of.outputs) == given]
    if len(fits) != 1:
        has = ", ".join(f"{target} ({of.inputs} inputs, {of.outputs} outputs)" for target, of in sizes.items())
        raise ConfigError(f"{file}: {name} with {shapes} fits not one parameter of the model's module: it has {has}")
    return fits[0]


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = parse_json(read_plain(file))
    except OSError as error:
        raise ConfigError(
            f"{file.parent} is no directory of an adapter: {file.name}: {error.strerror or error}"
        ) from None
    except InvalidArgumentError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise ConfigError(f"{file}: peft_type={show(kind)} is not served; LORA is")
    for name, value in config.items():
        if name not in _READ and value:
            raise ConfigError(f"{file}: {name}={show(value)} is not served")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{file}: bias={show(config['bias'])} is not served; 'none' is")
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise ConfigError(
            f"{file}: init_lora_weights={show(start)} changed the model's own weights; convert the adapter with "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    return config


def _pair(
    file: Path, name: str, halves: Mapping[str, Tensor], config: Mapping[str, Any], num_experts: int | None = None
) -> LoraPair:
    if halves.keys() != {"A", "B"} or len(halves["A"]) != halves["B"].shape[1]:
        shapes = ", ".join(f"lora_{half} {list(tensor.shape)}" for half, tensor in halves.items())
        raise ConfigError(f"{file}: {name} needs lora_A [rank, in] and lora_B [out, rank]; it has {shapes}")
    a, b = halves["A"], halves["B"]
    rank = len(a) / (num_experts or 1)
    said, alpha = (
        _of_pattern(config.get(pattern) or {}, name, config.get(usual))
        for pattern, usual in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    if said != rank or not isinstance(alpha, (int, float)):
        raise ConfigError(
            f"{file}: {name} has rank {rank:g}; {CONFIG_FILE} says r={show(said)}, lora_alpha={show(alpha)}"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if num_experts is None:
        return LoraPair(a, b, scale)
    a, b = a.reshape(num_experts, -1, a.shape[1]), b.reshape(len(b), -1, num_experts).permute(2, 0, 1)
    return LoraPair(a.contiguous(), b.contiguous(), scale)


def _of_pattern(patterns: Mapping[str, Any], name: str, usual: Any) -> Any:
    """The value of the first pattern that fits the end of a name, as peft finds it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), usual)


def _digest(pairs: Mapping[str, LoraPair]) -> str:
    digest = hashlib.sha256()
    for name, (a, b, scale) in pairs.items():
        digest.update(json.dumps([name, str(a.dtype), list(a.shape), str(b.dtype), list(b.shape), scale]).encode())
        for tensor in (a, b):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- on the device ---------------------------------------------------------------------------------------------------


@dataclass
class _Product:
    """A matrix product that adapters add to, and their weights. It is of one module, or joined of several."""

    module: nn.Module
    names: tuple[str, ...]  # of its parts, in the model
    weights: LoraWeights
    hooks: tuple[Any, ...]  # before and behind a call of the module, or around it; removed with the stacks
    finish: Callable[[Tensor], None] | None = None  # adds what the adapters of the call under way add


class AdapterStacks:
    """The weights of adapters on the device of a model, in `num_slots` slots.

    Stacks exist for projections that some adapter targets, with room for the largest rank. An adapter with other targets or
    a larger rank makes them grow (`make_room`); whatever has captured them must then be captured again.
    """

    def __init__(self, model: Any, num_slots: int) -> None:
        self.model = model
        self.num_slots = num_slots
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._products: dict[nn.Module, _Product] = {}
        self._experts: dict[nn.Module, dict[str, ExpertStack]] = {}  # by parameter
        self._overrides: list[Override] = []  # of experts
        self._sizes: dict[nn.Module, Mapping[str, ParameterSizes]] = {}
        self._rank = 0
        self._side = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Bytes of all stacks."""
        stacks = [stack for stacks in self._experts.values() for stack in stacks.values()]
        linear = sum(part.nbytes for each in self._products.values() for part in each.weights[:4])
        return linear + sum(part.nbytes for stack in stacks for part in stack)

    def parameter_sizes(self, name: str) -> Mapping[str, ParameterSizes]:
        """The parameters of a module that adapters may target although it is no linear layer."""
        module = self._modules.get(name)
        if module is None or _is_linear(module):
            return {}
        if module not in self._sizes:
            self._sizes[module] = parameter_sizes(module)
        return self._sizes[module]

    def _module_of(self, name: str, pair: LoraPair) -> nn.Module | None:
        """The module that computes what an adapter adds to."""
        return self._modules.get(name.rpartition(".")[0] if pair.a.ndim == 3 else name)

    def language_part(self, adapter: Adapter) -> Adapter:
        """What an adapter adds to the language part of a model, without encoders of images and the like."""
        outside = self._outside_language()
        pairs = {name: pair for name, pair in adapter.pairs.items() if self._module_of(name, pair) not in outside}
        if not pairs:
            raise InvalidArgumentError(f"the adapter adds nothing to the language part of {type(self.model).__name__}")
        return Adapter(_digest(pairs), pairs)

    def _outside_language(self) -> set[nn.Module]:
        """The modules that texts do not pass: none in a model of one part."""
        if self.model.config.get_text_config() is self.model.config:
            return set()
        language = {*self.model.get_decoder().modules(), self.model.get_output_embeddings()}
        return set(self._modules.values()) - language

    def check(self, adapter: Adapter) -> None:
        """Raises InvalidArgumentError unless all targets of an adapter are linear layers of the model, of its shapes."""
        if any(hasattr(module, "merged_adapters") for module in self._modules.values()):
            raise InvalidArgumentError("the model has adapters of peft in its layers; load others into a model without")
        head = self.model.get_output_embeddings()
        if folded := sorted(adapter.pairs.keys() & set(folded_weights(self.model))):
            raise InvalidArgumentError(
                f"the adapter targets {folded[0]}, whose weights are folded into queries and results, because the cache "
                "keeps latents; leave kv_b_proj out of target_modules, or merge the adapter into the model"
            )
        for name, pair in adapter.pairs.items():
            a, b, _ = pair
            if a.ndim == 3:  # its sizes were compared when it was read
                continue
            module = self._modules.get(name)
            if module is None:
                raise InvalidArgumentError(
                    f"the adapter targets {name}, which {type(self.model).__name__} does not have"
                )
            if module is head or not (_is_linear(module) or self.parameter_sizes(name)):
                raise InvalidArgumentError(
                    f"the adapter targets {name}, a {type(module).__name__}{' for the logits' * (module is head)}; served "
                    "are linear layers that compute every token, experts of transformers' ExpertsInterface, and routers"
                )
            needed, given = _sizes(module), (a.shape[1], b.shape[0])
            if needed != given:
                raise InvalidArgumentError(
                    f"the adapter's {name} is for {given[0]} inputs and {given[1]} outputs; the model has {needed[0]} and "
                    f"{needed[1]}: it belongs to another model"
                )

    def make_room(self, adapter: Adapter, probe: Any) -> bool:
        """Makes stacks for the targets and the rank of an adapter; returns whether that changed any.

        `probe` runs a few tokens through the model. If there is no memory, or a target does not compute every token, it
        raises, and the stacks are as they were.
        """
        rank = max(self._rank, padded_rank(adapter.rank))
        experts = [name.rpartition(".") for name, pair in adapter.pairs.items() if pair.a.ndim == 3]
        linear = [name for name, pair in adapter.pairs.items() if pair.a.ndim == 2]
        missing = {_whole(self._modules[name]) for name in linear} - self._products.keys()
        targets = {(self._modules[name], target) for name, _, target in experts}
        known = {(module, target) for module, stacks in self._experts.items() for target in stacks}
        if rank == self._rank and not missing and targets <= known:
            return False
        if any(module._compiled_call_impl is not None for module in self.model.modules()):
            raise InvalidArgumentError("compiled layers cannot take adapters: use compile=False")
        new_experts = {module for module, _ in targets} - self._experts.keys()
        if missing or new_experts:
            self._check_calls(missing | new_experts, probe)
        kept = [] if rank == self._rank else list(self._products)
        try:
            made = {module: self._empty(module, rank) for module in (*kept, *missing)}
            of_experts = {place: self._empty_experts(*place, rank) for place in {*known, *targets}}
        except torch.OutOfMemoryError as error:
            raise StorageMemoryError(
                f"{self.model.device} has no memory for {self.num_slots} adapters of rank {rank}; lower max_adapters: {error}"
            ) from None
        for module in kept:
            old, new = self._products[module].weights, made[module]
            new.a[:, :, : self._rank] = old.a
            new.b[..., : self._rank] = old.b
            new.scales.copy_(old.scales)
            new.ranks.copy_(old.ranks)
            self._products[module].weights = new
        for module, target in known:
            stack, bigger = self._experts[module][target], of_experts[module, target]
            bigger.a[:, :, : self._rank] = stack.a
            bigger.b[..., : self._rank] = stack.b
            bigger.scales.copy_(stack.scales)
        for module in missing:
            parts = tuple(self._names[part] for part in _parts(module))
            self._products[module] = _Product(module, parts, made[module], self._hooks(module))
        for module in new_experts:
            self._experts[module] = {}
            added = ExpertAdapters(self, self._experts[module], module)
            self._overrides.append(Override(module, added.forward))
        for (module, target), stack in of_experts.items():
            self._experts[module][target] = stack
        self._rank = rank
        return True

    def _hooks(self, module: nn.Module) -> tuple[Any, ...]:
        """Lets adapters add to what a module computes."""
        if _is_linear(module) or isinstance(module, JoinedProduct):
            return module.register_forward_pre_hook(self._start), module.register_forward_hook(self._finish)
        return (Override(module, partial(self._route, module)),)

    def _route(self, module: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward of a router, to whose product adapters add."""
        step = current_step()
        if step is None or step.stacks is not self:
            return own(*args, **kwargs)
        weights = self._products[module].weights
        with RouterProduct(module.weight, lambda x: start_lora(x, weights, step.groups, self._side)):
            return own(*args, **kwargs)

    @torch.inference_mode()
    def fill(self, slot: int, adapter: Adapter) -> None:
        """Writes the weights of an adapter into a slot, for which there is room."""
        for product in self._products.values():
            weights, begin = product.weights, 0
            pairs = [adapter.pairs.get(name) for name in product.names]
            if any(pair is not None for pair in pairs):
                weights.a[slot].zero_()
                weights.b[slot].zero_()
            for part, pair in enumerate(pairs):
                if pair is not None:
                    weights.a[slot, part, : len(pair.a)] = pair.a.to(weights.a.device, weights.a.dtype)
                    rows = weights.b[slot, begin : begin + weights.sizes[part]]
                    rows[:, : len(pair.a)] = pair.b.to(weights.b.device, weights.b.dtype)
                begin += weights.sizes[part]
            weights.ranks[slot] = weights.ranks.new_tensor([0 if pair is None else len(pair.a) for pair in pairs])
            weights.scales[slot] = weights.scales.new_tensor([0.0 if pair is None else pair.scale for pair in pairs])

        for module, stacks in self._experts.items():
            for target, stack in stacks.items():
                pair = adapter.pairs.get(f"{self._names[module]}.{target}")
                stack.scales[slot] = 0.0 if pair is None else pair.scale
                if pair is not None:
                    stack.a[slot].zero_()
                    stack.b[slot].zero_()
                    rank = pair.a.shape[1]
                    stack.a[slot, :, :rank] = pair.a.to(stack.a.device, stack.a.dtype)
                    stack.b[slot, ..., :rank] = pair.b.to(stack.b.device, stack.b.dtype)

    def close(self) -> None:
        """The model forgets the stacks."""
        for product in self._products.values():
            for hook in product.hooks:
                hook.remove()
        self._products.clear()
        for override in self._overrides:
            override.remove()
        self._experts.clear()

    def _empty(self, module: nn.Module, rank: int) -> LoraWeights:
        parts = [_sizes(part) for part in _parts(module)]
        sizes = tuple(outputs for _, outputs in parts)
        where = {"dtype": self.model.dtype, "device": self.model.device}
        return empty_weights(self.num_slots, rank, parts[0][0], sizes, **where)

    def _empty_experts(self, module: nn.Module, target: str, rank: int) -> ExpertStack:
        sizes = self._sizes[module][target]
        return empty_stack(self.num_slots, rank, sizes, dtype=self.model.dtype, device=self.model.device)

    def _check_calls(self, modules: Iterable[nn.Module], probe: Any) -> None:
        """Raises UnsupportedModelError if a module does not get every token of a step at once, as single experts do not."""
        rows: dict[nn.Module, list[int]] = {module: [] for module in modules}

        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            rows[module].append(args[0][..., 0].numel())

        def note_product(module: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
            def start(x: Tensor) -> Callable[[Tensor], None]:
                rows[module].append(len(x))
                return lambda out: None

            with RouterProduct(module.weight, start):
                return own(*args, **kwargs)

        hooks: list[Any] = []
        for module in rows:
            sizes = self._sizes.get(module, {})
            if "weight" in sizes:
                hooks.append(Override(module, partial(note_product, module)))
            else:
                hooks.append(module.register_forward_pre_hook(note))
        try:
            logits, _ = probe()
        finally:
            for hook in hooks:
                hook.remove()
        for module, counts in rows.items():
            if set(counts) != {len(logits)}:
                name = self._names[_parts(module)[0]]
                hint = "; language_adapters=True leaves such targets out" * (module in self._outside_language())
                raise UnsupportedModelError(
                    f"the adapter targets {name}, which does not compute every token in one product; this is not served{hint}"
                )

    def _start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        step, product = current_step(), self._products[module]
        product.finish = None
        if step is not None and step.stacks is self:
            x = args[0].reshape(-1, product.weights.a.shape[-1])
            product.finish = start_lora(x, product.weights, step.groups, self._side)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        product = self._products[module]
        if product.finish is not None:
            product.finish(output.view(-1, output.shape[-1]))
            product.finish = None


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def _sizes(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    first, second = module.weight.shape
    return (first, second) if _is_linear(module) else (second, first)  # Conv1D of GPT-2, or a router


def _whole(module: nn.Module) -> nn.Module:
    """The module that computes the product of a linear layer."""
    return module.joined if isinstance(module, ProjectionPart) else module


def _parts(module: nn.Module) -> tuple[nn.Module, ...]:
    """The linear layers whose products a module computes."""
    return module.members if isinstance(module, JoinedProduct) else (module,)
