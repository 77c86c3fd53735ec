"""The same prompts, faults and times make a transport find, decide, load, store and forget blocks as ever.

`same_transport.txt` is written again by `python tests/tiers/test_same_transport.py`: see `test_same_answers.py`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).resolve().parent))  # for programs that run without pytest
from runs import Run, Slow, assert_same, done_at_once, figures, write_down
from sides import SIZE, Side

from kvpool import KVCacheManager, ReuseScope
from kvpool.scheduling import Request
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.threads import ThreadPool

ANSWERS = Path(__file__).with_name("same_transport.txt")
TENANTS = ("", "", "a")
KINDS = ("prefix", "scope", "session", "tenant", "everything", "everything here")  # all but the first late


class Traffic:
    """Two engines that share a large tier; each has a small one of its own."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.shared = Slow(run, 40_000, "shared")
        self.sides = [Side(Slow(run, 9_000, f"own {n}"), self.shared, gpu_blocks=40, min_uses=1 + n) for n in (0, 1)]
        for side in self.sides:
            side.transport.decider._clock = lambda: run.now
            side.transport.fetcher._most_bytes = 800  # some prefixes come in parts
        self.stems = [list(range(100 * n, 100 * n + 30)) for n in range(3)]

    def step(self) -> None:
        run, rng = self.run, self.run.rng
        run.wait(rng.choice((0.0, 0.01, 0.5, 4.0, 10.0, 61.0)))
        stem = rng.choice(self.stems)
        tokens = stem[: rng.randrange(5, 31)] + [rng.randrange(1000, 1003)] * rng.randrange(6)
        request = Request("r", tokens, 1, scope=ReuseScope(tenant=rng.choice(TENANTS)))
        side = rng.choice(self.sides)
        if rng.random() < 0.5:
            side.manager.cache.evict(30)
        chosen = rng.random()
        if chosen < 0.35:
            said = self.compute(side, request)
        elif chosen < 0.75:
            said = self.fetch(side, request)
        elif chosen < 0.85:
            seconds = rng.choice((0.01, 0.06, 0.06, 0.5))
            side.transport.decider.observe_prompt(len(tokens), seconds)
            worth = side.transport.decider.is_worth_looking(len(tokens)), side.transport.decider.is_time_to_look()
            said = f"computed in {seconds}: {worth} {side.transport.patience(len(tokens)):.6g}"
        elif chosen < 0.95:
            prompt = side.transport.keys.of_prompt(request.prompt, request.scope)
            said = f"find {side.transport.find(prompt, rng.randrange(3))}"
        else:
            said = self.forget(side, request)
        side.manager.check()
        run.say(self.sides.index(side), said, *(self.look(each) for each in self.sides))

    def compute(self, side: Side, request: Request) -> str:
        """A request whose values are not read, so that all of them are zeros."""
        manager, offers = side.manager, side.transport.offers
        tokens = request.prompt.tolist()
        session = self.run.rng.choice((None, "chat"))
        handle = manager.allocate("a", tokens, scope=request.scope, session=session)
        cached = handle.num_cached_tokens
        manager.commit(handle)
        progress = offers.begin(handle.scope)
        for stop in (len(tokens) // 2, len(tokens)):
            offers.offer(handle, handle.token_ids[:stop], progress)
        manager.free(handle)
        return f"compute {tokens} {request.scope.tenant} {cached}"

    def fetch(self, side: Side, request: Request) -> str:
        run, transport = self.run, side.transport
        keys = transport.keys.of_prompt(request.prompt, request.scope)
        first = side.manager.match_prefix(request.prompt.tolist(), scope=request.scope).num_tokens // SIZE
        due = run.now + run.rng.choice((0.0005, 0.025, 60.0, 60.0, 60.0))
        done: list[Fetch] = []
        asked = Fetch(keys, first, run.now, due, is_asked_for=run.rng.random() < 0.2)
        transport.fetch(asked, done.append, lambda: None)
        (fetch,) = done
        run.wait(run.rng.choice((0.0, 0.02)))
        parts = [columns.tolist() for columns, _ in fetch.groups]
        lease, waits = transport.import_prefix(request, fetch)
        transport.give_back(fetch, waits)
        if lease is not None:
            side.manager.free(lease)
        decision = fetch.decision and fetch.decision._replace(load_seconds=0.0, compute_seconds=0.0)
        times = f"{fetch.loading_seconds:.6g} {fetch.num_bytes} {fetch.is_part}"
        return f"fetch {first} of {keys.num_blocks}: {fetch.num_blocks} {parts} {decision} {times} {fetch.media}"

    def forget(self, side: Side, request: Request) -> str:
        invalidator, cache = side.transport.invalidator, side.manager
        tenant = request.scope.tenant
        kind = self.run.rng.choice(KINDS if len(self.run.said) > 280 else KINDS[:1])
        if kind == "tenant":
            found = invalidator.of_tenant(lambda: cache.invalidate(scope=request.scope), tenant)
        elif kind.startswith("everything"):
            found = invalidator.everything(lambda: 0, remove=kind == "everything")
        else:
            prefix = request.prompt[: 6 * SIZE] if kind == "prefix" else None
            session = "chat" if kind == "session" else None
            scope = None if session else request.scope
            found = invalidator.content(lambda: 0, prefix, scope, session)
        return f"forget {kind} {tenant} {found}"

    def look(self, side: Side) -> str:
        """All counters; times with as many digits as every machine gives them."""
        stats = side.transport.stats()
        decisions = {name: float(f"{found:.6g}") for name, found in vars(stats.decisions).items()}
        speeds = [f"{tier.latency:.5g} {tier.bytes_per_second:.5g}" for tier in stats.tiers]
        counted = stats.prompt_tokens_loaded, stats.imports, stats.imports_without_room, stats.blocks_waiting
        tiers = [figures(watched.tier) for watched in side.transport.chain.watched]
        known = [len(watched.known) for watched in side.transport.chain.watched], len(side.transport.offers.lineage)
        return f"{decisions} {speeds} {stats.fetches} {stats.stores} {counted} {stats.staging_bytes} {known} {tiers}"


def transport(run: Run) -> None:
    managers = partial(KVCacheManager, clock=lambda: run.now)
    with (
        mock.patch.object(ThreadPool, "submit", done_at_once),
        mock.patch("sides.KVCacheManager", managers),
        mock.patch("kvpool.tiers.transport.fetching._ALIGNMENT", 64),
    ):
        traffic = Traffic(run)
        for _ in range(400):
            traffic.step()
        for side in traffic.sides:
            side.transport.close()
    assert [side.transport.stats().staging_bytes for side in traffic.sides] == [0, 0]


CASES = {"transport": transport}


def test_given_the_same_prompts_faults_and_times_then_a_transport_does_as_ever() -> None:
    assert_same("transport", CASES, ANSWERS)


if __name__ == "__main__":
    write_down(CASES, ANSWERS)
