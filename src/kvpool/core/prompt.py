"""A prompt as a value, what it shares with the tree, and its admission, thought through."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from kvpool.checks import as_count
from kvpool.core.node import Node, Root
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import Int32Array, as_token_array
from kvpool.pools.symbols import Fresh, Key, as_items
from kvpool.scope import MultimodalItem, ReuseScope, check_scope

DEFAULT_SCOPE: Final = ReuseScope()
PROMPT_OPTIONS: Final = ("scope", "multimodal", "cross_tokens")  # of verbs that take tokens: what belongs to the prompt
Items: TypeAlias = Iterable[MultimodalItem | tuple[int, int, Key]]  # what users give for multimodal items
_NO_TOKENS: Int32Array = np.empty(0, np.int32)


class Prompt:
    """The tokens of a request, its scope, the images behind its placeholder tokens, and the length of its encoder's input.

    Every verb that takes tokens takes a prompt instead. Make one where the same prompt is asked about before it is
    admitted: its tokens are checked once, and the manager looks for its cached prefix once for as long as nothing changes.
    A prompt cannot be changed. It keeps a copy of its tokens; with `copy=False` it keeps the given array, which nobody may
    change afterwards. With `may_be_cut` the tokens may end inside the last image.

    >>> from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, Prompt
    >>> manager = KVCacheManager(KVCacheConfig([LayerSpec(8, 128)], block_size=4, gpu_blocks=8))
    >>> prompt = Prompt([1, 2, 3, 4, 5])
    >>> bool(manager.can_allocate(prompt)), manager.allocate("a", prompt).num_prompt_tokens
    (True, 5)
    """

    __slots__ = ("_fixed_tokens", "_is_named", "_items", "_outlives_call", "_scope", "_tokens")

    def __init__(
        self,
        tokens: Any,
        scope: ReuseScope = DEFAULT_SCOPE,
        multimodal: Items | None = None,
        cross_tokens: int = 0,
        copy: bool = True,
        may_be_cut: bool = False,
    ) -> None:
        ids = as_token_array(tokens)
        if copy:
            ids = ids.copy()
            ids.setflags(write=False)
        self._tokens: Int32Array | None = ids
        self._scope = scope if scope is DEFAULT_SCOPE else check_scope(scope)
        self._items = None if multimodal is None else as_items(multimodal, ids, may_be_cut)
        if type(cross_tokens) is not int or cross_tokens:
            cross_tokens = as_count(cross_tokens, "cross_tokens")
        self._fixed_tokens = cross_tokens  # those whose places are fixed at admission
        # Whether all that it stands for is named, so that others may have the same: an encoder's input may have no name.
        self._is_named = not cross_tokens or scope.encoder != ""
        self._outlives_call = True  # somebody may ask about it again

    @property
    def tokens(self) -> Int32Array | None:
        """Their ids; None where only their number is known."""
        return self._tokens

    @property
    def scope(self) -> ReuseScope:
        """Who may share blocks with it."""
        return self._scope

    @property
    def items(self) -> tuple[MultimodalItem, ...] | None:
        """The images behind its placeholder tokens, in order of their positions."""
        return self._items

    @property
    def cross_tokens(self) -> int:
        """The length of its encoder's input."""
        return self._fixed_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), may_be_cut=True), (self._tokens, self._scope, self._items, self._fixed_tokens)

    def __repr__(self) -> str:
        length = "unknown" if self.tokens is None else len(self.tokens)
        return f"<prompt of {length} tokens in {self.scope}>"


def as_prompt(
    tokens: Any,
    scope: ReuseScope,
    multimodal: Items | None,
    cross_tokens: int = 0,
    may_be_cut: bool = False,
) -> Prompt:
    """What a verb was given as a prompt: one already, or tokens and what belongs to them. It lives as long as the call."""
    if not isinstance(tokens, Prompt):
        prompt = Prompt(tokens, scope, multimodal, cross_tokens, False, may_be_cut)
        prompt._outlives_call = False
        return prompt
    if scope is not DEFAULT_SCOPE or multimodal is not None or cross_tokens != 0:
        raise InvalidArgumentError(
            "a Prompt has its scope, multimodal items and cross_tokens already: give them to Prompt, not beside it"
        )
    return tokens


def unknown_prompt(scope: ReuseScope, multimodal: Items | None, cross_tokens: int) -> Prompt:
    """A prompt of which only the number of tokens is known: it reuses nothing."""
    prompt = Prompt(_NO_TOKENS, scope, None, cross_tokens, False)
    prompt._tokens = None
    if multimodal is not None:
        as_items(multimodal, None)  # refused by name: items stand for tokens
    return prompt


# --- what becomes of it -----------------------------------------------------------------------------------------------


class Match:
    """What a prompt shares with the tree. `num_blocks` full blocks along `path`, then `num_partial` tokens of `partial`."""

    __slots__ = (
        *("fresh", "logits", "next_key", "num_blocks", "num_matched_blocks", "num_partial", "num_recomputed"),
        *("partial", "path", "root", "tokens"),
    )

    def __init__(
        self,
        root: Root | None,
        path: list[Node],
        num_blocks: int,
        partial: Node | None = None,
        num_partial: int = 0,
        next_key: bytes | None = None,
        num_recomputed: int = 0,
    ) -> None:
        self.root = root
        self.path = path
        self.num_blocks = num_blocks
        self.num_matched_blocks = num_blocks  # the same before something was cut off that cannot be reused
        self.partial = partial  # the node that holds the block whose first `num_partial` tokens match
        self.num_partial = num_partial
        self.next_key = next_key  # the tokens of the first block that is not cached, if the path ends where it begins
        self.num_recomputed = num_recomputed  # 1 if all is cached and the last token is computed again, for its logits
        # Set by who looks for a prompt:
        self.tokens: Int32Array | None = None  # all of them as the tree holds them: symbols for placeholders of images
        self.fresh: Fresh | None = None  # symbols among them that nobody keeps yet
        self.logits: Any = None  # stored for exactly these tokens

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return self.num_blocks * block_size + self.num_partial - self.num_recomputed


class AdmissionPlan(NamedTuple):
    """An admission, thought through: what is matched and what each GPU pool must supply."""

    match: Match
    num_hit_tokens: int
    num_blocks: int
    num_fixed: int  # blocks of what does not grow
    needs: list[int]
    supply: list[int]
    fits: bool
    evicts: bool  # something must be evicted first
