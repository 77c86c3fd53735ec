"""Norms, gated activations and rotations in C: the same as torch, with every instruction set, and torch where C cannot."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.nn import functional

from kvpool.kernels import rows
from kvpool.kernels.rows import ACTIVATIONS, Activation, CompiledRows, gated, rms_norm, rotated
from tool_files import compiled_module, emulated

BOUNDS = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (1e-2, 1e-3)}  # relative, absolute


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return compiled_module("_rows", tmp_path_factory.mktemp("rows"))


@pytest.fixture(params=["best", "second", "third"])
def code(request: pytest.FixtureRequest, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> CompiledRows:
    """What the functions use."""
    known = dict(zip(("best", "second", "third"), module.instructions(), strict=False))
    if request.param not in known:
        pytest.skip(f"this processor has {len(known)} sets of instructions")
    compiled = CompiledRows(module, known[request.param])
    monkeypatch.setattr(rows, "code", lambda: compiled)
    return compiled


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (3.0 * torch.randn(shape, generator=generator)).to(dtype)


def close(given: Tensor, exact: Tensor) -> None:
    relative, absolute = BOUNDS[given.dtype]
    torch.testing.assert_close(given.double(), exact, rtol=relative, atol=absolute)


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [1, 5, 16, 33, 576])
@torch.no_grad()
def test_given_rows_then_their_norm_is_that_of_exact_numbers(size: int, dtype: torch.dtype) -> None:
    weight = drawn(size, dtype=dtype)
    for x in (drawn(2, 3, size, dtype=dtype), drawn(2, 3, size + 7, dtype=dtype)[..., 3 : size + 3]):
        exact = functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)

        close(rms_norm(x, weight, 1e-5), exact)


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=("silu", "gelu"))
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [1, 5, 16, 33, 1536])
@torch.no_grad()
def test_given_two_halves_then_they_are_gated(size: int, dtype: torch.dtype, activation: Activation) -> None:
    both = drawn(2, 3, 2 * size, dtype=dtype)
    for gate, up in ((drawn(6, size, dtype=dtype), drawn(6, size, dtype=dtype)), both.split(size, -1)):
        exact = activation.reference(gate.double()) * up.double()

        close(gated(gate, up, activation), exact)


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=("silu", "gelu"))
@torch.no_grad()
def test_given_numbers_that_are_large_or_none_then_gates_are_those_of_torch(activation: Activation) -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, 88.0, 200.0, 1e4, float("inf"), float("nan")])

    given = gated(gate.clone(), torch.ones(8), activation)

    torch.testing.assert_close(given, activation.reference(gate), equal_nan=True)
    assert torch.isnan(rms_norm(gate.bfloat16(), torch.ones(8).bfloat16(), 1e-5)).all()


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("size", [2, 10, 32, 66])
@torch.no_grad()
def test_given_angles_then_heads_are_rotated(size: int, dtype: torch.dtype) -> None:
    cosines, sines = drawn(1, 5, size, dtype=dtype), drawn(1, 5, 2 * size, dtype=dtype)[..., size:]
    for x in (drawn(1, 3, 5, size, dtype=dtype), drawn(1, 5, 4, size, dtype=dtype)[:, :, 1:].transpose(1, 2)):
        first, second = x.double().chunk(2, -1)
        exact = x.double() * cosines.double() + torch.cat((-second, first), -1) * sines.double()

        close(rotated(x, cosines, sines), exact)


@pytest.mark.usefixtures("code")
@torch.no_grad()
def test_given_many_rows_then_threads_share_them() -> None:
    x, weight = drawn(999, 400, dtype=torch.float32), drawn(400, dtype=torch.float32)
    alone = rms_norm(x, weight, 1e-5)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(rms_norm(x, weight, 1e-5), alone)
    finally:
        torch.set_num_threads(before)


def test_given_an_arm_processor_in_an_emulator_then_results_are_those_of_plain_loops(tmp_path: Path) -> None:
    command = emulated(Path(__file__).with_name("emulated_rows.c"), tmp_path)

    assert subprocess.run(command, capture_output=True, check=True).stdout == b"neon"


@pytest.mark.parametrize("given", ["float64", "another type", "gradients", "a stride", "nothing"])
def test_given_what_the_code_does_not_take_then_torch_does_it(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "code", lambda: pytest.fail)  # it has neither function
    x = torch.ones(0 if given == "nothing" else 4, 8, dtype=torch.float64 if given == "float64" else torch.float32)
    weight = torch.ones(8, dtype=torch.bfloat16 if given == "another type" else x.dtype)
    x = x.t().contiguous().t() if given == "a stride" else x

    with torch.set_grad_enabled(given == "gradients"):
        torch.testing.assert_close(rms_norm(x, weight, 0.0), x)
        torch.testing.assert_close(gated(x, x.to(weight.dtype), ACTIVATIONS[0]), functional.silu(x))
        angles = torch.ones(1, len(x), 8, dtype=weight.dtype), torch.zeros(1, len(x), 8, dtype=weight.dtype)
        torch.testing.assert_close(rotated(x[None, None], *angles), x[None, None])


def test_given_instructions_that_the_processor_lacks_then_they_are_refused(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="no instructions named mmx"), torch.no_grad():
        CompiledRows(module, "mmx").norm(torch.ones(2, 8), torch.ones(8), 0.0)
