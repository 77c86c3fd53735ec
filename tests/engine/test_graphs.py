"""Steps from graphs: which ones, what is behind their rows, and that the output is that of steps without."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fake_graphs import FakeRecorder, graph_runner, use_runner  # noqa: E402
from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams, graphs  # noqa: E402
from kvpool.engine.graphs import CaptureError, MixedGraphs, mixed_sizes  # noqa: E402
from kvpool.kernels.layout import whole_device  # noqa: E402
from kvpool.scheduling import BatchPlan, SchedulerConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

LIMITS = SchedulerConfig(max_tokens_per_step=100, max_sequences=8)
PROMPTS = [random_prompt(length, seed=seed).tolist() for seed, length in enumerate([5, 70, 1, 30, 64, 150])]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


def engine_with_graphs(
    family: str = "llama",
    *,
    recorder: FakeRecorder | None = None,
    max_tokens: int = 100,
    mixed: bool = True,
    all_graphs: bool = True,
    **options: Any,
) -> Engine:
    """An engine on a CPU whose steps run from graphs, as on a GPU."""
    engine = Engine(tiny_model(family), kv_blocks=128, scheduler=LIMITS, **options)
    runner = graph_runner(
        engine,
        mixed=mixed,
        max_sequences=LIMITS.max_sequences,
        max_tokens=max_tokens,
        recorder=recorder or FakeRecorder(),
    )
    runner.warm_up()
    while all_graphs and runner.captures_more:
        runner.capture_next()
    use_runner(engine, runner)
    return engine


def tokens(engine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    with engine:
        outputs = [out.token_ids for out in engine.generate(PROMPTS, params)]
        assert [out.token_ids for out in engine.generate(PROMPTS, params)] == outputs  # now from the cache
        engine.manager.check()
    return outputs


def plain(family: str = "llama", params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    return tokens(Engine(tiny_model(family), kv_blocks=128, scheduler=LIMITS, **options), params)


def test_given_steps_with_prompts_then_all_run_from_graphs_and_the_output_is_that_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = plain()
    engine = engine_with_graphs()
    monkeypatch.setattr(engine._loop.runner, "_run", None)  # nothing runs as it is

    assert tokens(engine) == expected


def test_given_another_thread_that_has_the_device_for_itself_then_steps_run_from_larger_graphs() -> None:
    expected = plain()[0]
    with engine_with_graphs(all_graphs=False) as engine:
        with whole_device:  # of this thread; the engine's cannot capture
            assert engine.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected
            assert engine.graphs.num_graphs == 2
        assert engine.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected
        assert engine.graphs.num_graphs > 2


@pytest.mark.quick("gemma2")
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral"])
def test_given_windows_sinks_or_experts_then_rows_behind_a_step_change_nothing(family: str) -> None:
    assert tokens(engine_with_graphs(family)) == plain(family)


def test_given_steps_above_the_largest_graph_then_they_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain()
    recorder = FakeRecorder()
    engine = engine_with_graphs(recorder=recorder, max_tokens=40)
    runner = engine._loop.runner
    sizes: list[int] = []
    run = runner._run
    monkeypatch.setattr(
        runner, "_run", lambda token_ids, *rest: (sizes.append(len(token_ids)), run(token_ids, *rest))[1]
    )

    assert tokens(engine) == expected
    assert min(sizes) > 40
    assert recorder.num_replays > 0


@pytest.mark.slow
def test_given_drafts_then_the_logits_behind_each_of_them_come_from_graphs_too() -> None:
    repeating = SamplingParams(max_new_tokens=40, ignore_eos=True)
    assert tokens(engine_with_graphs(draft_tokens=3), repeating) == plain(params=repeating, draft_tokens=3)


def test_given_a_model_that_cannot_be_captured_then_its_steps_run_as_they_are_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = plain()
    engine = engine_with_graphs(recorder=FakeRecorder(refuses="it waits for the device"))

    assert engine._loop.runner.graphs is engine._loop.runner.mixed_graphs is None
    assert engine.graphs.num_graphs == 0
    assert "LlamaForCausalLM cannot be captured: it waits for the device" in caplog.text
    assert tokens(engine) == expected


@pytest.mark.slow
def test_given_a_model_whose_steps_with_prompts_cannot_be_captured_then_those_that_decode_still_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graphs: MixedGraphs) -> None:
        raise CaptureError("experts of many tokens wait for the device")

    monkeypatch.setattr(MixedGraphs, "capture_largest", refuse)
    recorder = FakeRecorder()
    engine = engine_with_graphs(recorder=recorder)

    assert engine._loop.runner.mixed_graphs is None
    assert "steps with prompts run without CUDA graphs: experts of many tokens wait" in caplog.text
    assert tokens(engine) == plain()
    assert recorder.num_replays > 0


def test_given_graphs_are_required_then_a_model_that_cannot_be_captured_is_refused() -> None:
    with Engine(tiny_model("llama"), kv_blocks=16) as engine:
        runner = graph_runner(
            engine,
            cuda_graphs=True,
            recorder=FakeRecorder(refuses="no"),
        )
        with pytest.raises(CaptureError, match="LlamaForCausalLM"):
            runner.warm_up()


@pytest.mark.slow
def test_given_attention_that_captures_decoding_only_then_prompts_run_as_they_are_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_with_graphs(mixed=False)

    assert engine._loop.runner.mixed_graphs is None
    assert engine._loop.runner.graphs is not None
    assert "steps with prompts run without CUDA graphs" in caplog.text
    assert tokens(engine) == plain()


def test_given_an_engine_then_it_says_how_many_graphs_it_has() -> None:
    with engine_with_graphs() as engine:
        assert engine.graphs.num_graphs == len([1, 2, 4, 8]) + len([64, 100])
        assert engine.graphs.seconds > 0
    runner = engine._loop.runner
    assert (runner.graphs, runner.mixed_graphs, engine.graphs.num_graphs) == (
        None,
        None,
        0,
    )  # their memory is given back


@pytest.mark.slow
def test_given_lists_that_outgrow_their_buffers_then_the_graph_is_captured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "list_room", lambda *_: 3)
    engine = engine_with_graphs()
    mixed = engine._loop.runner.mixed_graphs
    assert mixed is not None
    before = dict(mixed._captured)

    assert tokens(engine) == plain()
    assert all(mixed._captured[size, False] is not before[size, False] for size in (64, 100))


def test_given_a_small_step_after_a_large_one_then_nothing_is_written_for_the_rows_behind_it() -> None:
    with engine_with_graphs() as engine:
        engine.generate([PROMPTS[4][:60]], SamplingParams(max_new_tokens=1))
        engine.generate([PROMPTS[1][:20]], SamplingParams(max_new_tokens=1))
        mixed = engine._loop.runner.mixed_graphs
        assert mixed is not None
        slots = mixed._captured[64, False].slots
        assert (slots[:, :20] >= 0).all()
        assert (slots[:, 20:] == -1).all()


def step(query_lens: list[int], *, logits: int | None = None) -> BatchPlan:
    """What a graph asks of a plan."""
    plan = object.__new__(BatchPlan)
    plan.sequences = (None,) * len(query_lens)  # type: ignore[assignment]
    plan.token_ids = np.zeros(sum(query_lens), np.int32)
    plan.logits_indices = np.arange(len(query_lens) if logits is None else logits)
    return plan


@pytest.mark.parametrize(
    ("query_lens", "size"),
    [
        ([1, 30], 64),
        ([64], 64),
        ([1, 64], 128),
        ([2048], 2048),
        ([1] * 63, 64),
        ([1] * 64, 128),
        ([1] * 100 + [413], 640),
    ],
)
def test_given_a_step_then_it_runs_in_the_smallest_graph_that_holds_it(query_lens: list[int], size: int) -> None:
    mixed = MixedGraphs(None, FakeRecorder(), mixed_sizes(4096), {}, 256, 0)  # type: ignore[arg-type]
    assert mixed.fits(step(query_lens))
    assert mixed._size_for(step(query_lens)) == size
    assert mixed.max_sequences(size) >= len(query_lens)


def test_given_too_many_tokens_or_logits_then_no_graph_holds_the_step() -> None:
    mixed = MixedGraphs(None, FakeRecorder(), mixed_sizes(4096), {}, 32, 0)  # type: ignore[arg-type]
    assert not mixed.fits(step([1, 2048]))
    assert mixed.fits(step([5] * 6, logits=30))
    assert not mixed.fits(step([5] * 8, logits=40))


@pytest.mark.parametrize("max_tokens", [1, 2, 63, 64, 65, 512, 2047, 2048, 100_000])
def test_given_any_limit_then_every_step_up_to_the_largest_graph_has_one_that_is_not_much_larger(
    max_tokens: int,
) -> None:
    sizes = mixed_sizes(max_tokens)
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 20
    if max_tokens > 1:
        assert sizes[-1] == min(max_tokens, 2048)
        assert max(np.diff([0, *sizes])) <= 128
        assert all(large <= 1.25 * small for small, large in pairwise(sizes) if small >= 320)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_a_runner_then_the_step_that_it_warms_up_with_is_of_the_largest_size_and_writes_nothing(
    family: str,
) -> None:
    with Engine(tiny_model(family), kv_blocks=16, scheduler=LIMITS) as engine:
        runner, sizes = engine._loop.runner, []
        note = lambda _, __, given: sizes.append(given["input_ids"].shape[1])  # noqa: E731
        engine._loop.runner.model.register_forward_pre_hook(note, with_kwargs=True)
        stores = [store.data for store in engine.plane.stores.values() if hasattr(store, "data")]
        for data in stores:
            data.fill_(7)
        runner._run_once()
        assert sizes == [LIMITS.max_tokens_per_step]
        assert all((data == 7).all() for data in stores)


class BreakingRecorder(FakeRecorder):
    """Records so many steps, and then has no memory."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.left = num_steps

    def record(self, step: Any) -> Any:
        if not self.left:
            raise torch.OutOfMemoryError("no more")
        self.left -= 1
        return super().record(step)


