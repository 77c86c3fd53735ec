"""Replays a recording of a `TraceRecorder` on a new manager. `operations.py` describes its lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvpool.checks import show
from kvpool.config import KVCacheConfig, LayerSpec, StatePart, StateSpec, Tier
from kvpool.config.layers import described
from kvpool.core.cache import Pin
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import KVPoolError, OutOfBlocksError, TraceError
from kvpool.manager import KVCacheManager
from kvpool.recording.lines import Lines
from kvpool.recording.operations import MAGIC_KEY, VERBS, VERSION, Operations, unpack
from kvpool.scope import Retention, ReuseHint, ReuseScope, TokenRange
from kvpool.stats import CacheStats

MAX_BLOCKS = 2**26  # of the pools of a manager that is made for a recording
MAX_TABLE_BLOCKS = 2**28  # of its block tables: 1 GiB
MAX_SLOTS = 2**26  # that one operation may ask for
MAX_SEQUENCES = 2**20  # that are live at once
_SWITCHES = (
    "block_size",
    "enable_prefix_caching",
    "partial_match",
    "copy_on_partial_reuse",
    "cache_unfilled_blocks",
    "offload_on_evict",
    "offload_min_priority",
    "host_write",
    "watermark",
    "objective",
    "depth_cost",
    "default_ttl",
    "max_pinned_tokens",
    "max_seq_len",
    "pressure_levels",
)
_BUDGETS = {"gpu_blocks": Tier.GPU, "host_blocks": Tier.HOST, "disk_blocks": Tier.DISK}


def header_of(manager: KVCacheManager) -> dict[str, Any]:
    """What is needed to make the same manager again, as plain data."""
    config, stats = manager.config, manager.stats()
    pools = {name: [p.total for p in stats.pools if p.tier == tier] for name, tier in _BUDGETS.items()}
    return {
        MAGIC_KEY: VERSION,
        "policy": manager.inspect.policy_name,
        "cached_runs": stats.num_cached_runs,  # cached before the recording, so a replay does not have them
        "layers": [described(layer) for layer in config.layers],
        **{name: getattr(config, name) for name in _SWITCHES},
        **{name: blocks for name, blocks in pools.items() if blocks},
    }


def manager_from(header: Mapping[str, Any], policy: str | None, clock: Callable[[], float]) -> KVCacheManager:
    """A new manager like the recorded one. `policy` replaces its policy and its objective."""
    layers = header.get("layers")
    if not isinstance(layers, list):
        raise TraceError(f"layers={show(layers)} must be a list of objects")
    settings = {name: header[name] for name in (*_SWITCHES, *_BUDGETS) if header.get(name) is not None}
    if policy is not None:
        settings = {name: value for name, value in settings.items() if name not in ("objective", "depth_cost")}
    config = KVCacheConfig([_layer(plain) for plain in layers], **settings, event_buffer_size=0)
    if (num_blocks := sum(map(config.num_blocks, _BUDGETS.values()))) > MAX_BLOCKS:
        raise TraceError(f"its manager has {num_blocks:,} blocks; more than {MAX_BLOCKS:,} cannot be replayed")
    name = policy or header.get("policy")
    if not isinstance(name, str):
        raise TraceError(f"policy={show(name)} must be the name of a policy")
    return KVCacheManager(config, policy=name, clock=clock)


def _layer(plain: object) -> LayerSpec | StateSpec:
    """A layer as its recording describes it."""
    if isinstance(plain, dict) and set(plain) == {"parts"}:
        parts, names = plain["parts"], {field.name for field in fields(StatePart)}
        if not isinstance(parts, list) or not all(isinstance(part, dict) and set(part) == names for part in parts):
            raise TraceError(
                f"parts={show(parts)} must be a list of objects with the fields {', '.join(sorted(names))}"
            )
        return StateSpec(tuple(StatePart(**part) for part in parts))
    known = {field.name for field in fields(LayerSpec)}
    if not isinstance(plain, dict) or not known >= set(plain):
        raise TraceError(f"a layer is {show(plain)}, and must be an object with fields of {', '.join(sorted(known))}")
    if missing := next((key for key in ("kv_heads", "head_dim") if key not in plain), None):
        raise TraceError(f"a layer lacks {missing}")
    return LayerSpec(**plain)


def recorded_scope(numbers: list[int] | None) -> ReuseScope:
    """A scope like the recorded one: equal numbers give equal scopes and tenants."""
    if numbers is None:
        return ReuseScope()
    tenant, scope, *encoder = numbers
    name = f"scope {scope}"
    return ReuseScope(tenant=f"tenant {tenant}" if tenant else "", adapter=name, encoder=name if encoder else "")


def replay_recording(path: str | Path, policy: str | None = None) -> CacheStats:
    """Repeats all recorded operations on a new manager. Its counters are then those of the recorded one.

    What the manager refused is not recorded, so `allocation_failures` and `extend_failures` are 0.
    With another `policy` the same operations run with another order of eviction. An operation that does not fit any more
    raises, as it would have in the engine.
    """
    return play_recording(path, policy)[0]


def play_recording(path: str | Path, policy: str | None = None) -> tuple[CacheStats, list[str]]:
    """`replay_recording`, and sentences about what the file does not hold."""
    with Lines(Path(path)) as lines:
        operations = Operations(lines)
        stats = _Player(operations, policy).run()
    return stats, operations.notes()


class _Player:
    def __init__(self, operations: Operations, policy: str | None) -> None:
        self.operations = operations
        self.now = 0.0
        try:
            self.manager = manager_from(operations.header, policy, lambda: self.now)
        except KVPoolError as error:
            raise TraceError(f"{operations.place} describes no manager: {error}") from None
        self.handles: dict[int, KVCacheHandle] = {}
        self.longest = 0  # tokens of the longest sequence
        self.pins: dict[int, Pin] = {}

    def run(self) -> CacheStats:
        for kind, when, *arguments in self.operations:
            self.now = when
            try:
                getattr(self, f"_{VERBS[kind]}")(*arguments)
            except OutOfBlocksError as error:
                raise type(error)(f"{self.operations.place} does not fit any more: {error}") from error
            except KVPoolError as error:
                raise TraceError(f"{self.operations.place} cannot be done again: {error}") from error
            self.manager.take_copies()
        return self.manager.stats()

    def _all(self, serials: list[int] | None) -> list[KVCacheHandle]:
        try:
            return [self.handles[serial] for serial in self.operations.batch(serials)]
        except KeyError as error:
            raise TraceError(f"sequence {error} is not live") from None

    def _one(self, serial: int) -> KVCacheHandle:
        return self._all([serial])[0]

    def _check_tables(self, num_tokens: int, more_sequences: int = 0) -> None:
        """Refuses block tables that would fill the memory: a short line may ask for a sequence of any length."""
        num_groups, num_rows, columns = self.manager.inspect.table_shape
        if len(self.handles) + more_sequences > MAX_SEQUENCES:
            raise TraceError(f"more than {MAX_SEQUENCES:,} sequences would be live")
        num_blocks = max(columns, num_tokens // self.manager.config.block_size)
        num_rows = max(num_rows, len(self.handles) + more_sequences)
        if num_groups * num_rows * num_blocks > MAX_TABLE_BLOCKS:
            raise TraceError(
                f"block tables for {num_rows:,} sequences of {num_tokens:,} tokens would take too much memory"
            )

    def _allocate(self, serial: int, prefix: list[Any] | None, more: dict[str, Any]) -> None:
        tokens = self.operations.prompt(serial, prefix)
        num_tokens = more.get("num_tokens", 0) if tokens is None else len(tokens)
        num_tokens += more.get("lookahead", 0) + more.get("cross_tokens", 0)
        self._check_tables(num_tokens, 1)
        self.longest = max(self.longest, num_tokens)
        more.pop("source", None)  # of 0.2
        scope = recorded_scope(more.pop("scope", None))
        if "session" in more:
            more["session"] = f"session {more['session']}"
        if "retention" in more:
            more["retention"] = _retention(more["retention"])
        self.handles[serial] = self.manager.allocate(serial, tokens, scope=scope, **more)

    def _extend(self, serials: list[int] | None, counts: Any, lookahead: int) -> None:
        most = max(counts, default=0) if isinstance(counts, list) else counts
        self.longest += most + lookahead
        # The tables may have to grow
        if self.longest > self.manager.inspect.table_shape[2] * self.manager.config.block_size:
            self.longest = max((handle.num_reserved for handle in self.handles.values()), default=0) + most + lookahead
            self._check_tables(self.longest)
        self.manager.extend_batch(self._all(serials), counts, lookahead)

    def _commit(self, serials: list[int] | None, counts: list[int] | None, packed: str | None) -> None:
        self.manager.commit_batch(self._all(serials), None if packed is None else unpack(packed), counts)

    def _commit_prompt(self, serial: int) -> None:
        self.manager.commit(self._one(serial))

    def _mark_written(self, serials: list[int] | None, counts: Any) -> None:
        self.manager.mark_written(self._all(serials), counts)

    def _slot_mapping(self, serials: list[int] | None, start: Any, stop: Any) -> None:
        first, last = ([bound] if isinstance(bound, int) else bound for bound in (start, stop))
        if max(last, default=0) - min(first, default=0) > MAX_SLOTS // max(1, len(self.operations.batch(serials))):
            raise TraceError(f"it asks for the slots of more than {MAX_SLOTS:,} tokens")
        self.manager.slot_mapping(self._all(serials), start, stop)

    def _rewind(self, serial: int, num_tokens: int) -> None:
        self.manager.rewind(self._one(serial), num_tokens)

    def _narrow(self, serial: int, position: int) -> None:
        self.manager.narrow(self._one(serial), position)

    def _hint(self, serial: int, stop: str | None, expected_seconds: float | None) -> None:
        self.manager.hint(self._one(serial), ReuseHint(stop, expected_seconds))

    def _fork(self, serial: int, children: list[int]) -> None:
        self._check_tables(0, len(children))
        for child, handle in zip(children, self.manager.fork(self._one(serial), *children), strict=True):
            self.handles[child] = handle

    def _free(self, serials: list[int] | None, keep: bool) -> None:
        handles = self._all(serials)
        self.manager.free_batch(handles, keep)
        for serial in self.operations.batch(serials):
            del self.handles[serial]

    def _store_last_logits(self, serial: int, num_tokens: int | None) -> None:
        self.manager.store_last_logits(self._one(serial), True, num_tokens)

    def _swap_out(self, serials: list[int] | None) -> None:
        self.manager.swap_out(*self._all(serials))

    def _swap_in(self, serials: list[int] | None) -> None:
        self.manager.swap_in(*self._all(serials))

    def _pin(self, number: int, pinned: Any, scope: list[int] | None, ttl: float | None) -> None:
        if isinstance(pinned, int):
            self.pins[number] = self.manager.cache.pin(self._one(pinned), ttl=ttl)
        else:
            self.pins[number] = self.manager.cache.pin(self.operations.tokens(pinned), recorded_scope(scope), ttl)

    def _unpin(self, number: int) -> None:
        if (pin := self.pins.pop(number, None)) is None:
            raise TraceError(f"there is no pin {number}")
        self.manager.cache.unpin(pin)

    def _set_quota(self, tenant: int, guaranteed: Any, maximum: Any) -> None:
        self.manager.cache.set_quota(recorded_scope([tenant, 0]).tenant, guaranteed=guaranteed, maximum=maximum)

    def _evict(self, num_blocks: int, pool: int, tier: int) -> None:
        self.manager.cache.evict(num_blocks, pool=pool, tier=Tier(tier))

    def _offload(self, num_blocks: int, pool: int, tier: int) -> None:
        self.manager.cache.offload(num_blocks, pool=pool, tier=Tier(tier))

    def _onboard(self, prefix: list[Any], scope: list[int] | None) -> None:
        self.manager.cache.onboard(self.operations.tokens(prefix), recorded_scope(scope))

    def _invalidate(self, prefix: list[Any] | None, scope: list[int] | None, session: int | None) -> None:
        if session is not None:
            self.manager.cache.invalidate(session=f"session {session}")
        else:
            self.manager.cache.invalidate(
                None if prefix is None else self.operations.tokens(prefix), scope=recorded_scope(scope)
            )

    def _invalidate_tenant(self, tenant: int) -> None:
        self.manager.cache.invalidate(tenant=recorded_scope([tenant, 0]).tenant)

    def _session(self, verb: str, tenant: int, session: int, seconds: float | None, child: int | None) -> None:
        sessions, name, whose = self.manager.sessions, f"session {session}", recorded_scope([tenant, 0]).tenant
        if verb == "pause":
            sessions.pause(name, seconds, tenant=whose)
        elif verb == "fork":
            sessions.fork(name, f"session {child}", tenant=whose)
        elif verb == "resume":
            sessions.resume(name, tenant=whose)
        else:
            sessions.end(name, tenant=whose)

    def _resize(self, num_blocks: int, pool: int, tier: int) -> None:
        if num_blocks > MAX_BLOCKS:
            raise TraceError(
                f"a pool of {num_blocks:,} blocks is asked for; more than {MAX_BLOCKS:,} cannot be replayed"
            )
        self.manager.cache.resize(num_blocks, pool=pool, tier=Tier(tier))

    def _defragment(self, tier: int) -> None:
        self.manager.cache.defragment(Tier(tier))

    def _reset_prefix_cache(self) -> None:
        self.manager.cache.reset()


def _retention(plain: dict[str, Any]) -> Retention:
    ranges = plain.get("ranges", [])
    for part in ranges:
        if missing := next((name for name in ("start", "end", "priority") if name not in part), None):
            raise TraceError(f"a token range lacks {missing}")
    return Retention(**{**plain, "ranges": tuple(TokenRange(**part) for part in ranges)})
