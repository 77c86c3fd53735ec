"""SamplingParams: how one request turns logits into tokens, and when it stops. Checked on construction; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvpool.checks import as_count, show
from kvpool.engine.grammar import Grammar
from kvpool.errors import ConfigError, InvalidArgumentError

# Fields that a model's generation_config.json may set. None means the value in that file, or off if it has none.
MODEL_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
MAX_LOGPROBS = 100
MAX_STOPS = 64
_NEVER = -1e4  # the bias of a token that a model must not write
_KINDS: dict[str, type] = {
    "logit_bias": Mapping,
    "stop": Iterable,
    "stop_token_ids": Iterable,
    "ignore_eos": bool,
    "skip_special_tokens": bool,
}
_MAY_BE_NONE = frozenset({*MODEL_FIELDS, "seed", "logprobs", "prompt_logprobs"})


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. A field that is None takes its value from the model's `generation_config.json`, or is off (greedy).

    Filters apply in the order of transformers: penalties, temperature, `top_k`, `top_p`, `min_p`. `repetition_penalty`
    counts prompt and output, `presence_penalty` and `frequency_penalty` the output only. The same `seed` gives the same
    tokens for the same logits, whatever else is in the batch; None draws a random seed. The text ends before the first
    `stop` string. No end-of-text token, `stop_token_ids` or `stop` string ends it before `min_new_tokens` tokens. A
    `grammar` (see `Engine.json_grammar`) allows only tokens that keep the text in a form, and ends it when it is complete.
    `logits_processors` are functions of transformers' form: they get the token ids [1, token] and scores [1, vocabulary] of
    a sample and return new scores, behind penalties and before temperature. `logprobs` asks for the log probability of each
    token and of so many best ones, before any filter; `prompt_logprobs` for those of the prompt's tokens.

    >>> SamplingParams(temperature=0.8, top_p=0.95, seed=7, stop="\\n\\n").stop
    ('\\n\\n',)
    """

    max_new_tokens: int = 128
    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # 0 is off
    top_p: float | None = None  # 1 is off
    min_p: float | None = None  # 0 is off
    repetition_penalty: float | None = None  # 1 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # whether the text leaves out special tokens
    grammar: Grammar | None = None
    logits_processors: Any = ()  # a function, or several
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same of each token of the prompt; then the prompt reuses nothing cached
    n: int = 1
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise InvalidArgumentError(f"{name} must be of type {kind.__name__}, got {show(getattr(self, name))}")
        for name, low, high in (
            *(("max_new_tokens", 1, 2**31), ("min_new_tokens", 0, 2**31), ("top_k", 0, 2**31)),
            *(
                ("n", 1, 2**16),
                ("seed", 0, 2**63 - 1),
                ("logprobs", 0, MAX_LOGPROBS),
                ("prompt_logprobs", 0, MAX_LOGPROBS),
            ),
        ):
            if not (getattr(self, name) is None and name in _MAY_BE_NONE):
                put(self, name, as_count(getattr(self, name), name, minimum=low, maximum=high))
        for name, low_bound, high_bound in (
            *(
                ("temperature", 0.0, 100.0),
                ("top_p", 0.0, 1.0),
                ("min_p", 0.0, 1.0),
                ("repetition_penalty", 0.0, 100.0),
            ),
            *(("presence_penalty", -100.0, 100.0), ("frequency_penalty", -100.0, 100.0)),
        ):
            if not (getattr(self, name) is None and name in _MAY_BE_NONE):
                put(self, name, _number(name, getattr(self, name), low_bound, high_bound))
        if self.top_p == 0.0 or self.repetition_penalty == 0.0:
            raise InvalidArgumentError("top_p and repetition_penalty must be above 0; leave them at 1 to turn them off")
        stops = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if len(stops) > MAX_STOPS or any(not isinstance(text, str) or not text for text in stops):
            raise InvalidArgumentError(f"stop must be up to {MAX_STOPS} non-empty strings, got {show(self.stop)}")
        put(self, "stop", stops)
        tokens = _items("stop_token_ids", self.stop_token_ids)
        ids = frozenset(as_count(token, "stop_token_ids", maximum=2**31 - 1) for token in tokens)
        put(self, "stop_token_ids", ids)
        bias = {
            as_count(token, "a token of logit_bias", maximum=2**31 - 1): _number("logit_bias", value, -1e4, 1e4)
            for token, value in dict(self.logit_bias).items()
        }
        put(self, "logit_bias", bias)  # a copy of our own; a read-only view of it could not be pickled
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidArgumentError(f"grammar must be what Engine.json_grammar returns, got {show(self.grammar)}")
        given = self.logits_processors
        processors = (given,) if callable(given) else _items("logits_processors", given)
        if not all(map(callable, processors)):
            raise InvalidArgumentError(f"logits_processors must be functions, got {show(given)}")
        put(self, "logits_processors", processors)
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidArgumentError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}"
            )
        if self.min_new_tokens and self.grammar is not None:
            raise InvalidArgumentError("a grammar says where the text ends: leave min_new_tokens at 0 beside it")

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with fields that are None taken from `defaults`.

        >>> SamplingParams(top_p=0.5).with_defaults(SamplingParams(temperature=0.6, top_p=0.9)).top_p
        0.5
        """
        open_fields = {name: getattr(defaults, name) for name in MODEL_FIELDS if getattr(self, name) is None}
        taken: dict[str, Any] = {name: value for name, value in open_fields.items() if value is not None}
        if defaults.logit_bias:
            taken["logit_bias"] = {**defaults.logit_bias, **self.logit_bias}
        return replace(self, **taken) if taken else self

    def stop_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end a text, of a model with these end-of-text tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)

    @property
    def is_greedy(self) -> bool:
        return not self.temperature

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on which tokens came before."""
        return (
            self.repetition_penalty not in (None, 1.0) or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    @property
    def needs_each_token(self) -> bool:
        """Whether scores depend on all tokens before, so that no token can be guessed ahead."""
        return self.has_penalties or self.grammar is not None or bool(self.logits_processors)

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are cut from the distribution."""
        return bool(self.top_k) or self.top_p not in (None, 1.0) or bool(self.min_p)


def _items(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except Exception:  # an array without a dimension says that it can be iterated over
        raise InvalidArgumentError(f"{name} must hold several values, got {show(values)}") from None


def _number(name: str, value: object, low: float, high: float) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # type: ignore[operator]  # nor what is not a number
        raise InvalidArgumentError(f"{name} must be a number in {low:g}..{high:g}, got {show(value)}")
    return float(value)  # type: ignore[arg-type]


def sampling_defaults(model: Any) -> SamplingParams:
    """The fields of SamplingParams that a model names; the others are None, as in `SamplingParams()`.

    As in transformers, temperature, top-k, top-p and min-p count only if the file says `do_sample`. Defaults of transformers
    itself that are not in the file (top-k 50) do not count.
    """
    config = getattr(model, "generation_config", None)
    samples = bool(getattr(config, "do_sample", None))
    counted = MODEL_FIELDS if samples else ("repetition_penalty",)
    named: dict[str, Any] = {name: getattr(config, name, None) for name in counted}
    banned = [*(getattr(config, "suppress_tokens", None) or ()), *_bad_words(model)]
    named["logit_bias"] = dict.fromkeys(banned, _NEVER)
    if samples and named["temperature"] is None:
        named["temperature"] = 1.0
    try:
        return SamplingParams(**named)
    except InvalidArgumentError as error:
        raise ConfigError(
            f"the model's generation configuration: {error}; mend it, or use Engine(model_defaults=False)"
        ) from error


# What else of a generation configuration changes answers of `generate`, and the values that mean nothing.
_NOT_FOLLOWED: Mapping[str, Any] = {
    **{
        "min_length": 0,
        "min_new_tokens": 0,
        "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0,
        "num_beams": 1,
    },
    **{"encoder_repetition_penalty": 1.0, "guidance_scale": 1.0, "penalty_alpha": 0.0, "typical_p": 1.0, "top_h": None},
    **{"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "exponential_decay_length_penalty": None, "sequence_bias": None},
    **{"stop_strings": None, "watermarking_config": None},
}


def not_followed(model: Any) -> dict[str, Any]:
    """What a model's generation configuration asks for beyond `sampling_defaults`: the engine does not do it."""
    config = getattr(model, "generation_config", None)
    asked = {name: getattr(config, name, None) for name in _NOT_FOLLOWED}
    found = {name: value for name, value in asked.items() if value not in (None, _NOT_FOLLOWED[name])}
    if any(len(word) > 1 for word in getattr(config, "bad_words_ids", None) or ()):
        found["bad_words_ids"] = "words of several tokens"
    return found


def _bad_words(model: Any) -> list[int]:
    """The words that a model must not write, as far as they are single tokens. As in transformers, none ends a text."""
    words = getattr(getattr(model, "generation_config", None), "bad_words_ids", None) or ()
    return [word[0] for word in words if len(word) == 1 and word[0] not in eos_token_ids(model)]


def not_first(model: Any) -> tuple[int, ...]:
    """The tokens that the model's own `generate` begins no answer with."""
    config = getattr(model, "generation_config", None)
    return tuple(getattr(config, "begin_suppress_tokens", None) or ())


def described(params: SamplingParams) -> str:
    """The sampling of a request in words, without fields that are off.

    >>> described(SamplingParams(temperature=0.6, top_p=0.9))
    'temperature 0.6, top_p 0.9'
    """
    said = [(name, getattr(params, name)) for name in MODEL_FIELDS]
    return ", ".join(f"{name} {value:g}" for name, value in said if value is not None) or "greedy"


def eos_token_ids(model: Any) -> frozenset[int]:
    """The tokens at which the model's own `generate` would stop."""
    places = (getattr(model, "generation_config", None), model.config.get_text_config(), model.config)
    named = next((ids for place in places if (ids := getattr(place, "eos_token_id", None)) is not None), None)
    return frozenset(() if named is None else [named] if isinstance(named, int) else named)
