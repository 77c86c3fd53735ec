"""What live requests do step by step: places, writes, commits, rewinds."""

from __future__ import annotations

from random import Random
from typing import Any

from byte_model import Request
from item_codes import FIRST, following, raw, whole_items
from wild_machine import WildMachine

from kvpool.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError

MAX_TOKENS = 64  # a request that grows beyond this is left alone


def next_tokens(m: WildMachine, rng: Random, request: Request, count: int, items: bool = False) -> list[int]:
    """Known ids where there are any, then mostly what a document says, so that requests compute the same.

    An item that has begun goes on. Another one begins only with `items`, and as a whole: whoever commits must tell it.
    """
    tokens, stop = request.tokens[:], len(request.tokens) + count
    document = rng.choice(m.setting.documents)
    whole = {item.position: item.length for item in whole_items(document[:stop])} if items else {}
    while (position := len(tokens)) < stop:
        follows = position < len(document) and rng.random() < 0.8
        token = raw(document[position]) if follows else rng.randrange(2)
        code = following(tokens[-1], token) if tokens else None
        if position < len(request.known):
            tokens.append(request.known[position])
        elif code is None and position in whole:
            tokens += document[position : position + whole[position]]
        else:
            tokens.append(token if code is None else code)
    return tokens[request.written :]


