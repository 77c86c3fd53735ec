"""`kvpool generate` completes prompts in one running batch; `kvpool chat` is a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.engine import options as opt
from kvpool.engine.params import SamplingParams
from kvpool.errors import InvalidArgumentError, NeverFitsError
from kvpool.terminal import check_files, write_json

if TYPE_CHECKING:
    from kvpool.engine.engine import Engine
    from kvpool.engine.generation import Completion

LIVELY = SamplingParams(temperature=0.7, top_p=0.9)  # where neither the user nor the model says how to sample
DEFAULT_SYSTEM = "You are a helpful assistant."


def register(app: typer.Typer, name: str) -> None:
    """Adds one of the two commands to the application."""
    app.command(name)(chat if name == "chat" else generate)


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
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be given again.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    json: Annotated[str | None, typer.Option(help="Write results as JSON; - for stdout.")] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Completes prompts with a model. A single prompt is printed while it is generated."""
    check_files(json)
    texts = _read_prompts(prompts, file, quiet)
    params = sampling.make_params(max_new_tokens=max_tokens, n=n, stop=stop or ())
    opt.tell_loading("loading the model ...", quiet)
    with engine_options.make_engine(
        host_memory=host_memory,
        model_defaults=sampling.model_defaults,
        scheduler=opt.limits(None, max(64, n)),
    ) as engine:
        opt.tell_sampling(engine, params, quiet)
        asked: list[Any] = (
            [engine.chat_prompt([{"role": "user", "content": t}]) for t in texts] if chat else list(texts)
        )
        live = len(texts) == 1 and params.n == 1 and json is None
        results = [opt.print_answer(engine, asked[0], params)] if live else engine.generate(asked, params)
        if live:
            print()
        elif json is None:
            _print_results(texts, results)
        else:
            write_json(json, [_as_dict(text, result) for text, result in zip(texts, results, strict=True)])
        opt.tell_notes(results, quiet)
        opt.tell(_summary(engine, results), quiet)


def _read_prompts(prompts: list[str] | None, file: Path | None, quiet: bool) -> list[str]:
    if file is not None:
        if prompts:
            raise InvalidArgumentError("give prompts or --file, not both")
        source = str(file)
    elif not prompts or prompts == ["-"]:
        source = "stdin"
        if sys.stdin.isatty():
            opt.tell("reading prompts, one per line; Ctrl-D ends them", quiet)
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
            {"text": s.text, "token_ids": s.token_ids, "finish_reason": s.finish_reason} for s in result.samples
        ],
    }


def _summary(engine: Engine, results: list[Completion]) -> str:
    tokens = sum(len(sample.token_ids) for result in results for sample in result.samples)
    longest = max(result.seconds for result in results)
    hits = engine.stats().cache.token_hit_rate
    return f"{tokens} tokens in {longest:.1f} s ({tokens / longest:.1f} tok/s); {hits:.0%} of the prompt tokens were cached"


@opt.command
def chat(
    *,
    engine_options: opt.EngineOptions,
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = DEFAULT_SYSTEM,
    image: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="An image for the first question; may be given again."),
    ] = None,
    max_tokens: opt.MaxTokens = 256,
    sampling: opt.SamplingOptions,
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends the conversation, Ctrl-C an answer."""
    opt.tell_loading("loading the model ...", quiet=False)
    params = sampling.make_params(max_new_tokens=max_tokens)
    with engine_options.make_engine(model_defaults=sampling.model_defaults) as engine:
        opt.tell_sampling(engine, params, quiet=False)
        silent = engine.sampling_defaults == SamplingParams()
        Conversation(engine, system, params.with_defaults(LIVELY) if silent else params, image or ()).run()


class Conversation:
    """One conversation, and how fast its prompts were computed so far."""

    def __init__(self, engine: Engine, system: str, params: SamplingParams, images: Sequence[Path] = ()) -> None:
        self.engine = engine
        self.params = params
        self._images = images  # for the next question
        self.messages = _opening(engine, system)
        self._seconds_per_token: float | None = None  # of prompt tokens that had to be computed

    def run(self) -> None:
        """Reads turns until there is none."""
        while True:
            try:
                said = input("you> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            except UnicodeDecodeError:
                print("[that was no UTF-8 text]")
                continue
            if not said:
                return
            self.turn(said)

    def turn(self, said: str) -> None:
        """Asks one question and prints the answer as it grows. A conversation that is too long loses its oldest turns."""
        shown: list[Any] = [{"type": "image", "image": image} for image in self._images]
        content = [*shown, {"type": "text", "text": said}] if shown else said
        messages: list[dict[str, Any]] = [*self.messages, {"role": "user", "content": content}]
        while True:
            try:
                prompt = self.engine.chat_prompt(messages)
                if self._is_tight(len(prompt)) and (shorter := _without_oldest_turn(messages)):
                    messages = shorter
                    continue
                result = opt.print_answer(self.engine, prompt, self.params, interruptible=True)
                break
            except NeverFitsError as error:
                messages = _without_oldest_turn(messages)
                if not messages:
                    print(f"[{error}]")
                    return
            except InvalidArgumentError as error:
                print(f"[{error}]")
                return
        self._images = ()
        forgotten = (len(self.messages) + 1 - len(messages)) // 2
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        words = self.saved(result) + (f"; too long: forgot the first {forgotten} turns" if forgotten else "")
        print(f"\n[{words}]")

    def _is_tight(self, num_tokens: int) -> bool:
        """Whether a prompt of this length leaves too little of the context for a whole answer."""
        limit = self.engine.config.max_seq_len
        return limit is not None and num_tokens + self.params.max_new_tokens - 1 > limit

    def saved(self, result: Completion) -> str:
        """What the cache did for this turn, in words."""
        total, cached = len(result.prompt_token_ids), result.num_cached_tokens
        words = f"{cached} of {total} prompt tokens from the cache"
        if result.first_token_seconds is None:
            return words
        words += f", first token after {1e3 * result.first_token_seconds:.0f} ms"
        if total - cached >= 16:  # enough to tell how long a token takes
            self._seconds_per_token = result.first_token_seconds / (total - cached)
        if cached and self._seconds_per_token is not None:
            words += f", about {1e3 * cached * self._seconds_per_token:.0f} ms saved"
        return words


def _opening(engine: Engine, system: str) -> list[dict[str, Any]]:
    """The first messages. Tries the model's template now, so that it fails before the user has typed anything."""
    question = {"role": "user", "content": "?"}
    engine.chat_prompt([question])
    opening = [{"role": "system", "content": system}] if system else []
    try:
        engine.chat_prompt([*opening, question])
    except InvalidArgumentError:
        if system != DEFAULT_SYSTEM:
            raise
        opt.tell("this model takes no system message; going on without", quiet=False)
        return []
    return opening


def _without_oldest_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation without its first question and answer; empty if only the newest question is left."""
    first = 1 if messages[0]["role"] == "system" else 0
    return messages[:first] + messages[first + 2 :] if len(messages) > first + 1 else []
