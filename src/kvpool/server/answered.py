"""Requests that were answered lately, and what their prompts missed: for questions by the id of a request or an answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from kvpool.engine.generation import Generation
from kvpool.sequences.missed import Divergence, MissedSpan
from kvpool.server.answers import missed_by_cause
from kvpool.server.auth import Caller
from kvpool.server.diagnostics import Fingerprint
from kvpool.server.errors import Problem
from kvpool.server.served_model import ServedModel

T = TypeVar("T")
MISSED_HEADER = "x-kvpool-missed"
MAX_NAMES = 1000  # two for each request; of one tenant, since a common limit would tell it how much others ask
MAX_SPANS = 100  # of a prompt


class AnsweredPrompt(NamedTuple):
    """A prompt as it was when it got its blocks."""

    num_tokens: int
    num_cached_tokens: int
    missed: tuple[MissedSpan, ...]  # the first of them


class Answered(NamedTuple):
    """A request of a client."""

    model: ServedModel
    prompts: tuple[AnsweredPrompt, ...]
    missed_tokens: Mapping[str, int]  # by cause

    @classmethod
    def of(cls, model: ServedModel, generations: Sequence[Generation]) -> Answered:
        """A request, of what is known of its prompts now."""
        prompts = tuple(
            AnsweredPrompt(one.num_prompt_tokens, one.num_cached_tokens, tuple(islice(one.missed, MAX_SPANS)))
            for one in generations
        )
        return cls(model, prompts, missed_by_cause(generations))

    def in_json(self) -> dict[str, Any]:
        """What it missed, as `/v1/cache/query` tells it of a prompt."""
        spans = [
            span_in_json(self.model, span) | ({"prompt": number} if len(self.prompts) > 1 else {})
            for number, prompt in enumerate(self.prompts)
            for span in prompt.missed
        ]
        return {
            "model": self.model.name,
            "prompt_tokens": sum(prompt.num_tokens for prompt in self.prompts),
            "cached_tokens": sum(prompt.num_cached_tokens for prompt in self.prompts),
            "missed_tokens": dict(self.missed_tokens),
            "missed": spans,
        }


class Recent(Generic[T]):
    """The last things of each tenant, by their names. One event loop uses it."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, T]] = {}  # the newest at the end

    def keep(self, tenant: str, names: Sequence[str], one: T) -> None:
        """Keeps one of a tenant under all its names, instead of what they named before."""
        kept = self._kept.setdefault(tenant, OrderedDict())
        for name in names:
            kept[name] = one
            kept.move_to_end(name)
        while len(kept) > MAX_NAMES:
            kept.popitem(last=False)

    def find(self, tenant: str, name: str) -> T | None:
        """That of a tenant with this name."""
        return self._kept[tenant].get(name) if tenant in self._kept else None

    @property
    def tenants(self) -> list[str]:
        """Whose things are kept."""
        return list(self._kept)


class AnsweredRequests:
    """The last requests of each tenant, by their ids and those of their answers."""

    def __init__(self) -> None:
        self._requests = Recent[Answered]()
        self.fingerprints = Recent[Fingerprint]()  # of those that asked for `diagnostics`, by the ids of their answers

    def keep(self, tenant: str, names: Sequence[str], answered: Answered) -> None:
        """Keeps a request of a tenant."""
        self._requests.keep(tenant, names, answered)

    def find(self, caller: Caller, name: str) -> Answered:
        """A request of the caller's tenant; an admin may name one of any. Another tenant's is as if it were not there."""
        for tenant in (caller.tenant, *(self._requests.tenants if caller.is_admin else ())):
            found = self._requests.find(tenant, name)
            if found is not None:
                return found
        raise Problem(
            404,
            f"no request of yours with the id {name!r} is known: the last {MAX_NAMES // 2} of a tenant are kept; give the "
            "x-request-id or the id of an answer",
            code="not_found",
        )


def missed_header(generations: Sequence[Generation]) -> dict[str, str]:
    """The header that says in short why prompts missed, the most frequent cause first."""
    told = ", ".join(f"{cause}={count}" for cause, count in missed_by_cause(generations).most_common())
    return {MISSED_HEADER: told} if told else {}


def span_in_json(model: ServedModel, span: MissedSpan) -> dict[str, Any]:
    """Why a part of a prompt is not cached, and where it parts from an earlier one the texts there."""
    told: dict[str, Any] = {"start": span.start, "end": span.end, "cause": span.cause.value, "words": span.words}
    detail, tokenizer = span.detail, model.engine.tokenizer
    if isinstance(detail, Divergence) and tokenizer is not None:
        told["parted"] = {
            "token": detail.at,
            "again": detail.again,
            "earlier_prompts": detail.num_alike,
            **{name: tokenizer.decode(list(getattr(detail, name))) for name in ("before", "here", "there")},
        }
    return told
