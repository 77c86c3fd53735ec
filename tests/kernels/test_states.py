"""States that are updated in their slots: the references against plain recurrences, and the kernels against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.nn.functional import conv1d, silu, softplus  # noqa: E402

from kvpool.kernels import states_triton  # noqa: E402
from kvpool.kernels.convolution_triton import convolve_one_triton, convolve_triton  # noqa: E402
from kvpool.kernels.layout import PackedStates, Selection, SlotStates, SteppedStates  # noqa: E402
from kvpool.kernels.states import (  # noqa: E402
    convolve_one_reference,
    convolve_reference,
    delta_rule_one_reference,
    delta_rule_steps_reference,
    select,
    select_one_reference,
    select_steps_reference,
)
from kvpool.kernels.states_triton import (  # noqa: E402
    delta_rule_one_triton,
    delta_rule_steps_triton,
    select_one_triton,
    select_steps_triton,
)

torch.manual_seed(0)  # for what is drawn below as parameters; each test sets it again

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_SLOTS = 6
IN_PLACE = [4, 1, 2]
ELSEWHERE = [0, 1, 5]  # what lay in 4 and 2 stays there; 1 is replaced


def slot_states(*shape: int, dtype: Any = torch.float32, targets: Any = ELSEWHERE, sources: Any = IN_PLACE) -> Any:
    """Random states, one after another with a gap between them, as in a store of many layers."""
    flat = torch.randn(NUM_SLOTS, torch.Size(shape).numel() + 16).to(dtype)
    stored = flat[:, : torch.Size(shape).numel()].unflatten(1, shape)
    return SlotStates(stored, torch.tensor(sources), torch.tensor(targets))


def packed_states(lengths: list[int], *shape: int, **options: Any) -> Any:
    states = slot_states(*shape, **options)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return PackedStates(states.stored, states.sources, states.targets, starts, tuple(lengths))


def moved(value: Any, device: str) -> Any:
    """A copy on a device, with the same strides: a store and its gaps, expanded tensors, parts of a projection."""
    if isinstance(value, SlotStates):
        tensors = [field.name for field in fields(value) if field.name != "lengths"]
        return replace(value, **{name: moved(getattr(value, name), device) for name in tensors})
    if isinstance(value, Selection):
        tensors = {name: moved(getattr(value, name), device) for name in ("dt", "a", "b", "c", "d", "dt_bias")}
        return replace(value, **tensors)
    if not isinstance(value, torch.Tensor):
        return value
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return whole.to(device, copy=True).as_strided(value.shape, value.stride(), value.storage_offset())


def assert_same(kernel: Callable[..., Any], reference: Callable[..., Any], arguments: list[Any], device: str) -> None:
    """The kernel has the reference's result and leaves the reference's bytes in every slot."""
    given = [moved(argument, device) for argument in arguments]
    expected = reference(*arguments)
    found = kernel(*given)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.cpu(), expected)
    (states,), (expected_states,) = ([a for a in every if isinstance(a, SlotStates)] for every in (given, arguments))
    torch.testing.assert_close(states.stored.cpu(), expected_states.stored)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("targets", [IN_PLACE, ELSEWHERE], ids=["in place", "elsewhere"])
def test_a_convolution_moves_on_token_by_token_as_one_over_all_of_them(targets: list[int]) -> None:
    states = slot_states(7, 4)
    before = states.stored.clone()
    tokens, weight, bias = torch.randn(3, 7, 5), torch.randn(7, 4), torch.randn(7)
    whole = torch.cat([before[IN_PLACE], tokens], dim=-1)
    expected = silu(conv1d(whole, weight.unsqueeze(1), bias, groups=7))[..., -5:]
    states = replace(states, targets=torch.tensor(targets))
    for i in range(5):
        out = convolve_one_reference(tokens[..., i], states, weight, bias, True)
        torch.testing.assert_close(out, expected[..., i])
        states = replace(states, sources=states.targets)
    assert torch.equal(states.stored[targets], whole[..., -4:])
    untouched = sorted(set(range(NUM_SLOTS)) - set(targets))
    assert torch.equal(states.stored[untouched], before[untouched])


def test_a_convolution_of_packed_sequences_is_that_of_each() -> None:
    lengths = [1, 9, 3]
    states = packed_states(lengths, 7, 4, sources=[4, -1, 2])
    before, starts = states.stored.clone(), states.starts
    x, weight = torch.randn(13, 7), torch.randn(7, 4)
    out = convolve_reference(x, states, weight, None, False)
    for i, (length, source) in enumerate(zip(lengths, (4, None, 2), strict=True)):
        earlier = torch.zeros(7, 4) if source is None else before[source]
        whole = torch.cat([earlier, x[starts[i] : starts[i + 1]].T], dim=-1)
        expected = conv1d(whole, weight.unsqueeze(1), groups=7)[:, -length:].T
        torch.testing.assert_close(out[starts[i] : starts[i + 1]], expected)
        assert torch.equal(states.stored[ELSEWHERE[i]], whole[:, -4:])


@pytest.mark.parametrize("by_key", [False, True], ids=["a decay for each head", "for each key"])
def test_the_delta_rule_corrects_what_a_state_recalls(by_key: bool) -> None:
    states = slot_states(2, 8, 6)
    before = states.stored[IN_PLACE].clone()
    q, k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 6)
    decay, beta = -torch.rand(3, 2, 8) if by_key else -torch.rand(3, 2), torch.rand(3, 2)
    found = delta_rule_one_reference(q, k, v, decay, beta, states, True)
    for n in range(3):
        for h in range(2):
            query, key = (x[n, h] / x[n, h].norm() for x in (q, k))
            state = before[n, h] * decay[n, h].exp().reshape(-1, 1)
            state = state + torch.outer(key, beta[n, h] * (v[n, h] - key @ state))
            torch.testing.assert_close(states.stored[ELSEWHERE[n], h], state)
            torch.testing.assert_close(found[n, h], query @ state / 8**0.5)


def mamba_2(heads: int, channels: int, size: int, groups: int) -> Selection:
    """Time steps, decays and what goes by are of a head, and expanded over its channels."""
    expanded = torch.randn(3, heads, 1).expand(-1, -1, channels), -torch.rand(heads, 1, 1).expand(-1, channels, size)
    b, c = torch.randn(3, groups, size), torch.randn(3, groups, size)
    d, bias = (torch.randn(heads, 1).expand(-1, channels) for _ in range(2))
    return Selection(*expanded, b, c, d, bias, softplus=True)


def mamba_1(channels: int, size: int, *, with_d: bool = True) -> Selection:
    a, d = -torch.rand(1, channels, size), torch.randn(1, channels) if with_d else None
    return Selection(
        torch.randn(3, 1, channels),
        a,
        torch.randn(3, 1, size),
        torch.randn(3, 1, size),
        d,
        torch.randn(1, channels) if with_d else None,
        softplus=with_d,
    )


@pytest.mark.parametrize("chosen", [mamba_1(6, 4), mamba_2(4, 6, 5, 2)], ids=["Mamba 1", "Mamba 2"])
def test_a_state_space_model_decays_and_adds(chosen: Selection) -> None:
    heads, channels, size = chosen.a.shape
    states = slot_states(heads, channels, size)
    before = states.stored[IN_PLACE].clone()
    x, gate = torch.randn(3, heads, channels), torch.randn(3, heads, channels)
    found = select_one_reference(x, chosen, states, gate)
    group = heads // chosen.b.shape[1]
    for n in range(3):
        for h in range(heads):
            dt = softplus(chosen.dt[n, h] + chosen.dt_bias[h])
            state = before[n, h] * torch.exp(dt[:, None] * chosen.a[h])
            state = state + torch.outer(dt * x[n, h], chosen.b[n, h // group])
            torch.testing.assert_close(states.stored[ELSEWHERE[n], h], state)
            out = (state @ chosen.c[n, h // group] + chosen.d[h] * x[n, h]) * silu(gate[n, h])
            torch.testing.assert_close(found[n, h], out)


def test_chunks_of_a_state_space_model_are_its_tokens_one_by_one() -> None:
    """Lengths around a chunk's; the second sequence begins."""
    lengths, heads, channels, size, groups = [300, 1, 129], 4, 6, 5, 2
    states = packed_states(lengths, heads, channels, size, sources=[4, -1, 2])
    singly = SlotStates(states.stored.clone(), torch.tensor([4, 3, 2]), states.targets)
    singly.stored[3] = 0
    tokens = sum(lengths)
    x, dt, a = torch.randn(tokens, heads, channels), torch.rand(tokens, heads), -torch.rand(heads)
    b, c = torch.randn(tokens, groups, size), torch.randn(tokens, groups, size)
    found = select(x, dt, a, b, c, states).split(lengths)
    inputs = [part.split(lengths) for part in (x, dt, b, c)]
    for i in range(3):
        row = replace(singly, sources=singly.sources[i : i + 1], targets=singly.targets[i : i + 1])
        for token in range(lengths[i]):
            one, step, b_one, c_one = (part[i][token : token + 1] for part in inputs)
            rate = a[:, None, None].expand(-1, channels, size)
            chosen = Selection(step[..., None].expand(-1, -1, channels), rate, b_one, c_one, None, None, False)
            expected = select_one_reference(one, chosen, row, None)
            torch.testing.assert_close(found[i][token], expected[0], rtol=1e-4, atol=1e-4)
            row = replace(row, sources=row.targets)
        torch.testing.assert_close(states.stored[row.targets], singly.stored[row.targets], rtol=1e-4, atol=1e-4)


