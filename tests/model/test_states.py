"""Hybrid models in flattened steps with their states in slots: the tokens of `generate`, whatever shares a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hybrids import HYBRIDS, VOCABULARY, hybrid_model
from models import tiny_model
from transformers import DynamicCache

from kvpool import CopyKind, CopyOp, LayerSpec, StateSpec, Tier, layers_from_hf
from kvpool.config import PoolSpec
from kvpool.errors import InvalidArgumentError, UnsupportedModelError
from kvpool.kernels.layout import SlotStates
from kvpool.model.forward import forward
from kvpool.model.hook import use_kvpool_attention
from kvpool.model.probing import inspect_model, run_probe
from kvpool.model.self_check import ContiguousAttention
from kvpool.model.state_probing import use_kvpool_states
from kvpool.model.state_steps import StateStep, keeping_states
from kvpool.model.states import own_states, state_specs
from kvpool.storage import BlockStore, StateLayout, StateSlots, TransferEngine

NUM_SLOTS = 8
NEW_TOKENS = 6
BEGIN = -1  # the source of a sequence without a state
ONE_BY_ONE = {
    "falcon_mamba",
    "jamba",
    "mamba",
    "zamba",
}  # behind a state, for transformers' Mamba 1 forgets it otherwise


class Work(NamedTuple):
    """The tokens of one sequence in a step, from which slot it goes on, and into which its state goes."""

    sequence: int
    tokens: Sequence[int]
    start: int
    source: int
    target: int


class Reference(NamedTuple):
    """What `generate` makes of a prompt."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens


class _Group(NamedTuple):
    """What transfers ask of a layer group."""

    pool: int = 0


class Runner:
    """A hybrid model with its states in slots; keys and values are kept whole."""

    def __init__(self, model: Any) -> None:
        self.model = model
        assert use_kvpool_attention(model)
        self.modules = use_kvpool_states(model, lambda: run_probe(model))
        self.specs = state_specs(self.modules)
        layout = StateLayout(self.specs)
        pool = PoolSpec(0, layout.block_bytes, (0,), {Tier.GPU: NUM_SLOTS, Tier.HOST: NUM_SLOTS})
        self.store = BlockStore(pool, Tier.GPU, {0: layout})
        self.store.data.fill_(255)  # no state is read that was not written
        self.slots = StateSlots(self.store)
        self.host = BlockStore(pool, Tier.HOST, {0: layout})
        stores = {(0, Tier.GPU): self.store, (0, Tier.HOST): self.host}
        self.transfers = TransferEngine(stores, [_Group()], torch.device("cpu"))  # type: ignore[list-item]
        self.attention = ContiguousAttention()

    def step(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """The logits behind each sequence's last token."""
        ids = torch.tensor([token for work in works for token in work.tokens])
        positions = torch.cat([torch.arange(work.start, work.start + len(work.tokens)) for work in works])
        counts = [len(work.tokens) for work in works]
        states = StateStep.of(self.slots, counts, [work.source for work in works], [work.target for work in works])
        attend = self.attention.step({work.sequence: count for work, count in zip(works, counts, strict=True)})
        last = torch.tensor(np.cumsum(counts) - 1)
        return list(forward(self.model, ids, positions, last, attend, states))

    def copy(self, source: int, target: int, tiers: tuple[Tier, Tier] = (Tier.GPU, Tier.GPU)) -> None:
        slots = np.array([source], np.int32), np.array([target], np.int32)
        self.transfers.submit([CopyOp(CopyKind.COPY_ON_WRITE, 0, *tiers, *slots)]).wait()

    def fork(self, sequence: int, child: int, length: int) -> None:
        """Keys and values of a sequence's first tokens, for another one."""
        kept = self.attention._kept
        for layer, owner in [key for key in kept if key[1] == sequence]:
            keys, values = kept[layer, owner]
            kept[layer, child] = keys[:length], values[:length]

    def decode(self, rows: dict[int, list[int]], slots: dict[int, int], count: int) -> dict[int, list[torch.Tensor]]:
        """Greedy steps of all sequences together: `rows` are their tokens, of which the last was not computed yet."""
        logits: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in rows}
        for _ in range(count):
            works = [Work(s, row[-1:], len(row) - 1, slots[s], slots[s]) for s, row in rows.items()]
            for (sequence, row), found in zip(rows.items(), self.step(works), strict=True):
                logits[sequence].append(found)
                row.append(int(found.argmax()))
        return logits

    def close(self) -> None:
        self.transfers.close()


def generated(model: Any, length: int, seed: int) -> Reference:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        eos_token_id=-1,
    )
    return Reference(prompt, output.sequences[0, length:].tolist(), torch.cat(output.logits))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() < 1e-4 * expected.std()


