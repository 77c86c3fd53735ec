"""Prefixes that come back from the host while others decode: how fast they come, and what that costs the others.

    python benchmarks/onboarding.py             an 8B shape on a GPU; elsewhere a tiny one, which only proves that it runs

The link is a copy of 1 GiB from page-locked memory in the same run. Time to first token is that of one request on an idle
engine: a prompt of 8,192 tokens computed, against the same prompt with all of it cached on the host.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from cases.engine_gpu import LARGE, gpu_seconds
from cases.engine_runs import open_engine, random_model, random_prompts
from cases.traffic_runs import StepTimer, mark
from harness import Case, Runner, argument_parser, main, say
from kvpool import Tier
from kvpool.engine import Chunk, Engine, SamplingParams
from traffic import TINY

ONCE = SamplingParams(max_new_tokens=1, ignore_eos=True)


class Setting(NamedTuple):
    """What is measured, and on what."""

    model: Any
    vocabulary: int
    prefix: int  # tokens
    num_prefixes: int
    num_decoding: int
    context: int
    memory: dict[str, Any]


def full_setting() -> Setting:
    """The 8B shape."""
    model = random_model(LARGE, "cuda", torch.bfloat16)
    return Setting(model, LARGE["vocab_size"], 8192, 8, 64, 1024, {"kv_bytes": 24 << 30, "host_bytes": 12 << 30})


def tiny_setting() -> Setting:
    """The same on a tiny model, to see that it runs."""
    model = random_model(TINY, "cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    return Setting(model, TINY["vocab_size"], 256, 3, 2, 32, {"kv_bytes": 1 << 23, "host_bytes": 1 << 22})


class Beside(NamedTuple):
    """Prefixes that came up while others decoded."""

    bytes_per_second: float  # of the transfers, from the first to the last
    step: float  # seconds of a step that only decodes, meanwhile
    undisturbed: float  # the same while nothing came


class Bench:
    """One engine, and what was measured on it, once each."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @functools.cached_property
    def engine(self) -> Engine:
        engine = open_engine(self.setting.model, **self.setting.memory)
        engine.generate([[5] * 200], ONCE)
        return engine

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """Prompts of the prefix' length; another seed, other tokens."""
        setting = self.setting
        return [
            [3 + seed, *prompt[1:]]
            for prompt in random_prompts(count, setting.prefix, setting.prefix, 0, setting.vocabulary)
        ]

    def offload(self) -> None:
        """Moves all that is cached to the host, and waits until it is there."""
        engine = self.engine
        pool = engine.manager.config.pools[0]
        engine.manager.cache.offload(pool.num_blocks[Tier.GPU])
        engine.generate([[7] * 20], ONCE)  # a step carries the copies out
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @functools.cache  # noqa: B019 - it lives as long as the process
    def first_tokens(self) -> tuple[float, float]:
        """Seconds to the first token of a prompt that is computed, and of one that is on the host: medians."""
        computed, loaded = [], []
        for prompt in self.prompts(5, seed=1):
            computed.append(self._first_token(prompt))
            self.offload()
            loaded.append(self._first_token(prompt))
            self.engine.manager.cache.reset()
        say(f"    first token computed {_ms(computed)}, from the host {_ms(loaded)}")
        return float(np.median(computed)), float(np.median(loaded))

    def _first_token(self, prompt: list[int]) -> float:
        seconds = self.engine.generate([prompt], ONCE)[0].first_token_seconds
        assert seconds is not None
        return seconds

    @functools.cache  # noqa: B019
    def beside(self) -> Beside:
        """Prefixes of several requests come up at once while others decode."""
        engine, setting = self.engine, self.setting
        engine.manager.cache.reset()
        prompts = self.prompts(setting.num_prefixes, seed=2)
        engine.generate(prompts, ONCE)
        self.offload()
        decoding = self._decoding()
        with StepTimer(engine) as timer, Moves(engine) as moves:
            before = _decode_steps(timer, lambda: time.sleep(0.4))
            during = _decode_steps(timer, lambda: _complete(engine, prompts))
            after = _decode_steps(timer, lambda: time.sleep(0.4))
            rate = moves.bytes_per_second()
        for generation in decoding:
            engine.cancel(generation)
        quiet = float(np.mean([np.mean(before), np.mean(after)]))
        say(
            f"    {len(prompts)} prefixes of {setting.prefix} tokens at {rate / 1e9:.1f} GB/s, the link has "
            f"{self.link() / 1e9:.1f}; {len(during)} steps of {1e3 * np.mean(during):.2f} ms meanwhile, "
            f"{1e3 * np.mean(before):.2f} ms before, {1e3 * np.mean(after):.2f} ms after"
        )
        return Beside(rate, float(np.mean(during)), quiet)

    def _decoding(self) -> list[Any]:
        """Requests that decode until they are cancelled, once all of them do."""
        setting, begun, all_begun = self.setting, set[int](), threading.Event()
        texts = random_prompts(setting.num_decoding, setting.context, setting.context, 0, setting.vocabulary)
        long = SamplingParams(max_new_tokens=setting.context, ignore_eos=True)

        def note(number: int, chunk: Chunk) -> None:
            begun.add(number)
            if len(begun) == len(texts):
                all_begun.set()

        found = [self.engine.submit(text, long, on_chunk=partial(note, number)) for number, text in enumerate(texts)]
        all_begun.wait()
        return found

    @functools.cache  # noqa: B019
    def link(self) -> float:
        """Bytes per second of a large copy from page-locked memory."""
        if not torch.cuda.is_available():
            return 1e10
        source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device="cuda")
        return source.numel() / gpu_seconds(lambda: target.copy_(source, non_blocking=True))


