"""Checks on short random texts that a model gives the same logits in flattened steps as by itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpool.config import StateSpec
from kvpool.errors import UnsupportedModelError
from kvpool.kernels.sparse import scores_of
from kvpool.model.forward import forward
from kvpool.model.hook import ATTENTION_NAME, Attend, AttentionCall, set_attention
from kvpool.model.state_steps import StateStep
from kvpool.storage import StateSlots

# How much logits may differ from those of eager attention, as a share of their spread, and for which share of the tokens. In
# float32 the difference is about 1e-6. In 16 bits rounding alone gives some percent (0.06 in 32 layers of random weights),
# and some tokens go to other experts.
_TOLERANCE, _CHECKED = 1e-3, 1.0
_TOLERANCE_16_BITS, _CHECKED_16_BITS = 0.2, 0.75

_SHORT_WINDOW = 16
_WINDOWS = ("window", "window_size", "attention_chunk_size", "index_topk")  # how the names of their lengths end
_NO_LIMIT = 2**17  # the positions that are tried in a model that names no limit
_SEED = 20


class _Text(NamedTuple):
    """Tokens of the self-check, and the position of the first one."""

    token_ids: Tensor
    start: int

    @property
    def length(self) -> int:
        return len(self.token_ids)


class CachedLayers(NamedTuple):
    """The layers of a model that keep something: the numbers of those that attend, and the states of others by number."""

    attention: frozenset[int]
    states: Mapping[int, StateSpec]


def check_against_eager(model: Any, max_positions: int | None, cached: CachedLayers) -> None:
    """Raises UnsupportedModelError unless flattened steps with our attention give the logits of its own eager attention.

    Random texts are computed in two chunks each, in changing order. This shows whether a model keeps more than K and V
    between tokens, or mixes neighbours. One text is twice as long as any window. To keep texts short, windows are narrowed
    during the check, both in the mask that the model builds and in what it asks of attention. A model whose windows cannot be
    found needs a longer text. Then one text begins at 0, one half way and one at the end of the model's
    positions, because some models treat far tokens differently.
    """
    with _narrowed(model, max_positions) as windows:
        reach = _longest_window_in_force(model)
        if max_positions is None or reach < max_positions:  # otherwise the window never hides a token
            windows.append(reach)
        longest = _SHORT_WINDOW + 2 * max(windows, default=0)
        lengths = [min(length, max_positions or length) for length in (longest, _SHORT_WINDOW)]
        sees_all = "it masks, keeps or mixes something that attention over cached K and V does not see"
        _require_equal(model, random_texts(model, lengths, [0, 0]), cached, sees_all)
        last = (max_positions or _NO_LIMIT) - _SHORT_WINDOW
        # Last, because a model that does not use position_ids may index outside of its tables there.
        if last > 1 and cached.attention:
            texts = random_texts(model, [_SHORT_WINDOW] * 3, [0, last // 2, last])
            by_position = f"at position {last // 2} or {last} it goes by something else than position_ids"
            _require_equal(model, texts, cached, by_position)


def _require_equal(model: Any, texts: Sequence[_Text], cached: CachedLayers, reason: str) -> None:
    """Raises UnsupportedModelError with this reason unless flattened steps give the logits of the model by itself."""
    attending = ContiguousAttention([text.start for text in texts])
    got = flattened_logits(model, texts, cached, attending)
    require_close(model, got, _eager_logits(model, texts, cached), reason)


def require_close(model: Any, got: Tensor, expected: Tensor, reason: str) -> None:
    """Raises UnsupportedModelError with this reason unless logits are those of the model by itself."""
    whole = all(weight.dtype == torch.float32 for weight in model.parameters())  # some give float32 logits in any case
    tolerance = _TOLERANCE if whole else _TOLERANCE_16_BITS
    differences = _relative_difference(got, expected)
    difference = differences.quantile(_CHECKED if whole else _CHECKED_16_BITS).item()
    if difference != difference:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}) gives logits that are NaN on a few tokens{_first_nan(model)}"
        )
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}) fails the self-check: its logits in flattened steps differ "
            f"from those of its own eager attention by {difference:.2g} of their spread (allowed: {tolerance}); {reason}"
        )


def _first_nan(model: Any) -> str:
    """Says which of its weights is to blame."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all()):
            return f": its weight {name} holds NaN or infinity; load or save it again"
    return ": its weights are finite, so its computation overflows; try dtype='bfloat16' or 'float32'"


