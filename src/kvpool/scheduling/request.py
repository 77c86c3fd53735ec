"""What a user asks for (`Request`), and the sequences that the scheduler makes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from kvpool.checks import as_count, show
from kvpool.core.handle import KVCacheHandle
from kvpool.core.prompt import Prompt
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import Int32Array, as_token_array
from kvpool.pools.symbols import as_items
from kvpool.scope import MultimodalItem, Retention, ReuseHint, ReuseScope, check_hint

MAX_PRIORITY = 2**31
NO_TOKENS: Int32Array = np.empty(0, np.int32)
log = logging.getLogger("kvpool")


class FinishReason(str, Enum):
    """Why a sequence ended."""

    LENGTH = "length"  # it has its max_new_tokens
    STOP = "stop"  # it sampled one of its stop tokens, or the engine called `Scheduler.finish`
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REFUSED = "refused"  # the pool shrank so far that it can never fit
    FAILED = "failed"  # a step with it could not run: `Scheduler.abandon`


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and how to continue it. Times are those of the scheduler's clock, in seconds.

    `n` samples share the prompt's blocks. `hint` tells the eviction policy when a continuation is expected; a function is
    asked when a sequence has stopped, with the tokens of its answer. One step computes all tokens of a span in `together`
    that are not cached, because they see one another. `retention`, `ttl`, `session`, `cross_tokens` and
    `multimodal` are handed to `KVCacheManager.allocate`.

    >>> Request("r1", [1, 2, 3], max_new_tokens=16, priority=5).num_places
    18
    """

    id: Hashable
    prompt: Any  # token ids; an int32 array after construction
    max_new_tokens: int
    _: KW_ONLY
    n: int = 1
    priority: int = 0  # larger is more urgent; counts with the policy "priority"
    scope: ReuseScope = ReuseScope()  # noqa: RUF009 - frozen
    stop_token_ids: Iterable[int] = ()
    deadline: float | None = None
    arrival: float | None = None  # None: when it is added
    cross_tokens: int = 0
    retention: Retention | None = None
    ttl: float | None = None
    session: str | None = None
    hint: ReuseHint | Callable[[Int32Array], ReuseHint | None] | None = None  # what its end says about a continuation
    multimodal: Any = ()  # (position, length, key) of images in the prompt; a tuple of MultimodalItem after construction
    together: Any = ()  # (start, stop) of spans of the prompt; a tuple in order after construction
    stop_ids: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            hash(self.id)
        except Exception as error:
            raise InvalidArgumentError(f"a request id must be hashable, got {self.id!r}: {error}") from None
        prompt = as_token_array(self.prompt, "prompt").copy()
        if not len(prompt):
            raise InvalidArgumentError(f"request {self.id!r}: the prompt needs at least one token")
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "multimodal", as_items(self.multimodal, prompt))
        object.__setattr__(self, "together", _as_spans(self.together, len(prompt)))
        as_count(self.max_new_tokens, "max_new_tokens", minimum=1)
        as_count(self.n, "n", minimum=1)
        as_count(self.priority, "priority", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)
        as_count(self.cross_tokens, "cross_tokens")
        if not isinstance(self.scope, ReuseScope):
            raise InvalidArgumentError(f"request {self.id!r}: scope must be a ReuseScope, got {show(self.scope)}")
        try:
            stops = list(self.stop_token_ids)
        except Exception:
            message = f"request {self.id!r}: stop_token_ids must hold ids, got {show(self.stop_token_ids)}"
            raise InvalidArgumentError(message) from None
        object.__setattr__(self, "stop_ids", frozenset(as_token_array(stops, "stop_token_ids").tolist()))
        for name in ("deadline", "arrival"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and isfinite(value)):
                raise InvalidArgumentError(f"request {self.id!r}: {name} must be a time in seconds, got {show(value)}")
        is_number = isinstance(self.ttl, (int, float)) and not isinstance(self.ttl, bool)
        if self.ttl is not None and not (is_number and self.ttl > 0):
            raise InvalidArgumentError(
                f"request {self.id!r}: ttl must be a positive number of seconds, got {show(self.ttl)}"
            )
        for name, kind in (("retention", Retention), ("session", str)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidArgumentError(f"request {self.id!r}: {name} must be a {kind.__name__}, got {show(value)}")
        if self.hint is not None and not callable(self.hint):
            check_hint(self.hint)

    def hint_at_end(self, answer: Int32Array) -> ReuseHint | None:
        """The hint about a continuation, now that the request stopped with this answer. A function that fails gives none."""
        if not callable(self.hint):
            return self.hint
        try:
            said = self.hint(answer)
            if said is not None:
                check_hint(said)
            return said
        except Exception:
            log.exception("the hint of request %r could not be asked; the policy is told why it stopped", self.id)
            return None

    @property
    def items(self) -> tuple[MultimodalItem, ...] | None:
        """The images in the prompt, as the manager takes them; None if there are none."""
        return self.multimodal or None

    def step_stop(self, start: int, stop: int, most: int) -> int:
        """Where a step ends that begins at `start` and may go on to `most`: at `stop`, unless that is inside a span.

        Then it ends with the span, or before it if that is over `most`. A step that begins in such a span is empty.
        """
        spans: tuple[tuple[int, int], ...] = self.together
        for first, end in spans:
            if first < stop < end:
                return end if end <= most else max(first, start)
        return stop

    def num_until_stop(self, samples: Int32Array) -> int:
        """How many of these tokens count: those up to the first stop token, that one included."""
        tokens = samples.tolist()
        if self.stop_ids.isdisjoint(tokens):
            return len(tokens)
        return 1 + next(at for at, token in enumerate(tokens) if token in self.stop_ids)

    def ends_with_item(self, num_tokens: int) -> bool:
        """Whether the last of `num_tokens` tokens is a placeholder of an image."""
        return bool(self.multimodal) and self.multimodal[-1].position + self.multimodal[-1].length == num_tokens

    @property
    def num_places(self) -> int:
        """Tokens whose keys and values are stored when it is complete. Those of the last sample never are."""
        return len(self.prompt) + self.max_new_tokens - 1


def _as_spans(together: Any, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Spans of a prompt, checked and in order."""
    try:
        spans = sorted((as_count(start, "start"), as_count(stop, "stop")) for start, stop in together)
    except Exception:
        raise InvalidArgumentError(f"together takes (start, stop) for every span, got {show(together)}") from None
    end = 0
    for start, stop in spans:
        if not end <= start < stop <= num_tokens:
            raise InvalidArgumentError(
                f"together={show(together)}: spans must not be empty, overlap or end behind {num_tokens} tokens"
            )
        end = stop
    return tuple(spans)


class SequenceState(str, Enum):
    """Where a sequence is."""

    WAITING = "waiting"  # it holds nothing: new, or preempted by recompute
    RUNNING = "running"  # it holds blocks on the GPU and a lane
    SWAPPED = "swapped"  # its blocks are on the host
    FINISHED = "finished"


class ScheduledSequence:
    """One continuation of a request: sample `index` of `request`. Made and changed by the scheduler only.

    A running sequence has a `handle` of the manager and a `lane`: a small number that stays the same while it runs, for
    whatever an engine keeps per sequence on the device (last token, random state, penalties).
    """

    __slots__ = (
        "accepted",
        "cached",
        "drafts",
        "finish_reason",
        "group",
        "handle",
        "in_flight",
        "index",
        "lane",
        "num_asked",
        "num_drafts_in_flight",
        "num_preemptions",
        "_prompt",
        "request",
        "residence",
        "state",
        "seniority",
        "tokens",
        "urgency",
        "waited_for_prefix",
    )

    def __init__(self, group: RequestGroup, index: int, tokens: Int32Array) -> None:
        self.group = group
        self.request = group.request
        self.index = index
        self.state = SequenceState.WAITING
        self.tokens = tokens  # ids known when it last entered or left the GPU: prompt and samples
        self._prompt: Prompt | None = None
        self.num_asked = 0  # how often the policy asked what is cached of it
        self.cached = (0, 0)  # what it was told: tokens, and how many of them on lower tiers
        self.in_flight = 0  # samples of unfinished plans, while it has no lane
        self.handle: KVCacheHandle | None = None
        self.lane = -1
        self.residence = 0  # grows whenever it leaves the GPU: rows of older plans are stale then
        self.urgency = 0  # from the policy: smaller goes first and may preempt larger
        self.seniority = 0  # order of first admission: of equally urgent sequences, the later one is preempted
        self.num_preemptions = 0
        self.drafts: Int32Array | None = None  # proposed for the next step
        # Accepted drafts before its newest sample that the next step computes again: no state was kept behind them
        self.accepted: Int32Array = NO_TOKENS
        self.num_drafts_in_flight = 0
        self.waited_for_prefix = False  # while another request computed the beginning of its prompt
        self.finish_reason: FinishReason | None = None

    @property
    def id(self) -> tuple[Hashable, int]:
        """Its request id at the manager: (request id, sample)."""
        return self.request.id, self.index

    @property
    def prompt(self) -> Prompt:
        """Its tokens as a `Prompt`: the same object for as long as the tokens stay the same."""
        prompt = self._prompt
        if prompt is None or prompt.tokens is not self.tokens:
            request = self.request
            prompt = Prompt(self.tokens, request.scope, request.items, request.cross_tokens, copy=False)
            self._prompt = prompt
        return prompt

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_running(self) -> bool:
        return self.state is SequenceState.RUNNING

    @property
    def rank(self) -> tuple[int, int, int]:
        """A sequence may take memory from one with a larger rank, never from one with a smaller rank."""
        return self.urgency, self.seniority, self.index

    @property
    def prefill_target(self) -> int:
        """How many of its tokens are computed as a prompt: all it had when it was admitted."""
        return self.live_handle().num_prompt_tokens

    def live_handle(self) -> KVCacheHandle:
        """The handle of a sequence that is on the GPU or swapped out."""
        assert self.handle is not None
        return self.handle

    def __repr__(self) -> str:
        return f"<sequence {self.index} of {self.request.id!r} {self.state.value}>"


class RequestGroup:
    """A request in the scheduler, and all sequences that continue it."""

    __slots__ = ("arrival", "branched", "next_index", "request", "sequences")

    def __init__(self, request: Request, arrival: float) -> None:
        self.request = request
        self.arrival = arrival
        self.branched = request.n == 1  # whether its samples have gone separate ways
        self.sequences = [ScheduledSequence(self, 0, request.prompt)]
        self.next_index = 1

    def new_sequence(self, tokens: Int32Array) -> ScheduledSequence:
        """One more continuation."""
        sequence = ScheduledSequence(self, self.next_index, tokens)
        self.next_index += 1
        self.sequences.append(sequence)
        return sequence

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)


class Output(NamedTuple):
    """What became of one sequence."""

    sample: int
    token_ids: Int32Array  # sampled tokens, the stop token included
    reason: FinishReason


class Finished(NamedTuple):
    """A request that is over, with the outputs of all its sequences."""

    request: Request
    outputs: tuple[Output, ...]
    detail: str = ""

    @property
    def reason(self) -> FinishReason:
        """Why its first sequence ended."""
        return self.outputs[0].reason

    @property
    def token_ids(self) -> Int32Array:
        """The sampled tokens of its first sequence."""
        return self.outputs[0].token_ids


def joined(*parts: Any) -> Int32Array:
    """Token ids one after the other."""
    return np.concatenate([np.empty(0, np.int32), *(np.asarray(part, np.int32) for part in parts)])
