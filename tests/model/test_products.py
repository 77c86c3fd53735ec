"""Matrix products on a CPU: every way gives the same, the fastest is taken, and the model stays what it was."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from operator import mul
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from models import tiny_model
from torch import Tensor, nn
from torch.nn.functional import linear

from kvpool.engine import Engine, engine_parts
from kvpool.errors import UnsupportedModelError
from kvpool.model import products
from kvpool.model.products import (
    ChosenLinear,
    PackedWeight,
    PartedProduct,
    Way,
    choose_products,
    in_float32,
    packed,
    packed_weights,
    plain,
    split,
    swapped,
)
from tool_files import compiled_module, emulated

ROWS = (1, 4, 16, 64, 256)


def measured(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Way, int], float]) -> list[tuple[int, list[Way]]]:
    """Products take so long, from now on; the list fills with what is measured."""
    asked: list[tuple[int, list[Way]]] = []

    def times(x: Tensor, operands: Mapping[Way, object]) -> dict[Way, list[float]]:
        asked.append((len(x), list(operands)))
        return {way: [seconds(way, len(x))] for way in operands}

    monkeypatch.setattr(products, "_interleaved", times)
    monkeypatch.setattr(products, "_measured", {})
    return asked


def two_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256, bias=False)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("way", [plain, swapped, in_float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_given_any_way_then_the_product_is_that_of_linear(way: Way, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 700).to(dtype), torch.randn(1100, 700).to(dtype)  # in_float32 takes three parts

    product = way(x, weight)

    assert product.dtype == dtype
    assert product.is_contiguous()
    exact = linear(x.double(), weight.double())
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (product.double() - exact).norm() < bound * exact.norm()


@pytest.fixture(autouse=True)
def no_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compiled_products", "compiled_split_products"):
        monkeypatch.setattr(products, name, lambda: None)


@pytest.fixture
def compiled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.getbasetemp()  # once for all tests of a process
    codes = [compiled_module(name, folder) for name in ("_products", "_split_products")]
    monkeypatch.setattr(products, "compiled_products", lambda: codes[0])
    monkeypatch.setattr(products, "compiled_split_products", lambda: codes[1] if codes[1].available() else None)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("way", [packed, split])
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (48, 64), (100, 70), (47, 5000), (1100, 3)])
@pytest.mark.parametrize("threads", [1, 3])
def test_given_a_packed_weight_then_the_product_is_that_of_linear(
    columns: int, depth: int, threads: int, way: Way
) -> None:
    if (code := products._code(way)) is None:
        pytest.skip("this processor has no AMX")
    torch.manual_seed(depth)
    weight = torch.randn(columns, depth)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 5, 6, 7, 8, 9, 16, 30, 200):
            x = torch.randn(rows, depth + 3)[:, 1 : depth + 1]  # rows with something between them
            product = way(x, PackedWeight([weight], code))
            torch.testing.assert_close(product, linear(x.double(), weight.double()).float(), atol=2e-4, rtol=1e-5)
    finally:
        torch.set_num_threads(before)


def numbers_of(parts: int, *shape: int) -> Tensor:
    """Random numbers, each the sum of so many in bfloat16."""
    numbers = torch.zeros(shape)
    drawn = torch.randn(shape)
    for _ in range(parts):
        numbers += (drawn - numbers).bfloat16().float()
    return numbers


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (100, 70), (47, 5000)])
def test_given_weights_of_fewer_bits_then_their_copies_are_smaller_and_products_as_exact(
    columns: int, depth: int
) -> None:
    if (code := products._code(split)) is None:
        pytest.skip("this processor has no AMX")
    torch.manual_seed(depth)
    x = torch.randn(200, depth)
    weight = torch.empty(columns, depth)
    copy = PackedWeight([weight], code)
    sizes = []
    for parts in (1, 2, 3, 1):  # changed in place each time
        weight.copy_(numbers_of(parts, columns, depth))
        copy.pack()
        sizes.append(products._copy_bytes(weight, code))
        exact = linear(x.double(), weight.double())
        assert (split(x, copy).double() - exact).norm() < 1e-6 * exact.norm()

    assert [(size - 64) * 3 // (sizes[2] - 64) for size in sizes] == [1, 2, 3, 1]


def test_given_an_arm_processor_in_an_emulator_then_products_are_those_of_plain_loops(tmp_path: Path) -> None:
    command = emulated(Path(__file__).with_name("emulated_products.c"), tmp_path)

    assert subprocess.run(command, capture_output=True, check=True).stdout == b"neon"


@pytest.mark.usefixtures("compiled")
def test_given_that_packed_weights_are_fastest_then_they_are_copied_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, lambda way, rows: 0.5 if way is packed and rows > 1 else 1.0)
    model = two_layers()
    expected = [model(torch.ones(2, rows, 256)) for rows in (1, 9, 300)]

    assert choose_products(model) == 2

    assert model[0].ways == (plain, packed, packed, packed, packed)
    assert len(packed_weights(model)) == 2
    assert list(model.state_dict()) == list(two_layers().state_dict())
    with torch.inference_mode():
        for rows, wanted in zip((1, 9, 300), expected, strict=True):
            torch.testing.assert_close(model(torch.ones(2, rows, 256)), wanted)
            torch.testing.assert_close(model(torch.ones(2, rows, 512)[..., ::2]), wanted)
        with pytest.raises(RuntimeError, match="same dtype"):
            model(torch.ones(16, 256, dtype=torch.float64))


class Gated(nn.Module):
    """Two products of the same tensor, and others that must not be taken for one with them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(256, 512), nn.Linear(256, 320)
        self.down = nn.Linear(512, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x)) + self.up(x.flip(-2))[..., :256] * self.up(x)[..., 64:]


