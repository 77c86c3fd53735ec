"""The options of `kvpool replay`, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.replay.formats import read_trace
from kvpool.replay.trace import Trace
from kvpool.terminal import parse_count, parse_tokens

_SIZES, _SERVING, _RESULTS = "What to compare", "Serving in simulated time", "Results"

TraceFile: TypeAlias = Annotated[
    Path, typer.Argument(help="Mooncake or token JSONL, a kvpool recording; plain, .gz or .zst.")
]
Policy: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Policies, comma separated (default lru); 'all' for every one.", rich_help_panel=_SIZES),
]
Capacity: TypeAlias = Annotated[
    str, typer.Option(help="Blocks of the cache: 10k, 1k:100k, 1k,5k,inf.", rich_help_panel=_SIZES)
]
Tiers: TypeAlias = Annotated[
    str, typer.Option(help="Instead: blocks per tier, gpu=10k,host=50k,disk=1m.", rich_help_panel=_SIZES)
]
HostWrite: TypeAlias = Annotated[
    str,
    typer.Option(
        help="When runs are copied to the host: back (on eviction) or through (at once).",
        rich_help_panel=_SIZES,
    ),
]
Objective: TypeAlias = Annotated[
    str,
    typer.Option(
        help="What eviction saves: blocks, seconds of computing them, or both side by side.", rich_help_panel=_SIZES
    ),
]
CheckpointEvery: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Of a --model whose layers keep a state: tokens between checkpoints inside prompts, none,1k,4k (default none).",
        rich_help_panel=_SIZES,
    ),
]
BlockSize: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per block (default: the trace's, 16 for tokens).", rich_help_panel=_SIZES),
]
Bounds: TypeAlias = Annotated[
    bool, typer.Option(help="Add the infinite cache and the offline optimum.", rich_help_panel=_SIZES)
]
Why: TypeAlias = Annotated[
    bool, typer.Option("--why", help="Say why tokens missed, and what each cause costs.", rich_help_panel=_SIZES)
]
FullBlocksOnly: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--full-blocks-only", help="Leave out partial last blocks, as an engine does.", rich_help_panel=_SIZES
    ),
]
Model: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="A config.json: bytes moved are reported too; checkpoints are simulated if its layers keep a state.",
        rich_help_panel=_SERVING,
    ),
]
KvDtype: TypeAlias = Annotated[
    str | None, typer.Option(help="Element type of K and V for --model.", rich_help_panel=_SERVING)
]
Gpu: TypeAlias = Annotated[
    str | None, typer.Option(help="Serve --model on this GPU: TTFT, throughput, goodput.", rich_help_panel=_SERVING)
]
Costs: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Serve on the machine that `kvpool bench --json FILE` measured.", rich_help_panel=_SERVING),
]
TensorParallel: TypeAlias = Annotated[
    int, typer.Option(help="Divide --model between so many GPUs.", min=1, rich_help_panel=_SERVING)
]
AllReduceBandwidth: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="GB/s between ranks, measured: the bus bandwidth of nccl-tests (default: 80 % of the data sheet)."
    ),
]
AllReduceLatency: TypeAlias = Annotated[
    float | None, typer.Option(help="µs of the smallest all-reduce, measured (default 15).")
]
SloTtft: TypeAlias = Annotated[
    float, typer.Option(help="Goodput: seconds to the first token, at most.", rich_help_panel=_SERVING)
]
SloTpot: TypeAlias = Annotated[
    float, typer.Option(help="Goodput: seconds per further token, at most.", rich_help_panel=_SERVING)
]
Speed: TypeAlias = Annotated[
    float, typer.Option(help="Arrivals come this many times as fast.", rich_help_panel=_SERVING)
]
Exact: TypeAlias = Annotated[
    bool, typer.Option("--exact", help="Of a recording: do every recorded operation again, as it was.")
]
Limit: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")]
MaxErrors: TypeAlias = Annotated[int, typer.Option(min=0, help="Broken lines to skip before giving up.")]
Workers: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Processes (default: one per processor).")]
Csv: TypeAlias = Annotated[
    str | None, typer.Option(help="Write one row per run; - for stdout.", rich_help_panel=_RESULTS)
]
Json: TypeAlias = Annotated[
    str | None, typer.Option(help="Write one row per run; - for stdout.", rich_help_panel=_RESULTS)
]
Report: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write one self-contained HTML page with pictures.", rich_help_panel=_RESULTS)
]
Plots: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write the pictures into this folder (.png, .svg).", rich_help_panel=_RESULTS)
]
Quiet: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", help="No table, no progress.", rich_help_panel=_RESULTS)
]


def refuse_unused(call: typer.Context, why: str, *names: str) -> None:
    """Refuses options that were given though this call does not read them."""
    sources = {name: call.get_parameter_source(name) for name in names}
    unused = [
        f"--{name.replace('_', '-')}" for name, source in sources.items() if source and source.name == "COMMANDLINE"
    ]
    if unused:
        raise InvalidArgumentError(f"{', '.join(unused)} would do nothing {why}; leave it out")


def refuse_unread(call: typer.Context, *, serves: bool) -> None:
    """Refuses options of `kvpool replay` that belong to others which were not given."""
    if call.params["tiers"]:
        refuse_unused(call, "with --tiers, which has the blocks of the GPU", "capacity")
    if call.params["model"] is None:
        refuse_unused(call, "without --model", "kv_dtype")
    if call.params["tensor_parallel"] == 1:
        refuse_unused(call, "without --tensor-parallel", "all_reduce_bandwidth", "all_reduce_latency")
    if not serves:
        refuse_unused(call, "without --gpu or --costs, which serve the trace", "speed", "slo_ttft", "slo_tpot")


DEFAULT_STEPS = (1, 2, 3, 5)  # of each power of ten in a range


def parse_capacities(text: str) -> list[int | None]:
    """`1k:100k` (steps 1, 2, 3, 5 of each power of ten), `1k,10k`, `inf`.

    >>> parse_capacities("1k:5k,inf")
    [1000, 2000, 3000, 5000, None]
    """
    found: list[int | None] = []
    for part in text.split(","):
        low, colon, high = part.strip().partition(":")
        if low.lower() in ("inf", "infinite", "∞"):
            found.append(None)
        elif not colon:
            found.append(parse_count(low, "--capacity"))
        else:
            found.extend(_range(parse_count(low, "--capacity"), parse_count(high, "--capacity")))
    return list(dict.fromkeys(found))


def _range(low: int, high: int) -> list[int]:
    if low > high:
        raise InvalidArgumentError(f"the range {low}:{high} is empty; write the smaller number first")
    inside = [step * 10**power for power in range(16) for step in DEFAULT_STEPS if low < step * 10**power < high]
    return sorted({low, high, *inside})


def parse_checkpoints(text: str) -> list[int | None]:
    """`none,1k`: tokens between checkpoints; none: only where prompts end and where they parted.

    >>> parse_checkpoints("none,1k")
    [None, 1024]
    """
    parts = [part.strip().lower() for part in text.split(",")]
    return list(dict.fromkeys(None if part == "none" else parse_tokens(part, "--checkpoint-every") for part in parts))


def parse_tiers(text: str) -> dict[str, int]:
    """`gpu=10k,host=50k,disk=1m`: blocks per tier."""
    tiers: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().lower().partition("=")
        if not equals or name not in ("gpu", "host", "disk"):
            raise InvalidArgumentError(f"--tiers has {part!r}; write gpu=10k,host=50k,disk=1m (blocks)")
        if name in tiers:
            raise InvalidArgumentError(f"--tiers {text!r} names {name} twice; write gpu=10k,host=50k,disk=1m (blocks)")
        tiers[name] = parse_count(value, f"--tiers {name}")
    if "gpu" not in tiers:
        raise InvalidArgumentError(f"--tiers {text!r} has no gpu tier; write gpu=10k,host=50k")
    return tiers


def load_trace(path: Path, max_errors: int, limit: int | None = None) -> Trace:
    """A trace with at least one request."""
    loaded = read_trace(path, max_errors=max_errors, limit=limit)
    if not len(loaded):
        reasons = "; ".join(loaded.problems.sentences()[:3]) or "it has no lines behind its first"
        raise TraceError(f"{path} holds no request that can be read ({reasons})")
    return loaded
