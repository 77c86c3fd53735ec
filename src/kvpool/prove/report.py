"""What a trial has shown, in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from kvpool.prove.scale import FALSE_ALARMS, FLOOR
from kvpool.prove.trial import NOT_TESTED, RIGHT, WRONG, Trial

STATUS: Final = {RIGHT: 0, WRONG: 1, NOT_TESTED: 2}
_SHOWN: Final = 4  # wrong answers of a check

_MEANINGS: Final = {
    RIGHT: "every answer from the cache was as the one computed",
    WRONG: "this cache gives answers that it should not give",
    NOT_TESTED: "nothing was proved",
}


def as_json(trial: Trial) -> dict[str, Any]:
    """All figures."""
    scale = trial.scale if trial.caches else None
    return {
        "verdict": trial.verdict,
        "endpoint": trial.endpoint.url,
        "model": trial.endpoint.model,
        "owner": trial.endpoint.owner,
        "seed": trial.seed,
        "compared": _compared(trial),
        "tokens": trial.prompts.num_tokens,
        "cold_by": trial.way or None,
        "noise": None if scale is None else max(scale.noise, default=None),
        "effect_of_a_block": None if scale is None else scale.effect,
        "limit": None if scale is None else scale.limit,
        "checks": [asdict(check) for check in trial.checks],
    }


def lines(trial: Trial) -> Iterator[str]:
    """The report in words."""
    endpoint = trial.endpoint
    about = f"{_compared(trial)}, prompts of {trial.prompts.num_tokens:,} tokens, seed {trial.seed}"
    yield f"{endpoint.model} at {endpoint.url}: {about}"
    if trial.caches:
        yield from _scale_in_words(trial)
    yield ""
    width = max((len(check.name) for check in trial.checks), default=0)
    for check in trial.checks:
        hits = ", ".join(f"{number:,} tokens from {source}" for source, number in check.hits.items())
        asked = f"{check.num_asked} answers, {hits or 'nothing cached'}" if check.num_asked else ""
        far = f", at most {check.worst:.2g} apart" if check.num_asked and endpoint.has_logprobs else ""
        words = "; ".join(part for part in (asked + far, check.why) if part)
        yield f"{check.verdict:<10}  {check.name:<{width}}  {words}"
        for words in check.wrong[:_SHOWN]:
            yield f"            {words}"
        if len(check.wrong) > _SHOWN:
            yield f"            and {len(check.wrong) - _SHOWN} more"
    yield ""
    yield f"{trial.verdict}: {_meaning(trial)}"


def page_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The report of `--in-process` in words."""
    for stage, number in found["by_stage"].items():
        yield f"{number:>6} pages  {stage}"
    for words in found["wrong"][:_SHOWN]:
        yield f"        {words}"
    yield (
        f"{found['verdict']}: {len(found['wrong'])} wrong among {found['pages_compared']:,} pages that came from a cache and "
        f"{found['pages_recomputed']:,} whose load failed, beside {found['pages_computed']:,} that were computed"
    )


def _compared(trial: Trial) -> str:
    """What is compared."""
    kind = "needles" if trial.has_needles else "random tokens" if trial.prompts.of_tokens else "texts"
    return f"{kind}, {'log probabilities' if trial.endpoint.has_logprobs else 'texts alone'}"


def _scale_in_words(trial: Trial) -> Iterator[str]:
    scale = trial.scale
    if not trial.endpoint.has_logprobs:
        yield f"no log probabilities: {scale.flips} of {len(scale.noise)} cold answers differ from each other"
    elif not scale.noise:
        yield f"noise could not be measured; the limit is {scale.limit:g}"
    else:
        rule = f"{scale.factor} times that" if scale.limit > FLOOR else "the least that counts"
        yield (
            f"noise of {len(scale.noise)} cold answers: at most {max(scale.noise):.2g}; the limit is {scale.limit:.2g}, "
            f"{rule} (false alarms: at most 1 in {1 / FALSE_ALARMS:,.0f} runs); one wrong block is {scale.effect:.2g}"
        )


def _meaning(trial: Trial) -> str:
    if not trial.caches:
        return "asked again at once, no prompt was found in the cache; is prefix caching on?"
    if trial.verdict == NOT_TESTED and trial.scale.is_blind:
        return "answers differ by themselves as much as one wrong block would change them"
    meaning = _MEANINGS[trial.verdict]
    left = sum(check.verdict == NOT_TESTED for check in trial.checks)
    return f"{meaning}; {left} of {len(trial.checks)} checks could not be made" if left else meaning
