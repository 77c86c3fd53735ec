"""`kvpool prove`: whether the cache of an engine gives right answers."""

from __future__ import annotations

import json as json_format
import random
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvpool.errors import InvalidArgumentError
from kvpool.files import read_plain, write_plain
from kvpool.prove import checks
from kvpool.prove.endpoint import Endpoint
from kvpool.prove.report import STATUS, as_json, lines, page_lines
from kvpool.prove.trial import FULL, QUICK, Plan, Trial
from kvpool.terminal import check_files, console, write_json


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(prove)


def prove(
    url: Annotated[str, typer.Argument(help="The address of an endpoint with OpenAI's API, such as http://HOST:8000.")],
    model: Annotated[str | None, typer.Option(help="Which model (default: the first one of /v1/models).")] = None,
    key: Annotated[str, typer.Option(envvar="KVPOOL_PROVE_KEY", help="The key that the endpoint wants.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Short prompts and little traffic: half a minute.")] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=64, help="Tokens of each prompt (default: 2000, or less where that takes long; 320 with --quick)."
        ),
    ] = None,
    fill_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Traffic that pushes prompts down the tiers (default: 120; 4 with --quick)."),
    ] = None,
    adapters: Annotated[str, typer.Option(help="Names of adapters that must not be mixed, as a,b.")] = "",
    salts: Annotated[
        bool | None,
        typer.Option(help="Whether cache_salt must keep prompts apart (default: yes for kvpool and vLLM)."),
    ] = None,
    reset: Annotated[bool, typer.Option(help="Whether to empty the engine's cache, and look what comes back.")] = True,
    restart_command: Annotated[
        str | None, typer.Option(help="A command that restarts the engine; what outlived it is asked for.")
    ] = None,
    restart_seconds: Annotated[float, typer.Option(min=1, help="How long the engine may take to start.")] = 600.0,
    before: Annotated[
        Path | None, typer.Option(help="Write here what --after needs. Restart the engine then yourself.")
    ] = None,
    after: Annotated[
        Path | None, typer.Option(help="Ask again what --before asked, of the engine that came after.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Ask the prompts of an earlier run, behind an empty cache.")] = None,
    in_process: Annotated[
        str | None,
        typer.Option(help="Compare bytes of pages in a vLLM here; URL is its model, this its options as JSON."),
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the report as JSON; - for stdout.")] = None,
) -> None:
    """Tell whether the KV cache of an engine gives right answers.

    Asks prompts that nobody asked before, first when nothing is cached, then from every place where the engine keeps
    them: its own memory, the tiers below (our own traffic pushes prompts there), after a restart, many at once, beside
    clients that leave, with other salts and adapters. Every answer is compared with the computed one, by the log
    probabilities where the endpoint gives them. What differs by chance was measured before.

    Use an engine that serves nobody else: the traffic pushes out what others cached, and --reset empties the cache.

    Exit status: 0 right, 1 wrong answers were found, 2 nothing could be proved. docs/prove.md says what it cannot see.

    \b
    kvpool prove http://127.0.0.1:8000 --quick
    kvpool prove http://127.0.0.1:8000 --adapters sql,poems --json report.json
    kvpool prove http://127.0.0.1:8000 --restart-command 'systemctl restart vllm'
    kvpool prove http://127.0.0.1:8000 --before state.json    # then restart it
    kvpool prove http://127.0.0.1:8000 --after state.json
    kvpool prove MODEL --in-process '{"kv_transfer_config": {...}}'
    """
    check_files(json, before)
    seed = random.SystemRandom().randrange(10**9) if seed is None else seed
    if in_process is not None:
        prove_pages(url, in_process, seed, json)
    if before is not None and after is not None:
        raise InvalidArgumentError("--before and --after are the two halves of a run: give one of them")
    endpoint = Endpoint(url, model, key)
    endpoint.negotiate()
    notes = console(to_stderr=True)
    trial = Trial(
        endpoint,
        plan_of(endpoint, quick, tokens, fill_seconds),
        seed,
        salts=salts,
        may_reset=reset,
        say=lambda words: notes.print(words, style="dim"),
    )
    if after is not None:
        second_half(trial, read_state(after))
    else:
        first_half(trial, [name for name in adapters.split(",") if name])
        if before is not None and trial.caches:
            checks.before_restart(trial)
            write_plain(before, json_format.dumps(trial.state()).encode())
        elif trial.caches:
            if restart_command is not None:
                checks.restarted(trial, restart_command, restart_seconds)
            else:
                trial.skip("after a restart", "give --restart-command, or --before and --after")
            checks.forgotten(trial)
    out = console(to_stderr=json == "-")
    for line in lines(trial):
        out.print(line, soft_wrap=True)
    if json is not None:
        write_json(json, as_json(trial))
    raise typer.Exit(STATUS[trial.verdict])


def prove_pages(model: str, options: str, seed: int, json: str | None) -> NoReturn:
    """Compares bytes, and ends the command."""
    from kvpool.prove.in_process import compare_pages

    try:
        given = json_format.loads(options)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise InvalidArgumentError(f"--in-process is {options!r}; write options of vLLM's LLM as a JSON object")
    found = compare_pages(model, given, seed)
    out = console(to_stderr=json == "-")
    for line in page_lines(found):
        out.print(line, soft_wrap=True)
    if json is not None:
        write_json(json, found)
    raise typer.Exit(STATUS[found["verdict"]])


def plan_of(endpoint: Endpoint, quick: bool, tokens: int | None, fill_seconds: float | None) -> Plan:
    """How much is asked; prompts fit into the context."""
    plan = QUICK if quick else FULL
    num_tokens = plan.num_tokens if tokens is None else tokens
    cold_seconds = plan.cold_seconds if tokens is None else None
    if endpoint.context is not None:
        room = endpoint.context - 64
        if tokens is not None and tokens > room:
            raise InvalidArgumentError(
                f"--tokens is {tokens}; with its answer that is over a context of {endpoint.context}"
            )
        num_tokens = min(num_tokens, room)
    seconds = plan.fill_seconds if fill_seconds is None else fill_seconds
    return plan._replace(num_tokens=num_tokens, fill_seconds=seconds, cold_seconds=cold_seconds)


def first_half(trial: Trial, adapters: list[str]) -> None:
    """All but what needs another process, or empties the cache."""
    trial.begin()
    if not trial.caches:
        trial.skip("asked again", "no prompt was found in the cache when it was asked again at once")
        return
    trial.say("measuring noise")
    trial.measure()
    checks.asked_again(trial)
    checks.branches(trial)
    checks.unsaid(trial)
    checks.other_traffic(trial)
    checks.crowd(trial)
    checks.salts(trial)
    checks.adapters(trial, adapters)


def second_half(trial: Trial, state: dict[str, Any]) -> None:
    """What a run with --before left to be asked by the process that came after."""
    if state["model"] != trial.endpoint.model:
        raise InvalidArgumentError(f"--after is of the model {state['model']!r}, not of {trial.endpoint.model!r}")
    trial.restore(state)
    trial.caches = True
    checks.after_restart(trial)
    checks.forgotten(trial)


def read_state(path: Path) -> dict[str, Any]:
    """What --before wrote."""
    try:
        state = json_format.loads(read_plain(path))
        if isinstance(state, dict) and "probes" in state:
            return state
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"cannot read {path}: {error}") from error
    raise InvalidArgumentError(f"{path} is no file that `kvpool prove --before` wrote")
