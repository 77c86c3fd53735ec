"""RedisTier: values in Redis or Valkey, one server or a cluster, shared by every process that has the address.

Each value is two strings in one hash slot: the bytes under `kvpool:NAMESPACE:{KEY}`, and their seal (the header of
`tiers/envelope.py`) under the same name with `:seal` at the end. So bytes go straight between the server and the caller's
memory, and the seal says how many to expect. The seal is written last: without it, the value does not exist.
"""

from __future__ import annotations

import re
import threading
from binascii import crc_hqx
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import Any

from kvpool.errors import InvalidArgumentError
from kvpool.tiers.contract import KEY_BYTES, Outcome
from kvpool.tiers.envelope import is_whole, num_bytes, seal
from kvpool.tiers.keys import SPACE_BYTES, KeyPattern
from kvpool.tiers.options import TierURL
from kvpool.tiers.remote.redis_node import CommandError, RedisNode, RedisOptions
from kvpool.tiers.remote.remote_tier import NodeError, Purging, RemoteTier, Share, seconds_left

PIPELINE_BYTES = 2 << 20
DIRECT_BYTES = 16 << 20
GROUP = 16
SCAN_COUNT = 1000  # names that the server looks at in one go
_SEAL = b":seal"
_VALUE = re.compile(rb"\{[0-9a-f]{64}\}(:seal)?$")