@contextmanager
def _narrowed(model: Any, max_positions: int | None) -> Iterator[list[int]]:
    """Replaces all windows in modules and configurations of the model by short ones of the same order.

    A window as long as the longest text stays as it is: it hides no token.
    """
    owners = {id(owner): owner for module in model.modules() for owner in (module, getattr(module, "config", None))}
    found = [
        (owner, name, value)
        for owner in owners.values()
        for name, value in getattr(owner, "__dict__", {}).items()
        if name.endswith(_WINDOWS) and type(value) is int and 0 < value < (max_positions or value + 1)
    ]
    windows = sorted({value for *_, value in found})
    narrow = {window: min(window, _SHORT_WINDOW + 4 * i) for i, window in enumerate(windows)}
    try:
        for owner, name, value in found:
            setattr(owner, name, narrow[value])
        yield list(narrow.values())
    finally:
        for owner, name, value in found:
            setattr(owner, name, value)


def _longest_window_in_force(model: Any) -> int:
    windows = [0]
    compute = ContiguousAttention().step({0: 1})

    def attend(call: AttentionCall) -> Tensor:
        windows.append(call.window or call.chunk or (call.choice.most if call.choice is not None else 0))
        return compute(call)

    first = torch.zeros(1, dtype=torch.int64, device=model.device)
    forward(model, first, first, None, attend, None)
    return max(windows)


def random_texts(model: Any, lengths: Sequence[int], starts: Sequence[int]) -> list[_Text]:
    """Texts of these lengths that begin at these positions."""
    generator = torch.Generator().manual_seed(_SEED)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return [
        _Text(torch.randint(vocab_size, (length,), generator=generator).to(model.device), start)
        for length, start in zip(lengths, starts, strict=True)
    ]


