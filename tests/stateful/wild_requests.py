"""How requests begin, multiply, move and end: admission, forks, swaps. What they do in between is in `wild_steps`."""

from __future__ import annotations

from random import Random
from typing import Any

from byte_model import Request
from item_codes import tellable
from reference import CachedBlocks, cached_blocks, expected_hit, takeable_blocks
from wild_machine import MAX_LIVE, WildMachine
from wild_steps import advance

from kvpool import AllocStatus, Retention, ReuseHint, ReuseScope, TokenRange
from kvpool.errors import InvalidArgumentError, KVPoolError, OutOfBlocksError, SequenceStateError

SESSIONS = (None, None, "s", "t", "")
DURATIONS = (None, None, 0.5, 1.5, 10.0)
TTLS = (None, None, None, None, 0.5, 2.0, 5.0, 20.0)
HINTS = (None, None, None, ReuseHint("stop"), ReuseHint("tool_calls", 3.0), ReuseHint(expected_seconds=30.0))

# --- admission --------------------------------------------------------------------------------------------------------


def draw_prompt(m: WildMachine, rng: Random) -> tuple[list[int], ReuseScope]:
    """What is cached or what a live request has, the beginning of a document, seldom something new; as codes."""
    tokens, scope = draw_codes(m, rng)
    return tellable(tokens), scope


