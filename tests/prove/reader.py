"""A model that finds needles, with weights that are computed, not trained: an induction head in four layers of a Llama.

Every part of the residual stream is a one-hot code in a place of its own (`Places`). Attention is hard: its scores are some
dozens apart. Half of a head's rotary frequencies are so low that they say nothing of positions: what is compared by content
stands there. The other half, with a constant in queries and keys, peaks at the distance that its phase says.

| layer | what each token learns |
|---|---|
| 0 | of the eight tokens before it: whether each is "is"; the thing before it, and the colour before that |
| 1 | from the nearest "is": the colour and the thing that stood before it |
| 2 | from the token before: all of that, and how far the "is" was |
| 3 | the token that stood this far behind an "is" behind this colour and this thing |

Behind a needle it says dots. Of what a prompt does not say, it says the codes of those that are like it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Digits, Punctuation, Sequence, WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvpool.prove.prompts import COLOURS, THINGS, Prompts

CONTEXT: Final = 4096
_HEADS, _DIM = 8, 128  # of attention; two of its heads of keys and values
_PAIRS: Final = _DIM // 2
_THETA: Final = 1e12  # the lower half of the frequencies is below 1e-6
_LOUD: Final = 16.0  # the constant of the residual stream: beside it all else hardly changes the norm
_NEAR: Final = 9  # distances from an "is": a code and the dot behind it
_SHARP: Final = 40.0  # a score of attention that decides
_SURE: Final = 9.0  # the logarithm of how much likelier the right token is than another one
_FINE, _COARSE = range(_PAIRS // 2), range(5, _PAIRS // 2)  # frequencies: all of them tell neighbours apart


def words() -> list[str]:
    """All that prompts say, as tokens, in an order that does not change."""
    prompts = Prompts(4000, seed=1)
    texts = [prompts.sample_text(), *(str(prompts.probe().prompt) for _ in range(20))]
    split = _splitter()
    found = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    found |= {*COLOURS, *THINGS, *(f"{thing}s" for thing in THINGS), *"0123456789"}
    return ["<unk>", *sorted(found)]


def _splitter() -> Any:
    return Sequence([WhitespaceSplit(), Punctuation(), Digits(individual_digits=True)])


def tokenizer() -> Any:
    """Words, marks, and digits one by one."""
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words())}, unk_token="<unk>"))
    made.pre_tokenizer = _splitter()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", clean_up_tokenization_spaces=False)


class Places:
    """Where in the residual stream which code stands, each a range."""

    def __init__(self, num_tokens: int) -> None:
        self.size = 0
        self.token = self._next(num_tokens)
        self.constant = self._next(1)
        self.is_at = self._next(_NEAR)  # one-hot: so many tokens before this one is an "is"
        self.colour_before, self.thing_before = self._next(len(COLOURS)), self._next(len(THINGS))
        self.colour, self.thing = self._next(len(COLOURS)), self._next(len(THINGS))
        self.asked = self._next(_NEAR + len(COLOURS) + len(THINGS))  # what the token before knew
        self.answer = self._next(num_tokens)
        self.known = (*self.is_at, *self.colour, *self.thing)
        self.size = math.ceil(self.size / 64) * 64

    def _next(self, length: int) -> range:
        self.size += length
        return range(self.size - length, self.size)


class _Layer:
    """The attention of a layer, head by head; everything in it begins as zero, and its MLP stays so."""

    def __init__(self, layer: Any, places: Places) -> None:
        self.places = places
        self.loud = math.sqrt(places.size)  # what a constant of the residual stream is behind the norm
        self.unit = self.loud / _LOUD  # and what a one is
        attention = layer.self_attn
        self.q, self.k, self.v, self.o = (
            getattr(attention, f"{name}_proj").weight.data for name in ("q", "k", "v", "o")
        )

    def look_back(self, head: int, distance: int, weight: float, pairs: Iterable[int]) -> None:
        """The head's score falls with the distance from the token so far before. Low frequencies make it fall for long."""
        kv, constant = head // (_HEADS // 2), self.places.constant[0]
        size = math.sqrt(weight * math.sqrt(_DIM)) / self.loud
        for pair in pairs:
            phase = distance * _THETA ** (-pair / _PAIRS)
            # A rotation of the key by its position, and of the query by its own, leaves cos(frequency * (far - distance)).
            self.k[kv * _DIM + pair, constant] = size
            self.q[head * _DIM + pair, constant] = size * math.cos(phase)
            self.q[head * _DIM + _PAIRS + pair, constant] = -size * math.sin(phase)

    def compare(self, head: int, number: int, query: int, key: int, weight: float) -> None:
        """The score grows by the weight where query and key have a one in these places; one of 64 such comparisons."""
        kv = head // (_HEADS // 2)
        half, at = divmod(number, _PAIRS // 2)
        row = half * _PAIRS + _PAIRS // 2 + at
        size = math.sqrt(weight * math.sqrt(_DIM))
        self.q[head * _DIM + row, query] = size / self._of(query)
        self.k[kv * _DIM + row, key] = size / self._of(key)

    def copy(self, head: int, row: int, source: int, target: int) -> None:
        """What a head finds in one place goes to another. `row` of the values of its group is free for it."""
        kv = head // (_HEADS // 2)
        self.v[kv * _DIM + row, source] = 1.0 / self._of(source)
        self.o[target, head * _DIM + row] = 1.0

    def _of(self, place: int) -> float:
        """How large a one in this place is behind the norm."""
        return self.loud if place == self.places.constant[0] else self.unit


def reader() -> Any:
    """The model."""
    names = words()
    places = Places(len(names))
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=places.size,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=_HEADS,
        num_key_value_heads=2,
        head_dim=_DIM,
        max_position_embeddings=CONTEXT,
        rope_theta=_THETA,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    for name, weight in model.named_parameters():
        weight.data.fill_(1.0 if "norm" in name else 0.0)
    _embed(model, places, names)
    layers = [_Layer(layer, places) for layer in model.model.layers]
    with torch.no_grad():
        _see_before(layers[0], names)
        _see_sentence(layers[1], names)
        _see_question(layers[2])
        _answer(layers[3], names)
    return model


def _embed(model: Any, places: Places, names: list[str]) -> None:
    """A token is its own code, and an "is" is no token behind itself. The answer's code is what the model says."""
    table, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    table[:, places.constant[0]] = _LOUD
    for token in range(len(names)):
        table[token, places.token[token]] = 1.0
        head[token, places.answer[token]] = _SURE * _LOUD / math.sqrt(places.size)
    table[names.index("is"), places.is_at[0]] = 1.0


def _see_before(layer: _Layer, names: list[str]) -> None:
    places = layer.places
    for head in range(_HEADS):
        layer.look_back(head, head + 1, _SHARP, _FINE)
        layer.copy(head, 0, places.token[names.index("is")], places.is_at[head + 1])
    for at, thing in enumerate(THINGS):
        layer.copy(0, 1 + at, places.token[names.index(thing)], places.thing_before[at])
    for at, colour in enumerate(COLOURS):
        layer.copy(1, 1 + len(THINGS) + at, places.token[names.index(colour)], places.colour_before[at])


def _see_sentence(layer: _Layer, names: list[str]) -> None:
    places = layer.places
    layer.look_back(0, 0, _SHARP, _COARSE)
    layer.compare(0, 0, places.constant[0], places.token[names.index("is")], 12 * _SHARP)
    pairs = [
        *zip(places.colour_before, places.colour, strict=True),
        *zip(places.thing_before, places.thing, strict=True),
    ]
    for row, (source, target) in enumerate(pairs):
        layer.copy(0, row, source, target)


def _see_question(layer: _Layer) -> None:
    layer.look_back(0, 1, _SHARP, _FINE)
    for row, (source, target) in enumerate(zip(layer.places.known, layer.places.asked, strict=True)):
        layer.copy(0, row, source, target)


def _answer(layer: _Layer, names: list[str]) -> None:
    """Two heads that look for the same: one copies half of the vocabulary, the other one the rest."""
    places, half = layer.places, len(names) // 2
    for head, tokens in ((0, range(half)), (_HEADS // 2, range(half, len(names)))):
        for number, (query, key) in enumerate(zip(places.known, places.asked, strict=True)):
            layer.compare(head, number, query, key, _SHARP)
        dot = places.asked[_NEAR - 1]
        layer.compare(head, len(places.asked), places.constant[0], dot, _SHARP / 2)  # where nothing else is known
        for row, token in enumerate(tokens):
            layer.copy(head, row, places.token[token], places.answer[token])


def write(folder: Path) -> str:
    """The model and its tokenizer as files that any engine loads."""
    reader().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
