"""The engine on a GPU: graphs, overlapped steps and every attention backend give what transformers gives."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.attention import available_backends  # noqa: E402
from kvpool.attention.triton_backend import TritonBackend  # noqa: E402
from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.engine.graphs import CaptureError, CudaRecorder, RecordedStep  # noqa: E402
from kvpool.engine.runner import ModelRunner  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

pytestmark = pytest.mark.gpu

PROMPTS = [random_prompt(length, seed=seed).tolist() for seed, length in enumerate([5, 40, 1, 17, 64])]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def tokens(model: Any, **options: Any) -> list[list[int]]:
    limits = SchedulerConfig(max_tokens_per_step=48, max_sequences=8)
    with Engine(model, kv_blocks=64, scheduler=limits, **options) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        again = engine.generate(PROMPTS, GREEDY)
        engine.manager.check()
        assert [out.token_ids for out in again] == [out.token_ids for out in outputs]
        return [out.token_ids for out in outputs]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mistral"])
def test_given_a_gpu_then_float32_output_is_that_of_the_cpu(family: str) -> None:
    want = tokens(tiny_model(family, head_dim=16) if family != "llama" else tiny_model(family))
    model = tiny_model(family, head_dim=16) if family != "llama" else tiny_model(family)
    assert tokens(model.to("cuda")) == want


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_given_a_gpu_that_is_not_the_first_then_the_output_is_the_same() -> None:
    assert tokens(tiny_model("llama").to("cuda:1")) == tokens(tiny_model("llama").to("cuda:0"))


def test_given_an_engine_that_serves_when_another_is_made_then_nobody_is_disturbed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Engine(tiny_model("llama").to("cuda"), kv_blocks=64) as first:
        running = [first.submit(prompt, SamplingParams(max_new_tokens=400, ignore_eos=True)) for prompt in PROMPTS[:2]]
        tokens(tiny_model("llama").to("cuda"), cuda_graphs=True)
        assert [len(generation.result(60).token_ids) for generation in running] == [400, 400]
    assert not caplog.records


def test_given_two_engines_made_at_the_same_moment_then_both_have_graphs_and_the_output_is_the_same() -> None:
    models = [tiny_model("llama").to("cuda") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda model: tokens(model, cuda_graphs=True), models))
    assert outputs == [tokens(tiny_model("llama"))] * 2


def test_given_a_closed_engine_then_the_memory_of_its_graphs_is_back() -> None:
    model = tiny_model("llama", vocab_size=2**16).to("cuda")
    engine = Engine(model, kv_blocks=64, scheduler=SchedulerConfig(max_sequences=64))
    engine.generate(PROMPTS, GREEDY)
    held = torch.cuda.memory_allocated()
    engine.close()
    assert held - torch.cuda.memory_allocated() > 4 * 2**16 * 64  # the logits of the largest graph


@pytest.mark.parametrize(
    "options", [{"cuda_graphs": False}, {"overlap": False}, {"overlap": False, "cuda_graphs": False}]
)
def test_given_no_graphs_or_no_overlap_then_the_output_is_the_same(options: dict[str, Any]) -> None:
    want = tokens(tiny_model("llama").to("cuda"))
    assert tokens(tiny_model("llama").to("cuda"), **options) == want


def test_given_plain_attention_then_nothing_waits_for_flashinfer_to_compile() -> None:
    with Engine(tiny_model("llama", hidden_size=256).to("cuda", torch.bfloat16), kv_blocks=64) as engine:
        assert engine._loop.runner.backend.choose(engine._loop.runner.kinds[0].spec).name == "triton"


def test_given_a_new_engine_then_its_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    shape = {"hidden_size": 384, "head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = tiny_model("llama", **shape)  # as no other test has it
    compiled: set[tuple[str, str]] = set()

    def listen(*, metadata: dict[str, Any], **_: Any) -> None:
        compiled.add((threading.current_thread().name.split("_")[0], metadata["name"]))

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    for _ in range(3):  # later ones find their kernels loaded
        with Engine(model.to("cuda", torch.bfloat16), kv_blocks=64) as engine:
            engine.generate(PROMPTS, GREEDY)
    attending = {(thread, name) for thread, name in compiled if "convert" not in name}
    assert {thread for thread, _ in attending} == {"kvpool-compile"}, compiled
    assert len(attending) >= 3


@pytest.mark.parametrize("name", ["triton", "torch", "flashinfer"])
def test_given_a_backend_then_bfloat16_output_follows_that_of_torch(name: str) -> None:
    if name not in [backend.name for backend in available_backends("cuda")]:
        pytest.skip(f"{name} is not installed here")
    model = tiny_model("llama", hidden_size=256).to("cuda", torch.bfloat16)
    outputs = tokens(model, attention=name)
    reference = tokens(tiny_model("llama", hidden_size=256).to("cuda", torch.bfloat16), attention="torch")
    # Rounding may make a random model choose otherwise somewhere; most texts begin alike all the same.
    assert sum(a[:4] == b[:4] for a, b in zip(outputs, reference, strict=True)) >= 4


def test_given_swapping_then_the_output_is_the_same() -> None:
    limits = SchedulerConfig(max_tokens_per_step=64, max_sequences=8, preemption="swap")
    prompts = [random_prompt(30, seed=seed).tolist() for seed in range(4)]
    options: dict[str, Any] = dict(block_size=4, host_bytes=2**22, scheduler=limits, cache={"watermark": 0.0})
    with Engine(tiny_model("llama").to("cuda"), kv_blocks=32, **options) as tight:
        outputs = [out.token_ids for out in tight.generate(prompts, GREEDY)]
        assert tight.stats().scheduler.swapped_out > 0
    with Engine(tiny_model("llama").to("cuda"), kv_blocks=256, block_size=4) as roomy:
        assert [out.token_ids for out in roomy.generate(prompts, GREEDY)] == outputs


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_new_tokens=8, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3),
        SamplingParams(
            max_new_tokens=8, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={5: 2.0}, logprobs=2
        ),
        SamplingParams(max_new_tokens=8, temperature=1.0, n=3),
    ],
)
def test_given_a_step_then_launching_it_does_not_wait_for_the_gpu(params: SamplingParams) -> None:
    limits = SchedulerConfig(max_tokens_per_step=48, max_sequences=8)
    with Engine(tiny_model("llama").to("cuda"), kv_blocks=64, scheduler=limits, attention="triton") as engine:
        engine.generate(PROMPTS, params)  # what is made on first use may wait
        launch = engine._loop._launch

        def strictly(plan: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine._loop._launch = strictly  # type: ignore[method-assign]
        outputs = engine.generate(PROMPTS, params)
        assert all(len(output.token_ids) for output in outputs)


@pytest.mark.filterwarnings("ignore")  # torch.compile has much to say: about torch.jit, softmax and TensorFloat32
def test_given_compiled_layers_then_single_sequences_and_batches_share_their_code() -> None:
    torch._dynamo.reset()
    limits = SchedulerConfig(max_sequences=8)
    with Engine(tiny_model("llama").to("cuda"), kv_blocks=64, compile=True, scheduler=limits) as engine:
        engine.warm_up()
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        engine.generate(PROMPTS, GREEDY)
        engine.generate(PROMPTS[:1], GREEDY)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0


@pytest.mark.filterwarnings("ignore")  # torch.compile has much to say
def test_given_requests_while_layers_are_compiled_then_nobody_is_disturbed(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    with Engine(tiny_model("llama").to("cuda"), kv_blocks=256, compile=True) as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]  # now its thread compiles
        longer = SamplingParams(max_new_tokens=400, ignore_eos=True)
        running = [engine.submit(prompt, longer) for prompt in PROMPTS]
        engine.warm_up()
        assert [len(generation.result(60).token_ids) for generation in running] == [400] * len(PROMPTS)
        assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
        assert engine.graphs.num_graphs > 20
    assert not [record for record in caplog.records if record.name == "kvpool"]


def test_given_a_step_that_cannot_be_captured_then_others_can() -> None:
    recorder, x = CudaRecorder(torch.device("cuda")), torch.ones(4, device="cuda")
    recorder.record(lambda: x + 1)
    with pytest.raises(CaptureError):
        recorder.record(lambda: x + float(x.sum()))  # it waits for the device
    recorded = recorder.record(lambda: x * 3)
    x.fill_(2)
    recorded.replay()
    assert recorded.output.tolist() == [6] * 4


def test_given_an_engine_that_was_warmed_up_then_no_request_waits_for_a_graph() -> None:
    with Engine(tiny_model("llama").to("cuda"), kv_blocks=64, scheduler=SchedulerConfig(max_sequences=24)) as engine:
        engine.warm_up()
        graphs = engine._loop.runner.graphs
        assert graphs is not None
        before = dict(graphs._captured)
        assert sorted(before) == [(size, False) for size in (1, 2, 4, 8, 16, 24)]
        engine.generate(PROMPTS, GREEDY)
        assert graphs._captured == before


def test_given_graphs_that_are_garbage_when_others_are_captured_then_those_are_not_disturbed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"kv_blocks": 64, "scheduler": SchedulerConfig(max_sequences=4)}
    engine = Engine(tiny_model("llama").to("cuda"), **options)
    garbage: list[Any] = [engine._loop.runner.graphs, engine._loop.runner.mixed_graphs]
    garbage.append(garbage)
    engine.close()
    del engine, garbage
    thresholds = gc.get_threshold()
    gc.set_threshold(20, 1, 1)  # often enough to come in the middle of a capture
    try:
        with Engine(tiny_model("llama").to("cuda"), cuda_graphs=True, **options) as other:
            other.warm_up()
            assert other.graphs.num_graphs == len([1, 2, 4]) + 20
    finally:
        gc.set_threshold(*thresholds)
    assert not caplog.records


class KeepingRecorder(CudaRecorder):
    """Keeps the steps that it records, to run them without their graph."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.steps: dict[int, Callable[[], Any]] = {}  # by where their result is

    def record(self, step: Callable[[], Any]) -> RecordedStep:
        recorded = super().record(step)
        self.steps[id(recorded.output)] = step
        return recorded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_a_step_with_prompts_then_its_graph_gives_bit_for_bit_what_running_it_gives(dtype: torch.dtype) -> None:
    limits = SchedulerConfig(max_tokens_per_step=200, max_sequences=8)
    model = tiny_model("llama", hidden_size=256).to("cuda", dtype)
    with Engine(model, kv_blocks=64, scheduler=limits, attention="triton") as engine:
        recorder = KeepingRecorder(torch.device("cuda"))
        runner = ModelRunner(
            engine._loop.runner.model,
            engine.shape,
            engine.plane,
            TritonBackend(engine.plane.device),
            max_tokens=200,
            recorder=recorder,
        )
        runner.warm_up()
        mixed = runner.mixed_graphs
        assert mixed is not None
        run, seen = mixed.run, []

        def both(plan: Any, inputs: Any) -> Any:
            logits = run(plan, inputs).clone()
            captured = mixed._captured[mixed._size_for(plan), False]
            again = recorder.steps[id(captured.recorded.output)]()[: len(logits)]
            seen.append((plan.num_tokens, torch.equal(again, logits)))
            return logits

        mixed.run = both  # type: ignore[method-assign]
        engine._loop.runner = runner
        engine.generate([random_prompt(n, seed=n).tolist() for n in (5, 40, 150, 17, 64, 300)], GREEDY)
    assert len({size for size, _ in seen}) > 2
    assert all(equal for _, equal in seen)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "mistral"])
