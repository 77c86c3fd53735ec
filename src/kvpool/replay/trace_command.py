"""`kvpool trace`: info, convert, synth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpool.errors import InvalidArgumentError
from kvpool.replay.command_options import load_trace
from kvpool.replay.formats import DEFAULT_MAX_ERRORS, write_trace
from kvpool.replay.trace import summary, to_blocks
from kvpool.terminal import check_files, console, parse_count, write_json

TraceArgument = Annotated[Path, typer.Argument(help="A trace file; plain, .gz or .zst.")]
MaxErrors = Annotated[int, typer.Option(min=0, help="Broken lines to skip before giving up.")]


def register(app: typer.Typer, name: str) -> None:
    """Adds the group of commands to the application."""
    group = typer.Typer(help="Look at, convert and synthesise workload traces.", no_args_is_help=True)
    group.command("info")(info)
    group.command("convert")(convert)
    group.command("synth")(synth)
    app.add_typer(group, name=name)


def info(
    trace: TraceArgument,
    max_errors: MaxErrors = DEFAULT_MAX_ERRORS,
    json: Annotated[str | None, typer.Option(help="Write the figures as JSON; - for stdout.")] = None,
) -> None:
    """Shows what is in a trace: sizes, sharing, reuse distances, and problems of the file."""
    check_files(json)
    loaded = load_trace(trace, max_errors)
    figures = summary(loaded)
    out = console(to_stderr=json == "-")
    for name, value in figures.items():
        shown = f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
        out.print(
            f"{name.replace('_', ' '):>26}  {shown:,}"
            if type(value) is int
            else f"{name.replace('_', ' '):>26}  {shown}"
        )
    for sentence in loaded.problems.sentences():
        out.print(f"note: {sentence}", style="yellow")
    if not loaded.reuse_known:
        out.print("note: this trace has lengths only; what its prompts share is not known", style="yellow")
    if json is not None:
        write_json(json, {**figures, "problems": loaded.problems.sentences()})


def convert(
    trace: TraceArgument,
    output: Annotated[Path, typer.Argument(help="Where to write JSONL; .gz and .zst are compressed.")],
    block_size: Annotated[
        int | None, typer.Option(help="Turn tokens, or smaller blocks, into blocks of so many tokens.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    max_errors: MaxErrors = DEFAULT_MAX_ERRORS,
) -> None:
    """Writes a trace in Mooncake's form (block ids) or as tokens."""
    check_files(output)
    loaded = load_trace(trace, max_errors, limit)
    if not loaded.reuse_known:
        raise InvalidArgumentError(
            f"{trace} has lengths only; `kvpool trace synth OUT --like {trace}` makes a trace of such lengths and arrivals"
        )
    if block_size is not None:
        loaded = to_blocks(loaded, block_size)
    write_trace(loaded, output)
    console(to_stderr=True).print(f"{output}: {len(loaded):,} requests, {loaded.num_ids:,} ids of {loaded.unit} tokens")


def synth(
    output: Annotated[Path, typer.Argument(help="Where to write JSONL; .gz and .zst are compressed.")],
    like: Annotated[Path | None, typer.Option(help="Fit the parameters to this trace.")] = None,
    requests: Annotated[str, typer.Option(help="How many, for example 10k.")] = "10k",
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    tenants: Annotated[
        int | None, typer.Option(min=0, help="Who asks: so many tenants (default: as in --like).")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Print the fitted parameters.")] = False,
) -> None:
    """Makes a trace from fitted parameters: arrivals, lengths, a tree of shared prompts, turns and the gaps between them.

    \b
    Another load like that of a recorded day; or out of nothing, for five tenants:
      kvpool trace synth busy.jsonl.gz --like TRACE --rate 6
      kvpool trace synth made.jsonl --requests 20k --tenants 5
    """
    from kvpool.replay.synth import WorkloadModel, fit, synthesise

    check_files(output)
    model = WorkloadModel()
    if like is not None:
        source = load_trace(like, DEFAULT_MAX_ERRORS)
        model = fit(source)
        if not source.reuse_known:
            console(to_stderr=True).print(
                f"note: what the prompts of {like} share is not known; those made here share nothing", style="yellow"
            )
    if rate is not None:
        model = model.with_rate(rate)
    if tenants is not None:
        model = model.with_tenants(tenants)
    if show:
        console(to_stderr=True).print(model)
    made = synthesise(model, parse_count(requests, "--requests"), seed=seed)
    write_trace(made, output)
    console(to_stderr=True).print(
        f"{output}: {len(made):,} requests, {made.num_ids:,} blocks, {made.num_unique:,} different"
    )
