"""The engine against transformers' own ways to generate, in one run; on a GPU also against the machine's limits.

    python benchmarks/engine.py                     what this machine can measure (a GPU's cases only where there is one)
    python benchmarks/engine.py --only SmolLM2      one part; see benchmarks/harness.py for the other options

On a CPU the figure is tokens per second of CPU time, with one thread. The 15M and 8B models have random weights: they
measure speed and nothing else.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from harness import Case, PeerAbsentError, PeerCase, Recorded, Runner, Times, TimesRecorded, argument_parser, main
from kvpool.engine import Engine, SamplingParams
from kvpool.engine.loading import load_model
from kvpool.scheduling import SchedulerConfig

Prompts = list[list[int]]

SMALL: dict[str, Any] = dict(
    vocab_size=32000,
    hidden_size=288,
    intermediate_size=768,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=6,
    max_position_embeddings=1024,
)
LARGE: dict[str, Any] = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=16384,
    rope_theta=500000.0,
)


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
        engine.manager.reset_prefix_cache()
        return [tokens_per_second(run, cpu)]

    return repeat


def live_memory(make: Callable[[], Any], prompts: Prompts, num_new: int) -> Runner:
    """The share of the referenced KV memory that holds tokens, averaged over the steps at full load, in percent."""
    engine = open_engine(make(), kv_bytes=2**26, scheduler=SchedulerConfig(max_tokens_per_step=512, max_sequences=128))
    shares: list[float] = []

    def look() -> None:
        pool = engine.manager.stats().pool()
        if pool.referenced > 0.9 * pool.total:
            tokens = sum(handle.num_written for handle in engine.manager.handles)
            shares.append(100 * tokens / (pool.referenced * engine.config.block_size))

    def repeat() -> list[float]:
        engine.manager.reset_prefix_cache()
        shares.clear()
        engine.generate(prompts, SamplingParams(max_new_tokens=num_new, ignore_eos=True), on_chunk=lambda *_: look())
        return [float(np.mean(shares))]

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


# --- the machine's limits ----------------------------------------------------------------------------------------------


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_seconds(lambda: target.copy_(source))


def matrix_rate() -> float:
    """Floating-point operations per second of a large bf16 matrix product on random data."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return float(2 * 8192**3 / gpu_seconds(lambda: left @ right))


def gpu_seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """The median time of one call on the GPU."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads: all but the embedding table, of which it reads a few rows."""
    embedding = model.get_input_embeddings().weight
    total: int = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return total - int(embedding.numel() * embedding.element_size())


def roofline(model: Any, bytes_per_token: int, prompts: Prompts, num_new: int) -> float:
    """Tokens per second of a whole run at the measured limits: prefill at the matrix rate, decode at the bandwidth."""
    flops = 2 * weight_bytes(model) / 2
    prefill = sum(map(len, prompts)) * flops / matrix_rate()
    context = sum(len(prompt) + num_new / 2 for prompt in prompts) * bytes_per_token
    decode = num_new * (weight_bytes(model) + context) / copy_bandwidth()
    return len(prompts) * num_new / (prefill + decode)


class Steady(NamedTuple):
    """A decoding step in the middle of a long run, in seconds."""

    step: float
    gap: float  # that the GPU waited between two steps, on its own clock
    ideal: float  # weights and KV of the step, read once at the measured bandwidth