class Moves:
    """Times the copies from the host while it is open, by events on their stream."""

    def __init__(self, engine: Engine) -> None:
        self._transfers = engine.plane.transfers
        self._move = self._transfers._move
        self._seen: list[tuple[Any, Any, int]] = []
        self._on_gpu = engine.plane.device.type == "cuda"

    def __enter__(self) -> Moves:
        self._transfers._move = self._timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._transfers._move = self._move  # type: ignore[method-assign]

    def _timed(self, step: Any) -> Any:
        begin = mark(self._on_gpu)
        checks = self._move(step)
        if (step.source.tier, step.target.tier) == (Tier.HOST, Tier.GPU):
            self._seen.append((begin, mark(self._on_gpu), len(step.src) * step.source.block_bytes))
        return checks

    def bytes_per_second(self) -> float:
        """Of all copies, from the start of the first to the end of the last."""
        begin, end = self._seen[0][0], self._seen[-1][1]
        seconds = begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
        return sum(num_bytes for *_, num_bytes in self._seen) / float(seconds)


def _decode_steps(timer: StepTimer, work: Callable[[], object]) -> list[float]:
    """Seconds of the steps without prompts while something is done."""
    timer.clear()
    work()
    return [step.seconds for step in timer.steps() if not step.num_prompt_tokens]


def _complete(engine: Engine, prompts: list[list[int]]) -> None:
    for generation in [engine.submit(prompt, ONCE) for prompt in prompts]:
        generation.result()


def cases(bench: Bench) -> list[Case]:
    """What the host tier brings one request, and what it costs the others."""

    def one(name: str, unit: str, better: Any, measure: Callable[[], float], bar: float) -> Case:
        def runner() -> Runner:
            return lambda: [measure()]

        return Case(name, unit, better, runner, (bar,), repeats=1, warmups=0)

    prefix = f"a prefix of {bench.setting.prefix:,} tokens"
    return [
        one(f"{prefix}, computed over loaded from the host", "x", "higher", lambda: _ratio(*bench.first_tokens()), 8.0),
        one(
            f"{prefix}, onboarded while others decode, of the link",
            "%",
            "higher",
            lambda: 100 * bench.beside().bytes_per_second / bench.link(),
            90.0,
        ),
        one(
            "a decode step meanwhile, over an undisturbed one",
            "x",
            "lower",
            lambda: _ratio(bench.beside().step, bench.beside().undisturbed),
            1.05,
        ),
    ]


def _ratio(over: float, under: float) -> float:
    return over / under


def _ms(seconds: list[float]) -> str:
    return ", ".join(f"{1e3 * each:.1f}" for each in seconds) + " ms"


if __name__ == "__main__":
    options = argument_parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    chosen = full_setting() if torch.cuda.is_available() and not options.quick else tiny_setting()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    sys.exit(main(cases(Bench(chosen)), [], options, versions, clock="time on the device"))
