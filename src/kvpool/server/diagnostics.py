"""`diagnostics` of `/v1/messages`, Anthropic's form: what differs from the request of an earlier answer that is named.

It compares requests, whether or not anything was cached. Of a request that has the field, hashes are kept, and no text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpool.engine.generation import Generation
from kvpool.server.agent_fields import without_varying_lines
from kvpool.server.body import Body
from kvpool.server.schema import Message


class Diagnostics(Body):
    """The earlier answer; none at the first turn."""

    previous_message_id: str | None = None


class Fingerprint(NamedTuple):
    """What a request consists of, as hashes in the order in which they are compared."""

    model: str
    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]
    others: bytes  # what else changes the prompt
    num_tokens: int

    @classmethod
    def of(
        cls, model: str, spoken: Sequence[Message], tools: Any, others: Any, num_tokens: int, *, keeps_lines: bool
    ) -> Fingerprint:
        """Of a conversation as chat templates get it. The lines that prompts leave out do not count."""
        turns = [message.model_dump(exclude_none=True) | {"content": _text(message.content)} for message in spoken]
        begin = 1 if turns and turns[0]["role"] == "system" else 0
        system = turns[0]["content"] if begin else None
        if not keeps_lines:
            system = without_varying_lines(system)
        hashes = tuple(map(_hash, turns[begin:]))
        return cls(model, _hash(system), _hash(tools), hashes, _hash(others), num_tokens)

    def reason(self, earlier: Fingerprint) -> str | None:
        """The first thing in which it differs from an earlier one; None: it only goes on."""
        for name in ("model", "system", "tools"):
            if getattr(self, name) != getattr(earlier, name):
                return f"{name}_changed"
        if self.messages[: len(earlier.messages)] != earlier.messages:
            return "messages_changed"
        return "unavailable" if self.others != earlier.others else None


class Diagnosis(NamedTuple):
    """A request that asked, and the earlier one, if it named one that is known."""

    request: Fingerprint
    names_earlier: bool
    earlier: Fingerprint | None

    def told(self, generation: Generation) -> dict[str, Any] | None:
        """The field of the answer; None where nothing differs."""
        if not self.names_earlier:
            return None
        if self.earlier is None:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        kind = self.request.reason(self.earlier)
        if kind is None or kind == "unavailable":
            return None if kind is None else {"cache_miss_reason": {"type": kind}}
        # All of the earlier prompt would have been found
        missed = min(self.earlier.num_tokens, self.request.num_tokens) - generation.num_cached_tokens
        return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": max(0, missed)}}


def _text(content: Any) -> Any:
    """Content whose parts are texts as one text, since clients send both."""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def _hash(what: Any) -> bytes:
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