def test_given_a_part_of_a_shared_product_that_its_module_has_changed_then_it_is_computed_again() -> None:
    shared, x = PartedProduct([2, 3, 1]), torch.arange(6.0)
    shared.part(0, x, torch.clone).add_(100)
    shared.part(1, x, torch.clone).add_(100)
    assert shared.part(1, x, torch.clone).tolist() == [2, 3, 4]
    assert shared.part(2, x, torch.clone).tolist() == [5]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("way", [packed, split])
def test_given_modules_with_the_same_input_then_they_have_one_copy_and_one_product(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    if products._code(way) is None:
        pytest.skip("this processor has no AMX")
    measured(monkeypatch, lambda tried, rows: 0.1 if tried is way else 1.0)
    model = Gated().requires_grad_(False)
    plain_model = Gated().requires_grad_(False)
    multiplied: list[int] = []
    multiply = PackedWeight.multiplied
    monkeypatch.setattr(
        PackedWeight, "multiplied", lambda copy, x: (multiplied.append(copy.num_columns), multiply(copy, x))[1]
    )

    assert choose_products(model, [[model.gate, model.up]]) == 3

    assert {copy.num_columns for copy in packed_weights(model)} == {256, 832}
    for numbers in (1.0, 3.0):  # the owner may change them
        for weights in (model, plain_model):
            weights.up.weight.mul_(numbers)
        for copy in packed_weights(model):
            copy.pack()
        x = torch.randn(2, 150, 256)
        with torch.inference_mode():
            multiplied.clear()
            gate, up = model.gate(x), model.up(x)
            assert multiplied == [832]
            torch.testing.assert_close(gate, plain_model.gate(x), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(up, plain_model.up(x), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(model(x), plain_model(x), atol=1e-4, rtol=1e-4)
    assert model.gate.shared is not None
    assert model.gate.shared._latest is None  # the last of them has freed the product


class Code:
    """Stands for C code whose copies take `size` bytes each."""

    def __init__(self, size: int) -> None:
        self.size = size

    def num_bytes(self, address: int, columns: int, depth: int) -> int:
        return self.size

    def pack(self, *args: int) -> None:
        pass


def test_given_weights_that_change_while_they_are_counted_then_no_more_is_written_than_was_counted() -> None:
    weight, told = torch.zeros(4, 4), list[int]()

    class Counting(Code):
        def num_bytes(self, *args: int) -> int:
            counted = 16 * (1 + int(weight[0, 0]))
            weight.add_(1)  # by a thread that trains the model: these numbers need more
            return counted

        def pack(self, *args: int) -> None:
            told.append(args[4])

    copy = PackedWeight([weight], Counting(0))
    copy.pack()

    assert told == [16, 32]


@pytest.mark.parametrize(("free", "copied"), [(799, []), (800, [packed]), (1999, [packed]), (2000, [packed, split])])
def test_given_copies_that_take_more_than_a_quarter_of_the_free_memory_then_they_are_not_made(
    free: int, copied: list[Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, lambda way, rows: {packed: 0.5, split: 0.4 if rows > 16 else 0.6}.get(way, 1.0))
    monkeypatch.setattr(products, "free_bytes", lambda device: free)
    monkeypatch.setattr(products, "compiled_products", lambda: Code(100))
    monkeypatch.setattr(products, "compiled_split_products", lambda: Code(150))
    model = two_layers()

    choose_products(model)

    assert len(packed_weights(model)) == 2 * len(copied)
    assert {way for layer in model for way in getattr(layer, "copies", ())} == set(copied)


def with_code(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(products, name, lambda: Code(1))


def test_given_other_types_or_no_compiled_code_then_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measured(monkeypatch, lambda way, rows: 1.0)
    choose_products(two_layers())
    with_code(monkeypatch, "compiled_products", "compiled_split_products")
    choose_products(two_layers(torch.bfloat16))

    assert asked
    assert all(not {packed, split} & set(ways) for _, ways in asked)


def test_given_compiled_code_and_no_clear_winner_then_it_is_used_for_2_to_64_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured(monkeypatch, lambda way, rows: 1.2 if (way is packed) == (rows <= 64) else 1.0)
    with_code(monkeypatch, "compiled_products")
    model = two_layers()

    choose_products(model)

    assert model[0].ways == (plain, packed, packed, packed, plain)


def test_given_amx_and_no_clear_winner_then_it_is_used_for_more_than_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measured(monkeypatch, lambda way, rows: 1.2 if way in (packed, split) else 1.0)
    with_code(monkeypatch, "compiled_products", "compiled_split_products")
    model = nn.Sequential(two_layers()[0])

    choose_products(model)

    assert [(rows, split in ways) for rows, ways in asked] == [(rows, rows > 64) for rows in ROWS]
    assert model[0].ways == (plain, packed, packed, packed, split)


@pytest.mark.parametrize(
    ("turns", "way"),
    [([0.7, 0.2, 0.7, 0.7, 0.7], swapped), ([0.1, 0.1, 0.1, 0.1, 0.85], split)],  # one turn without a neighbour
)
def test_given_a_way_that_is_not_faster_in_every_turn_then_the_expected_one_stays(
    turns: list[float], way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(x: Tensor, operands: Mapping[Way, object]) -> dict[Way, list[float]]:
        pace = [1.0, 2.0, 1.0, 4.0, 1.0]  # what else runs on the core changes from turn to turn
        return {way: list(map(mul, pace, turns if way is swapped else [1.0] * 5)) for way in operands}

    measured(monkeypatch, lambda way, rows: 1.0)
    monkeypatch.setattr(products, "_interleaved", times)
    with_code(monkeypatch, "compiled_products", "compiled_split_products")
    model = nn.Sequential(two_layers()[0])

    choose_products(model)

    assert model[0].ways[-1] is way


def test_given_a_choice_then_it_is_logged_by_shape_and_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured(monkeypatch, lambda way, rows: 0.5 if way is swapped and rows == 16 else 1.0)
    caplog.set_level("DEBUG", "kvpool")

    choose_products(nn.Sequential(two_layers()[0]))

    rows = "1:plain 4:plain 16:swapped 64:plain 256:plain"
    assert caplog.messages == [f"1 products with [512, 256] in torch.float32, by rows: {rows}"]


def test_given_a_way_that_is_faster_for_some_rows_then_it_is_taken_for_these(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, lambda way, rows: 0.5 if way is swapped and rows == 16 else 1.0)
    model = two_layers()
    expected = [model(torch.ones(rows, 256)) for rows in (1, 17, 300)]

    assert choose_products(model) == 2

    assert model[0].ways == (plain, plain, swapped, plain, plain)
    with torch.inference_mode():
        for rows, wanted in zip((1, 17, 300), expected, strict=True):
            torch.testing.assert_close(model(torch.ones(rows, 256)), wanted)
            torch.testing.assert_close(model(torch.ones(1, rows, 256)), wanted[None])


def test_given_chosen_products_then_parameters_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, lambda way, rows: 0.5 if way is swapped else 1.0)
    model = two_layers()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    choose_products(model)
    assert all(type(layer) is ChosenLinear for layer in model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert list(model.state_dict()) == list(two_layers().state_dict())


def test_given_a_gain_within_noise_then_the_plain_product_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, lambda way, rows: 0.85 if way is swapped else 1.0)
    model = two_layers()

    assert choose_products(model) == 0
    assert all(type(layer) is nn.Linear for layer in model)


def test_given_a_way_that_is_hopeless_then_it_is_not_tried_with_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measured(monkeypatch, lambda way, rows: 1.0 if way is in_float32 else 100.0)

    choose_products(nn.Sequential(two_layers(torch.bfloat16)[0]))

    assert asked[0] == (1, [plain, swapped, in_float32])
    assert asked[1:] == [(rows, [in_float32]) for rows in ROWS[1:]]


def test_given_a_shape_that_was_met_before_then_it_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measured(monkeypatch, lambda way, rows: 1.0)
    choose_products(two_layers())
    first = len(asked)

    choose_products(two_layers())

    assert first
    assert len(asked) == first


def test_given_modules_that_are_small_hooked_or_of_another_class_then_they_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(nn.Linear):
        pass

    measured(monkeypatch, lambda way, rows: 0.5 if way is swapped else 1.0)
    hooked = nn.Linear(512, 512)
    hooked.register_forward_hook(lambda *_: None)

    assert choose_products(nn.Sequential(nn.Linear(8, 8), hooked, Own(512, 512), nn.ReLU())) == 0


def test_given_gradients_are_wanted_then_they_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, lambda way, rows: 0.5 if way is swapped else 1.0)
    model = two_layers().requires_grad_(True)
    choose_products(model)

    model(torch.ones(16, 256)).sum().backward()

    assert model[0].weight.grad is not None


def test_given_a_real_measurement_then_every_number_of_rows_has_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_measured", {})

    choose_products(two_layers())

    assert all(len(ways) == len(ROWS) for ways in products._measured.values())
    assert len(products._measured) == 2


def test_given_a_model_that_is_refused_when_it_was_tried_with_chosen_products_then_it_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured(monkeypatch, lambda way, rows: 0.5 if way is swapped else 1.0)
    monkeypatch.setattr(products, "_SMALLEST", 1)
    model = tiny_model("llama").bfloat16()
    seen: list[bool] = []

    def refuse(tried: nn.Module, with_states: bool) -> None:
        seen.append(any(isinstance(module, ChosenLinear) for module in tried.modules()))
        raise UnsupportedModelError("not this one")

    monkeypatch.setattr(engine_parts, "inspect_model", refuse)
    with pytest.raises(UnsupportedModelError, match="not this one"):
        Engine(model, kv_blocks=16)

    assert seen == [True]  # trying a model takes minutes where its plain products do
    assert not any(isinstance(module, ChosenLinear) for module in model.modules())