SERVED = sorted(set(HYBRIDS) - {"inkling_text"})  # whose attention adds a bias that no paged cache can see


@pytest.fixture(scope="module", params=SERVED)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return hybrid_model(family)


@pytest.fixture(scope="module")
def references(model: Any) -> list[Reference]:
    return [generated(model, length, seed) for seed, length in enumerate((23, 9, 40))]


@pytest.fixture
def runner(references: list[Reference], model: Any) -> Any:
    made = Runner(model)
    yield made
    made.close()


@pytest.mark.quick("bamba")
def test_chunks_and_decoding_share_steps(runner: Runner, references: list[Reference]) -> None:
    a, b, c = references
    runner.step([Work(0, a.prompt[:10], 0, BEGIN, 5), Work(2, c.prompt[:17], 0, BEGIN, 3)])
    behind_b, behind_a = runner.step([Work(1, b.prompt, 0, BEGIN, 0), Work(0, a.prompt[10:], 10, 5, 5)])
    assert_near(behind_a, a.logits[0])
    assert_near(behind_b, b.logits[0])
    mixed = [Work(0, a.text[23:24], 23, 5, 5), Work(2, c.prompt[17:], 17, 3, 3), Work(1, b.text[9:10], 9, 0, 0)]
    for found, expected in zip(runner.step(mixed), (a.logits[1], c.logits[0], b.logits[1]), strict=True):
        assert_near(found, expected)
    rows = {0: a.text[:25], 1: b.text[:11], 2: c.text[:41]}
    logits = runner.decode(rows, {0: 5, 1: 0, 2: 3}, 4)
    assert rows == {0: a.text[:29], 1: b.text[:15], 2: c.text[:45]}
    for sequence, (reference, first) in enumerate(((a, 2), (b, 2), (c, 1))):
        assert_near(torch.stack(logits[sequence]), reference.logits[first : first + 4])


@pytest.mark.quick("bamba", "mamba2")
def test_chunks_of_one_token_and_of_equal_length(runner: Runner, references: list[Reference]) -> None:
    a, b, c = references
    runner.step([Work(i, r.prompt[:1], 0, BEGIN, i) for i, r in enumerate(references)])
    runner.step([Work(i, r.prompt[1:2], 1, i, i) for i, r in enumerate(references)])
    runner.step([Work(i, r.prompt[2:7], 2, i, i) for i, r in enumerate(references)])
    behind = runner.step([Work(i, r.prompt[7:], 7, i, i) for i, r in enumerate(references)])
    for found, reference in zip(behind, (a, b, c), strict=True):
        assert_near(found, reference.logits[0])


@pytest.mark.quick("bamba")
def test_a_checkpoint_is_the_slot_that_a_step_left(runner: Runner, references: list[Reference]) -> None:
    """The state at 17 stays in slot 3: the sequence goes on in slot 4, and another one begins from the same state."""
    a, _, c = references
    runner.step([Work(2, c.prompt[:17], 0, BEGIN, 3)])
    runner.fork(2, 7, 17)
    behind, _ = runner.step([Work(2, c.prompt[17:], 17, 3, 4), Work(0, a.prompt, 0, BEGIN, 1)])
    assert_near(behind, c.logits[0])
    rows = {0: a.text[:24], 2: c.text[:41]}
    runner.decode(rows, {0: 1, 2: 4}, 3)
    again, _ = runner.step([Work(7, c.prompt[17:], 17, 3, 6), Work(0, rows[0][-1:], 26, 1, 1)])
    assert_near(again, c.logits[0])
    rows = {7: c.text[:41]}
    runner.decode(rows, {7: 6}, NEW_TOKENS - 1)
    assert rows[7] == c.text


@pytest.mark.quick("bamba", "lfm2", "qwen3_5_moe_text")
def test_a_copied_slot_goes_on_by_itself(runner: Runner, references: list[Reference]) -> None:
    """A fork in the middle of decoding, whose state was on the host meanwhile: parent and child go on in the same steps."""
    a, b, _ = references
    runner.step([Work(0, a.prompt, 0, BEGIN, 0)])
    rows = {0: a.text[:24]}
    runner.decode(rows, {0: 0}, 2)
    runner.copy(0, 1, (Tier.GPU, Tier.HOST))
    runner.fork(0, 1, 25)
    runner.decode(rows, {0: 0}, 1)
    runner.copy(1, 2, (Tier.HOST, Tier.GPU))
    runner.copy(2, 6)
    other = [(token + 1) % VOCABULARY for token in b.prompt[:3]]
    runner.step([Work(1, [*a.text[25:26], *other], 25, 2, 2)])  # the child takes another way, in slot 2
    runner.fork(0, 8, 25)
    behind = runner.step([Work(8, a.text[25:27], 25, 6, 6), Work(0, rows[0][-1:], 26, 0, 0)])
    for found in behind:
        assert_near(found, a.logits[4])