def test_given_steps_with_prompts_then_logits_from_graphs_are_those_without_but_for_rounding(family: str) -> None:
    limits = SchedulerConfig(max_tokens_per_step=200, max_sequences=8)
    options = {} if family == "llama" else {"head_dim": 16}
    with Engine(tiny_model(family, **options).to("cuda"), kv_blocks=64, scheduler=limits) as engine:
        runner = engine._loop.runner
        mixed = runner.mixed_graphs
        assert mixed is not None
        run, differences = mixed.run, []

        def both(plan: Any, inputs: Any) -> Any:
            logits = run(plan, inputs).clone()
            runner.graphs, runner.mixed_graphs, kept = None, None, runner.graphs
            plain = runner.run(plan, inputs)
            if len(plain):  # not in the middle of a prompt
                differences.append((plain - logits).abs().max() / logits.abs().max())
            runner.graphs, runner.mixed_graphs = kept, mixed
            return logits

        mixed.run = both  # type: ignore[method-assign]
        engine.generate([random_prompt(n, seed=n).tolist() for n in (5, 40, 150, 17, 64, 300)], GREEDY)
    assert len(differences) >= 3  # 576 tokens, 200 a step
    assert max(differences) < 1e-4


def test_given_a_model_that_copies_from_the_host_in_every_step_then_it_runs_without_graphs_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    want = tokens(tiny_model("phimoe").to("cuda"), cuda_graphs=False)
    assert not caplog.records
    assert tokens(tiny_model("phimoe").to("cuda")) == want
    assert "PhimoeForCausalLM cannot be captured" in caplog.text


def test_given_a_small_prompt_and_a_large_limit_then_its_first_step_comes_from_a_graph() -> None:
    with Engine(tiny_model("llama").to("cuda"), kv_blocks=64, scheduler=SchedulerConfig(max_sequences=8)) as engine:
        assert engine._loop.runner.mixed_graphs is not None
        engine.warm_up()
        assert engine.graphs.num_graphs == len([1, 2, 4, 8]) + 20
        engine._loop.runner._run = None  # type: ignore[assignment, method-assign]
        assert len(engine.generate(PROMPTS, GREEDY)) == len(PROMPTS)
