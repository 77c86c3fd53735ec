"""Layers that are compiled beside requests: who answers meanwhile, when they are used, and what ends the thread."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fake_graphs import FakeRecorder, graph_runner, use_runner  # noqa: E402
from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import KVPoolError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

PROMPTS = [random_prompt(length, seed=length).tolist() for length in (5, 30)]
GREEDY = SamplingParams(max_new_tokens=4, ignore_eos=True)
TIMEOUT = 60.0


class Compiler:
    """Stands in for torch.compile: a layer is compiled when it first runs, as soon as it `may_go`, and computes the same."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.began = threading.Event()
        self.error: Exception | None = None
        self.callers: list[str] = []  # names of threads

    def compile(self, layer: Any, **_: Any) -> None:
        layer._compiled_call_impl = partial(self.call, layer)

    def call(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        self.began.set()
        assert self.may_go.wait(TIMEOUT)
        if self.error is not None:
            raise self.error
        self.callers.append(threading.current_thread().name)
        return layer._call_impl(*args, **kwargs)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **options: made.compile(layer, **options))
    return made


def make_engine(**options: Any) -> Engine:
    return Engine(tiny_model("llama"), kv_blocks=64, compile=True, **options)


def tokens(engine: Engine) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def wait_for_layers(engine: Engine) -> None:
    """Waits for the thread, and for what it asked the engine to do."""
    for thread in threading.enumerate():
        if thread.name == "kvpool-layers":
            thread.join(TIMEOUT)
    engine._thread.ask(lambda: None)


def test_given_layers_that_are_being_compiled_then_plain_ones_answer_and_compiled_ones_take_over(
    compiler: Compiler,
) -> None:
    with make_engine() as engine:
        expected = tokens(engine)
        assert compiler.began.wait(TIMEOUT)
        assert tokens(engine) == expected
        assert not compiler.callers
        compiler.may_go.set()
        wait_for_layers(engine)
        assert set(compiler.callers) == {"kvpool-layers"}
        assert tokens(engine) == expected
        assert compiler.callers[-1] == "kvpool-engine"
        assert engine.start_seconds["compiling layers, beside requests"] > 0


def test_given_warm_up_then_the_first_step_runs_by_compiled_layers(compiler: Compiler) -> None:
    compiler.may_go.set()
    with make_engine() as engine:
        engine.warm_up()
        assert "kvpool-engine" not in compiler.callers
        tokens(engine)
        steps = compiler.callers.count("kvpool-engine")
        assert steps == 2 * GREEDY.max_new_tokens  # two layers


def test_given_an_idle_engine_that_uses_its_time_then_layers_are_compiled_before_a_request(compiler: Compiler) -> None:
    with make_engine() as engine:
        engine.warm_up(wait=False)
        assert compiler.began.wait(TIMEOUT)
        compiler.may_go.set()


def test_given_a_compiler_that_fails_then_plain_layers_go_on_and_the_log_and_warm_up_say_so(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.error = RuntimeError("there is no C compiler")
    compiler.may_go.set()
    with make_engine() as engine:
        expected = tokens(engine)
        wait_for_layers(engine)
        assert "layers are not compiled, steps go on without: there is no C compiler" in caplog.text
        assert tokens(engine) == expected
        for _ in range(2):
            with pytest.raises(KVPoolError, match=r"torch\.compile failed, so layers are not compiled: there is no"):
                engine.warm_up()


def test_given_an_engine_that_closes_then_its_thread_ends_before_the_next_attention(compiler: Compiler) -> None:
    with make_engine() as engine:
        assert engine._parts.warm_up is not None
        compiler.may_go = engine._parts.warm_up._stopped
        tokens(engine)
        assert compiler.began.wait(TIMEOUT)
    assert compiler.callers == ["kvpool-layers"]  # one layer of two
    assert "kvpool-layers" not in {thread.name for thread in threading.enumerate()}


def engine_with_graphs(recorder: FakeRecorder) -> Engine:
    """An engine on a CPU whose steps run from graphs of plain layers, which must be there, until others are compiled."""
    engine = Engine(tiny_model("llama"), kv_blocks=64)
    runner = graph_runner(
        engine,
        cuda_graphs=True,
        max_sequences=4,
        max_tokens=64,
        compile_layers=True,
        recorder=recorder,
    )
    runner.warm_up()
    use_runner(engine, runner)
    return engine


def test_given_graphs_of_plain_layers_then_they_are_captured_again(compiler: Compiler) -> None:
    with engine_with_graphs(FakeRecorder()) as engine:
        runner = engine._loop.runner
        expected, plain = tokens(engine), runner.graphs
        compiler.may_go.set()
        engine.warm_up()
        assert runner.graphs is not None
        assert runner.graphs is not plain
        compiler.callers.clear()
        assert tokens(engine) == expected
        assert set(compiler.callers) == {"kvpool-engine"}  # a fake graph runs the step again


def test_given_compiled_layers_that_cannot_be_captured_then_requests_go_on_without_graphs(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FakeRecorder()
    with engine_with_graphs(recorder) as engine:
        expected = tokens(engine)
        recorder.refuses = "it waits for the device"
        compiler.may_go.set()
        engine.warm_up()
        assert tokens(engine) == expected
        assert engine._loop.runner.graphs is None
    assert "steps run without CUDA graphs" in caplog.text
