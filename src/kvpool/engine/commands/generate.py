"""`kvpool generate`: prompts in, texts out, all of them in one running batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.engine.commands import engine_options as opt
from kvpool.engine.engine import Engine
from kvpool.engine.generation import Completion
from kvpool.errors import InvalidArgumentError
from kvpool.terminal import check_files, write_json


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(generate)


@opt.command
def generate(
    *,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; - or none reads one per line from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Prompts from a file, one per line.")
    ] = None,
    engine_options: opt.EngineOptions,
    host_memory: opt.HostMemory = None,
    max_tokens: opt.MaxTokens = 128,
    sampling: opt.SamplingOptions,
    n: Annotated[int, typer.Option("-n", help="Samples of each prompt.")] = 1,
    beams: Annotated[int, typer.Option(help="Beam search with so many beams.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be given again.")] = None,
    draft_tokens: Annotated[int, typer.Option(help="Guess so many tokens from the text before; output unchanged.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    json: Annotated[str | None, typer.Option(help="Write results as JSON; - for stdout.")] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Completes prompts with a model. A single prompt is printed while it is generated."""
    check_files(json)
    texts = _read_prompts(prompts, file)
    params = sampling.make_params(max_new_tokens=max_tokens, n=n, num_beams=beams, stop=stop or ())
    opt.tell("loading the model ...", quiet)
    with engine_options.make_engine(
        host_memory=host_memory,
        draft_tokens=draft_tokens,
        model_defaults=sampling.model_defaults,
        scheduler=opt.limits(None, max(64, n, beams)),
    ) as engine:
        opt.tell_sampling(engine, params, quiet)
        asked: list[Any] = (
            [engine.chat_prompt([{"role": "user", "content": t}]) for t in texts] if chat else list(texts)
        )
        live = len(texts) == 1 and params.n == params.num_beams == 1 and json is None
        results = [opt.print_answer(engine, asked[0], params)] if live else engine.generate(asked, params)
        if live:
            print()
        elif json is None:
            _print_results(texts, results)
        else:
            write_json(json, [_as_dict(text, result) for text, result in zip(texts, results, strict=True)])
        opt.tell_notes(results, quiet)
        opt.tell(_summary(engine, results), quiet)


def _read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    if file is not None:
        if prompts:
            raise InvalidArgumentError("give prompts or --file, not both")
        source = str(file)
    elif not prompts or prompts == ["-"]:
        source = "stdin"
    else:
        return prompts
    try:
        lines = (sys.stdin.read() if file is None else file.read_text(encoding="utf-8")).splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{source} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {source}: {error.strerror or error}") from None
    kept = [line for line in lines if line.strip()]
    if not kept:
        raise InvalidArgumentError("there is no prompt; give some as arguments, in --file, or one per line on stdin")
    return kept


def _print_results(texts: list[str], results: list[Completion]) -> None:
    for text, result in zip(texts, results, strict=True):
        for sample in result.samples:
            print(f"> {text}\n{sample.text.strip()}\n")


def _as_dict(text: str, result: Completion) -> dict[str, Any]:
    return {
        "prompt": text,
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.num_cached_tokens,
        "first_token_seconds": result.first_token_seconds,
        "seconds": result.seconds,
        "notes": list(result.notes),
        "samples": [
            {"text": s.text, "token_ids": s.token_ids, "finish_reason": s.finish_reason, "score": s.score}
            for s in result.samples
        ],
    }


def _summary(engine: Engine, results: list[Completion]) -> str:
    tokens = sum(len(sample.token_ids) for result in results for sample in result.samples)
    longest = max(result.seconds for result in results)
    hits = engine.stats().cache.token_hit_rate
    return f"{tokens} tokens in {longest:.1f} s ({tokens / longest:.1f} tok/s); {hits:.0%} of the prompt tokens were cached"
