"""vLLM V0's calls at random against a slow model: what every sequence should read, number by number."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest

from kvpool import LayerSpec
from kvpool.compat import BlockManager, CacheEngine
from kvpool.errors import OutOfBlocksError, SequenceStateError

torch = pytest.importorskip("torch")


class Model:
    """Sequences with their tokens; the key of a token is a number that stands for all tokens up to it."""

    def __init__(self, seed: int, enable_caching: bool, marks: bool) -> None:
        self.marks = marks  # False: bytes go through `gpu_cache` and nobody marks them, as with V0's naive allocator
        self.random = random.Random(seed)
        layers = [LayerSpec(1, 2, dtype="float32")] * 2
        self.blocks = BlockManager(4, 24, 16, layers=layers, enable_caching=enable_caching, device="cpu")
        self.engine = CacheEngine(self.blocks)
        self.names = count()
        self.tokens: dict[str, list[int]] = {}
        self.waiting: dict[str, str] = {}  # samples of a prompt that is not computed yet
        self.computed: set[str] = set()
        self.swapped: set[str] = set()
        self.numbers: dict[tuple[int, ...], float] = {}

    def number(self, tokens: list[int]) -> float:
        return self.numbers.setdefault(tuple(tokens), float(len(self.numbers) + 1))

    def pick(self, names: set[str]) -> str | None:
        return self.random.choice(sorted(names)) if names else None

    def write(self, name: str, start: int) -> None:
        known = self.tokens[name]
        if not self.marks:
            table = self.blocks.get_block_table(name)
            for i in range(start, len(known)):
                for layer, (keys, values) in enumerate(self.engine.gpu_cache):
                    keys[table[i // 4], i % 4] = self.number(known[: i + 1]) * (1 - 2 * layer)
                    assert values is not None
                    values[table[i // 4], i % 4] = -keys[table[i // 4], i % 4]
            return
        column = torch.tensor([self.number(known[: i + 1]) for i in range(start, len(known))])
        for layer in range(2):
            values = (column * (1 - 2 * layer))[:, None, None].expand(-1, 1, 2)
            self.blocks.write(name, layer, start, values, -values)

    def allocate(self) -> None:
        name, prompt = f"s{next(self.names)}", [self.random.randrange(2) for _ in range(self.random.randrange(1, 14))]
        self.blocks.allocate(name, prompt)
        self.tokens[name] = prompt

    def compute(self) -> None:
        """The prompt of a sequence; the samples that wait for it have it as well."""
        name = self.pick(self.tokens.keys() - self.computed - self.waiting.keys())
        if name is not None:
            start = self.blocks.handle(name).num_committed
            self.write(name, start)
            if self.marks:
                self.blocks.mark_blocks_as_computed(name, None)
            samples = {sample for sample, parent in self.waiting.items() if parent == name}
            self.computed |= {name, *samples}
            for sample in samples:
                del self.waiting[sample]

    def fork(self) -> None:
        parent = self.pick(self.tokens.keys() - self.swapped - self.waiting.keys())
        if parent is not None:
            name = f"s{next(self.names)}"
            self.blocks.fork(parent, name)
            self.tokens[name] = self.tokens[parent][:]
            if parent in self.computed:
                self.computed.add(name)
            else:
                self.waiting[name] = parent

    def append(self) -> None:
        name = self.pick(self.computed - self.swapped)
        if name is not None:
            self.engine.copy(self.blocks.append_slots(name, num_lookahead_slots=self.random.choice([0, 0, 3])))
            self.tokens[name].append(self.random.randrange(2))
            self.write(name, len(self.tokens[name]) - 1)
            if self.marks:
                self.blocks.mark_blocks_as_computed(name, self.tokens[name][-1:])

    def swap_out(self) -> None:
        name = self.pick(self.computed - self.swapped)
        if name is not None and self.blocks.can_swap_out([name]):
            self.engine.swap_out(self.blocks.swap_out([name]))
            self.swapped.add(name)

    def swap_in(self) -> None:
        name = self.pick(self.swapped)
        if name is not None:
            self.engine.swap_in(self.blocks.swap_in([name]))
            self.swapped.discard(name)

    def free(self) -> None:
        name = self.pick(set(self.tokens))
        if name is None:
            return
        self.blocks.free(name)
        heirs = [sample for sample, parent in self.waiting.items() if parent == name]
        self.waiting.pop(name, None)
        if heirs:
            del self.waiting[heirs[0]]
            self.waiting |= dict.fromkeys(heirs[1:], heirs[0])
        del self.tokens[name]
        self.computed.discard(name)
        self.swapped.discard(name)

    def check(self) -> None:
        self.blocks.manager.check()
        for name in self.computed:
            known = self.tokens[name]
            wanted = np.array([self.number(known[: i + 1]) for i in range(len(known))], np.float32)
            for layer in range(2):
                if self.marks:
                    keys, values = self.blocks.read(name, layer)
                elif name in self.swapped:
                    continue
                else:
                    table, (k, v) = self.blocks.get_block_table(name), self.engine.gpu_cache[layer]
                    assert v is not None
                    keys, values = k[table].flatten(0, 1)[: len(known)], v[table].flatten(0, 1)[: len(known)]
                assert np.array_equal(keys[:, 0, 1].numpy(), wanted * (1 - 2 * layer)), name
                assert values is not None
                assert torch.equal(values, -keys)


@pytest.mark.quick("0-True-True", "0-False-False")
@pytest.mark.parametrize(("enable_caching", "marks"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("seed", range(2))
def test_given_random_calls_then_every_sequence_reads_what_the_model_says(
    seed: int, enable_caching: bool, marks: bool
) -> None:
    model = Model(seed, enable_caching, marks)
    steps = [
        model.allocate,
        model.compute,
        model.fork,
        model.append,
        model.append,
        model.swap_out,
        model.swap_in,
        model.free,
    ]
    refused = 0
    for _ in range(120):
        try:
            model.random.choice(steps)()
        except (OutOfBlocksError, SequenceStateError):
            refused += 1
        model.check()
    assert refused < 70
    for name in list(model.tokens):
        model.blocks.free(name)
    assert (model.blocks.get_num_free_gpu_blocks(), model.blocks.get_num_free_cpu_blocks()) == (24, 16)
