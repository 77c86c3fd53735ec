"""Sparse attention over an indexer (DSA): an indexer scores all tokens by short keys, and attention sees the best of them.

Transformers' indexer keeps its keys in the model's cache and returns the chosen tokens. Here its own forward runs until it
multiplies its queries with the keys of all tokens: `_Keys` stands in for these, and learns queries and weights from what is
done with it. They go to attention as a `Choice`, in place of the chosen tokens: keys and the choice are the cache's.

An indexer is recognised by its code (`update_indexer`) and by what it does with the keys. Any other is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

from kvpool.errors import UnsupportedModelError
from kvpool.kernels.sparse import Choice
from kvpool.model.states import calling

_NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)


def indexers(model: Any) -> list[Any]:
    """The modules that choose tokens for attention by keys of their own in the cache."""
    return calling(model, frozenset({"update_indexer"}))


def hand_over_choices(model: Any, name: str) -> None:
    """From now on indexers hand a `Choice` to attention, while the attention of the model is called `name`."""
    for attention, module in _pairs(model):
        module.forward = partial(_choice, attention, module, name)
        if _with_a_mask not in attention._forward_pre_hooks.values():
            attention.register_forward_pre_hook(_with_a_mask, with_kwargs=True)


def own_indexers(model: Any) -> None:
    """Gives the indexers of a model their own forward back."""
    for attention, module in _pairs(model):
        vars(module).pop("forward", None)
        for key, hook in list(attention._forward_pre_hooks.items()):
            if hook is _with_a_mask:
                del attention._forward_pre_hooks[key], attention._forward_pre_hooks_with_kwargs[key]


def _pairs(model: Any) -> Iterator[tuple[Any, Any]]:
    """Each indexer behind the attention that it is in."""
    found = set(map(id, indexers(model)))
    return ((module, child) for module in model.modules() for child in module.children() if id(child) in found)


def _with_a_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An attention that takes its mask apart for its indexer gets one; ours has none."""
    return args, {**kwargs, "attention_mask": _NO_MASK} if kwargs.get("attention_mask") is None else kwargs


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled layers stop here and go on behind it
def _choice(attention: Any, module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """In place of an indexer's forward."""
    own: Callable[..., Any] = type(module).forward
    if attention.config._attn_implementation != name:
        return own(module, *args, **kwargs)
    keys = _Keys()
    given = inspect.signature(own).bind(module, *args, **kwargs)
    given.arguments["past_key_values"] = keys
    reason = "it does something else with them than scoring each"
    try:
        own(*given.args, **given.kwargs)
    except _ScoredError as scored:
        return Choice(module.layer_idx, scored.queries, keys.of_step, scored.weights, module.index_topk)
    except (AttributeError, TypeError) as error:
        reason = str(error)
    raise UnsupportedModelError(f"{type(module).__name__} {KEPT_OTHERWISE}: {reason}")


KEPT_OTHERWISE = "keeps an indexer's keys in a form that kvpool does not know"


class _ScoredError(Exception):
    """Ends an indexer's forward: all that the scores of keys need is known."""

    def __init__(self, queries: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.queries, self.weights = queries, weights


class _Keys:
    """Stands for the indexer's keys of all tokens, for their products with queries, and for what is above zero of these.

    A score is the sum over heads of weight × relu(query · key), times positive numbers, which do not change the choice.
    """

    def __init__(self) -> None:
        self.of_step = torch.empty(0)  # [token, 1, element]
        self._queries: Tensor | None = None
        self._is_positive = False

    def update_indexer(self, keys: Tensor, *_: Any) -> _Keys:
        """Takes the keys of the step, [1, token, element], as a cache of transformers does."""
        self.of_step = keys[0].unsqueeze(1)
        return self

    def _same(self, *_: Any) -> _Keys:
        return self

    transpose = unsqueeze = float = _same

    def __mul__(self, factor: object) -> _Keys:
        if not isinstance(factor, float) or factor <= 0:
            raise TypeError(f"scores are multiplied by {factor}")
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.matmul and isinstance(args[1], cls):
            return args[1]._times(args[0])
        if function is relu:
            args[0]._is_positive = True
            return args[0]
        raise TypeError(f"it calls {getattr(function, '__name__', function)} for keys")

    def _times(self, factors: Tensor) -> _Keys:
        if self._queries is None:  # [1, token, head, element]
            self._queries = factors[0].to(self.of_step.dtype)
            return self
        if not self._is_positive:
            raise TypeError("products with keys may be negative")
        raise _ScoredError(self._queries, factors[0].squeeze(-2))  # [1, token, 1, head]
