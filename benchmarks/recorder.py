"""What recording costs a running engine, in percent of its CPU time.

    python benchmarks/recorder.py [--json FILE] [--check] [--quick] [--only WORD]

"direct" adds up what is spent in the recorder (in the manager's verbs beyond the verbs themselves, and in the recorder's
thread) and divides it by the rest of the process. "paired" runs the same kind of requests with and without, in turns, and
compares: it would also show indirect costs, but a shared machine makes single pairs differ by ten percent. One torch
thread. The smaller the model, the more the control plane weighs: the 0.2M Llama is a worst case that nobody serves, and has
no bar. SmolLM2 is absent without its package.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness
import kvpool
from harness import Case, PeerAbsentError, Runner
from kvpool.engine import Engine, SamplingParams
from kvpool.errors import ModelLoadError
from kvpool.replay import TraceRecorder
from kvpool.scheduling import SchedulerConfig

BAR = 2.0  # percent
VERBS = ("allocate", "extend_batch", "commit", "commit_batch", "slot_mapping", "free", "free_batch")
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 1024,
}
TINY = SMALL | {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2}


class Workload:
    """An engine and requests for it."""

    def __init__(self, model: Any, requests: int, prompt_tokens: int, new_tokens: int) -> None:
        torch.set_num_threads(1)
        limits = SchedulerConfig(max_sequences=requests)
        try:
            self.engine = Engine(model, device="cpu", kv_bytes=2**27, scheduler=limits)
        except ModelLoadError as error:
            raise PeerAbsentError(str(error).splitlines()[0]) from None
        self.manager: Any = self.engine.manager
        self.shape = (requests, prompt_tokens)
        self.params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        self.random = np.random.default_rng(0)
        self.folder = tempfile.TemporaryDirectory()

    def recorder(self) -> TraceRecorder:
        return TraceRecorder(Path(self.folder.name) / "live.kvtrace").attach(self.manager)

    def run(self) -> float:
        """CPU seconds of the process for one round of requests from an empty cache."""
        prompts = self.random.integers(0, self.engine.shape.vocab_size, self.shape).tolist()
        self.manager.cache.reset()
        start = time.process_time()
        self.engine.generate(prompts, self.params)
        return time.process_time() - start

    def close(self, recorder: TraceRecorder) -> float:
        """CPU seconds that the recorder's thread took, from its start to the end of the file."""
        assert recorder._thread is not None
        clock = time.pthread_getcpuclockid(recorder._thread.ident or 0)
        taken, start = time.clock_gettime(clock), time.process_time()
        recorder.close()
        return taken + time.process_time() - start


def direct(*settings: Any) -> Runner:
    """Percent of the engine's CPU time that is spent inside the recorder."""
    work = Workload(*settings)
    spent = {"inside": 0, "around": 0}

    def clocked(verb: Callable[..., Any], where: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return verb(*args, **kwargs)
            finally:
                spent[where] += time.thread_time_ns() - start

        return call

    def repeat() -> list[float]:
        spent.update(inside=0, around=0)
        for name in VERBS:
            setattr(work.manager, name, clocked(getattr(work.manager, name), "inside"))
        recorder = work.recorder()
        for name in VERBS:
            setattr(work.manager, name, clocked(getattr(work.manager, name), "around"))
        total = work.run()
        writer = work.close(recorder)
        verbs = (spent["around"] - spent["inside"]) / 1e9
        return [100 * (verbs + writer) / (total - verbs - writer)]

    return repeat


def paired(*settings: Any) -> Runner:
    """Percent that a round of requests takes longer when it is recorded; which of the two comes first alternates."""
    work = Workload(*settings)
    repeats = 0

    def recorded() -> float:
        recorder = work.recorder()
        taken, start = work.run(), time.process_time()
        recorder.close()
        return taken + time.process_time() - start

    def repeat() -> list[float]:
        nonlocal repeats
        repeats += 1
        order: list[Callable[[], float]] = [work.run, recorded] if repeats % 2 else [recorded, work.run]
        times = [measure() for measure in order]
        plain, with_recorder = times if repeats % 2 else reversed(times)
        return [100 * (with_recorder / plain - 1)]

    return repeat


def cases() -> list[Case]:
    """All cases, in the order of the table."""
    smol, small, tiny = (None, 16, 64, 8), (SMALL, 32, 64, 24), (TINY, 64, 64, 24)
    return [
        Case("direct, SmolLM2-135M, 16 requests", "%", "lower", partial(direct, *smol), (BAR,), repeats=5),
        Case("direct, 15M Llama, 32 requests", "%", "lower", partial(direct, *small), (BAR,), repeats=9),
        Case("direct, 0.2M Llama, 64 requests", "%", "lower", partial(direct, *tiny), repeats=15),
        Case("paired, 15M Llama, 32 requests", "%", "lower", partial(paired, *small), repeats=25),
        Case("paired, 0.2M Llama, 64 requests", "%", "lower", partial(paired, *tiny), repeats=60),
    ]


if __name__ == "__main__":
    options = harness.argument_parser(__doc__.splitlines()[0]).parse_args()
    sys.exit(harness.main(cases(), [], options, {"kvpool": getattr(kvpool, "__version__", "from source")}))