@pytest.mark.quick("bamba", "lfm2", "qwen3_5_moe_text")
def test_two_sequences_begin_from_one_state(runner: Runner, references: list[Reference]) -> None:
    _, b, c = references
    runner.step([Work(2, c.prompt[:30], 0, BEGIN, 0)])
    runner.fork(2, 3, 30)
    behind, elsewhere = runner.step([Work(2, c.prompt[30:], 30, 0, 1), Work(3, b.prompt, 30, 0, 2)])
    assert_near(behind, c.logits[0])
    alone = forward_alone(runner, [*c.prompt[:30], *b.prompt])
    assert_near(elsewhere, alone[-1])


def forward_alone(runner: Runner, tokens: list[int]) -> torch.Tensor:
    runner.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits: torch.Tensor = runner.model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def test_states_are_those_that_the_configuration_says(family: str, runner: Runner) -> None:
    described = layers_from_hf({**runner.model.config.to_dict(), "dtype": "float32"})
    assert list(runner.specs.values()) == [layer for layer in described if isinstance(layer, StateSpec)]
    assert {module.continues for module in runner.modules} == {family not in ONE_BY_ONE}


@pytest.mark.quick("bamba")
def test_a_hybrid_model_passes_the_self_check(family: str) -> None:
    model = hybrid_model(family)
    shape = inspect_model(model, with_states=True)
    described = layers_from_hf({**model.config.to_dict(), "dtype": "float32"})
    assert list(shape.states.values()) == [layer for layer in described if isinstance(layer, StateSpec)]
    assert len(shape.layers) == len(shape.attending) == len(described) - len(shape.states)
    if family != "kimi_linear":  # K and V are expanded there, as transformers computes them
        assert shape.layer_specs() == [layer for layer in described if isinstance(layer, LayerSpec)]


@pytest.mark.quick("bamba")
@pytest.mark.parametrize("family", ["bamba", "mamba", "qwen3_next", "zaya"], indirect=True)
def test_a_state_that_is_lost_fails_the_self_check(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: SlotStates, values: torch.Tensor) -> None:
        scatter(self, torch.zeros_like(values))

    scatter = SlotStates.scatter
    monkeypatch.setattr(SlotStates, "scatter", lost)
    model = hybrid_model(family)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="fails the self-check"):
        inspect_model(model, with_states=True)
    assert model.config._attn_implementation == before
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.quick("bamba")
def test_states_in_16_bits_keep_their_recurrence_in_float32(family: str) -> None:
    model = hybrid_model(family).bfloat16()
    shape = inspect_model(model, with_states=True)
    described = layers_from_hf({**model.config.to_dict(), "dtype": "bfloat16"})
    assert list(shape.states.values()) == [layer for layer in described if isinstance(layer, StateSpec)]
    assert {module.continues for module in use_kvpool_states(model, lambda: run_probe(model))} == {
        family not in ONE_BY_ONE
    }


@pytest.mark.parametrize("family", sorted(ONE_BY_ONE | {"bamba", "zamba2"}), indirect=True)
def test_transformers_itself_forgets_the_state_of_mamba_at_a_border(family: str) -> None:
    """Why some families go on token by token: behind a border, transformers' own cache gives them other logits."""
    model = hybrid_model(family)
    positions = torch.arange(40)[None]
    tokens = positions + 3
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits[0]
        cache = DynamicCache(config=model.config)
        arguments = dict(use_cache=True, cache_params=cache)
        for start in (0, 20):
            if family not in {"mamba", "falcon_mamba"}:
                arguments = dict(use_cache=True, past_key_values=cache, position_ids=positions[:, start : start + 20])
            behind = model(tokens[:, start : start + 20], **arguments).logits[0]
    difference = (behind - whole[20:]).abs().max() / whole.std()
    assert (difference > 1e-4) == (family in ONE_BY_ONE)


