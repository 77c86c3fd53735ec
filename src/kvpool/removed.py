"""What 0.3 took out, by the name it had as a setting, an option or a command, and what to use instead (decision 18)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

INSTEAD = {
    "tensor_parallel": "a model that needs several GPUs runs in vLLM or SGLang with kvpool's connector",
    "data_parallel": "kvpool route in front of a kvpool serve for each GPU, or --ray with --replicas",
    "beams": "kvpool.engine.beam_search(engine, prompt, width) gives the same results",
    "draft": "draft_tokens guesses from the text before; vLLM and SGLang run draft models",
}

INSTEAD_OF_COMMANDS = {
    "top": "the live view at / of a server, and deploy/grafana",
    "bench serve": "vllm bench serve drives any OpenAI endpoint",
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


def instead_of_command(words: Sequence[str]) -> str | None:
    """What to use instead of the command that these words begin with; None if there never was such a command.

    >>> instead_of_command(["top", "--once"])
    'kvpool top left in 0.3: the live view at / of a server, and deploy/grafana'
    """
    for name, instead in INSTEAD_OF_COMMANDS.items():
        if " ".join(words[: len(name.split())]) == name:
            return f"kvpool {name} left in 0.3: {instead}"
    return None
