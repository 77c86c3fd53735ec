"""The list of backends, those that work on a device, and a backend that chooses one for each kind of attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpool.attention.attention_batch import PagedBatch
from kvpool.attention.backend import AttentionBackend, AttentionPlan, PlanBuffers
from kvpool.errors import ConfigError, UnsupportedAttentionError
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache
from kvpool.kernels.sparse import Choice

Factory = Callable[[torch.device], AttentionBackend]
_FACTORIES: dict[str, Factory] = {}  # in order of preference


def register_backend(name: str) -> Callable[[Factory], Factory]:
    """Decorates a function that makes a backend. It raises UnsupportedAttentionError if the backend cannot run."""

    def register(factory: Factory) -> Factory:
        _FACTORIES[name] = factory
        return factory

    return register


@register_backend("triton")
def _create_triton(device: torch.device) -> AttentionBackend:
    _require("triton", device)
    from kvpool.attention.triton_backend import TritonBackend

    return TritonBackend(device)


@register_backend("flashinfer")
def _create_flashinfer(device: torch.device) -> AttentionBackend:
    _require("flashinfer", device)
    from kvpool.attention.flashinfer_backend import FlashInferBackend

    return FlashInferBackend(device)


@register_backend("cpu")
def _create_cpu(device: torch.device) -> AttentionBackend:
    from kvpool.attention.cpu_backend import CpuBackend

    return CpuBackend(device)


@register_backend("torch")
def _create_torch(device: torch.device) -> AttentionBackend:
    from kvpool.attention.torch_backend import TorchBackend

    return TorchBackend(device)


def _require(package: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise UnsupportedAttentionError(f"the {package} backend needs a CUDA device, not {device}; use torch")
    if importlib.util.find_spec(package) is None:
        raise UnsupportedAttentionError(
            f"the {package} backend needs the package {package}: pip install '.[gpu]' in a checkout of kvpool"
        )


def create_backend(name: str = "auto", device: torch.device | str | None = None) -> AttentionBackend:
    """The backend of this name. "auto" takes, for each kind of attention, the first of triton, flashinfer, cpu and torch
    that works on the device and can do it. FlashInfer is as fast as triton, and its first start compiles for minutes.

    >>> create_backend("torch", "cpu").name
    'torch'
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if name == "auto":
        return ChoosingBackend(where, available_backends(where))
    if name not in _FACTORIES:
        raise ConfigError(f"no attention backend is called {name!r}; use auto, {', '.join(_FACTORIES)}")
    return _FACTORIES[name](where)


def available_backends(device: torch.device | str) -> list[AttentionBackend]:
    """One of every backend that works on this device, the preferred one first."""
    backends = []
    for factory in _FACTORIES.values():
        try:
            backends.append(factory(torch.device(device)))
        except UnsupportedAttentionError:
            continue
    return backends


class ChoosingBackend(AttentionBackend):
    """Plans each kind of attention with the first of its backends that can do it."""

    name = "auto"

    def __init__(self, device: torch.device, backends: Sequence[AttentionBackend]) -> None:
        super().__init__(device)
        self.backends = tuple(backends)

    def choose(self, spec: AttentionSpec, *, graphs: bool = False) -> AttentionBackend:
        """The backend that plans `spec`; with `graphs`, one that can be captured. Raises if none can."""
        reasons = []
        for backend in self.backends:
            if (reason := backend.missing(spec)) is None and (backend.graphs or not graphs):
                return backend
            reasons.append(f"{backend.name}: {reason or 'cannot be captured in CUDA graphs'}")
        raise UnsupportedAttentionError(f"no attention backend on {self.device} can do {spec}: {'; '.join(reasons)}")

    def require_graphs(self, spec: AttentionSpec) -> None:
        """Raises UnsupportedAttentionError if no backend can capture `spec`."""
        self.choose(spec, graphs=True)

    def missing(self, spec: AttentionSpec) -> str | None:
        """What all backends lack; None if one can do it."""
        try:
            self.choose(spec)
        except UnsupportedAttentionError as error:
            return str(error)
        return None

    def plan(self, spec: AttentionSpec, batch: PagedBatch, buffers: PlanBuffers | None = None) -> AttentionPlan:
        """A plan of the chosen backend."""
        return self.choose(spec, graphs=buffers is not None).plan(spec, batch, buffers)

    def attend(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, sink_logits: Tensor | None, out: Tensor
    ) -> None:
        """Runs on the backend that planned."""
        plan.backend.attend(q, cache, plan, sink_logits, out)

    def attend_chosen(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        choice: Choice,
        sink_logits: Tensor | None,
        out: Tensor,
    ) -> None:
        """Runs on the backend that planned."""
        plan.backend.attend_chosen(q, cache, plan, choice, sink_logits, out)

    def compilations(self, spec: AttentionSpec, cache: LayerCache) -> Sequence[Callable[[], None]]:
        """Those of the backend that plans `spec`."""
        return self.choose(spec).compilations(spec, cache)

    def _planned(self, plan: AttentionPlan) -> bool:
        return plan.backend in self.backends

    def reserve(self, spec: AttentionSpec, **sizes: Any) -> PlanBuffers:
        """Buffers of the backend that plans `spec` for CUDA graphs."""
        return self.choose(spec, graphs=True).reserve(spec, **sizes)
