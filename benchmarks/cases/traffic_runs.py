"""Conversations that come and go on one engine, its steps timed one by one, and what the machine would need at best."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from cases.engine_gpu import weight_bytes
from kvpool.engine import Chunk, Completion, Engine, SamplingParams

BUCKETS = (256, 512, 1024, 2048)  # tokens of a mixed step, up to


@dataclass(frozen=True)
class Traffic:
    """Sessions that begin at once. A turn follows the one before it, with all that was said in front of it."""

    num_sessions: int = 96
    num_turns: int = 3
    shared: int = 1500  # tokens of the system prompt
    new: tuple[int, int] = (100, 1500)  # tokens of a turn, from and to
    num_generated: int = 100
    vocabulary: int = 128256
    seed: int = 0


class StepTime(NamedTuple):
    """One step of an engine as it was planned, and how long the device worked on it."""

    num_tokens: int
    num_prompt_tokens: int
    decode_context: int  # tokens that the decoding rows read
    prompt_pairs: int  # tokens of prompts times what each of them sees
    seconds: float


class Machine(NamedTuple):
    """What the device does at best, as measured in this run."""

    bytes_per_second: float
    operations_per_second: float


@dataclass
class Conversations:
    """What users saw of a run."""

    seconds: float
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    cached_share: float = 0.0  # of all prompt tokens


def mark(on_gpu: bool) -> Any:
    """Now: a moment of the current stream, or of the clock."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class StepTimer:
    """Times every step of an engine while it is open, by events on a GPU: from where the step before it was over."""

    def __init__(self, engine: Engine) -> None:
        self._loop = engine._loop
        self._launch = self._loop._launch
        self._marks: list[tuple[Any, Any, tuple[int, int, int, int]]] = []
        self._on_gpu = engine._loop.runner.device.type == "cuda"

    def __enter__(self) -> StepTimer:
        self._loop._launch = self._timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop._launch = self._launch  # type: ignore[method-assign]

    def steps(self) -> list[StepTime]:
        """All steps so far; waits for them."""
        marks = list(self._marks)  # the engine's thread adds more
        if not self._on_gpu:
            return [StepTime(*shape, end - begin) for begin, end, shape in marks]
        for _, end, _ in marks:
            end.synchronize()
        return [StepTime(*shape, begin.elapsed_time(end) / 1e3) for begin, end, shape in marks]

    def clear(self) -> None:
        self._marks = []

    def _timed(self, plan: Any) -> Any:
        begin = mark(self._on_gpu)
        launched = self._launch(plan)
        if not plan.is_empty:
            contexts = plan.kv_lengths
            pairs = sum(count * (before + (count + 1) // 2) for count, before in plan.prefills())
            shape = (plan.num_tokens, plan.num_prefill_tokens, int(contexts[: plan.num_decode].sum()), pairs)
            self._marks.append((begin, mark(self._on_gpu), shape))
        return launched


def _draw(rng: np.random.Generator, count: int, vocabulary: int) -> list[int]:
    tokens: list[int] = rng.integers(3, vocabulary, count).tolist()
    return tokens


def run_traffic(engine: Engine, traffic: Traffic) -> Conversations:
    """All sessions to their end."""
    rng = np.random.default_rng(traffic.seed)
    system = _draw(rng, traffic.shared, traffic.vocabulary)
    lengths = rng.integers(*traffic.new, (traffic.num_sessions, traffic.num_turns))
    turns = [[_draw(rng, length, traffic.vocabulary) for length in session] for session in lengths.tolist()]
    seen = Conversations(0.0)
    params = SamplingParams(max_new_tokens=traffic.num_generated, ignore_eos=True)
    left, over = [traffic.num_sessions], threading.Event()
    failed: list[BaseException] = []
    cached: list[tuple[int, int]] = []

    def talk(session: int, turn: int, history: list[int]) -> None:
        prompt = history + turns[session][turn]
        last: list[float] = []

        def on_chunk(chunk: Chunk) -> None:
            now = time.perf_counter()
            if last:
                seen.between_tokens.append(now - last[0])
            last[:] = [now]

        def on_end() -> None:  # in the engine's thread: the next turn is there before the next step
            try:
                done: Completion = generation.result(0)
                assert done.first_token_seconds is not None
                seen.first_token.append(done.first_token_seconds)
                cached.append((done.num_cached_tokens, len(prompt)))
                if turn + 1 < traffic.num_turns:
                    talk(session, turn + 1, prompt + done.token_ids)
                    return
            except BaseException as error:
                failed.append(error)
            left[0] -= 1
            if not left[0]:
                over.set()

        generation = engine.submit(prompt, params, on_chunk=on_chunk, on_end=on_end)

    began = time.perf_counter()
    for session in range(traffic.num_sessions):
        talk(session, 0, system)
    over.wait()
    seen.seconds = time.perf_counter() - began
    if failed:
        raise failed[0]
    seen.cached_share = sum(found for found, _ in cached) / sum(total for _, total in cached)
    return seen


def mixed_steps(
    engine: Engine, num_decoding: int, context: int, sizes: Sequence[int], repeats: int, vocabulary: int, seed: int
) -> dict[int, list[StepTime]]:
    """Steps in which `num_decoding` sequences decode and one prompt of each size begins and ends. A seed: other tokens."""
    rng = np.random.default_rng([1, seed])
    started = threading.Semaphore(0)
    num_new = 40 + 2 * repeats * len(sizes)  # steps that are decoded beside; measured ones come in between
    decoding = [
        engine.submit(
            _draw(rng, context, vocabulary),
            SamplingParams(max_new_tokens=8 * num_new, ignore_eos=True),
            on_chunk=lambda chunk: started.release(),
        )
        for _ in range(num_decoding)
    ]
    for _ in range(num_decoding):
        started.acquire()
    found: dict[int, list[StepTime]] = {}
    once = SamplingParams(max_new_tokens=1, ignore_eos=True)
    with StepTimer(engine) as timer:
        for size in sizes:
            timer.clear()
            for _ in range(repeats):
                engine.submit(_draw(rng, size, vocabulary), once).result()
            found[size] = [step for step in timer.steps() if step.num_prompt_tokens == size]
    for generation in decoding:
        engine.cancel(generation)
    return found


def ideal_seconds(step: StepTime, engine: Engine, machine: Machine) -> float:
    """Weights read once, or multiplied with every token; keys and values of decoding rows read once; prompts multiplied."""
    read = weight_bytes(engine.model)
    layers = engine.shape.layers
    multiplied = 2 * step.num_tokens * read / _bytes_per_weight(engine.model)
    linear = max(read / machine.bytes_per_second, multiplied / machine.operations_per_second)
    reading = step.decode_context * engine.config.bytes_per_token / machine.bytes_per_second
    attention = 2 * step.prompt_pairs * sum(layer.q_heads * (layer.k_dim + layer.v_dim) for layer in layers)
    return linear + reading + attention / machine.operations_per_second


def _bytes_per_weight(model: Any) -> int:
    return int(next(iter(model.parameters())).element_size())


def describe(steps: Sequence[StepTime], ideal: Callable[[StepTime], float]) -> list[str]:
    """A line for every kind of step: how many, how long, and what would do."""
    lines = []
    kinds = [("decode only", [step for step in steps if not step.num_prompt_tokens])]
    low = 0
    for high in BUCKETS:
        chosen = [step for step in steps if step.num_prompt_tokens and low < step.num_tokens <= high]
        kinds.append((f"<= {high} tokens, mixed", chosen))
        low = high
    kinds.append((f"> {low} tokens", [step for step in steps if step.num_prompt_tokens and step.num_tokens > low]))
    for name, chosen in kinds:
        if chosen:
            times = [1e3 * step.seconds for step in chosen]
            best = [1e3 * ideal(step) for step in chosen]
            lines.append(
                f"{name:24} {len(chosen):5}  mean {np.mean(times):6.1f} ms  median {np.median(times):6.1f} ms  "
                f"ideal {np.mean(best):6.1f} ms"
            )
    return lines
