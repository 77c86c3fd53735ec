"""An engine with pages and no model: what a page holds is a digest of every token before its end, so that wrong bytes show.

It drives both sides of a connector as vLLM does: looks up, makes room, loads, computes, stores, reports.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvpool.integrations.connector.orders import Introduction, Report
from kvpool.integrations.connector.pages import EnginePages
from kvpool.integrations.connector.scheduler_side import SchedulerSide
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.connector.worker_side import WorkerSide
from kvpool.integrations.connector.write_back import EngineCache
from kvpool.scope import ReuseHint
from kvpool.tiers import Fingerprint, Shard
from kvpool.tiers.transport.deciding import Decider, LoadDecision
from kvpool.tiers.transport.prefix_options import Option

BLOCK = 4
PAGE_BYTES = 32
LAYERS = 2
PROMPT = list(range(100, 118))  # four whole blocks and two tokens


def introduction(
    num_rows: int, rank: int = 0, num_workers: int = 1, layout: str = "toy", num_checkpoints: int = 0
) -> Introduction:
    """What a worker of the toy engine says of itself."""
    groups = (f"{LAYERS * PAGE_BYTES} bytes", f"{PAGE_BYTES} bytes")[: 1 + bool(num_checkpoints)]
    fingerprint = Fingerprint("toy", "v1", BLOCK, groups, layout, Shard(rank, num_workers))
    return Introduction(rank, num_workers, num_rows, fingerprint, num_checkpoints)


@dataclass
class ToyRequest:
    """The attributes of vLLM's request that a connector reads."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[str]:
        """The engine's own names of blocks."""
        ends = range(BLOCK, len(self.all_token_ids) + 1, BLOCK)
        return [content(self.all_token_ids[:end], 0, _salt(self)).hex()[:8] for end in ends]


def give_way() -> None:
    """Between steps that compute nothing, as vLLM does: a loop that only asks keeps the threads it waits for from running."""
    time.sleep(0.0005)


def lora(name: str, path: str = "") -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path)


def image(key: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=key, mm_position=SimpleNamespace(offset=offset, length=length))


def content(tokens: Sequence[int], rank: int = 0, salt: str = "") -> bytes:
    """What a page must hold whose last token is the last of these."""
    message = f"{list(tokens)} {rank} {salt}".encode()
    return hashlib.sha256(message).digest()


class AlwaysLoads(Decider):
    """Loads what tiers have, however long that takes."""

    def decide(self, options: Sequence[Option], first: int, block_size: int) -> LoadDecision:
        return LoadDecision(options[-1] if options else None, "always")