@pytest.mark.quick("no bias-3-4-elsewhere-cpu", "bias-4-2-in place-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("targets", [IN_PLACE, ELSEWHERE], ids=["in place", "elsewhere"])
@pytest.mark.parametrize(("inputs", "taps"), [(4, 4), (3, 4), (4, 2)])
@pytest.mark.parametrize("bias", [None, torch.randn(300)], ids=["no bias", "bias"])
def test_the_kernel_convolves_one_token(inputs: int, taps: int, bias: Any, targets: list[int], device: str) -> None:
    x = torch.randn(3, 310)[:, 10:]
    arguments = [x, slot_states(300, inputs, targets=targets), torch.randn(300, taps), bias, bias is None]
    assert_same(convolve_one_triton, convolve_one_reference, arguments, device)


@pytest.mark.quick("[33, 1, 32]-one begins-elsewhere-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("targets", [IN_PLACE, ELSEWHERE], ids=["in place", "elsewhere"])
@pytest.mark.parametrize("sources", [IN_PLACE, [4, -1, 2]], ids=["all go on", "one begins"])
@pytest.mark.parametrize("lengths", [[1, 70, 3], [33, 1, 32]], ids=str)
def test_the_kernel_convolves_packed_sequences(
    lengths: list[int], sources: list[int], targets: list[int], device: str
) -> None:
    x = torch.randn(70, sum(lengths)).T  # as a module transposes it
    states = packed_states(lengths, 70, 4, sources=sources, targets=targets)
    for bias, activate in ((torch.randn(70), True), (None, False)):
        arguments = [x, states, torch.randn(70, 4), bias, activate]
        assert_same(convolve_triton, convolve_reference, arguments, device)


@pytest.mark.quick("a decay for each head-16-8-in place-cpu", "for each key-16-8-elsewhere-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("targets", [IN_PLACE, ELSEWHERE], ids=["in place", "elsewhere"])
@pytest.mark.parametrize(("keys", "values"), [(16, 8), (12, 72)])
@pytest.mark.parametrize("by_key", [False, True], ids=["a decay for each head", "for each key"])
def test_the_kernel_applies_the_delta_rule(
    by_key: bool, keys: int, values: int, targets: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = torch.randn(3, 2 * (2 * keys + values))  # queries, keys and values side by side, as a convolution left them
    q, k, v = (part.unflatten(1, (2, -1)) for part in mixed.split([2 * keys, 2 * keys, 2 * values], dim=1))
    decay, beta = -torch.rand(3, 2, keys) if by_key else -torch.rand(3, 2), torch.rand(3, 2)
    states = slot_states(2, keys, values, targets=targets)
    for normalize, threshold in ((True, 0), (False, 256)):
        monkeypatch.setattr(states_triton, "_MANY_HEADS", threshold)  # in large programs, and in small ones
        assert_same(delta_rule_one_triton, delta_rule_one_reference, [q, k, v, decay, beta, states, normalize], device)


@pytest.mark.quick("Mamba 1-in place-cpu", "Mamba 1, less of it-elsewhere-cpu", "Mamba 2-in place-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("targets", [IN_PLACE, ELSEWHERE], ids=["in place", "elsewhere"])
@pytest.mark.parametrize(
    "chosen",
    [mamba_1(70, 16), mamba_1(5, 3, with_d=False), mamba_2(4, 12, 16, 2), mamba_2(2, 64, 128, 1)],
    ids=["Mamba 1", "Mamba 1, less of it", "Mamba 2", "Mamba 2, large"],
)
def test_the_kernel_updates_a_state_space_model(chosen: Selection, targets: list[int], device: str) -> None:
    heads, channels, size = chosen.a.shape
    x, gate = (part.unflatten(1, (heads, channels)) for part in torch.randn(3, 2 * heads * channels).chunk(2, dim=1))
    states = slot_states(heads, channels, size, targets=targets)
    for given in (gate, None):
        assert_same(select_one_triton, select_one_reference, [x, chosen, states, given], device)


# Sequences of a graph: one leaves its state behind its first token and has two drafts, one has no tokens, one begins. Two
# tokens belong to nobody.
STARTS, ENDS, NUM_TOKENS = [0, 3, 3, 8], [1, 3, 8], 10


def stepped_states(*shape: int, sources: Any = (4, 1, -1), targets: Any = (4, 1, 0), **options: Any) -> Any:
    states = slot_states(*shape, sources=list(sources), targets=list(targets), **options)
    return SteppedStates(states.stored, states.sources, states.targets, torch.tensor(STARTS), torch.tensor(ENDS))


def mamba_2_tokens(heads: int, channels: int, size: int, groups: int) -> Selection:
    chosen, dt = mamba_2(heads, channels, size, groups), torch.rand(NUM_TOKENS, heads, 1).expand(-1, -1, channels)
    b, c = torch.randn(NUM_TOKENS, groups, size), torch.randn(NUM_TOKENS, groups, size)
    return replace(chosen, dt=dt, b=b, c=c, dt_bias=None, softplus=False)


def test_steps_move_states_on_up_to_their_ends_and_drafts_change_none() -> None:
    states = stepped_states(2, 8, 6)
    before = states.stored.clone()
    q, k, v = (torch.randn(NUM_TOKENS, 2, size) for size in (8, 8, 6))
    decay, beta = -torch.rand(NUM_TOKENS, 2), torch.rand(NUM_TOKENS, 2)
    found = delta_rule_steps_reference(q, k, v, decay, beta, states, True)
    for source, target, start, stop, end in ((4, 4, 0, 3, 1), (-1, 0, 3, 8, 8)):
        state = before[source : source + 1].clone() if source >= 0 else torch.zeros(1, 2, 8, 6)
        row = SlotStates(state, torch.tensor([0]), torch.tensor([0]))
        for i in range(start, stop):
            tokens = (x[i : i + 1] for x in (q, k, v, decay, beta))
            torch.testing.assert_close(found[i : i + 1], delta_rule_one_reference(*tokens, row, True))
            if i + 1 == end:
                torch.testing.assert_close(states.stored[target], state[0])
    assert not found[8:].any()
    assert torch.equal(states.stored[[1, 2, 3, 5]], before[[1, 2, 3, 5]])


@pytest.mark.quick("in place-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("targets", [(4, 1, 0), (5, 2, 0)], ids=["in place", "elsewhere"])
def test_the_kernels_compute_tokens_step_by_step(targets: tuple[int, ...], device: str) -> None:
    x = torch.randn(70, NUM_TOKENS).T
    arguments = [x, stepped_states(70, 4, targets=targets), torch.randn(70, 4), torch.randn(70), True]
    assert_same(convolve_triton, convolve_reference, arguments, device)
    q, k, v = (torch.randn(NUM_TOKENS, 2, size) for size in (12, 12, 8))
    for decay in (-torch.rand(NUM_TOKENS, 2), -torch.rand(NUM_TOKENS, 2, 12)):
        arguments = [q, k, v, decay, torch.rand(NUM_TOKENS, 2), stepped_states(2, 12, 8, targets=targets), True]
        assert_same(delta_rule_steps_triton, delta_rule_steps_reference, arguments, device)
    arguments = [
        torch.randn(NUM_TOKENS, 4, 12),
        mamba_2_tokens(4, 12, 16, 2),
        stepped_states(4, 12, 16, targets=targets),
    ]
    assert_same(select_steps_triton, select_steps_reference, arguments, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_in_16_bits_round_once(dtype: Any) -> None:
    """Recurrent states stay in float32. The interpreter cuts off where a GPU rounds, so only a GPU can tell."""
    x, q, k, v = (torch.randn(3, *shape).to(dtype) for shape in ((64,), (2, 16), (2, 16), (2, 32)))
    arguments = [x, slot_states(64, 4, dtype=dtype), torch.randn(64, 4).to(dtype), torch.randn(64).to(dtype), True]
    assert_same(convolve_one_triton, convolve_one_reference, arguments, "cuda")
    arguments = [x, packed_states([1, 1, 1], 64, 4, dtype=dtype), *arguments[2:]]
    assert_same(convolve_triton, convolve_reference, arguments, "cuda")
    beta = torch.rand(3, 2).to(dtype)
    arguments = [q, k, v, -torch.rand(3, 2), beta, slot_states(2, 16, 32), True]
    assert_same(delta_rule_one_triton, delta_rule_one_reference, arguments, "cuda")
    chosen = mamba_2(2, 32, 16, 1)
    chosen = replace(chosen, dt=chosen.dt.to(dtype), b=chosen.b.to(dtype), c=chosen.c.to(dtype))
    assert_same(select_one_triton, select_one_reference, [v, chosen, slot_states(2, 32, 16), None], "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_very_small_time_steps_are_not_rounded_to_nothing(device: str) -> None:
    chosen = replace(mamba_2(2, 4, 4, 1), dt=torch.full((3, 2, 1), -14.0).expand(-1, -1, 4), dt_bias=None)
    states = slot_states(2, 4, 4)
    states.stored.zero_()
    assert_same(select_one_triton, select_one_reference, [torch.ones(3, 2, 4) * 1e6, chosen, states, None], device)
