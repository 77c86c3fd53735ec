"""What the connector's host adds to an engine's own cache on a trace: stored when computed, or when the engine gives it up.

    python benchmarks/connector_hits.py TRACE --gpu 1500 --host 1500

Counts blocks, one request after the other; a step computes 128 blocks of a prompt at most. The engine's cache is as vLLM's:
the least recently used block goes first, the end of a prompt before its beginning. Beside it: the same sizes in kvpool's own
engine, whose host is one cache with its GPU.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from kvpool.integrations.connector.orders import Introduction, JobProgress, Load, Orders, Report, Store
from kvpool.integrations.connector.scheduler_side import SchedulerSide
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.replay import Trace, read_trace
from kvpool.replay.simulate import ReplayConfig, replay
from kvpool.tiers import Fingerprint, Shard


class OwnCache:
    """An engine's cache of blocks; a name is the beginning of a prompt that a block ends."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._names: dict[int, Any] = {}
        self._pages: dict[Any, int] = {}

    def next_to_go(self, number: int) -> Iterable[int]:
        """Free pages in the order in which they are taken."""
        return [page for page, _ in zip(self._free, range(number), strict=False)]

    def name_of(self, page: int) -> Any | None:
        """What a page holds."""
        return self._names.get(page)

    def found(self, names: Sequence[Any]) -> list[int]:
        """The pages of the first blocks of a prompt that are here."""
        here = [self._pages.get(name) for name in names]
        return [page for page in here[: here.index(None) if None in here else None] if page is not None]

    def use(self, pages: Sequence[int]) -> None:
        """A request uses pages that were found."""
        for page in pages:
            del self._free[page]

    def take(self, number: int) -> list[int]:
        """Other pages for a request."""
        pages = []
        for _ in range(number):
            page, _ = self._free.popitem(last=False)
            if (old := self._names.pop(page, None)) is not None:
                del self._pages[old]
            pages.append(page)
        return pages

    def give_back(self, names: Sequence[Any], pages: Sequence[int]) -> None:
        """A request has ended: its blocks can be found until others get the pages."""
        for name, page in zip(reversed(names), reversed(pages), strict=True):
            if self._pages.setdefault(name, page) == page:
                self._names[page] = name
            self._free[page] = None
            self._free.move_to_end(page, last=page in self._names)


STEP = 128  # blocks


def found_blocks(trace: Trace, gpu: int, host: int, host_write: str, policy: str) -> tuple[int, int, int]:
    """Blocks of prompts that were found in the engine's cache and on the host, and blocks that were stored."""
    own, settings = (
        OwnCache(gpu),
        ConnectorSettings(host_blocks=host, host_write=host_write, policy=policy if host_write == "through" else None),
    )
    worker = Introduction(0, 1, host, Fingerprint("model", "weights", 1, ("1 byte",), "layout", Shard(0, 1)))
    side = SchedulerSide(settings, 1, [worker], cache=own, step_pages=STEP)
    in_cache = on_host = 0
    for number in range(len(trace)):
        ids = trace.ids_of(number).tolist()[: gpu - 1]
        name = str(number)
        names = _names(ids)
        request = SimpleNamespace(
            request_id=name,
            all_token_ids=[*ids, 0],  # the last token is computed
            num_prompt_tokens=len(ids) + 1,
            block_hashes=names,
            cache_salt=None,
            lora_request=None,
            mm_features=(),
            prompt_embeds=None,
            kv_transfer_params=None,
        )
        local = len(pages := own.found(names))
        loaded = side.look_up(request, local)
        assert loaded is not None
        own.use(pages)
        pages += own.take(loaded)
        side.order_load(request, [list(pages)], loaded)
        _confirm(side, side.orders(is_idle=True))
        for begin in range(local + loaded, len(ids), STEP) or [len(ids)]:
            new = own.take(min(STEP, len(ids) - begin))
            if begin == local + loaded:
                side.follow(name, [pages + new], begin + len(new), num_computed=begin)
            else:
                side.follow_on([(name, [new], begin + len(new))])
            pages += new
            _confirm(side, side.orders(is_idle=False))
        side.finish(name)
        own.give_back(names, pages)
        in_cache, on_host = in_cache + local, on_host + loaded
    return in_cache, on_host, side.stats()["stored"]


def _names(ids: Sequence[int]) -> list[int]:
    """A number for each beginning of a prompt."""
    return list(accumulate(ids, lambda before, each: hash((before, each)), initial=0))[1:]


def _confirm(side: SchedulerSide, orders: Orders) -> None:
    jobs: list[Load | Store] = [*orders.loads, *orders.stores]
    done = {job.job: JobProgress(1, len(job.rows)) for job in jobs}
    if done:
        side.take_report(Report(done))


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a file that kvpool replay reads")
    parser.add_argument("--gpu", type=int, required=True, help="blocks of the engine's cache")
    parser.add_argument("--host", type=int, required=True, help="blocks of the host")
    parser.add_argument(
        "--policy",
        default="adaptive",
        help="of the host if blocks are stored when computed, and of kvpool's engine (default adaptive)",
    )
    given = parser.parse_args()
    trace = read_trace(given.trace)
    total = sum(len(trace.ids_of(number)) for number in range(len(trace)))
    for how in ("through", "back"):
        own, host, stored = found_blocks(trace, given.gpu, given.host, how, given.policy)
        print(
            f"connector, {how:8} {own / total:7.2%} + {host / total:6.2%} = {(own + host) / total:6.2%}, stored {stored:,}"
        )
    for how in ("through", "back"):
        config = ReplayConfig(given.policy, capacity=given.gpu, host=given.host, host_write=how)
        result = replay(trace, config)
        print(f"engine,    {how:8} {'':17} = {result.hit_ratio:6.2%}, stored {result.copied_down_blocks:,}")


if __name__ == "__main__":
    main()
