"""Splits a model over several ranks by the plan that transformers has for its family. Each rank computes with its heads.

The plan says which weights are cut in which direction and where ranks add up their results. Everything that a model cannot
do is refused from its configuration, before weights are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvpool.errors import ConfigError, UnsupportedModelError
from kvpool.model.faster_layers import JoinedProduct
from kvpool.model.states import modules_with_state

log = logging.getLogger("kvpool")
_GATHERED = ("colwise_gather_output", "colwise_rep")  # every rank gets the whole result
_BY_ROWS = ("colwise", "packed_colwise", *_GATHERED)  # outputs are divided
_BY_COLUMNS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")  # inputs are divided


class RankPart(NamedTuple):
    """Which inputs and outputs of a `Linear` a rank has. The module keeps it as `rank_part`."""

    inputs: slice
    outputs: slice
    sizes: tuple[int, int]  # inputs and outputs of all ranks


class SummedLinear(nn.Linear):
    """A `Linear` of which each rank has some inputs: ranks add up their products, to which adapters have added."""

    joined: JoinedProduct  # of this rank
    group: Any  # of torch.distributed

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = self.joined(input)
        torch.distributed.all_reduce(product, group=self.group)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True)
class ShardPlan:
    """How the weights of one model are divided between `size` ranks: transformers' plan, and the KV heads it cannot cut."""

    styles: Mapping[str, str]  # by module, layer numbers as *
    size: int
    kv_heads: int  # of the whole model
    whole: frozenset[str] = frozenset()  # projections of K and V of which a rank keeps one head, as heads are fewer

    def loading(self, mesh: Any) -> dict[str, Any]:
        """Arguments of `from_pretrained`, which then reads the weights of this rank only."""
        from transformers.distributed import DistributedConfig

        return {
            "distributed_config": DistributedConfig(tp_size=self.size, tp_plan=dict(self.styles)),
            "device_mesh": mesh,
        }

    def cut(self, model: Any, mesh: Any) -> Any:
        """Keeps the part of this rank of a model whose weights are all in memory."""
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model.tp_plan = dict(self.styles)
        return apply_tensor_parallelism(model, mesh)

    def finish(self, model: Any, rank: int, mesh: Any) -> Any:
        """Makes a divided model ready: weights are plain tensors, which are faster than distributed ones, and so are the
        modules around them. A rank has one head of K and V where there are fewer heads than ranks.
        """
        from torch.distributed.tensor import DTensor

        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear):
                continue  # embeddings look up rows through a distributed tensor
            for key, weight in list(module._parameters.items()):
                if isinstance(weight, DTensor):
                    module._parameters[key] = nn.Parameter(weight.to_local(), requires_grad=False)
            style = self.styles.get(_generic(name))
            if style == "colwise":
                self._keep_outputs(module, rank)
            if style == "rowwise":
                self._keep_inputs(module, rank, mesh.get_group())
            if _generic(name) in self.whole:
                self._keep_head(module, rank * self.kv_heads // self.size)
                attention = model.get_submodule(name.rpartition(".")[0])
                if name.endswith("k_proj") and hasattr(
                    attention, "num_key_value_groups"
                ):  # eager attention repeats by it
                    attention.num_key_value_groups //= self.size // self.kv_heads
        return model

    def _keep_outputs(self, module: Any, rank: int) -> None:
        """Each rank has some outputs, from all inputs: a product like any other, without transformers' code around it."""
        del module.forward
        inputs, outputs = module.in_features, module.out_features
        module.out_features = own = outputs // self.size
        module.rank_part = RankPart(slice(None), slice(rank * own, (rank + 1) * own), (inputs, outputs))

    def _keep_inputs(self, module: Any, rank: int, group: Any) -> None:
        """Each rank has some inputs, which give a part of every output."""
        del module.forward
        inputs, outputs = module.in_features, module.out_features
        module.in_features = own = inputs // self.size
        module.rank_part = RankPart(slice(rank * own, (rank + 1) * own), slice(None), (inputs, outputs))
        module.__class__ = SummedLinear
        module.joined, module.group = JoinedProduct([module], with_bias=False), group

    def _keep_head(self, module: Any, head: int) -> None:
        for key, weight in list(module._parameters.items()):
            if weight is not None:
                rows = weight.detach().view(self.kv_heads, -1, *weight.shape[1:])[head].clone()
                module._parameters[key] = nn.Parameter(rows, requires_grad=False)
        outputs = module.out_features
        module.out_features = own = outputs // self.kv_heads
        module.rank_part = RankPart(slice(None), slice(head * own, (head + 1) * own), (module.in_features, outputs))


class Sharding:
    """The part of a model that this rank loads. `join` is called once the model is known to be divisible; it returns the mesh
    of all ranks. With `may_be_whole`, every rank loads the whole model if it is not divisible.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, join: Callable[[], Any], *, may_be_whole: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._join = join
        self._may_be_whole = may_be_whole
        self._plan: ShardPlan | None = None
        self._mesh: Any = None

    def begin(self, family: Any, config: Any) -> None:
        """Before weights are read."""
        try:
            self._plan = shard_plan(family, config, self.size)
        except (ConfigError, UnsupportedModelError) as error:
            if not self._may_be_whole:
                raise
            log.info("every rank computes all of a draft: %s", error)
        if self._mesh is None:
            self._mesh = self._join()

    def of_draft(self) -> Sharding:
        """How the same rank loads the draft of the model."""
        return Sharding(self.rank, self.size, self._device, lambda: self._mesh, may_be_whole=True)

    def read(self, family: Any, name: str, **options: Any) -> Any:
        """`from_pretrained`, which reads the weights of this rank only."""
        if self._plan is None:
            return family.from_pretrained(name, **options).to(self._device)
        with _local_rank(self._device.index or 0):
            model = family.from_pretrained(name, **self._plan.loading(self._mesh), **options)
        return self._plan.finish(model, self.rank, self._mesh)

    def cut(self, model: Any) -> Any:
        """Keeps the part of this rank of a model whose weights are all in memory."""
        if self._plan is None:
            return model
        return self._plan.finish(self._plan.cut(model, self._mesh), self.rank, self._mesh)


def shard_plan(family: Any, config: Any, size: int) -> ShardPlan:
    """The plan for a model of this configuration on `size` ranks. Raises if it cannot be divided so."""
    text = config.get_text_config()
    name = f"{type(config).__name__} (model_type {config.model_type!r})"
    asked = f"tensor_parallel={size}"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{asked}: {name} has an encoder of texts; only decoders are divided between ranks")
    with torch.device("meta"):
        model = family.from_config(config)
    names = {_generic(name) for part in (model.named_modules(), model.named_parameters()) for name, _ in part}
    styles = {key: style for key, style in (getattr(model, "tp_plan", None) or {}).items() if key in names}
    _check_states(model, styles, f"{asked}: layers of {name}")
    if not any("layers" in key for key in styles):
        raise UnsupportedModelError(
            f"{asked}: transformers has no tensor-parallel plan for {name}; serve it on one device, without tensor_parallel"
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    whole: frozenset[str] = frozenset()
    if any(style == "colwise" and _is_query(key) for key, style in styles.items()):  # ranks have heads of their own
        if heads % size:
            raise ConfigError(
                f"{asked} does not divide the {heads} attention heads of {name}; use a divisor of {heads}"
            )
        if kv_heads % size:
            if size % kv_heads:
                raise ConfigError(
                    f"{asked}: the {kv_heads} KV heads of {name} can be divided between ranks, or copied to an equal number "
                    f"of ranks each, but {size} is neither a divisor nor a multiple of {kv_heads}"
                )
            whole = frozenset(key for key in styles if key.endswith((".k_proj", ".v_proj")))
    for key in whole:
        del styles[key]
    _check_sizes(model, styles, size, f"{asked}: {name}")
    return ShardPlan(styles, size, kv_heads, whole)


def _check_states(model: Any, styles: Mapping[str, str], what: str) -> None:
    """Refuses a plan that divides a state. Every rank may have all of it, from projections that gather what ranks have."""
    keeping = modules_with_state(model)
    inside = {_generic(name) for name, module in model.named_modules() if any(module is each for each in keeping)}
    for key, style in styles.items():
        if style not in _GATHERED and any(key == each or key.startswith(f"{each}.") for each in inside):
            raise UnsupportedModelError(f"{what} keep a state, which {key} would divide between ranks; use one device")


def _generic(name: str) -> str:
    """The name of a module in plans, where the numbers of layers are *."""
    from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

    generic: str = replace_layer_number_by_wildcard(name)
    return generic


def _is_query(key: str) -> bool:
    return "attn" in key.split(".")[-2] or "attention" in key.split(".")[-2] if "." in key else False


def _check_sizes(model: Any, styles: dict[str, str], size: int, what: str) -> None:
    """Refuses a layer that cannot be cut into equal parts. A vocabulary that cannot be is left whole."""
    uneven: dict[str, int] = {}
    for name, module in model.named_modules():
        key = _generic(name)
        if isinstance(module, nn.Linear) and key in styles:
            divided = module.out_features if styles[key] in _BY_ROWS else module.in_features
            if styles[key] in (*_BY_ROWS, *_BY_COLUMNS) and divided % size:
                uneven[key] = divided
    for key, divided in uneven.items():
        if "layers" in key:
            raise ConfigError(f"{what} has {divided} rows or columns in {key}, which {size} ranks cannot share equally")
    if uneven:
        embeddings = [key for key, style in styles.items() if style == "embedding_rowwise"]  # tied to the head
        for key in (*uneven, *embeddings):
            del styles[key]


@contextmanager
def _local_rank(index: int) -> Iterator[None]:
    """Tells transformers the device of this rank, which it reads from the environment."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(index)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