def draw_codes(m: WildMachine, rng: Random) -> tuple[list[int], ReuseScope]:
    kind, scope = rng.random(), rng.choice(m.setting.scopes)
    tail = [rng.randrange(3) for _ in range(rng.choice((0, 0, 0, 1, 2, 3 * m.size)))]
    if kind < 0.3 and (cached := list(cached_blocks(m.manager))):  # on whichever tier it lies
        scope, prefix = rng.choice(cached)
        return [*prefix, *tail], scope
    if kind < 0.55 and m.live:
        other = rng.choice(list(m.live.values()))
        tokens = (other.tokens + other.known[other.written :])[: m.setting.num_tokens]
        return tokens + (tail or [0] * (not tokens)), other.scope
    document = rng.choice(m.setting.documents)
    length = rng.randrange(1, len(document) + 1)
    if kind < 0.7:  # ends with a block: its last token is computed again, unless its logits are stored
        length = max(1, length // m.size) * m.size
    return document[:length] + tail, scope


def draw_retention(rng: Random, num_tokens: int) -> Retention | None:
    if rng.random() < 0.7:
        return None
    first, cut = sorted(rng.sample(range(2 * num_tokens + 1), 2))  # some of it behind the prompt
    ranges = [TokenRange(first, cut, priority=rng.randrange(101), duration=rng.choice(DURATIONS))]
    if rng.random() < 0.5:
        ranges.append(TokenRange(cut, None, priority=rng.randrange(101), duration=rng.choice(DURATIONS)))
    decode_priority = rng.choice((None, 10, 80))
    return Retention(ranges, decode_priority, None if decode_priority is None else rng.choice(DURATIONS))


def draw_admission(m: WildMachine, rng: Random) -> tuple[list[int], bool, dict[str, Any]]:
    """The tokens of a prompt, whether the manager is told them, and what it is told besides."""
    tokens, scope = draw_prompt(m, rng)
    options: dict[str, Any] = {"scope": scope, "lookahead": rng.choice((0, 0, 0, 0, 1, 3, m.size))}
    if rng.random() < 0.3:
        options["reserve"] = rng.randrange(len(tokens) + 1)
    if m.cross:
        options["cross_tokens"] = rng.choice((0, 1, m.size, 2 * m.size))
        if rng.random() < 0.7:  # an input that has a name may be shared
            name = f"audio {rng.randrange(2)} of {options['cross_tokens']}"
            options["scope"] = ReuseScope(scope.tenant, scope.adapter, encoder=name)
    known = rng.random() < 0.9
    return tokens, known, options if known else options | {"num_tokens": len(tokens)}


def draw_keeping(rng: Random, num_tokens: int) -> dict[str, Any]:
    """How long what a request computes should be kept, and whose it is."""
    return {
        "session": rng.choice(SESSIONS),
        "ttl": rng.choice(TTLS),
        "retention": draw_retention(rng, num_tokens),
        "hint": rng.choice(HINTS),
        "lease": rng.random() < 0.1,
    }


def as_asked(
    m: WildMachine, tokens: list[int], known: bool, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that name a prompt, and all of them."""
    scope, cross_tokens = options["scope"], options.get("cross_tokens", 0)
    named = (
        m.naming(tokens, scope, cross_tokens=cross_tokens) if known else {"scope": scope, "cross_tokens": cross_tokens}
    )
    rest = {key: value for key, value in options.items() if key not in ("scope", "cross_tokens")}
    return named, rest | named


def is_too_long(m: WildMachine, tokens: list[int], known: bool, options: dict[str, Any]) -> bool:
    longest = max(len(tokens) if known else 0, options.get("reserve", len(tokens)) + options["lookahead"])
    return m.config.max_seq_len is not None and longest > m.config.max_seq_len


def allocate_batch(m: WildMachine, rng: Random) -> None:
    """Several requests in one call: whoever does not fit is refused, and the others come in."""
    drawn = [draw_admission(m, rng) for _ in range(rng.randrange(1, 4))]
    if len(m.live) + len(drawn) > MAX_LIVE:
        return
    asked = [
        {"request_id": f"b{next(m.names)}"} | as_asked(m, *admission)[1] | draw_keeping(rng, len(admission[0]))
        for admission in drawn
    ]
    admitted = []
    for admission, result in zip(drawn, m.manager.allocate_batch(asked), strict=True):
        if is_too_long(m, *admission):
            assert isinstance(result, InvalidArgumentError)
        elif not isinstance(result, OutOfBlocksError):
            assert not isinstance(result, KVPoolError), result
            admitted.append(note_admission(m, result, *admission))
    for request in admitted:
        write_encoder_tokens(m, request)


def allocate(m: WildMachine, rng: Random) -> None:
    if len(m.live) >= MAX_LIVE:
        return
    tokens, known, options = draw_admission(m, rng)
    keeping = draw_keeping(rng, len(tokens))
    name = f"r{next(m.names)}"
    scope, cross_tokens = options["scope"], options.get("cross_tokens", 0)
    named, asked = as_asked(m, tokens, known, options)
    if is_too_long(m, tokens, known, options):
        m.refused(InvalidArgumentError, lambda: m.manager.allocate(name, **asked, **keeping))
        return
    cached, takeable = cached_blocks(m.manager), takeable_blocks(m.manager)
    shares = known and (not cross_tokens or scope.encoder != "")
    question = {key: value for key, value in named.items() if key != "cross_tokens"}
    match = m.ask(lambda: m.manager.match_prefix(**question)) if shares else None
    answer = m.ask(lambda: m.manager.can_allocate(**asked))
    admitted, handle = m.attempt(lambda: m.manager.allocate(name, **asked, **keeping), OutOfBlocksError)
    if m.config.watermark == 0:
        assert admitted == (answer.status is AllocStatus.OK), f"{answer} but admitted={admitted}"
    else:
        assert admitted or not answer, f"{answer} but refused"
    if not admitted:
        return
    request = note_admission(m, handle, tokens, known, options)
    assert request.publishes == handle.publishes
    if match is None:
        assert handle.num_cached_tokens == 0
    else:
        check_hit(m, match, answer, request, tokens, cached, takeable)
    write_encoder_tokens(m, request)
    if rng.random() < 0.6:  # the usual prefill: everything reserved is written and committed at once
        advance(m, rng, request, request.reserved - request.written, commit=True, by_ids=False)


def note_admission(m: WildMachine, handle: Any, tokens: list[int], known: bool, options: dict[str, Any]) -> Request:
    hit, scope = handle.num_cached_tokens, options["scope"]
    reserved = max(options.get("reserve", len(tokens)), hit)
    # The last block of a prompt that is cached as a whole is held as it is, though its last token is computed again.
    held = (
        known
        and hit == len(tokens) - 1
        and len(tokens) % m.size == 0
        and handle.num_cached_blocks * m.size == len(tokens)
    )
    if held:
        reserved = len(tokens)
    values = m.histories.of_prompt(scope, tokens)
    num_cross = options.get("cross_tokens", 0)
    is_unnamed = num_cross > 0 and not scope.encoder
    request = Request(
        handle,
        scope,
        tokens[:hit],
        values[:hit],
        tokens[:] if known else [],
        reserved,
        hit,
        len(tokens) if known else 0,
        m.config.enable_prefix_caching and not is_unnamed,
        num_cross,
        handle.request_id if is_unnamed else None,
        m.sessions.now(handle.session),
        ready=values[hit:] if held else [],
    )
    m.live[handle.request_id] = request
    return request


def check_hit(
    m: WildMachine,
    match: Any,
    answer: Any,
    request: Request,
    tokens: list[int],
    cached: CachedBlocks,
    takeable: set[tuple[ReuseScope, tuple[int, ...]]],
) -> None:
    hit = request.handle.num_cached_tokens
    assert match.num_tokens == match.num_blocks * m.size + match.num_partial_tokens
    expected = expected_hit(m.config, cached, request.scope, tokens, match.has_last_logits, takeable)
    assert match.num_tokens in expected, f"{match} but {expected}"
    # the answer may do without a partial block for the watermark's sake; allocate does not look at that
    assert hit == answer.num_cached_tokens or (m.config.watermark and answer.num_cached_tokens < hit)
    # a block that would be copied from may have to make room instead: then only whole blocks are reused
    assert hit == match.num_tokens or (match.num_partial_tokens and hit < match.num_tokens)
    logits = request.handle.last_logits
    assert hit < len(tokens) or logits is not None or request.handle.is_lease
    if logits is not None:
        value, origin = logits
        assert (hit, value) == (len(tokens), request.values[-1]), "the logits of another prompt, or of an old one"
        m.check_origins("stored logits", origin)


def write_encoder_tokens(m: WildMachine, request: Request) -> None:
    m.run_copies()
    handle = request.handle
    if handle.num_cached_fixed_tokens:  # another one filled them
        assert handle.num_cached_fixed_tokens == request.num_cross
        assert request.scope.encoder
        return
    for group in m.cross:
        table = request.handle.block_table(group)
        assert len(table) == -(-request.num_cross // m.size)
        for position in range(request.num_cross):
            slot = table[position // m.size] * m.size + position % m.size
            m.bytes.write(group, slot, m.histories.named((request.scope, request.encoder, position)))


# --- families and ends ------------------------------------------------------------------------------------------------


def fork(m: WildMachine, rng: Random) -> None:
    request = m.pick(rng)
    if request is None or len(m.live) >= MAX_LIVE:
        return
    names = [f"f{next(m.names)}" for _ in range(rng.randrange(1, min(3, MAX_LIVE - len(m.live)) + 1))]
    for name, handle in zip(names, m.manager.fork(request.handle, *names), strict=True):
        m.live[name] = request.forked(handle)


def come_and_go(m: WildMachine, rng: Random) -> None:
    """A request from its beginning to its end: what it leaves in the cache makes others push something down."""
    before = set(m.live)
    allocate(m, rng)
    for request in [request for name, request in m.live.items() if name not in before]:
        advance(m, rng, request, request.reserved - request.written, commit=True, by_ids=False)
        m.manager.free(request.handle)
        note_end(m, [request], keep=True)


def free(m: WildMachine, rng: Random) -> None:
    keep = rng.random() < 0.8
    if rng.random() < 0.7:
        some = [r for r in [m.pick(rng, swapped=None)] if r is not None]
        for request in some:
            m.manager.free(request.handle, keep, hint=rng.choice(HINTS))
    else:
        some = m.pick_some(rng, swapped=None)[:3]
        m.manager.free_batch([request.handle for request in some], keep)
    note_end(m, some, keep)


def note_end(m: WildMachine, requests: list[Request], keep: bool) -> None:
    m.only_grew = m.only_grew and keep
    for request in requests:
        del m.live[request.handle.request_id]
        m.freed.append(request.handle)


def store_last_logits(m: WildMachine, rng: Random) -> None:
    request = m.pick(rng)
    if request is None:
        return
    length = request.num_prompt if rng.random() < 0.6 else rng.randrange(1, request.reserved + 2)
    logits = None
    if 0 < length <= request.written:
        m.run_copies()
        logits = request.values[length - 1], m.sessions.number(m.origin(request, length))
    done, stored = m.attempt(
        lambda: m.manager.store_last_logits(request.handle, logits, None if length == request.num_prompt else length),
        SequenceStateError,
    )
    assert done == (0 < length <= request.committed), (length, done)
    if done and stored:
        match = m.manager.match_prefix(**m.naming(tellable(request.known[:length]), request.scope))
        assert match.has_last_logits == (match.num_tokens == length)


def hint(m: WildMachine, rng: Random) -> None:
    request = m.pick(rng, swapped=None)
    if request is not None:
        m.manager.hint(request.handle, rng.choice([said for said in HINTS if said is not None]))


def swap_out(m: WildMachine, rng: Random) -> None:
    some = m.pick_some(rng)
    handles = [request.handle for request in some]
    answer = m.ask(lambda: m.manager.can_swap_out(*handles))
    done, _ = m.attempt(lambda: m.manager.swap_out(*handles), OutOfBlocksError)
    assert done == bool(answer), f"{answer} but done={done}"
    for request in some if done else ():
        request.swapped = True
        request.ready = []
        request.publishes = request.handle.publishes  # it learns now whether what it holds was invalidated


def swap_in(m: WildMachine, rng: Random) -> None:
    some = m.pick_some(rng, swapped=True)
    handles = [request.handle for request in some]
    answer = m.ask(lambda: m.manager.can_swap_in(*handles))
    done, _ = m.attempt(lambda: m.manager.swap_in(*handles), OutOfBlocksError)
    assert done == bool(answer) or (m.config.watermark and done), f"{answer} but done={done}"
    for request in some if done else ():
        request.swapped = False


OPERATIONS = {
    allocate: 12,
    allocate_batch: 2,
    come_and_go: 8,
    fork: 3,
    free: 6,
    store_last_logits: 2,
    hint: 1,
    swap_out: 4,
    swap_in: 5,
}
