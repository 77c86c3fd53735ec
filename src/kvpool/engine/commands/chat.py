"""`kvpool chat`: a conversation in the terminal; after each turn it says what the cache saved."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.engine.commands import engine_options as opt
from kvpool.engine.engine import Engine
from kvpool.engine.generation import Completion
from kvpool.engine.sampling.params import SamplingParams
from kvpool.errors import InvalidArgumentError, NeverFitsError

LIVELY = SamplingParams(temperature=0.7, top_p=0.9)  # where neither the user nor the model says how to sample
DEFAULT_SYSTEM = "You are a helpful assistant."


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(chat)


@opt.command
def chat(
    *,
    engine_options: opt.EngineOptions,
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = DEFAULT_SYSTEM,
    max_tokens: opt.MaxTokens = 256,
    sampling: opt.SamplingOptions,
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends the conversation, Ctrl-C an answer."""
    opt.tell("loading the model ...", quiet=False)
    params = sampling.make_params(max_new_tokens=max_tokens)
    with engine_options.make_engine(model_defaults=sampling.model_defaults) as engine:
        opt.tell_sampling(engine, params, quiet=False)
        silent = engine.sampling_defaults == SamplingParams()
        Talk(engine, system, params.with_defaults(LIVELY) if silent else params).run()


class Talk:
    """One conversation, and how fast its prompts were computed so far."""

    def __init__(self, engine: Engine, system: str, params: SamplingParams) -> None:
        self.engine = engine
        self.params = params
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
        """One question and its answer, printed while it is generated. What is too long loses its oldest turns."""
        messages = [*self.messages, {"role": "user", "content": said}]
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
        forgotten = (len(self.messages) + 1 - len(messages)) // 2
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        words = self.saved(result) + (f"; too long: forgot the first {forgotten} turns" if forgotten else "")
        print(f"\n[{words}]")

    def _is_tight(self, num_tokens: int) -> bool:
        """Whether the context has no room for a whole answer to so long a prompt."""
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


def _opening(engine: Engine, system: str) -> list[dict[str, str]]:
    """How the conversation begins. What the model's template cannot do is known before anybody has typed a word."""
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


def _without_oldest_turn(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation without its first question and answer; nothing if only the newest question is left."""
    first = 1 if messages[0]["role"] == "system" else 0
    return messages[:first] + messages[first + 2 :] if len(messages) > first + 1 else []
