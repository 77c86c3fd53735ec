"""create_backend gives what works here, and says before anything runs what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from paged_cases import Case, spec

from kvpool.attention import AttentionBackend, AttentionPlan, AttentionSpec, PagedBatch, PlanBuffers, create_backend
from kvpool.attention.registry import ChoosingBackend
from kvpool.attention.torch_backend import TorchBackend
from kvpool.attention.triton_backend import TritonBackend
from kvpool.errors import ConfigError, InvalidArgumentError, UnsupportedAttentionError
from kvpool.kernels import compiled_attention
from kvpool.kernels.layout import LayerCache

CPU = torch.device("cpu")


class NoWindows(TorchBackend):
    """A backend that cannot do everything."""

    name = "no-windows"

    def missing(self, spec: AttentionSpec) -> str | None:
        return None if spec.window is None else "sliding windows"


@pytest.mark.parametrize("kv_dtype", ["float32", "int4"])
def test_given_a_cpu_then_auto_plans_with_what_was_compiled_or_with_torch(kv_dtype: str) -> None:
    built = Case("plain", spec(kv_dtype=kv_dtype)).build()

    backend = create_backend("auto", "cpu")

    compiled = compiled_attention() is not None and kv_dtype == "float32"
    assert backend.plan(built.case.spec, built.batch).backend.name == ("cpu" if compiled else "torch")
    built.check(built.run(backend))


def test_given_a_backend_that_lacks_something_then_auto_falls_back_for_that_kind_of_attention_alone() -> None:
    limited, everything = NoWindows(CPU), TorchBackend(CPU)
    auto = ChoosingBackend(CPU, [limited, everything])

    assert auto.choose(spec()) is limited
    assert auto.choose(spec(window=16)) is everything
    for case in (Case("plain", spec()), Case("window", spec(window=16))):
        built = case.build()
        built.check(built.run(auto))


def test_given_a_backend_with_kernels_to_compile_then_auto_compiles_those_of_the_one_that_plans() -> None:
    compiled: list[str] = []

    class Compiling(TorchBackend):
        def compilations(self, spec: AttentionSpec, cache: LayerCache) -> list[Callable[[], None]]:
            return [lambda: compiled.append("kernel")]

    built = Case("plain", spec()).build()
    for compile in ChoosingBackend(CPU, [Compiling(CPU), TorchBackend(CPU)]).compilations(spec(), built.cache):
        compile()
    assert compiled == ["kernel"]
    assert not ChoosingBackend(CPU, [NoWindows(CPU), Compiling(CPU)]).compilations(spec(), built.cache)


def test_auto_passes_on_whatever_a_backend_does_in_its_own_way() -> None:
    def own_methods(kind: type[AttentionBackend]) -> set[str]:
        return {name for name in vars(AttentionBackend) if not name.startswith("_") and name in vars(kind)}

    assert own_methods(TritonBackend) | own_methods(TorchBackend) <= own_methods(ChoosingBackend) | {"graphs"}


def test_given_no_backend_that_can_do_it_then_auto_names_what_each_lacks() -> None:
    auto = ChoosingBackend(CPU, [NoWindows(CPU)])

    assert auto.missing(spec()) is None
    with pytest.raises(UnsupportedAttentionError, match="no-windows: sliding windows"):
        auto.require(spec(window=16))


def test_given_an_unknown_name_then_the_known_ones_are_listed() -> None:
    with pytest.raises(ConfigError, match="triton, flashinfer, cpu, torch"):
        create_backend("flash", "cpu")


def test_given_no_compiled_module_then_the_cpu_backend_says_so_and_auto_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.attention.cpu_backend.compiled_attention", lambda: None)
    with pytest.raises(UnsupportedAttentionError, match=r"cpu backend was not compiled; .* or use torch"):
        create_backend("cpu", "cpu")
    assert create_backend("auto", "cpu").choose(spec()).name == "torch"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedAttentionError, match="cpu backend needs a CPU, not meta"):
        create_backend("cpu", "meta")


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_given_a_cpu_then_gpu_backends_say_that_they_need_cuda(name: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match="needs a CUDA device"):
        create_backend(name, "cpu")


def test_given_the_torch_backend_then_cuda_graphs_are_refused() -> None:
    with pytest.raises(UnsupportedAttentionError, match="torch backend cannot be captured"):
        create_backend("torch", "cpu").reserve(spec(), max_sequences=4, max_blocks=8)
    with pytest.raises(UnsupportedAttentionError, match="cannot be captured in CUDA graphs"):
        create_backend("auto", "cpu").reserve(spec(), max_sequences=4, max_blocks=8)


class Capturable(NoWindows):
    name = "capturable"
    graphs = True


def test_given_a_kind_of_attention_then_backends_say_whether_it_can_be_captured() -> None:
    auto = ChoosingBackend(CPU, [Capturable(CPU), TorchBackend(CPU)])
    for backend in (Capturable(CPU), auto):
        backend.require_graphs(spec())
        with pytest.raises(UnsupportedAttentionError):
            backend.require_graphs(spec(window=16))
    with pytest.raises(UnsupportedAttentionError, match="torch backend cannot be captured"):
        TorchBackend(CPU).require_graphs(spec())


def wrong_arguments() -> list[tuple[str, dict[str, Any], str]]:
    built = Case("plain", spec()).build()
    other = Case("other", spec(kv_dtype="float16"), block_size=32).build()
    return [
        ("one row less", {"q": built.q[1:]}, "q is torch.float32 of shape"),
        ("other dtype", {"q": built.q.half()}, "planned was float32"),
        ("output too small", {"out": built.q[:, :1]}, "out is"),
        ("other store", {"cache": other.cache}, r"\('float16', 32, "),
        ("no V", {"cache": LayerCache(k=built.cache["k"])}, "the layer has no part 'v'"),
        ("other device", {"q": built.q.to("meta")}, "q is on meta"),
        ("unplanned sink logits", {"sink_logits": torch.zeros(4)}, "sink_logits=False"),
    ]


@pytest.mark.parametrize(
    ("change", "named"), [case[1:] for case in wrong_arguments()], ids=[c[0] for c in wrong_arguments()]
)
def test_given_arguments_that_do_not_fit_the_plan_then_run_says_which(change: dict[str, Any], named: str) -> None:
    built = Case("plain", spec()).build()
    backend = create_backend("torch", "cpu")
    plan = backend.plan(built.case.spec, built.batch)

    with pytest.raises(InvalidArgumentError, match=named):
        backend.run(**{"q": built.q, "cache": built.cache, "plan": plan, **change})


def test_given_sink_logits_of_another_shape_or_a_foreign_plan_then_run_refuses() -> None:
    built = Case("sinks", spec(sink_logits=True)).build()
    backend = create_backend("torch", "cpu")
    plan = backend.plan(built.case.spec, built.batch)

    with pytest.raises(InvalidArgumentError, match=r"sink_logits has shape \(3,\)"):
        backend.run(built.q, built.cache, plan, sink_logits=torch.zeros(3))
    for name in ("torch", "auto"):
        with pytest.raises(InvalidArgumentError, match="another torch backend"):
            create_backend(name, "cpu").run(built.q, built.cache, plan, sink_logits=built.sink_logits)


def test_given_buffers_then_a_batch_that_is_too_large_is_refused() -> None:
    batch = PagedBatch.build([0, 2, 3], [4, 5, 6], [1, 1], [20, 16], block_size=16)

    PlanBuffers(spec(), max_sequences=2, max_query_tokens=2, max_blocks=3).check(spec(), batch)
    for sizes, named in (((1, 2, 3), "2 sequences"), ((2, 1, 3), "2 queries"), ((2, 2, 2), "3 blocks")):
        with pytest.raises(InvalidArgumentError, match=named):
            PlanBuffers(spec(), *sizes).check(spec(), batch)
    with pytest.raises(InvalidArgumentError, match="reserve a set for each spec"):
        PlanBuffers(spec(window=3), 2, 2, 3).check(spec(), batch)


def test_given_the_interface_then_a_backend_must_implement_it() -> None:
    assert AttentionBackend.__abstractmethods__ == {"missing", "plan", "attend"}
    assert AttentionPlan(TorchBackend(CPU), spec(), 3, 16).num_query_tokens == 3
