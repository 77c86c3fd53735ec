"""What the engine's benchmarks have in common: models, prompts, whole runs, and transformers' own ways to generate."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from harness import PeerAbsentError, Runner
from kvpool.engine import Engine, SamplingParams

Prompts = list[list[int]]


def random_model(shape: Mapping[str, Any], device: str, dtype: torch.dtype) -> Any:
    """A Llama of this shape with random weights; its own attention."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **shape, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def random_prompts(count: int, low: int, high: int, shared: int, vocabulary: int) -> Prompts:
    """Prompts of `low` to `high` tokens behind `shared` common ones."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, vocabulary, shared).tolist()
    return [common + rng.integers(3, vocabulary, int(n)).tolist() for n in rng.integers(low, high + 1, count)]


_open: list[Engine] = []


def open_engine(*args: Any, **options: Any) -> Engine:
    """A new engine; the one of the case before gives its memory back."""
    while _open:
        _open.pop().close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _open.append(Engine(*args, **options))
    _open[0].warm_up()
    return _open[0]


# --- what is measured ------------------------------------------------------------------------------------------------


def tokens_per_second(run: Callable[[], int], cpu: bool) -> float:
    """Tokens that `run` generated per second of CPU time, or of wall time on a GPU."""
    clock = time.process_time if cpu else time.perf_counter
    start = clock()
    tokens = run()
    return tokens / (clock() - start)


def engine_throughput(make: Callable[[], Any], prompts: Prompts, num_new: int, cpu: bool, **options: Any) -> Runner:
    """Whole runs of the engine from an empty cache."""
    engine = open_engine(make(), **options)
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)

    def run() -> int:
        return sum(len(out.token_ids) for out in engine.generate(prompts, params))

    def repeat() -> list[float]:
        engine.manager.cache.reset()
        return [tokens_per_second(run, cpu)]

    return repeat


# --- transformers in the same run --------------------------------------------------------------------------------------


class Transformers:
    """`generate` one prompt after another, in static batches, or `generate_batch`: one peer each."""

    def __init__(self, name: str, batch_size: int | None) -> None:
        self.name = name
        self._batch_size = batch_size
        self._run: Callable[[], int] | None = None
        self._cpu = True

    def start(self) -> str:
        return str(transformers.__version__)

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        self._run = None
        if self.name not in params["peers"]:
            raise PeerAbsentError(f"{self.name} is not part of this case")
        model, prompts, num_new = params["make"](), params["prompts"], params["num_new"]
        self._cpu = params["cpu"]
        if self._batch_size is None:
            self._run = lambda: self._continuous(model, prompts, num_new)
        else:
            self._run = lambda: self._static(model, prompts, num_new, self._batch_size or 1)

    def repeat(self) -> Sequence[float]:
        assert self._run is not None
        return [tokens_per_second(self._run, self._cpu)]

    def close(self) -> None:
        self._run = None

    @staticmethod
    @torch.inference_mode()
    def _static(model: Any, prompts: Prompts, num_new: int, batch_size: int) -> int:
        """Sorted by length, padded on the left."""
        ordered = sorted(prompts, key=len)
        for start in range(0, len(ordered), batch_size):
            batch = ordered[start : start + batch_size]
            width = len(batch[-1])
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            for row, prompt in enumerate(batch):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask = (torch.arange(width) >= torch.tensor([[width - len(prompt)] for prompt in batch])).long()
            on_device = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
            model.generate(**on_device, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0)
        return len(prompts) * num_new

    @staticmethod
    def _continuous(model: Any, prompts: Prompts, num_new: int) -> int:
        config = transformers.GenerationConfig(
            max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
        )
        outputs = model.generate_batch(inputs=prompts, generation_config=config)
        return sum(len(output.generated_tokens) for output in outputs.values())


ONE_BY_ONE, STATIC, CONTINUOUS = "generate, one by one", "generate, static batch", "generate_batch"
