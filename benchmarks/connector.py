"""What the connector adds to an engine's scheduler: milliseconds of CPU time per step that decodes 64 requests.

    python benchmarks/connector.py [--json FILE] [--check] [--quick] [--only WORD]

Requests stand at different places in their blocks, as they do in traffic, so that a step of blocks of 16 tokens fills four
of them. Counted is everything that runs beside the scheduler: following the step, its orders, and the workers' report.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from harness import Case, Runner, argument_parser, cpu_ms, freeze_heap, main, random_tokens
from kvpool.integrations.connector.orders import Introduction, JobProgress, Orders, Report
from kvpool.integrations.connector.scheduler_side import SchedulerSide
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.tiers import Fingerprint, Shard

REQUESTS = 64
PROMPT, PER_STEP = 1024, 8192  # tokens
HOST_TOKENS = 1 << 20
LIMIT = 0.2  # milliseconds a step


def request(number: int, prompt: Sequence[int]) -> Any:
    """The attributes of vLLM's request that a connector reads."""
    return SimpleNamespace(
        request_id=f"request {number}",
        all_token_ids=list(prompt),
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
        kv_transfer_params=None,
        block_hashes=[],
        num_prompt_tokens=len(prompt),
    )


class FreePages:
    """An engine's own cache: pages are free, and so many of them hold blocks that others may find."""

    def __init__(self, num_pages: int, num_named: int) -> None:
        self.num_pages = num_pages
        self._named = num_named
        self.taken = 0

    def next_to_go(self, number: int) -> Iterable[int]:
        """Pages in the order of their numbers."""
        return (page % self.num_pages for page in range(self.taken, self.taken + number))

    def name_of(self, page: int) -> Any | None:
        """Every page stands for a block."""
        return page if page < self._named else None


class Steps:
    """A scheduler's side with requests that decode, and workers that confirm everything one step later."""

    def __init__(self, block_size: int, *, has_disk: bool, writes_back: bool = False) -> None:
        self._directory = tempfile.TemporaryDirectory() if has_disk else None
        extra: dict[str, Any] = {"host_write": "back" if writes_back else "through"}
        if self._directory is not None:
            extra |= {"disk": self._directory.name, "disk_bytes": "64MB"}
        fingerprint = Fingerprint("model", "weights", block_size, ("64 bytes",), "layout", Shard(0, 1))
        worker = Introduction(0, 1, HOST_TOKENS // block_size, fingerprint)
        pages = HOST_TOKENS // block_size
        self._own = FreePages(pages, pages) if writes_back else None
        step_pages = PER_STEP // block_size
        self._side = SchedulerSide(
            ConnectorSettings.of(extra), block_size, [worker], cache=self._own, step_pages=step_pages
        )
        self._block_size = block_size
        self._page = 0
        self._orders = Orders()
        drawn = random_tokens(5, REQUESTS, PROMPT)
        self._running = [request(number, each.tolist()) for number, each in enumerate(drawn)]
        for number, each in enumerate(self._running):
            self._admit(each, number * block_size // REQUESTS)

    def _admit(self, each: Any, behind: int) -> None:
        """Computes a prompt; `behind` tokens more, so that not all requests fill a block in the same step."""
        each.all_token_ids += [7] * behind
        while self._side.look_up(each, 0) is None:
            pass
        self._side.order_load(each, [], 0)
        pages = self._pages(-(-len(each.all_token_ids) // self._block_size))
        self._side.follow(each.request_id, [pages], len(each.all_token_ids))
        self._confirm(self._side.orders(is_idle=False))

    def _pages(self, number: int) -> list[int]:
        self._page += number
        if self._own is not None:
            self._own.taken = self._page
        return list(range(self._page - number, self._page))

    def _confirm(self, orders: Orders) -> None:
        done = {store.job: JobProgress(1, len(store.rows)) for store in orders.stores}
        done.update((spill.job, JobProgress(1, len(spill.rows))) for spill in orders.spills)
        if done:
            self._side.take_report(Report(done))

    def cycle(self) -> list[float]:
        """As many steps as a block has tokens; the mean of them."""
        spent = 0.0
        for _ in range(self._block_size):
            lengths, pages = [], []
            for each in self._running:
                lengths.append(len(each.all_token_ids))
                each.all_token_ids.append(lengths[-1] * 31 % 50_000)
                pages.append([self._pages(1)] if lengths[-1] % self._block_size == 0 else None)
            names = [each.request_id for each in self._running]
            spent += self._step(names, pages, [length + 1 for length in lengths])
        return [spent / self._block_size]

    def _step(self, names: Sequence[str], pages: Sequence[list[list[int]] | None], lengths: Sequence[int]) -> float:
        start = time.thread_time_ns()
        self._side.follow_on(zip(names, pages, lengths, strict=True))
        orders = self._side.orders(is_idle=False)
        self._confirm(self._orders)
        self._orders = orders
        return cpu_ms(start)


def decoding(block_size: int, options: dict[str, bool]) -> Runner:
    """One repeat: as many steps as a block has tokens."""
    steps = Steps(block_size, **options)
    freeze_heap()
    return steps.cycle


def cases() -> list[Case]:
    """Every block size, with a host that takes what leaves, one that takes what is computed, and a disk below it."""
    return [
        Case(
            name=f"scheduler's side, {REQUESTS} requests, blocks of {block_size}, {where}",
            unit="ms",
            better="lower",
            kvpool=partial(decoding, block_size, options),
            bars=(LIMIT,),
            repeats=20,
        )
        for block_size in (16, 32, 128)
        for where, options in (
            ("host that takes what leaves", dict(has_disk=False, writes_back=True)),
            ("host", dict(has_disk=False)),
            ("host and disk", dict(has_disk=True)),
        )
    ]


if __name__ == "__main__":
    sys.exit(main(cases(), [], argument_parser(__doc__.splitlines()[0]).parse_args(), {}))
