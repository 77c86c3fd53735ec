"""What all verbs of the manager share: the state behind its one lock, and the observers who are told what was done."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvpool.compiling import mypyc_attr
from kvpool.manager.guard import Guard, Observer, contain
from kvpool.pools.arrays import Int32Array
from kvpool.sequences.prompt import Prompt
from kvpool.sequences.state import CacheState


@mypyc_attr(allow_interpreted_subclasses=True)
class Facade:
    """The verbs are in its heirs, by the reader's question: `Maintenance`, `Steps`, and `KVCacheManager` itself.

    Each inherits from the one before, because compiled classes have one base (decision 6).

    A verb checks its arguments, takes the lock, delegates to the part that does it, and tells observers.
    """

    _state: CacheState
    _guard: Guard
    _observers: tuple[Observer, ...]

    def _coded(self, prompt: Prompt) -> Int32Array:
        """The tokens of a prompt as the tree holds them; symbols that nobody knows yet are not kept."""
        assert prompt.tokens is not None
        return self._state.rows.symbols.encode(prompt.tokens, prompt.items)[0] if prompt.items else prompt.tokens

    def _tell(self, verb: str, result: Any, *arguments: Any) -> None:
        """Tells observers what was done. Called inside the lock, so they hear of operations in their order."""
        for observer in self._observers:
            contain(partial(observer.done, verb, self._state.context.now, result, arguments))