def check_slots(m: WildMachine, request: Request, slots: Any, start: int, stop: int) -> None:
    """Slots name the right places of the request's own table."""
    assert slots.shape == (len(m.config.groups), stop - start)
    for group in range(len(m.config.groups)):
        table = request.handle.block_table(group) if group in m.growing else []
        for position in range(start, stop):
            block = table[position // m.size] if table else None
            is_ready = request.written <= position < request.written + len(request.ready)
            expected = -1 if block is None or is_ready else block * m.size + position % m.size
            assert slots[group, position - start] == expected, f"{request.handle}, group {group}, position {position}"


def note_commit(m: WildMachine, request: Request, count: int, by_ids: bool) -> None:
    end = request.committed + count
    if by_ids:
        request.known += request.tokens[len(request.known) : end]
    if request.publishes:
        for depth in range(request.committed // m.size + 1, min(end, len(request.known)) // m.size + 1):
            m.published.add(request.values[depth * m.size - 1])
    if end > len(request.known):
        request.publishes = False
    request.committed = end


def advance(m: WildMachine, rng: Random, request: Request, count: int, *, commit: bool, by_ids: bool) -> None:
    """Writes the next `count` reserved tokens of one request and commits them, or only marks them as written."""
    start = request.written
    count = min(count, request.reserved - start)
    done, slots = m.attempt(lambda: m.manager.slot_mapping([request.handle], start, start + count), OutOfBlocksError)
    if not done:
        return
    check_slots(m, request, slots, start, start + count)
    m.write(request, next_tokens(m, rng, request, count, items=commit and by_ids), slots)
    if not commit:
        m.manager.mark_written(request.handle, count)
        return
    commit_written(m, rng, request, request.written - request.committed, by_ids)


def commit_written(m: WildMachine, rng: Random, request: Request, count: int, by_ids: bool) -> None:
    if by_ids and request.committed <= len(request.known):
        m.manager.commit(request.handle, **told_commit(rng, [request], [count]))
        note_commit(m, request, count, True)
    else:
        m.manager.commit(request.handle, count)
        note_commit(m, request, count, False)


def told_commit(rng: Random, requests: list[Request], counts: list[int]) -> dict[str, Any]:
    """The tokens of a commit and the items that begin among them; those that came with a prompt may be left out."""
    tokens: list[int] = []
    items = []
    for request, count in zip(requests, counts, strict=True):
        codes = request.tokens[request.committed : request.committed + count]
        items += [
            item._replace(position=len(tokens) + item.position)
            for item in whole_items(codes)
            if request.committed + item.position >= len(request.known) or rng.random() < 0.5
        ]
        tokens += [raw(code) for code in codes]
    return {"tokens": tokens, "multimodal": items or None}


def compute(m: WildMachine, rng: Random) -> None:
    if request := m.pick(rng):
        count = rng.randrange(2 * m.size + 1)
        advance(m, rng, request, count, commit=rng.random() < 0.6, by_ids=rng.random() < 0.6)


def commit_in_pieces(m: WildMachine, rng: Random) -> None:
    if request := m.pick(rng):
        commit_written(m, rng, request, rng.randrange(request.written - request.committed + 1), rng.random() < 0.5)


def extend(m: WildMachine, rng: Random) -> None:
    request = m.pick(rng)
    if request is None or request.reserved > MAX_TOKENS:
        return
    count, lookahead = rng.choice((0, 1, 1, 2, m.size, rng.randrange(2 * m.size + 1))), rng.choice((0, 0, 0, 1, m.size))
    limit = m.config.max_seq_len
    if limit is not None and request.reserved + count + lookahead > limit:
        m.refused(InvalidArgumentError, lambda: m.manager.extend(request.handle, count, lookahead))
        return
    needs = m.ask(lambda: m.manager.blocks_needed(request.handle, count, lookahead))
    supply = [pool.num_free + pool.num_cached - pool.num_pinned for pool in m.cache.gpu_pools]
    done, slots = m.attempt(lambda: m.manager.extend(request.handle, count, lookahead), OutOfBlocksError)
    if not m.cache.orders.quotas:
        assert done == all(n <= s for n, s in zip(needs, supply, strict=True)), f"{needs} of {supply}, done={done}"
    if not done:
        return
    start = request.reserved
    request.reserved += count
    check_slots(m, request, slots, start, start + count)
    if request.written == start and count and rng.random() < 0.6:
        m.write(request, next_tokens(m, rng, request, count), slots)
        m.manager.mark_written(request.handle, count)


def extend_batch(m: WildMachine, rng: Random) -> None:
    some = [r for r in m.pick_some(rng) if r.reserved <= MAX_TOKENS]
    counts = [1] * len(some) if rng.random() < 0.5 else [rng.randrange(m.size + 2) for _ in some]
    argument: Any = 1 if set(counts) == {1} else counts
    lookahead = rng.choice((0, 0, 1, m.size))
    handles = [request.handle for request in some]
    batch = m.manager.batch(handles) if rng.random() < 0.5 else handles
    done, slots = m.attempt(
        lambda: m.manager.extend_batch(batch, argument, lookahead), OutOfBlocksError, InvalidArgumentError
    )
    if not done:
        return
    offset = 0
    for request, count in zip(some, counts, strict=True):
        request.reserved += count
        assert m.config.max_seq_len is None or request.reserved + lookahead <= m.config.max_seq_len
        check_slots(m, request, slots[:, offset : offset + count], request.reserved - count, request.reserved)
        offset += count


def decode(m: WildMachine, rng: Random) -> None:
    """Decode steps of a batch: one token each, written and committed."""
    some = [r for r in m.pick_some(rng) if r.committed == r.written == r.reserved == len(r.known) <= MAX_TOKENS]
    batch = m.manager.batch([request.handle for request in some])
    for _ in range(rng.choice((1, 2, 4, m.size + 1))):
        done, slots = m.attempt(lambda: m.manager.extend_batch(batch), OutOfBlocksError, InvalidArgumentError)
        if not done:
            return
        items = rng.random() < 0.2
        for index, request in enumerate(some):
            request.reserved += 1
            m.write(request, next_tokens(m, rng, request, 1, items), slots[:, index : index + 1])
        m.manager.commit_batch(batch, **told_commit(rng, some, [1] * len(some)))
        for request in some:
            note_commit(m, request, 1, by_ids=True)


def compute_batch(m: WildMachine, rng: Random) -> None:
    """All reserved tokens of several requests, written and committed in one call."""
    by_ids = rng.random() < 0.5
    some = [r for r in m.pick_some(rng) if not by_ids or r.committed <= len(r.known)]
    handles = [request.handle for request in some]
    starts, stops = [r.written for r in some], [r.reserved for r in some]
    done, slots = m.attempt(lambda: m.manager.slot_mapping(handles, starts, stops), OutOfBlocksError)
    if not done:
        return
    offset = 0
    for request, start, stop in zip(some, starts, stops, strict=True):
        places = slots[:, offset : offset + stop - start]
        check_slots(m, request, places, start, stop)
        m.write(request, next_tokens(m, rng, request, stop - start, items=by_ids), places)
        offset += stop - start
    counts = [r.written - r.committed for r in some]
    ids = told_commit(rng, some, counts) if by_ids else {"tokens": None}
    m.manager.commit_batch(handles, **ids, counts=counts)
    for request, count in zip(some, counts, strict=True):
        note_commit(m, request, count, by_ids)


def rewind(m: WildMachine, rng: Random) -> None:
    request = m.pick(rng)
    if request is None:
        return
    count = min(rng.choice((0, 1, 2, m.size, rng.randrange(3 * m.size + 1))), request.reserved)
    take_back(m, request, count)


def take_back(m: WildMachine, request: Request, count: int) -> bool:
    done, _ = m.attempt(lambda: m.manager.rewind(request.handle, count), OutOfBlocksError, SequenceStateError)
    if not done:
        return False
    request.reserved -= count
    if request.written > request.reserved:
        del request.known[request.reserved :]
    del request.ready[max(0, request.reserved - request.written) :]
    del request.tokens[request.reserved :], request.values[request.reserved :]
    request.narrowed = min(request.narrowed, request.reserved)
    request.committed = min(request.committed, request.reserved)
    return True


def narrow(m: WildMachine, rng: Random) -> None:
    """A request promises to read no more than what queries from a position on do."""
    if request := m.pick(rng):
        position = rng.randrange(max(request.num_prompt, request.reserved) + 1)
        m.manager.narrow(request.handle, position)
        request.narrowed = max(request.narrowed, position)


def compute_item_again(m: WildMachine, rng: Random) -> None:
    """A request is cut off inside an item and goes on: with the rest of it, if nobody begins another one."""
    places = [
        (request, at)
        for request in m.requests()
        for at, code in enumerate(request.known[: request.committed])
        if at and max(code, request.known[at - 1]) >= FIRST
    ]
    if not places:
        return
    request, start = rng.choice(places)
    count = request.reserved - start
    if take_back(m, request, count) and m.attempt(lambda: m.manager.extend(request.handle, count), OutOfBlocksError)[0]:
        request.reserved += count
        advance(m, rng, request, rng.randrange(1, count + 1), commit=True, by_ids=rng.random() < 0.9)


def export(m: WildMachine, rng: Random) -> None:
    """What kernels are handed is what the tables show."""
    some = m.pick_some(rng)
    batch = m.manager.batch([request.handle for request in some])
    for group in range(len(m.config.groups)):
        tables = [request.handle.block_ids(group).tolist() for request in some]
        padded = m.ask(lambda group=group: batch.padded_table(group).tolist())
        assert padded == [t + [-1] * (len(padded[0]) - len(t)) for t in tables]
        if group in m.states:
            m.refused(InvalidArgumentError, lambda group=group: batch.csr(group))
            continue
        csr = m.ask(lambda group=group: batch.csr(group))
        for index, request in enumerate(some):
            length = request.num_cross if group in m.cross else request.reserved
            held = [block for block in tables[index][: -(-length // m.size)] if block >= 0]
            assert csr.indices[csr.indptr[index] : csr.indptr[index + 1]].tolist() == held


OPERATIONS = {
    compute: 6,
    commit_in_pieces: 3,
    extend: 5,
    extend_batch: 3,
    decode: 6,
    compute_batch: 4,
    rewind: 3,
    export: 1,
    compute_item_again: 4,
    narrow: 2,
}