def flattened_logits(
    model: Any, texts: Sequence[_Text], cached: CachedLayers, attention: ContiguousAttention
) -> Tensor:
    """The logits of all texts, one after another, computed in two steps: a third of each text, then the rest."""
    slots = StateSlots.allocate(cached.states, len(texts), model.device) if cached.states else None
    cuts = [text.length // 3 for text in texts]
    heads = torch.cat([text.token_ids[:cut] for text, cut in zip(texts, cuts, strict=True)])
    positions = positions_of([text.start for text in texts], cuts).to(heads.device)
    begun = [i for i, cut in enumerate(cuts) if cut]
    states = None if slots is None else StateStep.of(slots, [cuts[i] for i in begun], [-1] * len(begun), begun)
    head_logits = forward(model, heads, positions, None, attention.step(dict(enumerate(cuts))), states)

    order = range(len(texts) - 1, -1, -1)
    rests = {i: texts[i].length - cuts[i] for i in order}
    tails = torch.cat([texts[i].token_ids[cuts[i] :] for i in order])
    positions = positions_of([texts[i].start + cuts[i] for i in order], list(rests.values())).to(heads.device)
    if slots is not None:
        states = StateStep.of(slots, list(rests.values()), [i if cuts[i] else -1 for i in order], list(order))
    tail_logits = forward(model, tails, positions, None, attention.step(rests), states)
    parts = zip(torch.split(head_logits, cuts), torch.split(tail_logits, list(rests.values()))[::-1], strict=True)
    return torch.cat([part for pair in parts for part in pair])


def _eager_logits(model: Any, texts: Sequence[_Text], cached: CachedLayers) -> Tensor:
    """The logits of all texts, one after another, each computed whole by the model itself."""
    set_attention(model, "eager")
    try:
        with torch.no_grad():
            outputs = [model(input_ids=text.token_ids.unsqueeze(0), **_past_of(model, text, cached)) for text in texts]
            return torch.cat([output.logits[0] for output in outputs])
    finally:
        set_attention(model, ATTENTION_NAME)


def _past_of(model: Any, text: _Text, cached: CachedLayers) -> dict[str, Any]:
    """Arguments that tell the model where a text begins, as `generate` does: its positions, and a cache with a past.

    The cache holds none of the earlier tokens, like the cache of a sliding layer after they have left the window.
    """
    positions = torch.arange(text.start, text.start + text.length, device=model.device).unsqueeze(0)
    where = {"position_ids": positions} if _gets_positions(model) else {}
    if not text.start:
        return {"use_cache": False, **where}
    from transformers.cache_utils import (
        Cache,
        DynamicIndexedLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionLayer,
    )

    class Far:
        """Keys and values of the text only, which begins after the earlier tokens."""

        def get_seq_length(self) -> int:
            return text.start + int(super().get_seq_length())  # type: ignore[misc]

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.get_seq_length() - text.start + query_length, text.start

    class FarLayer(Far, DynamicIndexedLayer):  # type: ignore[misc]
        """A layer that attends, maybe to tokens that an indexer chooses."""

    class FarHybrid(Far, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
        """One that keeps a state, too."""

    def layer(number: int) -> Any:
        if number not in cached.states:
            return FarLayer()
        return FarHybrid() if number in cached.attention else LinearAttentionLayer()

    num_layers = model.config.get_text_config().num_hidden_layers
    past = Cache(layers=[layer(number) for number in range(num_layers)])
    return {"use_cache": True, "past_key_values": past, **where}


def _gets_positions(model: Any) -> bool:
    """Whether `generate` gives a model positions. Roberta counts from another number if it gets none."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    return "position_ids" in model.prepare_inputs_for_generation(tokens, position_ids=tokens, use_cache=False)


def _relative_difference(got: Tensor, expected: Tensor) -> Tensor:
    """For each token the difference of two rows of logits, as a share of the spread of the expected ones."""
    got, expected = got.float(), expected.float()
    spread = expected - expected.mean(dim=-1, keepdim=True)
    difference: Tensor = torch.linalg.vector_norm(got - expected, dim=-1) / torch.linalg.vector_norm(spread, dim=-1)
    return difference


class ContiguousAttention:
    """Attention in plain torch over contiguous keys and values: slow, and easy to verify.

    attention = ContiguousAttention()
    forward(model, both_prompts, positions, None, attention.step({0: 7, 1: 5}))   # sequence 0: 7 tokens, 1: 5
    forward(model, two_tokens, torch.tensor([7, 5]), None, attention.step({0: 1, 1: 1}))
    """

    def __init__(self, starts: Sequence[int] = ()) -> None:
        self._starts = starts  # the position of the first token of each sequence; by default 0
        self._seen: dict[int, Tensor] = {}  # what an indexer chose last, by sequence
        self._kept: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # (layer, sequence) -> parts [token, head, dim]

    def step(self, num_tokens: dict[int, int]) -> Attend:
        """The attention for one step with so many new tokens of each sequence, one sequence after another."""

        def attend(call: AttentionCall) -> Tensor:
            stops = list(accumulate(num_tokens.values()))
            rows = [slice(stop - count, stop) for stop, count in zip(stops, num_tokens.values(), strict=True)]
            return torch.cat([self._attend(call, *part) for part in zip(num_tokens, rows, strict=True)])

        return attend

    def _attend(self, call: AttentionCall, sequence: int, rows: slice) -> Tensor:
        k, v = self._keep(call.layer, sequence, call.k[rows], call.v[rows])
        if (choice := call.choice) is not None and choice.layer == call.layer:
            (keys,) = self._keep(-1 - call.layer, sequence, choice.k[rows])
            self._seen[sequence] = _chosen(choice.q[rows], choice.weights[rows], keys, choice.most)
        start = self._starts[sequence] if self._starts else 0
        seen = None if choice is None else self._seen[sequence]
        return attention(call, call.q[rows], k, v, start, seen)

    def _keep(self, layer: int, sequence: int, *parts: Tensor) -> tuple[Tensor, ...]:
        """All tokens of a sequence so far."""
        before = self._kept.get((layer, sequence))
        if before is not None:
            parts = tuple(torch.cat(pair) for pair in zip(before, parts, strict=True))
        self._kept[layer, sequence] = parts
        return parts


def _chosen(q: Tensor, weights: Tensor, keys: Tensor, most: int) -> Tensor:
    """Whether the last tokens of a sequence see each of its tokens, as an indexer chooses: [token, token]."""
    scores = scores_of(q, weights, keys[:, 0].float())
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(len(keys) - len(q) + 1), -torch.inf)
    best = scores.topk(min(most, len(keys))).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)


def attention(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, start: int = 0, chosen: Tensor | None = None
) -> Tensor:
    """Attention of the last tokens of one sequence over all of it, which begins at position `start`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
    key_position = torch.arange(start, start + len(k), device=q.device)
    end = start + len(k)
    query_position = torch.arange(end - len(q), end, device=q.device)[:, None]
    hidden = key_position > query_position
    if call.window is not None:
        hidden |= key_position <= query_position - call.window
    if call.chunk is not None:
        hidden |= key_position < query_position // call.chunk * call.chunk
    if chosen is not None:
        hidden |= ~chosen
    scores = scores.masked_fill(hidden, -torch.inf)
    if call.sinks is not None:  # one more key, which has no value
        sinks = call.sinks.float()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def positions_of(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """The positions of runs of tokens, one after another: `positions_of([0, 5], [2, 1])` is [0, 1, 5]."""
    return torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