class ToyEngine:
    """Serves one request at a time; `pages` are reused at once, so that nothing is found in them by luck."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        host_blocks: int = 16,
        num_pages: int = 32,
        layout: str = "toy",
        announces: bool = False,
        device: str = "cpu",
        pages: type[EnginePages] = EnginePages,
        clock: Callable[[], float] = time.monotonic,
        cache: EngineCache | None = None,
        step_pages: int = 0,
        **extra: Any,
    ) -> None:
        settings = ConnectorSettings.of({"host_blocks": host_blocks, **extra})
        self.layers = [
            {
                f"layer {n}": torch.zeros((num_pages, PAGE_BYTES), dtype=torch.uint8, device=device)
                for n in range(LAYERS)
            }
            for _ in range(num_workers)
        ]
        workers = [introduction(host_blocks, rank, num_workers, layout) for rank in range(num_workers)]
        self.workers = [
            WorkerSide(settings, pages(layers, num_pages), worker)
            for layers, worker in zip(self.layers, workers, strict=True)
        ]
        self.scheduler = SchedulerSide(
            settings,
            BLOCK,
            workers,
            hash_size=BLOCK if announces else None,
            cache=cache,
            step_pages=step_pages,
            clock=clock,
        )
        for worker in self.workers:
            worker._part_blocks = 2
        if settings.has_tiers:  # it computes nothing, so a load would never be faster
            self.scheduler.host._loader.decider = AlwaysLoads(2)
        self.num_pages = num_pages
        self.computed = 0  # tokens
        self._at = 0
        self._ended: dict[str, int] = {}  # workers that are done with the load of a request

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def serve(
        self, request: ToyRequest, *, local_blocks: int = 0, chunk: int = 1000, hint: ReuseHint | None = None
    ) -> int:
        """Prefills a request; returns the tokens that were loaded. The first blocks may be in the engine's own cache."""
        tokens = request.all_token_ids
        count = self.look_up(request, local_blocks * BLOCK)
        pages = [(self._at + n) % self.num_pages for n in range(-(-len(tokens) // BLOCK))]
        self._at += len(pages)
        for page in pages:
            self._fill(page, b"\xee" * PAGE_BYTES, b"\xee" * PAGE_BYTES)
        for name in self.layers[0]:
            self._compute(request, pages, name, range(local_blocks))
        self.scheduler.order_load(request, [pages], count)
        done = local_blocks * BLOCK + count
        if count:
            failed: set[int] = set()
            while request.request_id not in self._step_loads(failed):
                give_way()
            done = self._first_failed(pages, failed, done)
        self._prefill(request, pages, done, chunk)
        self.scheduler.finish(request.request_id, hint)
        self.idle()
        return count

    def look_up(self, request: ToyRequest, num_computed: int = 0) -> int:
        while True:
            count = self.scheduler.look_up(request, num_computed)
            if count is not None:
                return count
            give_way()

    def idle(self) -> None:
        """Steps without requests, as long as the connector wants them."""
        while self.scheduler.has_waiting:
            self._step_loads(set())
            give_way()
        self.scheduler.host.check()

    def _prefill(self, request: ToyRequest, pages: list[int], done: int, chunk: int) -> None:
        is_new, total = True, len(request.all_token_ids)
        while done < total:
            upto = min(total, done + chunk)
            new = self._new_pages(pages, upto)
            if is_new:
                self.scheduler.follow(request.request_id, [list(pages)], upto, num_computed=done)
            else:
                self.scheduler.follow_on([(request.request_id, [new] if new else None, upto)])
            orders, is_new = self.scheduler.orders(is_idle=False), False
            for worker in self.workers:
                worker.begin_step(orders)
            for name in self.layers[0]:
                self._compute(request, pages, name, range(done // BLOCK, upto // BLOCK))
            self.computed += upto - done
            for worker in self.workers:
                worker.load(orders)
                worker.store(orders)
                worker.poll(is_idle=False)
            failed = set().union(*(worker.take_failed_pages() for worker in self.workers))
            self._report()
            done = self._first_failed(pages, failed, upto)

    def _new_pages(self, pages: list[int], num_tokens: int) -> list[int]:
        """Pages that a step adds to those of a request."""
        return []

    def _compute(self, request: ToyRequest, pages: list[int], name: str, blocks: range) -> None:
        """A page depends on the page before it, as attention does: garbage in, garbage out."""
        salt = _salt(request)
        for rank, layers in enumerate(self.layers):
            layer = layers[name]
            for block in blocks:
                before = layer[pages[block - 1]].cpu().numpy().tobytes() if block else b""
                tokens = request.all_token_ids[: (block + 1) * BLOCK]
                right = content(tokens[:-BLOCK], rank, salt) if block else b""
                value = content(tokens, rank, salt) if before == right else b"\xbb" * PAGE_BYTES
                layer[pages[block]] = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(layer.device)

    def holds(self, request: ToyRequest, pages: list[int], num_blocks: int) -> bool:
        """Whether the first blocks of a request are in its pages, for all workers and layers."""
        tokens, salt = request.all_token_ids, _salt(request)
        return all(
            layer[pages[block]].cpu().numpy().tobytes() == content(tokens[: (block + 1) * BLOCK], rank, salt)
            for rank, layers in enumerate(self.layers)
            for layer in layers.values()
            for block in range(num_blocks)
        )

    def last_pages(self, request: ToyRequest) -> list[int]:
        """Of the request that was served last."""
        number = -(-len(request.all_token_ids) // BLOCK)
        return [(self._at - number + n) % self.num_pages for n in range(number)]

    def _fill(self, page: int, *values: bytes) -> None:
        for layers in self.layers:
            for layer, value in zip(layers.values(), values, strict=True):
                layer[page] = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(layer.device)

    def _step_loads(self, failed: set[int]) -> set[str]:
        """A step that computes nothing; requests whose loads all workers have ended."""
        orders = self.scheduler.orders(is_idle=True)
        over = []
        for worker in self.workers:
            worker.begin_step(orders)
            worker.load(orders)
            worker.store(orders)
            worker.poll(is_idle=True)
            for request_id in worker.take_loaded():
                self._ended[request_id] = self._ended.get(request_id, 0) + 1
                if self._ended[request_id] == len(self.workers):
                    del self._ended[request_id]
                    over.append(request_id)
            failed |= worker.take_failed_pages()
        self._report()
        return set(over)

    def _report(self) -> None:
        reports = [report for worker in self.workers if (report := worker.take_report()) is not None]
        if reports:
            joined = Report()
            for report in reports:
                joined = joined.joined(report)
            self.scheduler.take_report(joined)
        self.scheduler.host.check()

    def _first_failed(self, pages: list[int], failed: set[int], done: int) -> int:
        lost = [block for block, page in enumerate(pages) if page in failed]
        return min(done, lost[0] * BLOCK) if lost else done


def _salt(request: ToyRequest) -> str:
    adapter = "" if request.lora_request is None else request.lora_request.lora_name
    images = [(each.identifier, each.mm_position.offset) for each in request.mm_features]
    return f"{request.cache_salt or ''}/{adapter}/{images}"