def test_given_a_start_then_the_largest_graphs_are_captured_and_the_others_while_the_engine_is_idle() -> None:
    with engine_with_graphs(all_graphs=False) as engine:
        runner = engine._loop.runner
        assert runner.graphs is not None
        assert runner.mixed_graphs is not None
        assert (runner.graphs.sizes, runner.mixed_graphs.sizes) == ([8], [100])
        engine.warm_up(wait=False)
        done = threading.Event()
        while engine._loop.has_idle_work:  # nobody asks for anything
            assert not done.wait(0.001)
        assert (runner.graphs.sizes, runner.mixed_graphs.sizes) == ([1, 2, 4, 8], [64, 100])


@pytest.mark.slow
def test_given_requests_before_all_graphs_are_there_then_steps_capture_what_they_need() -> None:
    assert tokens(engine_with_graphs(all_graphs=False)) == plain()


def test_given_an_engine_that_is_warmed_up_then_all_graphs_are_there() -> None:
    with engine_with_graphs(all_graphs=False) as engine:
        engine.warm_up()
        assert engine.graphs.num_graphs == 6


@pytest.mark.parametrize("close", [True, False])
def test_given_graphs_that_are_left_then_an_engine_ends_without_them(close: bool) -> None:
    engine = engine_with_graphs(all_graphs=False)
    loop, thread = engine._loop, engine._thread
    asked = threading.Event()
    loop.use_idle_time = asked.set  # type: ignore[method-assign]
    engine.warm_up(wait=False)
    assert asked.wait(60)
    if close:
        engine.close()
    del engine  # an engine without references ends when it is idle
    assert thread._thread is not None
    thread._thread.join(60)
    assert not thread._thread.is_alive()


def test_given_no_memory_for_more_graphs_then_the_engine_goes_on_with_those_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_with_graphs(all_graphs=False, recorder=BreakingRecorder(4))
    engine.warm_up()
    assert engine.graphs.num_graphs == 4
    assert "captured when steps need them: no more" in caplog.text
    assert len(engine.generate([[5]], GREEDY)) == 1
    engine.close()


@pytest.mark.slow
def test_given_a_capture_that_fails_later_then_its_step_runs_as_it_is_and_graphs_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = FakeRecorder()
    engine = engine_with_graphs(all_graphs=False, recorder=recorder)
    recorder.refuses = "another thread waited for the device"
    assert tokens(engine) == plain()
    assert "a step runs without its CUDA graph: LlamaForCausalLM cannot be captured: another thread" in caplog.text
