"""The connector interface of vLLM 0.31, on the two sides in `kvpool.integrations.connector`; later versions extend it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from kvpool.integrations.connector.orders import NO_PAGE, Introduction, Orders, Report
from kvpool.integrations.connector.pages import EnginePages, LinkedPages
from kvpool.integrations.connector.reports import COUNTS, STORAGE, BlockEvent, BlocksRemoved
from kvpool.integrations.connector.scheduler_side import SchedulerSide
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.connector.worker_side import WorkerSide
from kvpool.integrations.vllm_versions.vllm_identity import checked_block_size, fingerprint, is_windowed, keeps_state
from kvpool.scope import ReuseHint
from kvpool.storage.memory import free_bytes

_log = logging.getLogger("kvpool")

EXPECTED = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "register_kv_caches": ("kv_caches",),
    "bind_connector_metadata": ("connector_metadata",),
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "get_transfer_results": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "get_handshake_metadata": (),
    "set_xfer_handshake_metadata_pp_aware": ("metadata",),
    "build_connector_worker_meta": (),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "has_pending_push_work": (),
    "reset_cache": (),
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "take_events": (),
    "get_kv_connector_stats": (),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "shutdown": (),
}


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Orders of a step, for the workers."""

    orders: Orders


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers report of a step; in the first one also their introductions, if there was no handshake."""

    report: Report
    introductions: tuple[Introduction, ...] = ()

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        """The report of these workers and another one together."""
        return WorkerMetadata(self.report.joined(other.report), self.introductions + other.introductions)


@dataclass
class WorkerIntroduction(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The introduction of a worker before the first step."""

    introduction: Introduction


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """kvpool's host cache and tiers below vLLM's own cache."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        self._settings = settings.of_engine(vllm_config.parallel_config.data_parallel_index)
        self._block_size = checked_block_size(vllm_config, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._state_groups = [n for n, group in enumerate(groups) if keeps_state(group)]
        self._row_groups = [n for n, group in enumerate(groups) if not keeps_state(group)]
        self._main_group = next((n for n in self._row_groups if not is_windowed(groups[n])), self._row_groups[0])
        self._has_windows = any(is_windowed(group) for group in groups)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._introduction: Introduction | None = None  # of this worker, until it was sent
        self._workers: list[Introduction] = []
        self._given: dict[str, list[list[int]]] = {}  # pages of requests of this step for which nothing is loaded here
        self._hash_size = self._block_size
        self._pool: Any = None  # vLLM's own cache
        self._found_in: Any = None  # where it finds blocks: another object after each reset
        self._follows_resets = vllm_config.weight_transfer_config is not None  # weights may change in place

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that was not stored is computed again."""
        return False

    # --- in the workers ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The worker has made its pages."""
        config = self._vllm_config
        groups = [group.layer_names for group in self._kv_cache_config.kv_cache_groups]
        of_rows, of_states = ([groups[n] for n in some] for some in (self._row_groups, self._state_groups))
        on_gpu = any(kv_caches[name].is_cuda for of_group in of_rows for name in of_group)
        kind = LinkedPages if on_gpu else EnginePages
        num_blocks = self._kv_cache_config.num_blocks
        pages = kind(kv_caches, num_blocks, of_rows if len(groups) > 1 else None)
        states = kind(kv_caches, num_blocks, of_states) if of_states else None
        each_block = pages.row_bytes + (0 if states is None else states.row_bytes)
        settings = self._settings.sized(num_blocks * each_block, free_bytes("cpu"), config.parallel_config.world_size)
        num_rows, num_checkpoints = settings.num_rows(pages.row_bytes), 0
        if states is not None:
            num_rows, num_checkpoints = settings.num_checkpoints(pages.row_bytes, states.row_bytes)
        introduction = self._introduction = Introduction(
            config.parallel_config.rank,
            config.parallel_config.world_size,
            num_rows,
            fingerprint(config, settings, self._block_size, pages, states),
            num_checkpoints,
        )
        # With several groups, vLLM may fill new blocks with zeros, or copies, before it says that a step begins.
        self._worker = WorkerSide(
            settings,
            pages,
            introduction,
            states=states,
            is_reader=not config.kv_transfer_config.is_kv_producer,
            stores_at_once=len(groups) > 1,
        )

    def get_handshake_metadata(self) -> WorkerIntroduction | None:
        """The introduction of this worker. vLLM asks every worker before the first step.

        vLLM's MultiConnector passes the metadata of one connector to all. Inside it, this one returns nothing here, and
        introduces itself in the first step.
        """
        if self._introduction is None or get_kv_transfer_group() is not self:
            return None
        introduction, self._introduction = self._introduction, None
        return WorkerIntroduction(introduction)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: takes its orders."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(self._step_orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts loads, for which requests wait outside of steps."""
        self._ready_worker.load(self._step_orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: no layer of a step waits for a load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: all layers are stored together, beside the next step."""

    def wait_for_save(self) -> None:
        """The step has written its pages, or has told the GPU to."""
        self._ready_worker.store(self._step_orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over."""
        self._ready_worker.poll(is_idle=self._step_orders.is_idle)
        return None, self._ready_worker.take_loaded() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The same with requests whose loads failed, for engines in which pages do not identify the request."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._ready_worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that vLLM must compute again."""
        return self._ready_worker.take_failed_pages()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Jobs that ended."""
        report = self._ready_worker.take_report()
        if self._introduction is not None:
            introduction, self._introduction = self._introduction, None
            return WorkerMetadata(report or Report(), (introduction,))
        return None if report is None else WorkerMetadata(report)

    # --- beside the scheduler ----------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes the introductions of the workers, and ignores those of other connectors."""
        self._meet(each.introduction for each in metadata.values() if isinstance(each, WorkerIntroduction))

    def _meet(self, workers: Iterable[Introduction]) -> None:
        """Begins when all workers have introduced themselves."""
        self._workers += workers
        if self._scheduler is not None or len(self._workers) < self._vllm_config.parallel_config.world_size:
            return
        transfer = self._vllm_config.kv_transfer_config
        self._scheduler = SchedulerSide(
            self._settings,
            self._block_size,
            sorted(self._workers, key=lambda worker: worker.rank),
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
            hash_size=self._hash_size if announces(self._vllm_config) else None,
            cache=self._own_cache(),
            step_pages=self._vllm_config.scheduler_config.max_num_batched_tokens // self._block_size,
        )
        num_rows, num_blocks = min(worker.num_rows for worker in self._workers), self._kv_cache_config.num_blocks
        if num_rows < num_blocks and not self._scheduler.writes_back:
            _log.warning(
                "kvpool connector: the host has room for %s blocks and vLLM for %s: most of what it holds is a copy of "
                "what vLLM has; a larger host_bytes would help, or host_write='back' where nothing else needs 'through'",
                f"{num_rows:,}",
                f"{num_blocks:,}",
            )

    def _own_cache(self) -> OwnCache | None:
        """vLLM's own cache, if it can be followed: all layers share their pages, and each hash names one block."""
        is_simple = len(self._kv_cache_config.kv_cache_groups) == 1 and self._hash_size == self._block_size
        return OwnCache(self._pool) if self._pool is not None and self._pool.enable_caching and is_simple else None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What can be loaded for a waiting request; asked in every step while it waits."""
        if self._scheduler is None:
            return None, False  # the first step brings the introductions of the workers
        if self._follows_resets and self._pool is not None:
            self._follow_resets(self._scheduler)
        num_tokens = self._scheduler.look_up(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM gave a request its blocks."""
        tables = blocks.get_block_ids()
        if not num_external_tokens:
            self._given[request.request_id] = self._pages(tables)
        states = [tables[n] for n in self._state_groups]
        self._ready_scheduler.order_load(request, self._pages(tables), num_external_tokens, states)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """A step is planned: orders stores of what it writes, and returns all orders for the workers."""
        side, scheduled = self._scheduler, scheduler_output.num_scheduled_tokens
        given, self._given = self._given, {}
        if side is None:
            return StepMetadata(Orders(is_idle=not scheduled))
        for name, pages in given.items():
            if name not in scheduled:  # inside vLLM's MultiConnector another one loads it
                side.leave_to_others(name, pages)
        if self._state_groups:
            self._follow_states(side, scheduler_output.kv_connector_block_state)
            return StepMetadata(side.orders(is_idle=not scheduled))
        for new in scheduler_output.scheduled_new_reqs:
            self._follow(side, new.req_id, new.block_ids, new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        running = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        going_on = []
        for name, pages, computed in running:
            if name in cached.resumed_req_ids:
                self._follow(side, name, pages, computed, scheduled[name])
            else:
                going_on.append((name, pages, computed + scheduled[name]))
        if self._has_windows:
            tables = scheduler_output.kv_connector_block_state.get_block_ids
            side.follow_on(going_on, lambda name: self._pages(tables(name)))
        else:
            side.follow_on(going_on)
        return StepMetadata(side.orders(is_idle=not scheduled))

    def _follow(self, side: SchedulerSide, name: str, pages: Any, computed: int, scheduled: int) -> None:
        side.follow(name, self._pages(pages), computed + scheduled, num_computed=computed)

    def _follow_states(self, side: SchedulerSide, step: Any) -> None:
        """vLLM says which of its blocks hold a state behind a whole block of a request, after this step at the latest.

        It cannot be read from block tables: they have a block for some states only, and vLLM moves them.
        """
        for name, offers in step.boundary_state_offloads.items():
            states: dict[int, dict[int, int]] = {}
            for group, block, num_tokens in offers:
                if num_tokens % self._block_size == 0:
                    states.setdefault(num_tokens, {})[group] = block
            whole = [
                num_tokens for num_tokens, of_groups in states.items() if len(of_groups) == len(self._state_groups)
            ]
            tables = step.get_block_ids(name) if whole else None
            if tables is not None:
                last = max(whole)
                side.follow_checkpoint(name, self._pages(tables), last, [states[last][n] for n in self._state_groups])

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did."""
        said = connector_output.kv_connector_worker_meta
        if said is not None:
            self._meet(said.introductions)
            self._ready_scheduler.take_report(said.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """False: vLLM may free the blocks, because steps have copied them."""
        if self._scheduler is not None:
            self._scheduler.finish(request.request_id, _hint_of(request))
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, for connectors with several layer groups."""
        return self.request_finished(request, block_ids[self._main_group])

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Takes vLLM's own cache, and the number of tokens of each of its hashes."""
        self._hash_size = int(gpu_block_pool.hash_block_size)
        self._pool, self._found_in = gpu_block_pool, gpu_block_pool.cached_block_hash_to_block

    def _follow_resets(self, side: SchedulerSide) -> None:
        """Forgets everything when vLLM has reset its own cache only, which it does not tell.

        Whoever sends new weights to an engine asks for that behind them.
        """
        found_in = self._pool.cached_block_hash_to_block
        if found_in is not self._found_in:
            self._found_in = found_in
            side.reset()

    def take_events(self) -> Iterable[Any]:
        """Blocks on the host and in the tiers, under vLLM's own hashes."""
        return () if self._scheduler is None else [self._event(each) for each in self._scheduler.take_events()]

    def _event(self, event: BlockEvent) -> Any:
        names = [maybe_convert_block_hash(name) for name in event.names]
        locality = "REMOTE" if event.medium == STORAGE and self._settings.disk is None else "LOCAL"
        if isinstance(event, BlocksRemoved):
            return BlockRemoved(block_hashes=names, medium=event.medium, group_idx=self._main_group, locality=locality)
        return BlockStored(
            block_hashes=names,
            parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
            token_ids=event.tokens,
            block_size=self._block_size,
            lora_id=None,
            medium=event.medium,
            lora_name=event.adapter,
            group_idx=self._main_group,
            locality=locality,
        )

    def has_pending_push_work(self) -> bool:
        """Steps without requests carry the last blocks to the tiers."""
        return self._scheduler is not None and self._scheduler.has_waiting

    def reset_cache(self) -> bool:
        """Forgets everything that was stored so far, also in tiers."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        """Closes the tiers of either side."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()

    # --- what it counts ----------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """The counts of either side since the last call."""
        side = self._scheduler or self._worker
        counts = {} if side is None else side.take_counts()
        return ConnectorStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """For vLLM's log."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ConnectorMetrics:
        """For `/metrics`."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _pages(self, block_ids: Sequence[list[int]]) -> list[list[int]]:
        """The pages of each group without states. vLLM writes block 0 for a page that has left its window."""
        if self._state_groups:
            return [block_ids[n] for n in self._row_groups]
        if not self._has_windows:
            return list(block_ids)
        return [[page or NO_PAGE for page in of_group] for of_group in block_ids]

    @property
    def _step_orders(self) -> Orders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.orders

    @property
    def _ready_worker(self) -> WorkerSide:
        assert self._worker is not None, "vLLM calls register_kv_caches first"
        return self._worker

    @property
    def _ready_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "all workers introduce themselves first"
        return self._scheduler


class OwnCache:
    """What vLLM's own cache gives up next. It is read between steps only, as vLLM's scheduler does."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def num_pages(self) -> int:
        """All blocks of vLLM."""
        return int(self._pool.num_gpu_blocks)

    def next_to_go(self, number: int) -> Iterable[int]:
        """The free blocks in the order in which vLLM takes them."""
        block = self._pool.free_block_queue.fake_free_list_head
        for _ in range(min(number, self._pool.free_block_queue.num_free_blocks)):
            block = block.next_free_block
            yield block.block_id

    def name_of(self, page: int) -> Any | None:
        """The hash of a block that vLLM can find."""
        found = self._pool.blocks[page].block_hash
        return None if found is None else get_block_hash(found)


_HINTS = {stop: ReuseHint(stop=stop) for stop in ("stop", "length")}


def _hint_of(request: Any) -> ReuseHint | None:
    """What the end of a request says about a continuation; nothing if it was aborted."""
    return _HINTS.get(str(request.get_finished_reason()))


def announces(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


# --- statistics ------------------------------------------------------------------------------------------------------


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """Counts of one step, or sums of several."""

    def reset(self) -> None:
        """Begins anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """The sum of these counts and others."""
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {f"kvpool {name}": number for name, number in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter for each of `COUNTS`, as `vllm:kvpool_<name>_total`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {}
        for name, meaning in COUNTS.items():
            family = counter(name=f"vllm:kvpool_{name}", documentation=f"kvpool: {meaning}.", labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = family.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what was counted since the last call."""
        for name, number in transfer_stats_data.items():
            self._counters[engine_idx, name].inc(number)
