"""What 0.3 took out, by the name it had as a setting, an option or a command, and what to use instead (decision 18)."""

from __future__ import annotations

from collections.abc import Iterable

INSTEAD = {
    "tensor_parallel": "a model that needs several GPUs runs in vLLM or SGLang with kvpool's connector",
    "data_parallel": "kvpool route in front of a kvpool serve for each GPU, or --ray with --replicas",
    "draft": "draft_tokens guesses from the text before; vLLM and SGLang run draft models",
}


def instead_of(names: Iterable[str]) -> str | None:
    """What to use instead of the first of these names that is no more; None if none of them ever was.

    >>> instead_of(["--quiet", "--tensor-parallel=2"])
    "--tensor-parallel left in 0.3: a model that needs several GPUs runs in vLLM or SGLang with kvpool's connector"
    """
    for name in names:
        word = name.partition("=")[0]
        if (words := INSTEAD.get(word.lstrip("-").replace("-", "_"))) is not None:
            return f"{word} left in 0.3: {words}"
    return None
