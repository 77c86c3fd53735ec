"""`kvpool bench`: throughput, time to first token and time between tokens of a model, and the costs of its single steps.

`kvpool warm` compiles ahead what the first start of an engine would compile, and says what that took.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from kvpool.config.layers import ceil_div
from kvpool.engine import options as opt
from kvpool.engine.engine import Engine
from kvpool.engine.generation import Chunk
from kvpool.engine.params import SamplingParams
from kvpool.engine.sizing import copy_seconds
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.model.compiled_layers import layers_folder
from kvpool.model.loading import DEFAULT_NAME
from kvpool.scheduling import LinearCostModel
from kvpool.scheduling.cost_model import MeasuredStep, Measurement, fit_costs
from kvpool.scope import ReuseScope
from kvpool.terminal import check_files, console, progress_bar, write_json

DEFAULT_SHARED_TOKENS = 128
# What is timed to find the costs of single steps.
PROMPTS = (32, 128, 512, 1024)
BATCHES = (1, 4, 16)
CONTEXTS = (16, 256, 768)
DECODE_STEPS = 6
LINK_BYTES = 2**26
SHORTEST_PROMPT = 4


def register(app: typer.Typer, name: str) -> None:
    """Adds one of the two commands to the application."""
    app.command(name)(warm if name == "warm" else bench)


@opt.command
def bench(
    *,
    engine_options: opt.EngineOptions,
    host_memory: opt.HostMemory = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, shared ones included.")] = 256,
    shared_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that all prompts begin with (default 128, or half of short prompts)."),
    ] = None,
    max_tokens: opt.MaxTokens = 32,
    max_sequences: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
    max_tokens_per_step: Annotated[
        int | None, typer.Option(help="Tokens of one step, decoding and prefill together (default 2048 or more).")
    ] = None,
    compare: Annotated[bool, typer.Option(help="Measure without the prefix cache too.")] = True,
    costs: Annotated[
        bool | None,
        typer.Option(help="Also time single steps, for `kvpool replay|plan --costs` (default: with --json)."),
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the figures as JSON; - for stdout.")] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Runs random prompts with a common beginning, with and without the prefix cache, and prints the times.

    With --json FILE it also measures what prefill, decoding and the link to the host cost on this machine: `kvpool replay
    TRACE --costs FILE` and `kvpool plan --costs FILE` then answer for it instead of for a GPU out of a list.
    """
    check_files(json)
    shared = min(DEFAULT_SHARED_TOKENS, prompt_tokens // 2) if shared_tokens is None else shared_tokens
    if shared > prompt_tokens:
        raise InvalidArgumentError(
            f"--shared-tokens is {shared}, more than --prompt-tokens {prompt_tokens}; share less"
        )
    settings = dict(requests=requests, prompt_tokens=prompt_tokens, shared_tokens=shared, max_tokens=max_tokens)
    rows: list[dict[str, Any]] = []
    measurement: Measurement | None = None
    loaded: Any = None
    for caching in (True, False) if compare else (True,):
        opt.tell_loading("loading the model ..." if loaded is None else "without the prefix cache ...", quiet)
        options = engine_options if caching else engine_options.changed(record=None)  # one trace, of the first run
        with options.make_engine(
            loaded,
            host_memory,
            scheduler=opt.limits(max_tokens_per_step, max_sequences),
            cache={"enable_prefix_caching": caching},
            keyed_tiers=caching,
            model_defaults=False,  # random prompts: greedy tokens cost the same in every model
        ) as engine:
            engine.warm_up()  # so that no request waits for a graph, or runs by layers that are not compiled yet
            rows.append({"prefix_cache": caching, **_measure(engine, **settings, quiet=quiet)})
            if caching and (costs or (costs is None and json is not None)):
                measurement = _try_costs(engine, engine_options.model or DEFAULT_NAME, wanted=bool(costs), quiet=quiet)
            loaded = engine.model
    if json is not None:
        costs_told = {} if measurement is None else {"measurement": measurement.to_dict()}
        write_json(json, {"settings": settings, "runs": rows, **costs_told})
    if json != "-":
        _print_table(rows)
        if measurement is not None:
            _print_costs(measurement)


def _try_costs(engine: Engine, name: str, wanted: bool, quiet: bool) -> Measurement | None:
    """The costs of single steps. If the cache is too small to time them, raises if they were asked for, else None."""
    opt.tell("timing single steps ...", quiet)
    try:
        return measure_costs(engine, name)
    except ConfigError as error:
        if wanted:
            raise
        opt.tell(f"no costs are written: {error}", quiet)
        return None


def _measure(
    engine: Engine, requests: int, prompt_tokens: int, shared_tokens: int, max_tokens: int, quiet: bool
) -> dict[str, Any]:
    prompts = _prompts(requests, prompt_tokens, shared_tokens, engine.shape.vocab_size)
    params = SamplingParams(max_new_tokens=max_tokens, ignore_eos=True)
    engine.generate([prompts[0][:16]], SamplingParams(max_new_tokens=2, ignore_eos=True))  # what is made on first use
    arrivals: list[list[float]] = [[] for _ in prompts]
    with progress_bar("generating", requests * max_tokens, quiet) as advance:

        def note(prompt: int, chunk: Chunk) -> None:
            if chunk.token_ids:
                arrivals[prompt].append(time.perf_counter())
                advance(len(chunk.token_ids))

        start = time.perf_counter()
        results = engine.generate(prompts, params, on_chunk=note)
        seconds = time.perf_counter() - start
    gaps = [gap for times in arrivals for gap in np.diff(times).tolist()]
    cached = sum(result.num_cached_tokens for result in results)
    return {
        "seconds": seconds,
        "output_tokens_per_second": requests * max_tokens / seconds,
        "total_tokens_per_second": requests * (prompt_tokens + max_tokens) / seconds,
        "cached_prompt_share": cached / (requests * prompt_tokens),
        "first_token_ms": _percentiles([result.first_token_seconds or 0.0 for result in results]),
        "between_tokens_ms": _percentiles(gaps),
        "preemptions": engine.stats().scheduler.preemptions,
    }


def _prompts(requests: int, length: int, shared: int, vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    common = rng.integers(0, vocabulary, shared).tolist()
    return [common + rng.integers(0, vocabulary, length - shared).tolist() for _ in range(requests)]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{p}": float(1e3 * np.percentile(np.array(seconds), p)) for p in (50, 90, 99)}


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("", *("with the prefix cache" if row["prefix_cache"] else "without" for row in rows))

    table.add_row("output tok/s", *(f"{row['output_tokens_per_second']:.1f}" for row in rows))
    table.add_row("prompt tokens from the cache", *(f"{row['cached_prompt_share']:.0%}" for row in rows))
    for name, key in (("first token, ms", "first_token_ms"), ("between tokens, ms", "between_tokens_ms")):
        values = (" / ".join(f"{value:.1f}" for value in row[key].values()) for row in rows)
        table.add_row(f"{name}: p50 / p90 / p99", *values)
    table.add_row("preemptions", *(str(row["preemptions"]) for row in rows))
    console(to_stderr=False).print(table)


def _print_costs(found: Measurement) -> None:
    costs = found.costs
    console(to_stderr=False).print(
        f"{found.model} on {found.machine}: prefill {1 / max(costs.prefill_seconds_per_token, 1e-12):,.0f} tok/s (median "
        f"error {found.errors['prefill']:.0%}); a decode step {1e3 * costs.decode_seconds_per_step:.2f} ms + "
        f"{1e3 * costs.decode_seconds_per_sequence:.3f} ms a sequence + "
        f"{1e6 * costs.decode_seconds_per_context_token:.3f} µs a token of context (median error "
        f"{found.errors['decode']:.0%}); link {costs.transfer_bytes_per_second / 1e9:.1f} GB/s"
    )


class StepLog(LinearCostModel):
    """A cost model that keeps every step that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[MeasuredStep] = []

    def observe_step(
        self, prefills: Sequence[tuple[int, int]], num_sequences: int, context: int, seconds: float
    ) -> None:
        self.steps.append(MeasuredStep(list(prefills), num_sequences, context, seconds))


def measure_costs(engine: Engine, name: str) -> Measurement:
    """What prefill, decoding and the link cost with this engine's model on this machine."""
    scheduler = engine._loop.scheduler
    usual, log = scheduler.costs, StepLog()
    random = np.random.default_rng(0)
    longest = _longest(engine)
    scheduler.costs = log
    try:
        for length in sorted({min(length, longest) for length in PROMPTS}):
            _run(engine, random, 1, length, 1)
        for context in sorted({min(context, longest - DECODE_STEPS) for context in CONTEXTS}):
            for batch in BATCHES:
                if batch <= scheduler.config.max_sequences and _fits(engine, batch, context + DECODE_STEPS):
                    _run(engine, random, batch, context, DECODE_STEPS)
    finally:
        scheduler.costs = usual
    costs, errors = fit_costs(_medians(log.steps), link_speed(engine.model.device))
    return Measurement(
        machine=machine_name(engine.model.device),
        memory_bytes=memory_bytes(engine.model.device),
        model=name,
        parameters=sum(parameter.numel() for parameter in engine.model.parameters()),
        layers=tuple(engine.config.layers),
        costs=costs,
        errors=errors,
    )


def _longest(engine: Engine) -> int:
    """The longest prompt that fits into one step, the model's positions and the cache."""
    per_step = engine._loop.scheduler.config.max_tokens_per_step
    limits = (per_step, engine.config.longest_sequence(), engine.shape.max_positions)
    return max(SHORTEST_PROMPT + DECODE_STEPS, min(limit for limit in limits if limit) - DECODE_STEPS)


def _fits(engine: Engine, batch: int, num_tokens: int) -> bool:
    blocks = ceil_div(num_tokens, engine.config.block_size) * batch
    return all(blocks <= pool.total // 2 for pool in engine.manager.stats().pools)


def _run(engine: Engine, random: np.random.Generator, batch: int, length: int, num_new: int) -> None:
    """Runs a batch of random prompts twice, so that the second run initialises nothing. None of them is cached."""
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    for _ in range(2):
        prompts = random.integers(0, engine.shape.vocab_size, (batch, length)).tolist()
        engine.generate(prompts, params, scope=ReuseScope(tenant="kvpool bench"))


def _medians(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The median step of each shape. Contexts that differ by less than 16 tokens per sequence count as one shape."""
    alike: dict[object, list[MeasuredStep]] = {}
    for step in steps:
        shape = (tuple(step.prefills), step.num_sequences, step.context // (16 * max(1, step.num_sequences)))
        alike.setdefault(shape, []).append(step)
    return [
        group[0]._replace(
            seconds=float(np.median([step.seconds for step in group])),
            context=round(float(np.mean([step.context for step in group]))),
        )
        for group in alike.values()
    ]


def link_speed(device: torch.device, num_bytes: int = LINK_BYTES) -> float:
    """Bytes per second between this device and (pinned) host memory, one way."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return num_bytes / copy_seconds(source.zero_(), target)


def machine_name(device: torch.device) -> str:
    """A name for the machine that a model runs on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} processor with {torch.get_num_threads()} threads"


def memory_bytes(device: torch.device) -> int:
    """All memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- kvpool warm -----------------------------------------------------------------------------------------------------


@opt.command
def warm(
    *,
    engine_options: opt.EngineOptions,
    max_sequences: Annotated[int, typer.Option(help="Sequences in one step.", min=1)] = 256,
    quiet: opt.Quiet = False,
) -> None:
    """Compile and keep what a model needs on this GPU, so that the next engines start fast.

    \b
    kvpool warm --model DIR
    kvpool warm --model DIR --compile --kv-dtype int8   # as you will serve it

    Triton's and torch's caches keep it, by GPU, version, shape and type; the
    folders are printed. Set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to
    put them into an image or onto a volume.
    """
    opt.tell_loading("loading the model ...", quiet)
    with engine_options.make_engine(keyed_tiers=False, scheduler=opt.limits(None, max_sequences)) as engine:
        engine.warm_up()
        engine.generate([[0] * 8], SamplingParams(max_new_tokens=2, ignore_eos=True))
        stages = {**engine.start_seconds, "capturing all CUDA graphs, which are not kept": engine.graphs.seconds}
    for name, seconds in stages.items():
        print(f"{seconds:7.1f} s  {name}")
    for name, folder in _folders().items():
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
        print(f"{size / 2**20:7.1f} MiB of {name}: {folder}")


def _folders() -> dict[str, Path]:
    """Where compiled kernels are kept."""
    triton = os.environ.get("TRITON_CACHE_DIR")
    return {
        "kernels": Path(triton) if triton else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache",
        "layers": layers_folder(),
    }