def steady_decode(model: Any, batch: int, context: int = 1024, num_steps: int = 96) -> Steady:
    """Measures steps of `batch` sequences around this context."""
    limits = SchedulerConfig(max_tokens_per_step=8192, max_sequences=batch)
    engine = open_engine(model, scheduler=limits, memory_fraction=0.6, compile=True, cache={"enable_prefix_caching": False})
    loop = engine._loop
    launch = loop._launch
    begins, ends, full = [], [], []

    def timed(plan: Any) -> Any:
        begins.append(_mark())
        launched = launch(plan)
        ends.append(_mark())
        full.append(plan.num_tokens == plan.num_decode == batch)
        return launched

    loop._launch = timed  # type: ignore[method-assign]
    length = context - num_steps // 2
    prompts = random_prompts(batch, length, length, 0, LARGE["vocab_size"])
    engine.generate(prompts, SamplingParams(max_new_tokens=num_steps, ignore_eos=True))
    torch.cuda.synchronize()
    steps = [i for i in range(len(ends) - 1) if full[i] and full[i + 1]][4:]
    step = np.median([ends[i].elapsed_time(ends[i + 1]) for i in steps])
    gap = np.median([ends[i].elapsed_time(begins[i + 1]) for i in steps])
    num_bytes = weight_bytes(model) + batch * context * engine.config.bytes_per_token
    return Steady(float(step) / 1e3, float(gap) / 1e3, num_bytes / copy_bandwidth())


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def decode_over_ideal(model: Any, batch: int) -> Runner:
    def repeat() -> list[float]:
        steady = steady_decode(model, batch)
        return [steady.step / steady.ideal]

    return repeat


def exposed_host_ms(model: Any, batch: int) -> Runner:
    return lambda: [1e3 * steady_decode(model, batch).gap]


def first_token_ratio(model: Any, num_tokens: int) -> Runner:
    """Time to first token of a cold prompt over that of the same prompt when it is cached."""
    limits = SchedulerConfig(max_tokens_per_step=8192, max_sequences=8)
    engine = open_engine(model, scheduler=limits, memory_fraction=0.3, compile=True)
    once = SamplingParams(max_new_tokens=1, ignore_eos=True)

    def repeat() -> list[float]:
        engine.manager.reset_prefix_cache()
        prompts = random_prompts(1, num_tokens, num_tokens, 0, LARGE["vocab_size"])
        cold = engine.generate(prompts, once)[0].seconds
        warm = engine.generate(prompts, once)[0].seconds
        return [cold / warm]

    return repeat


# --- cases -------------------------------------------------------------------------------------------------------------


def cpu_cases(quick: bool) -> list[Case]:
    count, num_new = (6, 8) if quick else (32, 128)

    def small() -> Any:
        return random_model(SMALL, "cpu", torch.float32)

    mixed = random_prompts(count, 64, 512, 0, SMALL["vocab_size"])
    limits = SchedulerConfig(max_tokens_per_step=512, max_sequences=64)
    params = {"make": small, "prompts": mixed, "num_new": num_new, "cpu": True, "peers": (STATIC, CONTINUOUS)}
    cases = [
        Case(
            f"15M Llama, {count} requests of 64-512, {num_new} new",
            "tok/CPU-s",
            "higher",
            lambda: engine_throughput(small, mixed, num_new, True, kv_bytes=2**29, scheduler=limits),
            bars=(Times(1.3, STATIC),),
            peer_case=PeerCase("mixed", params, 2),
            recorded=(Recorded(CONTINUOUS, 85, "tuned", "Neoverse-N1, 1 thread", "2026-11"),),
            repeats=3,
            quick_repeats=1,
            warmups=0,
        ),
        Case(
            "KV memory that holds live tokens at full load",
            "%",
            "higher",
            lambda: live_memory(small, random_prompts(24, 300, 512, 0, SMALL["vocab_size"]), 64),
            bars=(97.0,),
            repeats=1,
            quick_repeats=1,
            warmups=0,
        ),
    ]
    return cases + real_model_cases(quick)


