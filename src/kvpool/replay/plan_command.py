"""`kvpool plan`: what fits, what tiers add, and when loading beats computing, each number with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.config.model_config import layers_from_hf
from kvpool.errors import InvalidArgumentError
from kvpool.replay import command_options as opt
from kvpool.replay.capacity_plan import (
    GIB,
    GPU_FRACTION,
    Plan,
    PlanRequest,
    curve_parts,
    curve_sentence,
    knees,
    make_plan,
)
from kvpool.replay.command_options import load_trace
from kvpool.replay.costs import GPUS
from kvpool.replay.formats import DEFAULT_MAX_ERRORS
from kvpool.replay.parallel import Interconnect, RankShape
from kvpool.replay.runs import run_all
from kvpool.replay.simulate import ReplayConfig, least_capacity
from kvpool.replay.trace import Trace
from kvpool.scheduling.cost_model import read_costs
from kvpool.terminal import check_files, console, parse_bytes, parse_tokens, progress_bar, write_json

CURVE_POINTS = 9
_UNITS = (("GiB", GIB), ("MiB", 2**20), ("KiB", 1024))


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(plan)


def plan(
    call: typer.Context,
    model: Annotated[Path, typer.Option(help="A Hugging Face config.json, or the folder that holds it.")],
    gpu: Annotated[str | None, typer.Option(help=f"One of {', '.join(GPUS)}.")] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Instead of --gpu: the machine that `kvpool bench --json FILE` measured.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Element type of K and V: fp8, bfloat16, int8, int4.")] = None,
    context: Annotated[str, typer.Option(help="Tokens per sequence; 32k is 32,768.")] = "8k",
    concurrency: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    num_gpus: Annotated[
        int, typer.Option(help="GPUs whose memory and speed are added up; --tensor-parallel counts what that costs.")
    ] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(help="Ranks of each engine, a GPU each: bytes of one, all-reduces.", min=1)
    ] = 1,
    data_parallel: Annotated[int, typer.Option(help="Engines that share the sequences.", min=1)] = 1,
    all_reduce_bandwidth: opt.AllReduceBandwidth = None,
    all_reduce_latency: opt.AllReduceLatency = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    weight_bytes: Annotated[
        float | None, typer.Option(help="Bytes per parameter (default: as the config says).")
    ] = None,
    gpu_fraction: Annotated[float, typer.Option(help="Part of the GPU memory to use.")] = GPU_FRACTION,
    host: Annotated[str, typer.Option(help="Host memory for the cache, for example 512GB.")] = "0",
    disk: Annotated[str, typer.Option(help="Disk for the cache, for example 4TB.")] = "0",
    trace: Annotated[Path | None, typer.Option(help="A trace: adds its hit curve and recommends sizes.")] = None,
    policy: Annotated[str, typer.Option(help="Eviction policy for the hit curve.")] = "adaptive",
    json: Annotated[str | None, typer.Option(help="Write all numbers; - for stdout.")] = None,
) -> None:
    """Plans the memory of a model on GPUs from its config alone, and explains each number.

    Speeds are a share of data-sheet figures; with --costs they are measured.

    \b
    Does it fit? How much cache is enough? And on a machine of my own?
      kvpool plan --model config.json --gpu h200 --context 32k --concurrency 200
      kvpool plan --model config.json --gpu h200 --tensor-parallel 4
      kvpool plan --model config.json --gpu h200 --trace TRACE
      kvpool bench --model DIR --json costs.json
      kvpool plan --model DIR --costs costs.json
    """
    if (gpu is None) == (costs is None):
        raise InvalidArgumentError("give --gpu NAME, or --costs FILE written by `kvpool bench --json FILE`")
    if trace is None:
        opt.refuse_unused(call, "without --trace", "policy")
    if tensor_parallel == 1:
        opt.refuse_unused(call, "without --tensor-parallel", "all_reduce_bandwidth", "all_reduce_latency")
    request = PlanRequest(
        str(model),
        gpu,
        kv_dtype,
        parse_tokens(context, "--context"),
        concurrency,
        num_gpus,
        block_size,
        weight_bytes,
        gpu_fraction,
        parse_bytes(host, "--host"),
        parse_bytes(disk, "--disk"),
        None if costs is None else read_costs(costs),
        tensor_parallel,
        data_parallel,
        None if gpu is None else Interconnect.of(gpu, all_reduce_bandwidth, all_reduce_latency),
    )
    check_files(json)
    loaded = None if trace is None else load_trace(trace, DEFAULT_MAX_ERRORS)
    made = make_plan(request)
    result: dict[str, Any] = made.to_dict()
    out = console(to_stderr=json == "-")
    _print_plan(out, made)
    if loaded is not None and "kv_bytes_per_token" not in made.numbers:
        reason = "no layer attends" if "gpu_checkpoints" in made.numbers else "nothing is left for a cache"
        out.print(f"There is no hit curve: {reason}.", style="bold")
    elif loaded is not None:
        lower = {"host": request.host_bytes, "disk": request.disk_bytes}
        layers: Any = layers_from_hf(request.model, dtype=kv_dtype)
        if tensor_parallel > 1:
            layers = RankShape.of(request.model, layers, tensor_parallel).layers
        result["trace"] = _curve(out, loaded, ReplayConfig(policy, layers=layers), made, lower)
    if json is not None:
        write_json(json, result)


def _print_plan(out: Any, made: Plan) -> None:
    from rich.table import Table

    table = Table(show_header=True, header_style="bold")
    table.add_column("what")
    table.add_column("how much", justify="right")
    table.add_column("why")
    for name, value in made.numbers.items():
        table.add_row(name.replace("_", " "), _shown(name, value), made.why[name])
    out.print(table)
    out.print(made.verdict, style="bold")


def _shown(name: str, value: float) -> str:
    """A number with the unit in its name."""
    if name == "parameters":
        return f"{value / 1e9:.2f} B"
    if name.endswith("_bytes"):
        unit, size = next(each for each in _UNITS if value >= each[1] or each[1] == 1024)
        return f"{value / size:,.1f} {unit}"
    if "seconds" in name:
        return f"{value:.3f} s" if value >= 1e-3 else f"{value * 1e6:.3g} µs"
    return f"{value:,.0f}"


def _curve(out: Any, loaded: Trace, config: ReplayConfig, made: Plan, lower: dict[str, int]) -> dict[str, Any]:
    """Hit ratios over sizes in bytes of this model: what the GPU holds, what each tier adds, and where the knees are."""
    unit = loaded.block_size
    block_bytes = unit * int(made.numbers["kv_bytes_per_token"])
    most = max(loaded.num_unique if loaded.unit > 1 else loaded.num_ids // unit, 2)
    least = least_capacity(config.layers, unit)
    marks = _tier_sizes(made, lower, block_bytes, max(most, least))
    spread = {max(least, round(most ** (0.4 + 0.6 * point / (CURVE_POINTS - 1)))) for point in range(CURVE_POINTS)}
    capacities = sorted(spread | set(marks))
    with progress_bar("hit curve", len(capacities)) as advance:
        results = run_all(loaded, [replace(config, capacity=size) for size in capacities], progress=advance)
    ratios = [result.hit_ratio for result in results]
    gpu_blocks = int(made.numbers["kv_budget_bytes"]) // block_bytes
    best = knees(capacities, ratios, gpu_blocks) if any(ratios) else {}
    for size, ratio in zip(capacities, ratios, strict=True):
        notes = [marks[size]] if size in marks else []
        notes += [f"knee, {where}" for where, found in best.items() if found == size]
        mark = f"  ◄ {'; '.join(notes)}" if notes else ""
        out.print(f"{size:>12,} blocks {size * block_bytes / GIB:>10,.1f} GiB  {ratio:7.4f}{mark}")
    found = dict(zip(capacities, ratios, strict=True))
    for where, knee_size in best.items():
        size = curve_parts(capacities, gpu_blocks)[where][-1] if knee_size is None else knee_size
        words = f"{size:,} blocks of {unit} tokens ({size * block_bytes / GIB:,.1f} GiB in all)"
        what = "no knee yet, more finds more up to" if knee_size is None else "the knee is at"
        last = "" if knee_size is None else "; more buys little there"
        out.print(
            f"{loaded.name}, {where}: {what} {words}, which find {found[size]:.1%} of the blocks{last}.", style="bold"
        )
    out.print(curve_sentence(capacities, ratios) if not any(ratios) else "Live requests need their room beside it.")
    known = next((size for size in best.values() if size is not None), None)
    return {
        "name": loaded.name,
        "policy": config.policy,
        "curve": [{"capacity": size, "bytes": size * block_bytes, "hit_ratio": found[size]} for size in capacities],
        "tiers": {name: {"capacity": size, "hit_ratio": found[size]} for size, name in marks.items()},
        "knees": best,
        "knee": known,
        "knee_bytes": None if known is None else known * block_bytes,
    }


def _tier_sizes(made: Plan, lower: dict[str, int], block_bytes: int, most: int) -> dict[int, str]:
    """How many blocks the GPU, and the GPU with each lower tier, can hold, at most those of the trace; and their names."""
    size, name = int(made.numbers["kv_budget_bytes"]), "GPU"
    found = {min(max(1, size // block_bytes), most): name}
    for tier, more in lower.items():
        if more:
            size, name = size + more, f"{name} + {tier}"
            found.setdefault(min(size // block_bytes, most), name)
    return found
