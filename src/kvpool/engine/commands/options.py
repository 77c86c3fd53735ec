"""What the engine's commands share: the options that make an engine, and those that make sampling parameters."""

from __future__ import annotations

import sys
from queue import SimpleQueue
from typing import Annotated, Any

import typer

from kvpool.engine.engine import Engine, Prompt
from kvpool.engine.generation import Completion
from kvpool.engine.params import SamplingParams
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
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that together have this probability.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")]


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


def tell(text: str, quiet: bool) -> None:
    """A remark beside the result: on stderr, so that the result can be piped."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)