class RedisTier(RemoteTier[RedisNode]):
    """Values in Redis or Valkey.

    `redis://[user:password@]host[:port][/database]?option=value&…`, or `rediss://` for TLS. Options: `cluster=1` and
    `nodes=host:port,…` (more nodes to begin with), `namespace`, `ttl` (seconds from storing), `timeout`, `max_value_bytes`,
    `connections` (per node), `pause` (seconds before a node that failed is probed), `ca`, `cert`, `key` (files, for TLS).
    A server that is down or refuses the password raises nothing: `stats().problem` says what is wrong.
    """

    def __init__(self, url: str) -> None:
        parsed = TierURL.parse(url)
        if parsed.scheme not in ("redis", "rediss"):
            raise InvalidArgumentError(f"a Redis tier's address begins with redis:// or rediss://, got {parsed.shown}")
        self._options = options = RedisOptions.of(parsed)
        super().__init__(parsed.shown, timeout=options.timeout, max_value_bytes=options.max_value_bytes)
        self._expiry = [] if options.ttl is None else ["PX", str(max(1, int(options.ttl * 1000)))]
        self._prefix = f"kvpool:{options.namespace}:"
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._slots: SlotMap | None = None
        self._by_address = {seed: RedisNode(*seed, options) for seed in options.seeds}
        self._first = self._by_address[options.seeds[0]]
        for _ in range(2 if options.cluster else 1):  # the first round of a cluster brings the other nodes
            probes = [self._probe_in_background(node) for node in self._nodes()]
            wait([probe for probe in probes if probe is not None], options.timeout / 2)

    def names(self, key: bytes) -> tuple[str, str]:
        """Where the bytes of a value are, and where its seal. The braces keep both in one slot."""
        name = f"{self._prefix}{{{key.hex()}}}"
        return name, f"{name}:seal"

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[RedisNode]:
        with self._lock:
            return list(self._by_address.values())

    def _holders(self) -> list[RedisNode]:
        """In a cluster only the masters, because replicas hold the same values."""
        slots = self._slots
        with self._lock:
            nodes = self._by_address
            return list(nodes.values()) if slots is None else [nodes[each] for each in slots.addresses if each in nodes]

    def _node_of(self, key: bytes) -> RedisNode:
        slots = self._slots
        address = None if slots is None else slots.address(slot_of(key.hex().encode()))
        return self._first if address is None else self._by_address.get(address, self._first)

    def _probe(self, node: RedisNode) -> None:
        if self._options.cluster:
            self._learn_slots([*(known for known in self._nodes() if known.breaker.allows()), node])
        node.check(self.timeout)

    def _learn_slots(self, nodes: list[RedisNode]) -> None:
        """Takes the slot map of the first node that answers, and closes nodes that have left."""
        with self._learning:
            for node in nodes:
                try:
                    slots = SlotMap(node.cluster_slots(self.timeout), node.host)
                except (NodeError, TimeoutError):
                    continue
                self._take_over(slots)
                return

    def _take_over(self, slots: SlotMap) -> None:
        with self._lock:
            wanted = slots.addresses | set(self._options.seeds)
            gone = [self._by_address.pop(address) for address in set(self._by_address) - wanted]
            for address in wanted - set(self._by_address):
                self._by_address[address] = RedisNode(*address, self._options)
            self._slots = slots
        for node in gone:
            node.close()

    def _moved(self, node: RedisNode, refusal: CommandError) -> None:
        """Slots have moved: asks who has them now, in the background."""
        if not self._options.cluster:
            problem = "it is a node of a cluster: add cluster=1 to the address"
            node.breaker.failed(problem)
            raise NodeError(problem)
        if not self._learning.locked():
            node.threads.submit(self._learn_slots, [node])

    # --- shares ------------------------------------------------------------------------------------------------------

    def _run(self, share: Share[RedisNode], client: object, commands: list[list[object]]) -> list[object]:
        """Answers of the node, each a value or a `CommandError`."""
        return share.node.run(client, commands, share.seconds_left())

    def _ask(
        self, share: Share[RedisNode], client: object, places: Sequence[int], commands: list[list[object]]
    ) -> Iterator[tuple[int, object]]:
        """The answer to the command of each place. If the server refuses one, that key has failed, or the node has."""
        for place, answer in zip(places, self._run(share, client, commands), strict=True):
            if not isinstance(answer, CommandError):
                yield place, answer
                continue
            share.outcomes[place] = Outcome.FAILED
            if answer.moved:
                self._moved(share.node, answer)
            elif not answer.is_about_the_value:
                share.node.breaker.failed(answer.text)
                raise NodeError(answer.text)

    def _find_share(self, share: Share[RedisNode]) -> None:
        with share.node.connection() as client:
            places = self._find_groups(share, client) if self._slots is None else range(len(share.keys))
            if places:
                lookups: list[list[object]] = [["EXISTS", *self.names(share.keys[place])] for place in places]
                for place, count in self._ask(share, client, places, lookups):
                    share.outcomes[place] = Outcome.OK if count == 2 else Outcome.MISS

    def _find_groups(self, share: Share[RedisNode], client: object) -> list[int]:
        """Looks up groups of keys, each with one command that counts how many exist. Returns the places of groups of which
        only some exist. Of a prefix that is one group, so a long prefix costs little more than a short one."""
        groups = [list(range(len(share.keys)))[start : start + GROUP] for start in range(0, len(share.keys), GROUP)]
        commands: list[list[object]] = [
            ["EXISTS", *(name for place in group for name in self.names(share.keys[place]))] for group in groups
        ]
        divided = []
        for group, count in zip(groups, self._run(share, client, commands), strict=True):
            if count in (0, 2 * len(group)):
                for place in group:
                    share.outcomes[place] = Outcome.OK if count else Outcome.MISS
            else:
                divided += group
        return divided

    def _remove_share(self, share: Share[RedisNode]) -> None:
        with share.node.connection() as client:
            commands: list[list[object]] = [["UNLINK", *self.names(key)] for key in share.keys]
            for place, count in self._ask(share, client, range(len(share.keys)), commands):
                share.outcomes[place] = Outcome.OK if count else Outcome.MISS
                self.stale.discard(share.keys[place])

    def _purge_share(self, purging: Purging[RedisNode]) -> None:
        """Uses SCAN, which does not block the server for others. It may miss values that are written meanwhile."""
        with purging.node.connection() as client:
            for names in self._scanned(purging.node, client, purging.pattern, purging.deadline):
                answers = self._answers(purging.node, client, [["UNLINK", name] for name in names], purging.deadline)
                for name, removed in zip(names, answers, strict=True):
                    if isinstance(removed, CommandError):
                        purging.num_left += 1
                    elif not name.endswith(_SEAL):
                        purging.removed += removed

    def _list_node(self, node: RedisNode, deadline: float) -> Iterator[dict[bytes, int]]:
        """Values whose bytes and seal are both there."""
        with node.connection() as client:
            for names in self._scanned(node, client, KeyPattern(), deadline):
                found = [name.removesuffix(_SEAL) for name in names if name.endswith(_SEAL)]
                commands = [[verb, name] for name in found for verb in ("EXISTS", "STRLEN")]
                answers = self._answers(node, client, commands, deadline)
                yield {
                    bytes.fromhex(name[-2 * KEY_BYTES - 1 : -1].decode()): size
                    for name, is_there, size in zip(found, answers[::2], answers[1::2], strict=True)
                    if is_there == 1 and isinstance(size, int)
                }

    def _scanned(self, node: RedisNode, client: object, pattern: KeyPattern, deadline: float) -> Iterator[list[bytes]]:
        """The names of such keys, in parts; a name may come twice."""
        cursor, shape = "0", self._shape(pattern)
        while True:
            scan = ["SCAN", cursor, "MATCH", shape, "COUNT", str(SCAN_COUNT)]
            (answer,) = self._answers(node, client, [scan], deadline)
            if isinstance(answer, CommandError):
                raise NodeError(answer.text)
            cursor = answer[0].decode()
            yield [name for name in answer[1] if _is_value(name)]
            if cursor == "0":
                return

    def _answers(self, node: RedisNode, client: object, commands: list[Any], deadline: float) -> list[Any]:
        """The answers of a node to commands of a scan. Each command takes no longer than a request may."""
        return node.run(client, commands, min(self.timeout, seconds_left(deadline))) if commands else []

    def _shape(self, pattern: KeyPattern) -> str:
        """The names of such keys for SCAN."""
        space = "?" * 2 * SPACE_BYTES if pattern.space is None else pattern.space.hex()
        return f"{self._prefix}{{{space}{pattern.tag.hex()}*"

    def _load_share(self, share: Share[RedisNode]) -> None:
        with share.node.connection() as client:
            seals: list[list[object]] = [["GET", self.names(key)[1]] for key in share.keys]
            for place, header in list(self._ask(share, client, range(len(share.keys)), seals)):
                if header is None:
                    share.outcomes[place] = Outcome.MISS
                    continue
                assert isinstance(header, bytes)
                share.outcomes[place] = self._load_sealed(share, client, place, header)

    def _load_sealed(self, share: Share[RedisNode], client: object, place: int, header: bytes) -> Outcome:
        key, view = share.keys[place], share.views[place]
        length = num_bytes(header, key)
        if length is not None and length > view.nbytes:
            return Outcome.FAILED
        found = -1 if length is None else self._read(share, client, key, view[:length])
        if length is not None and found == length and is_whole(header, key, view[:length]):
            self.left_unfilled(view.nbytes - length)
            return Outcome.OK
        self.stale.add(key)
        return Outcome.MISS if found is None else Outcome.FAILED

    def _read(self, share: Share[RedisNode], client: object, key: bytes, view: memoryview) -> int | None:
        """The number of bytes read; None if they are gone, -1 if they are not what was sealed.

        Nobody may write to the caller's memory after the deadline. If the time limit of the client ends before the deadline,
        it reads straight into that memory. Otherwise it reads a copy, with the remaining time as the limit.
        """
        node, name = share.node, self.names(key)[0]
        if not view.nbytes:
            return 0
        if view.nbytes <= DIRECT_BYTES and share.seconds_left() > node.direct_seconds:
            return node.read_into(client, name, view)
        answer = self._run(share, client, [["GET", name]])[0]
        if answer is None:
            return None
        if not isinstance(answer, bytes) or len(answer) != view.nbytes:
            return -1
        view[:] = answer
        return len(answer)

    def _store_share(self, share: Share[RedisNode]) -> None:
        with share.node.connection() as client:
            lookups: list[list[object]] = [["EXISTS", *self.names(key)] for key in share.keys]
            missing = []
            for place, count in self._ask(share, client, range(len(share.keys)), lookups):
                if count == 2 and share.keys[place] not in self.stale:
                    share.outcomes[place] = Outcome.OK
                elif share.node.is_full():
                    share.outcomes[place] = Outcome.REFUSED
                else:
                    missing.append(place)
            for part in _parts(missing, share.views):
                self._store_part(share, client, part)

    def _store_part(self, share: Share[RedisNode], client: object, part: list[int]) -> None:
        commands: list[list[object]] = []
        for place in part:
            key, view = share.keys[place], share.views[place]
            name, seal_name = self.names(key)
            commands.append(["SET", name, view, *self._expiry])
            commands.append(["SET", seal_name, seal(key, view), *self._expiry])
        answers = self._run(share, client, commands)
        for place, of_bytes, of_seal in zip(part, answers[::2], answers[1::2], strict=True):
            refusal = next((answer for answer in (of_bytes, of_seal) if isinstance(answer, CommandError)), None)
            if refusal is None:
                share.outcomes[place] = Outcome.OK
                self.stale.discard(share.keys[place])
            elif refusal.moved:
                share.outcomes[place] = Outcome.FAILED
                self._moved(share.node, refusal)
            else:
                share.outcomes[place] = Outcome.REFUSED
                share.node.refused()
                self.report(self._told(share.node, f"stores nothing: {refusal.text}"))