@pytest.mark.parametrize("family", ["bamba", "nemotron_h", "zamba2"], indirect=True)
def test_transformers_itself_bounds_time_steps_in_prompts_only(family: str) -> None:
    """Why logits of some families depend on whether a token was read or generated: transformers computes it otherwise."""
    model = hybrid_model(family, time_step_min=0.1) if family != "bamba" else hybrid_model(family)
    places = torch.arange(16).split(1)
    with torch.no_grad():
        whole = model(torch.arange(3, 19)[None], use_cache=False).logits[0]
        cache = DynamicCache(config=model.config)
        singly = [
            model(place[None] + 3, position_ids=place[None], use_cache=True, past_key_values=cache).logits[0]
            for place in places
        ]
    difference = (torch.cat(singly) - whole).abs().max() / whole.std()
    assert (difference > 1e-3) == (family != "bamba")


@pytest.mark.parametrize("family", ["bamba", "mamba", "olmo_hybrid", "zaya"], indirect=True)
def test_a_step_that_a_graph_replays_reads_the_slots_of_the_moment(runner: Runner, references: list[Reference]) -> None:
    """Slots on the device change in place between two steps. The last row only fills up, in slot 7."""
    a, b, _ = references
    runner.step([Work(0, a.prompt, 0, BEGIN, 0), Work(1, b.prompt, 0, BEGIN, 1)])
    sources, targets = torch.tensor([0, 1, 7]), torch.tensor([2, 3, 7])
    step = StateStep.decoding(runner.slots, sources, targets)
    for place in range(2):
        ids = torch.tensor([a.tokens[place], b.tokens[place], 5])
        positions = torch.tensor([23 + place, 9 + place, place])
        attend = runner.attention.step({0: 1, 1: 1, 9: 1})
        behind_a, behind_b, _ = forward(runner.model, ids, positions, None, attend, step)
        assert_near(behind_a, a.logits[place + 1])
        assert_near(behind_b, b.logits[place + 1])
        sources.copy_(targets)
        targets.copy_(torch.tensor([4, 3, 7]))


def test_a_step_names_a_source_and_a_target_for_every_sequence() -> None:
    runner = Runner(hybrid_model("lfm2"))
    for counts, sources, targets in (([1], [], [0]), ([1, 1], [0, 1], [0]), ([0], [0], [0])):
        with pytest.raises(InvalidArgumentError, match="at least one token"):
            StateStep.of(runner.slots, counts, sources, targets)
    with pytest.raises(InvalidArgumentError, match="name a slot twice"):
        StateStep.of(runner.slots, [1, 1], [0, 1], [2, 2])
    runner.close()


def test_modules_of_one_layer_keep_states_of_their_own() -> None:
    """Inkling has four convolutions in every layer, each with a state of its own in the layer's cache."""
    model = hybrid_model("inkling_text")
    hidden = {module: torch.randn(1, 12, module.conv1d.in_channels) for module in short_convolutions(model)}
    expected = {module: module(values) for module, values in hidden.items()}
    modules = use_kvpool_states(model, lambda: [module(values) for module, values in hidden.items()])
    specs = state_specs(modules)
    assert [part.name for part in specs[0].parts] == ["conv", "conv1", "conv2", "conv3"]
    slots = StateSlots.allocate(specs, 2)
    for step, cut in (
        (StateStep.of(slots, [5], [BEGIN], [1]), slice(0, 5)),
        (StateStep.of(slots, [7], [1], [0]), slice(5, 12)),
    ):
        with keeping_states(step), torch.no_grad():
            for module, values in hidden.items():
                torch.testing.assert_close(module(values[:, cut]), expected[module][:, cut])


def short_convolutions(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "InklingShortConvolution"]


def test_attention_with_a_bias_by_distance_is_refused() -> None:
    model = hybrid_model("inkling_text")
    assert use_kvpool_attention(model)
    with pytest.raises(UnsupportedModelError, match="adds a mask or bias of its own"):
        run_probe(model)


def test_a_model_is_given_back_as_it_was() -> None:
    model = hybrid_model("qwen3_next")
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
        runner = Runner(model)
        runner.close()
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(tokens, use_cache=False).logits, before)
        assert any("forward" in vars(module) for module in model.modules())
        own_states(model)
        assert not any("forward" in vars(module) for module in model.modules())
        assert torch.equal(model(tokens, use_cache=False).logits, before)


def test_a_model_without_states_has_no_such_modules() -> None:
    model = tiny_model("llama")
    assert use_kvpool_states(model, lambda: None) == []


def test_a_module_that_reads_a_mask_of_the_whole_step_is_refused() -> None:
    model = hybrid_model("lfm2")
    runner = Runner(model)
    module = runner.modules[0].module
    states = StateStep.of(runner.slots, [3], [BEGIN], [0])
    with keeping_states(states), pytest.raises(UnsupportedModelError, match="takes attention_mask of the whole step"):
        module(torch.zeros(1, 3, 64), attention_mask=torch.ones(1, 3))
    runner.close()