def real_model_cases(quick: bool) -> list[Case]:
    """SmolLM2 with a shared system prompt: what prefix reuse is for."""
    count, num_new, shared = (3, 4, 64) if quick else (16, 64, 512)

    def real() -> Any:
        return load_model(None, device="cpu", dtype="float32").model

    def own_attention() -> Any:
        model = real()
        model.set_attn_implementation("sdpa")
        return model

    prompts = random_prompts(count, 16, 48, shared, 40000)
    peers = (ONE_BY_ONE, STATIC, CONTINUOUS)
    params = {"make": own_attention, "prompts": prompts, "num_new": num_new, "cpu": True, "peers": peers}
    return [
        Case(
            f"SmolLM2, {count} requests behind {shared} shared tokens, {num_new} new",
            "tok/CPU-s",
            "higher",
            lambda: engine_throughput(real, prompts, num_new, True, kv_bytes=2**30),
            bars=(Times(3.0, ONE_BY_ONE), Times(1.5, STATIC), Times(3.0, CONTINUOUS)),
            peer_case=PeerCase("shared", params, 1),
            repeats=2,
            quick_repeats=1,
            warmups=0,
        )
    ]


def gpu_cases(quick: bool) -> list[Case]:
    """The 8B shape of the issue; `quick` uses two layers, to see that it runs."""
    shape = {**LARGE, "num_hidden_layers": 2} if quick else LARGE
    model = random_model(shape, "cuda", torch.bfloat16)
    count, length, num_new = (8, 64, 16) if quick else (256, 512, 256)
    prompts = random_prompts(count, length, length, 0, LARGE["vocab_size"])
    limits = SchedulerConfig(max_tokens_per_step=8192, max_sequences=256)
    kv_bytes_per_token = shape["num_hidden_layers"] * 2 * 8 * 128 * 2
    limit = roofline(model, kv_bytes_per_token, prompts, num_new)

    def own_attention() -> Any:
        model.set_attn_implementation("sdpa")
        return model

    params = {"make": own_attention, "prompts": prompts, "num_new": num_new, "cpu": False, "peers": (STATIC,)}
    common: dict[str, Any] = dict(repeats=1, quick_repeats=1)
    return [
        Case(
            f"8B shape, {count} requests of {length}, {num_new} new",
            "tok/s",
            "higher",
            lambda: engine_throughput(lambda: model, prompts, num_new, False, scheduler=limits),
            bars=(0.7 * limit, TimesRecorded(14.0)),
            recorded=(Recorded(CONTINUOUS, 555, "sdpa", "H200", "2026-11"),),
            ceiling=limit,
            warmups=1,
            **common,
        ),
        Case(
            "decode step over its ideal, batch 64, context 1,024",
            "x",
            "lower",
            lambda: decode_over_ideal(model, 64),
            bars=(1.35,),
            warmups=0,
            **common,
        ),
        Case(
            "decode step over its ideal, batch 256, context 1,024",
            "x",
            "lower",
            lambda: decode_over_ideal(model, 256),
            bars=(1.35,),
            warmups=0,
            **common,
        ),
        Case(
            "host time per decode step outside the GPU's shadow, batch 256",
            "ms",
            "lower",
            lambda: exposed_host_ms(model, 256),
            bars=(0.3,),
            warmups=0,
            **common,
        ),
        Case(
            "time to first token of 8k tokens, cold over cached",
            "x",
            "higher",
            lambda: first_token_ratio(model, 8192),
            bars=(10.0,),
            warmups=1,
            **common,
        ),
        Case(
            f"8B shape, {count} requests of {length}, {num_new} new, against a static batch",
            "tok/s",
            "higher",
            lambda: engine_throughput(
                lambda: model, prompts, num_new, False, scheduler=limits, memory_fraction=0.35
            ),
            bars=(Times(3.5, STATIC),),
            peer_case=PeerCase("whole", params, 1),
            warmups=1,
            **common,
        ),
    ]


if __name__ == "__main__":
    options = argument_parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    chosen = gpu_cases(options.quick) if torch.cuda.is_available() else cpu_cases(options.quick)
    batch_size = 256 if torch.cuda.is_available() else 8
    rivals = [Transformers(ONE_BY_ONE, 1), Transformers(STATIC, batch_size), Transformers(CONTINUOUS, None)]
    sys.exit(main(chosen, rivals, options, {"torch": torch.__version__, "transformers": transformers.__version__}))
