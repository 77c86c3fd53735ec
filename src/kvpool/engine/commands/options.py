"""What the engine's commands share: the options that make an engine, and those that make sampling parameters."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Annotated, Any

import typer

from kvpool.engine.engine import Engine, Prompt
from kvpool.engine.generation import Completion
from kvpool.engine.sampling.model_defaults import described
from kvpool.engine.sampling.params import SamplingParams
from kvpool.errors import ConfigError, InvalidArgumentError, OutOfBlocksError, StorageMemoryError
from kvpool.scheduling import SchedulerConfig
from kvpool.terminal import check_files, parse_bytes

Model = Annotated[
    str | None,
    typer.Option(help="A directory, a GGUF file, a config.json (random weights); default: SmolLM2-135M-Instruct."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: a GPU where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="Of the weights: float32, bfloat16, float16; default: the files'.")]
KVDtype = Annotated[str | None, typer.Option(help="Of keys and values: also fp8_e4m3, int8, int4.")]
Memory = Annotated[str | None, typer.Option(help="For keys and values: 512MiB, 8GiB; default: a share of what is free.")]
HostMemory = Annotated[str | None, typer.Option(help="More of it on the host, to swap requests to.")]
Record = Annotated[str | None, typer.Option(help="Write a trace for `kvpool replay`; prompts cannot be read from it.")]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile each layer: slower start, faster steps.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0 always takes the likeliest token; default: as the model says.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens that together have this probability.")]
ModelDefaults = Annotated[bool, typer.Option(help="Sample as generation_config.json says where no option says otherwise.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")]


# Fields of the library, which its errors name, and the options that set them.
_OPTIONS = {
    "max_new_tokens": "--max-tokens",
    "num_beams": "--beams",
    "kv_bytes": "--memory",
    "memory_fraction": "--memory",
    "host_bytes": "--host-memory",
    "model_defaults=False": "--no-model-defaults",
    "n": "-n",
    **{name: f"--{name}" for name in ("temperature", "seed", "stop", "dtype", "device")},
    **{name: f"--{name.replace('_', '-')}" for name in ("top_p", "kv_dtype", "draft_tokens")},
    **{name: f"--{name.replace('_', '-')}" for name in ("max_sequences", "max_tokens_per_step")},
}
# A name that is a word, too, is meant only where a value or a demand follows.
_FIELD = re.compile(
    r"(?<![\w.-])(?:"
    + "|".join(re.escape(name) + (r"\b" if "_" in name else r"(?==| must)") for name in _OPTIONS)
    + ")"
)


@contextmanager
def named_as_options() -> Iterator[None]:
    """Errors about fields of the library name the options that the user typed instead."""
    try:
        yield
    except (ConfigError, InvalidArgumentError, OutOfBlocksError, StorageMemoryError) as error:
        error.args = (in_options(str(error)), *error.args[1:])
        raise


def in_options(text: str) -> str:
    """A message of the library, with the options in place of its fields.

    >>> in_options("max_new_tokens must be at least 1; n=3 results need at least as many beams, num_beams=2")
    '--max-tokens must be at least 1; -n=3 results need at least as many beams, --beams=2'
    """
    return _FIELD.sub(lambda found: _OPTIONS[found[0]], text)


def make_engine(
    model: str | None,
    device: str | None,
    dtype: str | None,
    kv_dtype: str | None,
    memory: str | None,
    host_memory: str | None,
    compile_layers: bool,
    record: str | None = None,
    **options: Any,
) -> Engine:
    """The engine that the options describe."""
    check_files(record)
    return Engine(
        model,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_bytes=None if memory is None else parse_bytes(memory, "--memory"),
        host_bytes=0 if host_memory is None else parse_bytes(host_memory, "--host-memory"),
        compile=compile_layers,
        record=record,
        **options,
    )


def limits(max_tokens_per_step: int | None, max_sequences: int) -> SchedulerConfig:
    """How much one step may hold; by default as much as all of its sequences need to decode, at least."""
    if max_tokens_per_step is None:
        max_tokens_per_step = max(SchedulerConfig.max_tokens_per_step, max_sequences)
    return SchedulerConfig(max_tokens_per_step=max_tokens_per_step, max_sequences=max_sequences)


def print_answer(engine: Engine, prompt: Prompt, params: SamplingParams, *, interruptible: bool = False) -> Completion:
    """Completes a prompt and prints it while it grows. A closed pipe ends it, and so does Ctrl-C.

    If it is `interruptible`, what there is at a Ctrl-C is the result.
    """
    texts: SimpleQueue[str | None] = SimpleQueue()
    generation = engine.submit(
        prompt, params, on_chunk=lambda chunk: texts.put(chunk.text), on_end=lambda: texts.put(None)
    )
    try:
        while (text := texts.get()) is not None:
            print(text, end="", flush=True)
    except BaseException as error:
        engine.cancel(generation)
        if not (interruptible and isinstance(error, KeyboardInterrupt)):
            raise
    return generation.result()


def tell_sampling(engine: Engine, params: SamplingParams, quiet: bool) -> None:
    """Says how tokens are chosen where the model has its own wishes."""
    if engine.sampling_defaults != SamplingParams():
        tell(f"sampling: {described(params.with_defaults(engine.sampling_defaults))} (the model's own unless you say)", quiet)


def tell_notes(results: Sequence[Completion], quiet: bool) -> None:
    """Says what the engine changed in the requests, each thing once."""
    for note in dict.fromkeys(note for result in results for note in result.notes):
        tell(in_options(note), quiet)


def tell(text: str, quiet: bool) -> None:
    """A remark beside the result: on stderr, so that the result can be piped."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)