def _is_value(name: bytes) -> bool:
    """Whether a name is that of a value's bytes or seal. Other names with our prefix are never touched."""
    return _VALUE.search(name) is not None


def _parts(places: list[int], views: list[memoryview]) -> Iterator[list[int]]:
    """Places in parts, each with a bounded number of bytes or a single value; a part goes to the server at once."""
    part: list[int] = []
    size = 0
    for place in places:
        if part and size + views[place].nbytes > PIPELINE_BYTES:
            yield part
            part, size = [], 0
        part.append(place)
        size += views[place].nbytes
    if part:
        yield part


# --- clusters --------------------------------------------------------------------------------------------------------


NUM_SLOTS = 16384


def slot_of(tag: bytes) -> int:
    """The slot of a key whose hash tag is `tag`.

    >>> slot_of(b"123456789")  # CRC-16/XMODEM, 0x31C3
    12739
    """
    return crc_hqx(tag, 0) % NUM_SLOTS


class SlotMap:
    """Slots to addresses, from the answer to CLUSTER SLOTS."""

    def __init__(self, answer: list[list[Any]], asked: str) -> None:
        """`asked` is the host that answered. An entry without an address means this host."""
        ranges = sorted((int(last), int(first), master) for first, last, master, *_ in answer)
        self._lasts = [last for last, _, _ in ranges]
        self._firsts = [first for _, first, _ in ranges]
        self._addresses = [((master[0] or b"").decode() or asked, int(master[1])) for _, _, master in ranges]

    @property
    def addresses(self) -> set[tuple[str, int]]:
        """All masters."""
        return set(self._addresses)

    def address(self, slot: int) -> tuple[str, int] | None:
        """The master of a slot; None if nobody serves it."""
        at = bisect_left(self._lasts, slot)
        return self._addresses[at] if at < len(self._lasts) and self._firsts[at] <= slot else None
