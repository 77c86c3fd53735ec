"""`kvpool replay`: policies, sizes and tiers side by side on one trace."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from kvpool.config import GroupKind, KVCacheConfig
from kvpool.config.cache_config import OBJECTIVES, check_host_write, check_objective
from kvpool.errors import InvalidArgumentError
from kvpool.recording.playback import play_recording
from kvpool.replay import command_options as opt
from kvpool.replay import misses
from kvpool.replay.bounds import FLAT_FIFO, INFINITE, MODELS, OPTIMUM
from kvpool.replay.capacity_plan import curve_sentence
from kvpool.replay.command_options import (
    load_trace,
    parse_capacities,
    parse_checkpoints,
    parse_tiers,
    refuse_unread,
    refuse_unused,
)
from kvpool.replay.formats import DEFAULT_MAX_ERRORS
from kvpool.replay.runs import map_over, run_all
from kvpool.replay.simulate import PrefillTime, ReplayConfig, ReplayResult, hit_curve
from kvpool.replay.trace import Trace
from kvpool.terminal import check_files, check_folders, console, progress_bar, write_csv, write_json

if TYPE_CHECKING:
    from kvpool.config import LayerSpec, StateSpec
    from kvpool.scheduling import LinearCostModel

DEFAULT_CAPACITIES = "1k,5k,10k,30k,50k,100k,inf"


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(replay)


def replay(
    call: typer.Context,
    trace: opt.TraceFile,
    policy: opt.Policy = None,
    capacity: opt.Capacity = DEFAULT_CAPACITIES,
    tiers: opt.Tiers = "",
    host_write: opt.HostWrite = "back",
    objective: opt.Objective = "blocks",
    checkpoint_every: opt.CheckpointEvery = None,
    block_size: opt.BlockSize = None,
    bounds: opt.Bounds = True,
    full_blocks_only: opt.FullBlocksOnly = False,
    why: opt.Why = False,
    model: opt.Model = None,
    kv_dtype: opt.KvDtype = None,
    gpu: opt.Gpu = None,
    costs: opt.Costs = None,
    tensor_parallel: opt.TensorParallel = 1,
    all_reduce_bandwidth: opt.AllReduceBandwidth = None,
    all_reduce_latency: opt.AllReduceLatency = None,
    slo_ttft: opt.SloTtft = 2.0,
    slo_tpot: opt.SloTpot = 0.1,
    speed: opt.Speed = 1.0,
    exact: opt.Exact = False,
    limit: opt.Limit = None,
    max_errors: opt.MaxErrors = DEFAULT_MAX_ERRORS,
    workers: opt.Workers = None,
    csv: opt.Csv = None,
    json: opt.Json = None,
    report: opt.Report = None,
    plots: opt.Plots = None,
    quiet: opt.Quiet = False,
) -> None:
    """Replays a trace through the real control plane, once for every policy and capacity.

    \b
    Which policy, how much memory? What would a host tier add, what would users
    notice?
      kvpool replay TRACE --policy lru,adaptive --capacity 1k:100k
      kvpool replay TRACE --tiers gpu=10k,host=50k
      kvpool replay TRACE --capacity 10k --model config.json --gpu h200
      kvpool replay TRACE --capacity 10k --report out.html
      kvpool replay TRACE --model hybrid.json --checkpoint-every none,1k
    """
    out = console(to_stderr="-" in (csv, json))
    check_files(csv, json, report)
    check_folders(plots)
    if csv == json == "-":
        raise InvalidArgumentError("--csv - and --json - would both go to stdout; write one of them to a file")
    if exact:
        read = {"trace", "exact", "policy", "csv", "json", "quiet", "workers"}
        refuse_unused(call, "with --exact, which does what was recorded", *sorted(call.params.keys() - read))
        _exact(trace, policy, json, csv, out)
        return
    sizes = _sizes(policy or _USUAL_POLICIES, capacity, tiers, host_write, objective)
    machine = _machine(model, kv_dtype, gpu, costs)
    if tensor_parallel > 1:
        machine = _divided(machine, model, kv_dtype, gpu, tensor_parallel, (all_reduce_bandwidth, all_reduce_latency))
    refuse_unread(call, serves=machine is not None and machine.costs is not None)
    rules = _rules(checkpoint_every, machine)
    started = time.perf_counter()
    loaded = _read(out, trace, max_errors, limit, full_blocks_only)
    configs = _configs(sizes, block_size, bounds, machine, rules, why)
    with progress_bar(f"replaying {loaded.name}", len(configs), quiet) as advance:
        results = run_all(loaded, configs, workers=workers, progress=advance)
    rows = [result.row() for result in results]
    if machine is not None and machine.costs is not None:
        _add_serving(rows, loaded, configs, machine, speed, (slo_ttft, slo_tpot), workers, quiet)
    if not quiet:
        _print_tables(out, loaded, results, rows, time.perf_counter() - started)
        for sentence in _remarks(loaded, results, rows, speed):
            out.print(sentence, style="bold")
    if csv is not None:
        write_csv(csv, rows)
    if json is not None:
        write_json(json, rows)
    _draw(out, report, plots, loaded, results, configs, rows)


def _read(out: Any, path: Path, max_errors: int, limit: int | None, full_blocks_only: bool) -> Trace:
    loaded = load_trace(path, max_errors, limit)
    if full_blocks_only:
        loaded = loaded.full_blocks_only()
    for sentence in loaded.problems.sentences():
        out.print(f"note: {sentence}", style="yellow")
    return loaded


def _draw(
    out: Any,
    report: Path | None,
    plots: Path | None,
    trace: Trace,
    results: list[ReplayResult],
    configs: list[ReplayConfig],
    rows: list[dict[str, Any]],
) -> None:
    """Writes the page and the pictures that the user wants, and prints their paths."""
    if report is not None:
        from kvpool.replay.report import write_report

        write_report(report, trace, results, configs, rows)
        out.print(f"report: {report}")
    if plots is not None:
        from kvpool.replay.pictures import absent_pictures, save_pictures

        for path in save_pictures(plots, trace, results, configs):
            out.print(f"picture: {path}")
        for sentence in absent_pictures(trace):
            out.print(f"note: {sentence}", style="yellow")


class _Sizes(NamedTuple):
    """What to run: policies and models with their objectives, capacities, blocks of lower tiers, and `host_write`."""

    policies: list[tuple[str, str]]
    capacities: list[int | None]
    lower: dict[str, Any]


def _sizes(policy: str, capacity: str, tiers: str, host_write: str, objective: str) -> _Sizes:
    from kvpool.eviction import make_policy, policy_names

    wanted = OBJECTIVES if objective == "both" else (check_objective(objective, InvalidArgumentError),)
    given = list(policy_names()) if policy == "all" else [name.strip().lower() for name in policy.split(",")]
    names: list[tuple[str, str]] = []
    for name in given:
        weighs = name not in MODELS and make_policy(name).weighs  # an unknown name is refused before anything runs
        names += [(name, each) for each in (wanted if weighs else ("blocks",))]
    if objective != "blocks" and all(each == "blocks" for _, each in names):
        raise InvalidArgumentError(
            f"--objective {objective} needs a policy that knows what blocks cost: adaptive, cost"
        )
    blocks = parse_tiers(tiers) if tiers else {}
    check_host_write(host_write, InvalidArgumentError)
    if host_write != "back" and not blocks.get("host"):
        raise InvalidArgumentError(
            f"--host-write {host_write} does nothing without a host; write --tiers gpu=10k,host=50k"
        )
    if not tiers:
        return _Sizes(names, parse_capacities(capacity), {})
    return _Sizes(names, [blocks.pop("gpu")], {**blocks, "host_write": host_write})


def _rules(checkpoint_every: str | None, machine: _Machine | None) -> list[dict[str, Any]]:
    """What the model keeps and where: its layers, and those that attend alone if others keep a state."""
    if machine is None or not machine.keeps_states:
        if checkpoint_every is not None:
            raise InvalidArgumentError("--checkpoint-every needs a --model of which some layers keep a state")
        return [{} if machine is None else {"layers": machine.layers}]
    every = parse_checkpoints(checkpoint_every or "none")
    return [{"layers": machine.layers, "checkpoint_every": each} for each in every] + [{"layers": machine.attention}]


def _configs(
    sizes: _Sizes,
    block_size: int | None,
    bounds: bool,
    machine: _Machine | None,
    rules: list[dict[str, Any]],
    why: bool,
) -> list[ReplayConfig]:
    names, capacities, lower = sizes
    time = PrefillTime() if machine is None else machine.time
    options: dict[str, Any] = {"block_size": block_size, "time": time, **lower}
    configs = [
        ReplayConfig(name, size, objective=objective, why=why, **options, **rule)
        for name, objective in names
        if name not in MODELS
        for rule in rules
        for size in capacities
    ]
    models = [name for name, _ in names if name in MODELS]
    if bounds:
        models += [OPTIMUM, INFINITE]
    below = {tier: blocks for tier, blocks in lower.items() if tier in ("host", "disk")}
    for name in dict.fromkeys(models):
        tiers = below if name == OPTIMUM else {}
        found = [None] if name == INFINITE else capacities
        configs.extend(ReplayConfig(name, size, block_size=block_size, time=time, **tiers) for size in found)
    return configs


class _Machine(NamedTuple):
    """The model's layers, and what its steps cost, if serving is to be simulated."""

    layers: tuple[LayerSpec | StateSpec, ...]
    costs: LinearCostModel | None

    @property
    def attention(self) -> tuple[LayerSpec | StateSpec, ...]:
        """The layers that attend."""
        return tuple(layer for layer in self.layers if layer.kind is not GroupKind.STATE)

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state."""
        return len(self.attention) < len(self.layers)

    @property
    def time(self) -> PrefillTime:
        """What computing and loading prefixes takes."""
        return (
            PrefillTime()
            if self.costs is None
            else PrefillTime.of(self.costs, ReplayConfig(layers=self.layers).token_bytes)
        )


def _machine(model: Path | None, kv_dtype: str | None, gpu: str | None, measured: Path | None) -> _Machine | None:
    from kvpool.config.model_config import layers_from_hf
    from kvpool.replay.costs import costs_for, count_weights
    from kvpool.scheduling.cost_model import read_costs

    if gpu is not None and measured is not None:
        raise InvalidArgumentError("give --gpu NAME or --costs FILE, not both: each says what a step costs")
    if measured is not None:
        found = read_costs(measured)
        if model is None:
            return _Machine(found.layers, found.costs)
        found.check_model(count_weights(model).total)
        return _Machine(layers_from_hf(model, dtype=kv_dtype), found.costs)
    if gpu is not None:
        if model is None:
            raise InvalidArgumentError("--gpu needs --model config.json: the cost of a token depends on the model")
        costs, layers = costs_for(model, gpu, kv_dtype)
        return _Machine(layers, costs)
    return None if model is None else _Machine(layers_from_hf(model, dtype=kv_dtype), None)


def _divided(
    machine: _Machine | None,
    model: Path | None,
    kv_dtype: str | None,
    gpu: str | None,
    ranks: int,
    link: tuple[float | None, float | None],
) -> _Machine:
    """The same model on several GPUs: bytes are those of one rank."""
    from kvpool.replay.parallel import Interconnect, RankCosts, RankShape

    if machine is None or model is None or (machine.costs is not None and gpu is None):
        raise InvalidArgumentError(
            f"--tensor-parallel {ranks} needs --model config.json, and takes --gpu NAME; --costs hold for what was measured"
        )
    if gpu is None:
        return _Machine(RankShape.of(model, machine.layers, ranks).layers, None)
    found = RankCosts.of(model, gpu, ranks, Interconnect.of(gpu, *link), kv_dtype)
    return _Machine(found.shape.layers, found.divided)


def _add_serving(
    rows: list[dict[str, Any]],
    trace: Trace,
    configs: list[ReplayConfig],
    machine: _Machine,
    speed: float,
    slo: tuple[float, float],
    workers: int | None,
    quiet: bool,
) -> None:
    """Runs the real scheduler in simulated time, for every row of finite size except bounds, and adds its columns."""
    from kvpool.replay.serving import ServingConfig, simulate_serving

    assert machine.costs is not None
    servings = {
        index: ServingConfig(config, machine.layers, machine.costs, speed=speed, slo_ttft=slo[0], slo_tpot=slo[1])
        for index, config in enumerate(configs)
        if config.policy not in MODELS and config.capacity is not None and config.layers == machine.layers
    }
    with progress_bar("serving", len(servings), quiet) as advance:
        found = map_over(trace, simulate_serving, list(servings.values()), workers=workers, progress=advance)
    for index, result in zip(servings, found, strict=True):
        rows[index].update(result.row())


_CHECKPOINTS = (
    "A capacity is the memory of so many blocks of K and V. Rows with checkpoints divide it between blocks and states; the "
    "others keep K and V of the layers that attend alone, as if states took no memory."
)
_TIER_NAMES = {"GPU": "GPU", "HOST": "host", "DISK": "disk"}


def _print_tables(
    out: Any, trace: Trace, results: list[ReplayResult], rows: list[dict[str, Any]], seconds: float
) -> None:
    title = f"{trace.name}: {len(trace):,} requests, {results[0].requested_blocks:,} blocks"
    found = {tier for result in results for tier, blocks in result.hit_blocks_by_tier.items() if blocks}
    tiers = [tier for tier in ("GPU", "HOST", "DISK") if tier in found] if found & {"HOST", "DISK"} else []
    has_states = any(result.checkpoints for result in results)  # their labels are long
    wide = ("token ratio", "evicted")[: 0 if tiers else 1 if has_states else 2]
    table = _table(title, "policy", "capacity", "hit blocks", "hit ratio", "saved", *wide)
    for heading in (*(f"{_TIER_NAMES[tier]} hits" for tier in tiers), "offloaded") if tiers else ():
        table.add_column(heading, justify="right")
    for result in results:
        cells = [
            result.label,
            _size(result),
            f"{result.hit_blocks:,}",
            f"{result.hit_ratio:.4f}",
            f"{result.saved_ratio:.1%}",
        ]
        if not tiers:
            evicted = "" if result.bound else f"{result.evicted_blocks:,}"
            cells += [f"{result.token_hit_ratio:.4f}", evicted][: len(wide)]
        if tiers and result.policy not in (INFINITE, FLAT_FIFO):
            cells += [f"{result.hit_blocks_by_tier.get(tier, 0):,}" for tier in tiers]
            cells.append("" if result.bound else f"{result.offloaded_blocks:,}")
        table.add_row(*cells, style="dim" if result.bound else "")
    table.caption = f"saved: of the seconds that computing all prompts takes. {seconds:.1f} s"
    out.print(table)
    if has_states:
        out.print(_CHECKPOINTS, style="dim")
    for bound in dict.fromkeys(f"{result.policy}: {result.bound}" for result in results if result.bound):
        out.print(bound, style="dim")
    if any(result.missed for result in results):
        why = _table("why tokens missed", "policy", "capacity", "cause", "tokens", "of prompts", "worth", "of all")
        for result in results:
            missed = sum(one.seconds for one in result.missed.values())
            total = result.saved_seconds / result.saved_ratio if result.saved_ratio else missed
            for words in misses.cells(result.missed, result.requested_tokens, total):
                why.add_row(result.label, _size(result), *words)
        why.caption = "worth: the seconds that computing them takes, of the seconds that computing all prompts takes"
        out.print(why)
    served = [(result, row) for result, row in zip(results, rows, strict=True) if "ttft_p50" in row]
    if served:
        out.print(_serving_table(served))


_USUAL_POLICIES = f"lru,{KVCacheConfig.eviction_policy}"  # the second one is what a manager uses
_OVERLOAD = 0.1  # of the time in which the trace arrives


def _remarks(trace: Trace, results: list[ReplayResult], rows: list[dict[str, Any]], speed: float) -> list[str]:
    """What the numbers mean where they could be misread: nothing is shared, there is no knee, the GPU is overloaded."""
    found = []
    for label in dict.fromkeys(result.label for result in results if not result.bound):
        points = hit_curve(results, label)
        sentence = curve_sentence(*zip(*points, strict=True)) if points else ""
        if sentence:
            found.append(sentence if not any(ratio for _, ratio in points) else f"{label}: {sentence}")
    arriving = trace.duration / speed
    late = [
        row
        for row in rows
        if row.get("simulated_seconds", 0.0) > (1 + _OVERLOAD) * arriving and row["ttft_p90"] > _OVERLOAD * arriving
    ]
    if late:
        most, served = max(row["simulated_seconds"] for row in late), sum("ttft_p50" in row for row in rows)
        found.append(
            f"Overload in {len(late)} of {served} runs: requests arrive in {arriving:,.0f} s and take up to {most:,.0f} s to "
            "serve, so waiting times say how long the trace is. Lower --speed, or use more GPUs."
        )
    return list(dict.fromkeys(found))


def _serving_table(served: list[tuple[ReplayResult, dict[str, Any]]]) -> Any:
    table = _table(
        "served in simulated time", "policy", "capacity", "TTFT p50", "p90", "p99", "ms/token", "tokens/s", "goodput"
    )
    for result, row in served:
        waits = [f"{row[f'ttft_p{percent}']:,.2f} s" for percent in (50, 90, 99)]
        speeds = [f"{1e3 * row['tpot_p50']:,.1f}", f"{row['output_tokens_per_second']:,.0f}", f"{row['goodput']:.1%}"]
        table.add_row(result.label, _size(result), *waits, *speeds)
    if refused := max(row["refused"] for _, row in served):
        table.caption = f"up to {refused:,} requests were refused: they are larger than the whole cache"
    return table


def _table(title: str, *headings: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        words = heading in ("policy", "capacity", "cause")  # numbers may be folded in a narrow window, these never
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=words)
    return table


def _size(result: ReplayResult) -> str:
    return "∞" if result.capacity is None else f"{result.capacity:,}"


def _exact(path: Path, policy: str | None, json: str | None, csv: str | None, out: Any) -> None:
    stats, notes = play_recording(path, policy)
    out.print(
        f"{path.name}: {stats.requests:,} requests, {sum(stats.hit_blocks.values()):,} of {stats.prompt_blocks:,} blocks and "
        f"{sum(stats.hit_tokens.values()):,} of {stats.prompt_tokens:,} tokens were cached"
    )
    for note in notes:
        out.print(f"note: {note}", style="yellow")
    if json is not None:
        write_json(json, stats.to_dict())
    if csv is not None:
        counts = {name: value for name, value in stats.to_dict().items() if isinstance(value, (int, float))}
        write_csv(csv, [counts])
