"""`kvpool bench serve`: load on any OpenAI endpoint, and how it answers: percentiles, rates, goodput."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.clients.load import Endpoint, LoadRequest, RequestResult, fetch_text, figures, of_trace, run_load, synthetic
from kvpool.errors import InvalidArgumentError
from kvpool.terminal import check_files, console, progress_bar, write_json

KEY_VARIABLE = "OPENAI_API_KEY"
DEFAULT_CLIENTS = 16


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(serve)


def serve(
    url: Annotated[str, typer.Option(help="The endpoint: http://127.0.0.1:8000.")],
    model: Annotated[str, typer.Option(help="Its name there; default: the first one that the endpoint lists.")] = "",
    key: Annotated[str, typer.Option(envvar=KEY_VARIABLE, help="The API key.", show_default=False)] = "",
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    trace: Annotated[
        Path | None, typer.Option(help="Ask what this trace asked, when it did, instead of a synthetic mix.")
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="How much faster than the trace.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="How many; default: 100, or all of the trace.")] = None,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help=f"So many at once, each sends one after the other; default: {DEFAULT_CLIENTS}."),
    ] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Instead: requests a second, as they come.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Words of a prompt, about one token each.")] = 256,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Those of a shared beginning.")] = 128,
    prefixes: Annotated[int, typer.Option(min=1, help="How many different beginnings there are.")] = 4,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an answer; default: 64, or what the trace had.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for exactly as many: a field that not all servers know.")
    ] = True,
    first_ms: Annotated[
        float | None, typer.Option(help="Goodput: the first token comes within so many milliseconds.")
    ] = None,
    between_ms: Annotated[float | None, typer.Option(help="Goodput: the mean time between tokens is within.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request may take.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of the mix.")] = 0,
    json_file: Annotated[str | None, typer.Option("--json", help="Write the figures as JSON; - for stdout.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")] = False,
) -> None:
    """Put load on an OpenAI endpoint, of kvpool or another server, and print how it answers.

    \b
    kvpool bench serve --url http://127.0.0.1:8000 --clients 32
    kvpool bench serve --url URL --rate 5 --first-ms 500 --between-ms 50
    kvpool bench serve --url URL --trace live.kvtrace.gz --speed 2

    Every request is a stream. A first token counts when its text arrives, not when the stream opens.
    """
    check_files(json_file)
    if api not in ("chat", "completions"):
        raise InvalidArgumentError(f"--api is {api!r}; it is chat or completions")
    if clients is not None and rate is not None:
        raise InvalidArgumentError("--clients and --rate are two ways to set the pace; give one")
    endpoint = Endpoint.at(url, key=key, model=model, is_chat=api == "chat", ignore_eos=ignore_eos)
    if trace is not None:
        asked = _traced(trace, requests, speed, max_tokens, rate, paced=clients is None)
        num_clients = clients
    else:
        asked = synthetic(
            requests or 100,
            prompt_tokens=prompt_tokens,
            shared_tokens=shared_tokens,
            num_prefixes=prefixes,
            max_tokens=max_tokens or 64,
            rate=rate,
            seed=seed,
        )
        num_clients = None if rate is not None else clients or DEFAULT_CLIENTS
    outcomes, seconds = _driven(endpoint, asked, num_clients, timeout, quiet)
    found = figures(outcomes, seconds, first_ms=first_ms, between_ms=between_ms)
    if json_file is not None:
        settings = {"url": url, "clients": num_clients, "rate": rate, "first_ms": first_ms, "between_ms": between_ms}
        write_json(json_file, {"settings": settings, **found})
    if json_file != "-":
        _print(found)
    if not found["completed"]:
        raise typer.Exit(1)


def _traced(
    file: Path, limit: int | None, speed: float, max_tokens: int | None, rate: float | None, *, paced: bool
) -> list[LoadRequest]:
    from kvpool.replay.formats import read_trace

    if rate is not None:
        raise InvalidArgumentError("--rate is for the synthetic mix; --speed sets the pace of a trace")
    return of_trace(read_trace(file, limit=limit), speed=speed, max_tokens=max_tokens, paced=paced)


def _driven(
    endpoint: Endpoint, asked: list[LoadRequest], num_clients: int | None, timeout: float, quiet: bool
) -> tuple[list[RequestResult], float]:
    async def drive() -> tuple[list[RequestResult], float]:
        chosen = endpoint._replace(model=endpoint.model or await _first_model(endpoint))
        with progress_bar("asking", len(asked), quiet) as advance:
            return await run_load(
                chosen, asked, num_clients=num_clients, timeout=timeout, on_done=lambda outcome: advance(1)
            )

    return asyncio.run(drive())


async def _first_model(endpoint: Endpoint) -> str:
    try:
        listed = json.loads(await fetch_text(endpoint, "/v1/models"))
        return str(listed["data"][0]["id"])
    except (OSError, asyncio.TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        why = str(error) or type(error).__name__
        raise InvalidArgumentError(
            f"no model is listed at {endpoint.host}:{endpoint.port} ({why}); is it there? or name one: --model"
        ) from None


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("", "p50", "p90", "p99")
    for name in ("first_token", "between_tokens", "request"):
        table.add_row(f"{name.replace('_', ' ')}, ms", *(f"{value:.1f}" for value in found[f"{name}_ms"].values()))
    out = console(to_stderr=False)
    out.print(table)
    cached = (
        "" if found["cached_prompt_share"] is None else f", {found['cached_prompt_share']:.0%} of prompt tokens cached"
    )
    out.print(
        f"{found['completed']} of {found['requests']} requests in {found['seconds']:.1f} s: "
        f"{found['requests_per_second']:.2f} a second, goodput {found['goodput_per_second']:.2f} "
        f"({found['goodput_share']:.0%}), {found['output_tokens_per_second']:.1f} tokens a second{cached}"
    )
    for error, count in found["errors"].items():
        out.print(f"{count} failed: {error}")
