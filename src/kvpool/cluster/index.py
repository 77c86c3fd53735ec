"""Which prefix of a prompt every node of a cluster has cached, and in which medium: a table of blocks by content.

Nodes name blocks by their own hashes, but say which tokens the blocks hold. The index identifies a block by its content: the
sum of all tokens up to its end, each times a random weight of its position. The keys of a whole prompt are one product and
one running sum, so a lookup compares no tokens and computes no hash in Python. The weights are secret and new in every
process. Two different prefixes get the same key with a probability under 2^-46; then a request may go to a worse node.

A block has one bit per node in a word for each medium, so it costs the same whether one node has it or 64.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.checks import check_int, show
from kvpool.cluster.hash_table import HashTable, Keys, Slots
from kvpool.cluster.wire_events import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, WireEvent
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import as_array

MAX_NODES = 64
_MASK_64 = (1 << 64) - 1
_WHOLE_PREFIX = (
    "full_attention",
    "mla_attention",
    "sink_full_attention",
)  # kinds of layer groups that need every block
_ONE = np.uint64(1)
_RUNS = 4  # runs that are followed one by one; if more seem to be left, the rest is looked up at once
_MOST_MEMBERS = 4096
_vecdot = getattr(np, "vecdot", None)  # since numpy 2.0


class Hit(NamedTuple):
    """How many of the first tokens of a prompt a node has: on its GPU; there or in host memory; there or on storage."""

    gpu: int
    cpu: int
    storage: int


class NodeBlocks(NamedTuple):
    """How many blocks a node has in each medium."""

    gpu: int
    cpu: int
    storage: int


class IndexStats(NamedTuple):
    """The size of an index, and how many events it could not use."""

    num_blocks: int
    num_bytes: int
    num_orphans: int  # blocks whose parent is not known: their node must announce them again
    num_refused: int  # events about another block size, an unknown medium or an unknown node


class _Node:
    """What is known of one node besides its bits."""

    __slots__ = ("aliases", "bit", "num_blocks", "skipped_groups")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.num_blocks = [0] * len(MEDIA)
        self.aliases: dict[int, int] = {}  # its hashes of blocks for which other nodes have another hash
        self.skipped_groups: set[int] = set()  # layer groups that say nothing about prefixes


class ClusterIndex:
    """What up to 64 nodes have cached. Any thread may call it.

    `apply(node, events)` takes the events of a node, `match(tokens)` says what each node would reuse. For hybrid models, only
    the full-attention layers count.
    """

    def __init__(self, block_size: int, *, seed: int | None = None) -> None:
        self.block_size = check_int(block_size, "block_size", 1, 1 << 20, InvalidArgumentError)
        self._seed = secrets.randbits(63) if seed is None else seed
        self._lock = threading.Lock()
        self._nodes: dict[Hashable, _Node] = {}
        self._names: dict[int, Hashable] = {}  # by their bits
        self._known_members: dict[int, tuple[Hashable, ...]] = {}  # sets of nodes by the words that stand for them
        self._is_tiered = False  # whether any block was ever stored elsewhere than on a GPU
        self._weights = np.zeros((0, self.block_size), np.int64)  # of each position, in blocks
        self._block_weights: Keys = np.zeros(0, np.uint64)  # added up over each block
        self._no_key = np.random.default_rng(self._seed + 3).integers(0, 1 << 64, dtype=np.uint64)
        self._by_content = HashTable(self._seed + 1)
        self._by_hash = HashTable(self._seed + 2)
        self._keys: Keys = np.zeros(0, np.uint64)
        self._hashes: Keys = np.zeros(0, np.uint64)
        self._depths: Slots = np.zeros(0, np.int32)
        self._named = np.zeros(0, np.bool_)  # whether the hash of a slot is in `_by_hash`
        self._holders = np.zeros((len(MEDIA), 0), np.uint64)
        self._free: Slots = np.zeros(0, np.int32)
        self._num_free = 0
        self._num_orphans = self._num_refused = 0

    # --- nodes -------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[Hashable, ...]:
        """The names of the nodes."""
        return tuple(self._nodes)

    def add_node(self, node: Hashable) -> None:
        """Adds a node; a known one stays as it is."""
        with self._lock:
            if node in self._nodes:
                return
            used = {each.bit for each in self._nodes.values()}
            if len(used) == MAX_NODES:
                raise InvalidArgumentError(
                    f"an index has room for {MAX_NODES} nodes, {show(node)} would be one more; see docs/cluster.md for cells"
                )
            bit = next(bit for bit in range(MAX_NODES) if bit not in used)
            self._nodes[node] = _Node(bit)
            self._names[bit] = node
            self._known_members.clear()

    def remove_node(self, node: Hashable) -> None:
        """Forgets a node and everything that it holds."""
        with self._lock:
            known = self._node(node)
            self._clear(known)
            del self._nodes[node], self._names[known.bit]
            self._known_members.clear()

    def clear_node(self, node: Hashable) -> None:
        """Forgets what a node holds; it stays in the index."""
        with self._lock:
            self._clear(self._node(node))

    def _node(self, node: Hashable) -> _Node:
        try:
            return self._nodes[node]
        except KeyError:
            raise InvalidArgumentError(f"{show(node)} is no node of this index; add_node() first") from None

    # --- events ------------------------------------------------------------------------------------------------------

    def apply(self, node: Hashable, events: Iterable[WireEvent]) -> int:
        """Applies events of a node. Returns how many blocks were dropped because their parent is not known."""
        num_orphans = 0
        for event in events:
            with self._lock:  # for each: a question waits for one event at most
                known = self._node(node)
                if isinstance(event, BlockStored):
                    num_orphans += self._store(known, event)
                elif isinstance(event, BlockRemoved):
                    self._remove(known, event)
                elif isinstance(event, AllBlocksCleared):
                    self._clear(known)
                else:
                    raise InvalidArgumentError(
                        f"{show(event)} is no event of the wire: WireTranslator makes them from those of a manager"
                    )
        return num_orphans

    def _store(self, node: _Node, event: BlockStored) -> int:
        if event.kind is not None and event.kind not in _WHOLE_PREFIX:
            if event.group is not None:
                node.skipped_groups.add(event.group)
            return 0
        if event.medium not in MEDIA or event.block_size != self.block_size:
            self._num_refused += 1
            return 0
        hashes, tokens = _numbers(event.hashes, np.uint64), _numbers(event.tokens, np.int64)
        if len(tokens) != len(hashes) * self.block_size:
            raise InvalidArgumentError(
                f"{len(hashes)} blocks of {self.block_size} tokens were stored with {len(tokens)} tokens: {show(event)}"
            )
        depth, base = 0, self._root(event.lora_name)
        if event.parent is not None:
            parent = int(self._resolve(node, _numbers([event.parent], np.uint64))[0])
            if parent < 0:
                self._num_orphans += len(hashes)
                return len(hashes)
            depth, base = int(self._depths[parent]) + 1, int(self._keys[parent])
        keys = self._content(tokens, depth, base, event.extra_keys)
        slots = self._by_content.find(keys)
        is_new = slots < 0
        if is_new.any():
            slots[is_new] = self._new_slots(keys[is_new], np.flatnonzero(is_new) + depth)
        self._name(node, hashes, slots, is_new)
        medium = MEDIA.index(event.medium)
        self._is_tiered |= medium > 0
        bit, words = _ONE << np.uint64(node.bit), self._holders[medium, slots]
        node.num_blocks[medium] += len(slots) - int(np.count_nonzero(words & bit))
        self._holders[medium, slots] = words | bit
        return 0

    def _name(self, node: _Node, hashes: Keys, slots: Slots, is_new: npt.NDArray[np.bool_]) -> None:
        """Records a node's hashes of blocks: a new block gets the hash as its name; for others the node gets an alias."""
        taken = self._by_hash.find(_spread(hashes))
        is_first = np.zeros(len(hashes), np.bool_)
        is_first[np.unique(hashes, return_index=True)[1]] = True
        named = is_new & (taken < 0) & is_first
        if named.any():
            self._hashes[slots[named]] = hashes[named]
            self._named[slots[named]] = True
            self._by_hash.add(_spread(hashes[named]), slots[named])
        for at in np.flatnonzero(~named & (taken != slots)).tolist():
            node.aliases[int(hashes[at])] = int(slots[at])

    def _remove(self, node: _Node, event: BlockRemoved) -> None:
        if event.group in node.skipped_groups:
            return
        if event.medium not in MEDIA:
            self._num_refused += 1
            return
        slots = self._resolve(node, _numbers(event.hashes, np.uint64))
        slots = np.unique(slots[slots >= 0])
        medium = MEDIA.index(event.medium)
        bit, words = _ONE << np.uint64(node.bit), self._holders[medium, slots]
        node.num_blocks[medium] -= int(np.count_nonzero(words & bit))
        self._holders[medium, slots] = words & ~bit
        if node.aliases:
            gone = set(slots[~self._holds(node, slots)].tolist())
            for block_hash in event.hashes:
                if node.aliases.get(block_hash) in gone:
                    del node.aliases[block_hash]
        self._drop(slots[~self._holders[:, slots].any(axis=0)])

    def _resolve(self, node: _Node, hashes: Keys) -> Slots:
        """The slots of blocks by the node's hashes; -1 for unknown ones."""
        slots = self._by_hash.find(_spread(hashes))
        if node.aliases:
            for at, block_hash in enumerate(hashes.tolist()):
                if (alias := node.aliases.get(block_hash)) is not None:
                    slots[at] = alias
        return slots

    def _holds(self, node: _Node, slots: Slots) -> npt.NDArray[np.bool_]:
        """Whether a node has these blocks in any medium."""
        words: Keys = np.bitwise_or.reduce(self._holders[:, slots], axis=0)
        return ((words >> np.uint64(node.bit)) & _ONE).astype(np.bool_)

    def _clear(self, node: _Node) -> None:
        bit = _ONE << np.uint64(node.bit)
        held = np.flatnonzero(np.bitwise_or.reduce(self._holders, axis=0) & bit).astype(np.int32)
        self._holders[:, held] &= ~bit
        node.num_blocks = [0] * len(MEDIA)
        node.aliases.clear()
        node.skipped_groups.clear()
        self._drop(held[~self._holders[:, held].any(axis=0)])

    # --- content and slots -------------------------------------------------------------------------------------------

    def _root(self, lora_name: str | None) -> int:
        """The first summand of the keys of all prompts for an adapter."""
        return hash((self._seed, lora_name)) & _MASK_64

    def _content(self, tokens: npt.NDArray[Any], depth: int, base: int, extra_keys: Sequence[Any] | None) -> Keys:
        """The keys of consecutive full blocks. The first is number `depth` of a prompt and follows `base`."""
        num_blocks = len(tokens) // self.block_size
        end = depth + num_blocks
        if len(self._weights) < end:
            self._more_weights(end)
        ids = tokens.astype(np.int64).reshape(num_blocks, self.block_size)
        sums = _row_products(ids, self._weights[depth:end]).view(np.uint64)
        sums += self._block_weights[depth:end]
        for at, extra in enumerate(extra_keys or ()):
            if extra and at < num_blocks:
                sums[at : at + 1] += np.uint64(hash((self._seed, depth + at, _frozen(extra))) & _MASK_64)
        keys: Keys = np.add.accumulate(sums)
        keys += np.array(base, np.uint64)  # adding a zero-dimensional array is faster than adding a number
        return keys

    def _more_weights(self, num_blocks: int) -> None:
        """Makes weights for at least so many blocks. A token counts as its id plus one, so that token 0 changes the sum."""
        shape = (max(1024, 1 << (num_blocks - 1).bit_length()), self.block_size)
        self._weights = np.random.default_rng(self._seed).integers(0, 1 << 64, shape, np.uint64).view(np.int64)
        self._block_weights = self._weights.sum(axis=1).view(np.uint64)

    def _new_slots(self, keys: Keys, depths: npt.NDArray[np.int64]) -> Slots:
        """Slots for new blocks."""
        if self._num_free < len(keys):
            self._grow(len(keys))
        self._num_free -= len(keys)
        slots = self._free[self._num_free : self._num_free + len(keys)][::-1].copy()  # ascending, where they were new
        self._keys[slots] = keys
        self._depths[slots] = depths
        self._by_content.add(keys, slots)
        return slots

    def _grow(self, num_wanted: int) -> None:
        old = len(self._keys)
        new = max(1024, 2 * old, old + num_wanted)
        for name in ("_keys", "_hashes", "_depths", "_named", "_free"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(new - old, getattr(self, name).dtype))))
        self._holders = np.concatenate((self._holders, np.zeros((len(MEDIA), new - old), np.uint64)), axis=1)
        self._free[self._num_free : self._num_free + new - old] = np.arange(new - 1, old - 1, -1)
        self._num_free += new - old

    def _drop(self, slots: Slots) -> None:
        """Forgets blocks that nobody holds any more."""
        if not len(slots):
            return
        self._by_content.remove(self._keys[slots])
        self._keys[slots] = self._no_key  # the same content may be added again in another slot
        named = slots[self._named[slots]]
        self._by_hash.remove(_spread(self._hashes[named]))
        self._named[named] = False
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)

    # --- questions ---------------------------------------------------------------------------------------------------

    def match(
        self, tokens: Any, *, lora_name: str | None = None, extra_keys: Sequence[Any] | None = None
    ) -> dict[Hashable, Hit]:
        """How many tokens of a prompt each node has cached, in full blocks, without nodes that have none.

        `extra_keys` of its blocks come in the form of the wire; see `scope_keys` and `item_keys`.
        """
        return self._match(tokens, lora_name, extra_keys)[1]

    def match_keys(
        self, tokens: Any, *, lora_name: str | None = None, extra_keys: Sequence[Any] | None = None
    ) -> tuple[list[int], dict[Hashable, Hit]]:
        """The same, and a number for every full block of the prompt, which identifies all tokens up to its end."""
        keys, hits = self._match(tokens, lora_name, extra_keys)
        return keys.tolist(), hits

    def _match(
        self, tokens: Any, lora_name: str | None, extra_keys: Sequence[Any] | None
    ) -> tuple[Keys, dict[Hashable, Hit]]:
        ids = as_array(tokens, "tokens")
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise InvalidArgumentError(f"a prompt is a row of token ids, got {show(tokens)}")
        num_tokens = len(ids) // self.block_size * self.block_size
        with self._lock:
            keys = self._content(ids[:num_tokens], 0, self._root(lora_name), extra_keys)
            path = self._path(keys)
            return keys, {} if path is None else self._hits(path)

    def _hits(self, path: slice | Slots) -> dict[Hashable, Hit]:
        """The hits of all nodes, from the words of the media for the blocks of a prompt."""
        gpu = self._holders[0][path]
        on_gpu = self._lengths(gpu)
        lower = self._holders[1:, path] if self._is_tiered else None
        if lower is None or not lower.tobytes().strip(b"\0"):  # cached on GPUs only, as for most prompts
            same = {length: Hit(length, length, length) for length in set(on_gpu.values())}
            return {node: same[length] for node, length in on_gpu.items()}
        or_cpu = self._lengths(gpu | lower[0])
        anywhere = self._lengths(gpu | lower[0] | lower[1])
        return {node: Hit(on_gpu.get(node, 0), or_cpu.get(node, 0), length) for node, length in anywhere.items()}

    def _lengths(self, words: Keys) -> dict[Hashable, int]:
        """How many tokens each node has up to its first gap, from the words of one medium, without nodes that lack the first
        block.
        """
        found: dict[Hashable, int] = {}
        differs = (words[1:] != words[:-1]).tobytes()
        alive, end = words.item(0), 0
        while alive:
            end = differs.find(b"\1", end) + 1
            word = words.item(end) if end else 0
            if lost := alive & ~word:
                found.update(dict.fromkeys(self._members(lost), (end or len(words)) * self.block_size))
                alive &= word
        return found

    def _members(self, word: int) -> tuple[Hashable, ...]:
        """The nodes whose bits are set. Results are kept, because the same sets come often."""
        known = self._known_members.get(word)
        if known is None:
            if len(self._known_members) == _MOST_MEMBERS:
                self._known_members.clear()
            known = tuple(name for bit, name in self._names.items() if word >> bit & 1)
            self._known_members[word] = known
        return known

    def _path(self, keys: Keys) -> slice | Slots | None:
        """The slots of the longest prefix of a prompt that anybody holds; None if nobody has its first block.

        Blocks of one event mostly have consecutive slots, so the first one leads to all of them. If such a run is short
        compared with the rest of the prompt, many runs will follow, so the rest is looked up at once.
        """
        runs: list[Slots] = []
        at, num_keys = 0, len(keys)
        while at < num_keys:
            first = self._by_content.find_one(keys.item(at))
            if first < 0:
                break
            length = _num_leading(self._keys[first : first + num_keys - at], keys[at:])
            if length == num_keys:
                return slice(first, first + length)
            runs.append(np.arange(first, first + length, dtype=np.int32))
            at += length
            if length * _RUNS < num_keys - at:
                slots = self._by_content.find(keys[at:])
                missing = np.flatnonzero(slots < 0)
                runs.append(slots[: missing[0]] if len(missing) else slots)
                break
        if not runs:
            return None
        return np.concatenate(runs) if len(runs) > 1 else runs[0]

    def node_blocks(self) -> dict[Hashable, NodeBlocks]:
        """What every node has, in blocks."""
        with self._lock:
            return {name: NodeBlocks(*node.num_blocks) for name, node in self._nodes.items()}

    def stats(self) -> IndexStats:
        """Its size, and what it could not use."""
        with self._lock:
            num_blocks = len(self._keys) - self._num_free
            return IndexStats(num_blocks, self._num_bytes(), self._num_orphans, self._num_refused)

    def _num_bytes(self) -> int:
        arrays = (self._keys, self._hashes, self._depths, self._named, self._holders, self._free, self._weights)
        tables = self._by_content.num_bytes + self._by_hash.num_bytes
        return tables + sum(array.nbytes for array in arrays) + self._block_weights.nbytes


def _numbers(values: Sequence[int], dtype: type[Any]) -> npt.NDArray[Any]:
    """Hashes or tokens of an event."""
    try:
        return np.array(values, dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"an event has {show(values)}, which are no {np.dtype(dtype).name}: {error}"
        ) from None


def _spread(names: Keys) -> Keys:
    """Spreads block names evenly over 64 bits, even if a node numbers its blocks 1, 2, 3. Different names stay different."""
    mixed: Keys = (names ^ (names >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xD1342543DE82EF95)
    return mixed ^ (mixed >> np.uint64(32))


def _num_leading(values: Keys, wanted: Keys) -> int:
    """How many of the first values are as wanted; there may be fewer values."""
    at = (values == wanted[: len(values)]).tobytes().find(b"\0")
    return len(values) if at < 0 else at


def _row_products(ids: npt.NDArray[np.int64], weights: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sum of the products of each row."""
    products: npt.NDArray[np.int64] = np.einsum("ij,ij->i", ids, weights) if _vecdot is None else _vecdot(ids, weights)
    return products


def _frozen(value: Any) -> Any:
    """Nested lists as tuples, which have a hash."""
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value
