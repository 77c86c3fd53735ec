"""What a model's own `generation_config.json` says about sampling: it stands where a caller says nothing."""

from __future__ import annotations

from typing import Any

from kvpool.engine.sampling.params import MODEL_FIELDS, SamplingParams
from kvpool.errors import ConfigError, InvalidArgumentError


def sampling_defaults(model: Any) -> SamplingParams:
    """The fields of SamplingParams that a model names; the others are None, as in `SamplingParams()`.

    As in transformers, temperature, top-k, top-p and min-p count only where the model says `do_sample`. What transformers
    itself would assume beyond the file (top-k 50) does not.
    """
    config = getattr(model, "generation_config", None)
    samples = bool(getattr(config, "do_sample", None))
    counted = MODEL_FIELDS if samples else ("repetition_penalty",)
    named: dict[str, Any] = {name: getattr(config, name, None) for name in counted}
    if samples and named["temperature"] is None:
        named["temperature"] = 1.0
    try:
        return SamplingParams(**named)
    except InvalidArgumentError as error:
        raise ConfigError(
            f"the model's generation configuration: {error}; mend it, or use Engine(model_defaults=False)"
        ) from error


def described(params: SamplingParams) -> str:
    """The sampling of a request in words, without what is off.

    >>> described(SamplingParams(temperature=0.6, top_p=0.9))
    'temperature 0.6, top_p 0.9'
    """
    said = [(name, getattr(params, name)) for name in MODEL_FIELDS]
    return ", ".join(f"{name} {value:g}" for name, value in said if value is not None) or "greedy"


def eos_token_ids(model: Any) -> frozenset[int]:
    """The tokens that end a text, as the model's own generation would stop at them."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = model.config.get_text_config().eos_token_id if named is None else named
    return frozenset(() if named is None else [named] if isinstance(named, int) else named)
