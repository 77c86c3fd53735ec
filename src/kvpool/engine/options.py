"""What the engine's commands share: the options that make an engine, and those that make sampling parameters."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool import fields
from kvpool.config.cache_config import check_objective
from kvpool.engine.params import SamplingParams, described
from kvpool.engine.settings import EngineSettings, as_settings
from kvpool.engine.starting import Start
from kvpool.errors import ConfigError, InvalidArgumentError, OutOfBlocksError, StorageMemoryError
from kvpool.fields import options_of, settings_of
from kvpool.model.sources import check_source
from kvpool.scheduling import SchedulerConfig
from kvpool.terminal import check_files, parse_bytes, raising_interrupts
from kvpool.tiers import TierConfig, read_tiers
from kvpool.tiers.settings import COMMAND_OPTIONS

if TYPE_CHECKING:  # the engine imports torch, which takes seconds: commands check what they were given first
    from kvpool.engine.engine import Engine, Prompt
    from kvpool.engine.generation import Completion

HostMemory = Annotated[str | None, typer.Option(help="Host memory for swapped-out requests, e.g. 16GiB.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")]


SHOWN = settings_of(EngineSettings)


@dataclass(frozen=True)
class _OfModel:
    """A class of its own, because a command shows options in the order of fields and this one comes first."""

    model: Annotated[
        str | None,
        typer.Option(help="A directory, a GGUF file, a config.json (random weights) (default SmolLM2-135M-Instruct)."),
    ] = None


_Shown: Any = options_of(EngineSettings, "_Shown", bases=(_OfModel,))


@dataclass(frozen=True)
class EngineOptions(_Shown):  # type: ignore[misc]
    """The options of every command that makes an engine: the settings that have a help text, and two more."""

    config: Annotated[
        Path | None, typer.Option(envvar="KVPOOL_CONFIG", help="A TOML file with a section [tiers]: docs/tiers.md.")
    ] = None
    objective: Annotated[
        str | None, typer.Option(help="What eviction saves: blocks (default), or seconds of computing them.")
    ] = None

    def changed(self, **options: Any) -> EngineOptions:
        """The same with other values of some options."""
        return replace(self, **options)

    def make_engine(
        self,
        model: Any = None,
        host_memory: str | None = None,
        *,
        cache: Mapping[str, Any] | None = None,
        keyed_tiers: bool = True,
        **options: Any,
    ) -> Engine:
        """The engine that the options describe. A `model` that is already loaded takes the place of theirs."""
        check_files(self.record)
        if model is None:
            self.check_model()
        settings = {**self._settings(host_memory, cache, keyed_tiers), **options}
        as_settings(settings)  # what is wrong is said before the next line, which takes seconds
        try:
            from kvpool.engine.engine import Engine
        except ModuleNotFoundError as error:
            raise ConfigError(f"an engine needs {error.name}: pip install '.[hf]' in a checkout of kvpool") from None
        with ExitStack() as closing:
            with raising_interrupts():
                engine = Engine(self.model if model is None else model, **settings)
                closing.callback(engine.close)
            closing.pop_all()
        return engine

    def check(self, host_memory: str | None = None) -> None:
        """Refuses wrong options before a model is loaded."""
        as_settings(self._settings(host_memory))

    def check_model(self) -> None:
        """Refuses a model that is not there."""
        if self.model is not None:
            check_source(self.model)

    def _settings(
        self, host_memory: str | None, cache: Mapping[str, Any] | None = None, keyed_tiers: bool = True
    ) -> dict[str, Any]:
        """The settings of an engine."""
        tiers = self.tiers(host_memory).engine_options()
        if not keyed_tiers:
            tiers = {name: value for name, value in tiers.items() if name in ("host_bytes", "cache")}
        shown = {each.name: getattr(self, name) for name, each in SHOWN.items() if each.name not in COMMAND_OPTIONS}
        shown = {name: value for name, value in shown.items() if value is not None}
        if self.memory is not None:
            shown["kv_bytes"] = parse_bytes(self.memory, "--memory")
        fields_of_cache = {**tiers.get("cache", {}), **self._objective(), **(cache or {})}
        return {**shown, **tiers, "cache": fields_of_cache or None}

    def _objective(self) -> dict[str, Any]:
        return {} if self.objective is None else {"objective": check_objective(self.objective)}

    def tiers(self, host_memory: str | None = None) -> TierConfig:
        """The settings of tiers: of the file, the environment and these options."""
        given = {setting: getattr(self, option) for option, setting in COMMAND_OPTIONS.items()}
        return read_tiers(self.config, options={**given, "host_bytes": host_memory})


@dataclass(frozen=True)
class SamplingOptions:
    """The options of every command that prints text."""

    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token (default: as the model says).")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens that together have this probability.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None
    model_defaults: Annotated[
        bool, typer.Option(help="Sample as generation_config.json says where no option says otherwise.")
    ] = True

    def make_params(self, **others: Any) -> SamplingParams:
        """Sampling parameters as these options and `others` say."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, seed=self.seed, **others)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """`kvpool.fields.command`, with errors that name options."""
    return named_as_options()(fields.command(function))


# Fields of the library, which its errors name, and the options that set them.
_OPTIONS = {
    "max_new_tokens": "--max-tokens",
    "kv_bytes": "--memory",
    "memory_fraction": "--memory",
    "host_bytes": "--host-memory",
    "model_defaults=False": "--no-model-defaults",
    "n": "-n",
    **{name: f"--{name}" for name in ("temperature", "seed", "stop", "dtype", "device")},
    **{
        name: f"--{name.replace('_', '-')}"
        for name in ("top_p", "kv_dtype", "draft_tokens", "disk_bytes", "tier_timeout")
    },
    **{name: f"--{name.replace('_', '-')}" for name in ("max_sequences", "max_tokens_per_step")},
}
# A name that is also a common word counts only if "=" or "must" follows.
_FIELD = re.compile(
    r"(?<![\w.-])(?:"
    + "|".join(re.escape(name) + (r"\b" if "_" in name else r"(?==| must)") for name in _OPTIONS)
    + ")"
)


@contextmanager
def named_as_options() -> Iterator[None]:
    """Makes errors about fields of the library name the options that the user typed."""
    try:
        yield
    except (ConfigError, InvalidArgumentError, OutOfBlocksError, StorageMemoryError) as error:
        error.args = (in_options(str(error)), *error.args[1:])
        raise


def in_options(text: str) -> str:
    """A message of the library, with the options in place of its fields.

    >>> in_options("max_new_tokens must be at least 1; n=300 is over max_sequences=256")
    '--max-tokens must be at least 1; -n=300 is over --max-sequences=256'
    """
    return _FIELD.sub(lambda found: _OPTIONS[found[0]], text)


def limits(max_tokens_per_step: int | None, max_sequences: int) -> SchedulerConfig:
    """The limits of a step. By default it holds at least one token for each sequence."""
    if max_tokens_per_step is None:
        max_tokens_per_step = max(SchedulerConfig.max_tokens_per_step, max_sequences)
    return SchedulerConfig(max_tokens_per_step=max_tokens_per_step, max_sequences=max_sequences)


def print_answer(engine: Engine, prompt: Prompt, params: SamplingParams, *, interruptible: bool = False) -> Completion:
    """Completes a prompt and prints the text while it grows. A closed pipe or Ctrl-C ends it with an error.

    If it is `interruptible`, Ctrl-C ends it with the text so far as the result.
    """
    texts: SimpleQueue[str | None] = SimpleQueue()
    generation = engine.submit(
        prompt, params, on_chunk=lambda chunk: texts.put(chunk.text), on_end=lambda: texts.put(None)
    )
    try:
        while (text := texts.get()) is not None:
            print(text, end="", flush=True)
    except BaseException as error:
        engine.cancel(generation)
        if not (interruptible and isinstance(error, KeyboardInterrupt)):
            raise
    return generation.result()


def tell_sampling(engine: Engine, params: SamplingParams, quiet: bool) -> None:
    """Prints the sampling parameters if the model has defaults of its own."""
    if engine.sampling_defaults != SamplingParams():
        tell(
            f"sampling: {described(params.with_defaults(engine.sampling_defaults))} (the model's own unless you say)",
            quiet,
        )


def tell_notes(results: Sequence[Completion], quiet: bool) -> None:
    """Prints what the engine changed in the requests, each change once."""
    for note in dict.fromkeys(note for result in results for note in result.notes):
        tell(in_options(note), quiet)


def tell_loading(text: str, quiet: bool) -> None:
    """`tell` before an engine is made: what takes long is told, too."""
    Start.shown = not quiet
    tell(text, quiet)


def tell(text: str, quiet: bool) -> None:
    """Prints a remark to stderr, so that the result on stdout can be piped."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)
