"""However an engine or a request ends, nobody waits for ever, every token is handed out once, and the memory comes back."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Chunk, Engine, SamplingParams  # noqa: E402
from kvpool.errors import InvalidArgumentError, KVPoolError, SequenceStateError, StepError  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

PROMPT = random_prompt(9).tolist()
SECONDS = 60.0  # until a test that hangs is a failure


def params(num_new: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, ignore_eos=True, **options)


def make_engine(**options: Any) -> Engine:
    return Engine(tiny_model("llama"), kv_blocks=64, **options)


class HeldStep:
    """A callback in which the engine's thread stays until the test lets it go."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, chunk: Chunk) -> None:
        self.begun.set()
        self.may_end.wait(SECONDS)


def fail_at(engine: Engine, poison: int) -> None:
    """Forward passes with this token raise, as they do when the device runs out of memory."""

    def broken(module: Any, args: Any, kwargs: Any) -> None:
        if (kwargs["input_ids"] == poison).any():
            raise RuntimeError("the device is on fire")

    engine._loop.runner.model.register_forward_pre_hook(broken, with_kwargs=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_given_a_fork_of_the_process_then_the_engine_says_there_that_it_runs_elsewhere() -> None:
    reader, writer = os.pipe()
    with make_engine() as engine:
        engine.generate([PROMPT], params(2))
        child = os.fork()
        if child == 0:
            try:
                engine.submit(PROMPT)
            except BaseException as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert f"runs in process {os.getpid()}" in os.read(reader, 4096).decode()
        assert len(engine.generate([PROMPT], params(2))[0].token_ids) == 2
    os.close(reader)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["result", "cancel", "stats"])
def test_given_a_request_of_the_parent_then_a_forked_process_is_told_instead_of_waiting_for_ever(method: str) -> None:
    reader, writer = os.pipe()
    with make_engine() as engine:
        step = HeldStep()
        generation = engine.submit(PROMPT, params(8), on_chunk=step)
        step.begun.wait(SECONDS)
        child = os.fork()
        if child == 0:
            signal.alarm(int(SECONDS))  # ends the child if it does wait
            try:
                getattr(engine if method == "stats" else generation, method)()
            except BaseException as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        step.may_end.set()
        assert f"runs in process {os.getpid()}" in os.read(reader, 4096).decode()
        assert len(generation.result(SECONDS).token_ids) == 8
    os.close(reader)


def test_given_a_closed_engine_then_it_refuses_requests_and_still_tells_its_numbers() -> None:
    engine = make_engine()
    engine.generate([PROMPT], params(2))
    engine.close()
    engine.close()
    with pytest.raises(SequenceStateError, match="closed"):
        engine.submit(PROMPT)
    assert engine.stats().scheduler.finished == 1
    assert sum(engine.memory.values()) == 0


def test_given_an_engine_that_nobody_has_any_more_then_its_request_ends_first_and_then_it_goes() -> None:
    engine = make_engine()
    generation = engine.submit(PROMPT, params(20))
    thread, model = engine._thread._thread, weakref.ref(engine.model)
    del engine
    assert len(generation.result(SECONDS).token_ids) == 20
    assert thread is not None
    thread.join(SECONDS)
    gc.collect()
    assert not thread.is_alive()
    assert model() is None


def test_given_an_idle_engine_when_it_is_let_go_then_its_memory_is_back_at_once() -> None:
    engine = make_engine()
    engine.generate([PROMPT], params(2))
    thread, model = engine._thread._thread, weakref.ref(engine.model)
    assert thread is not None
    gc.collect()
    del engine
    assert not thread.is_alive()
    assert model() is None


@pytest.mark.slow
def test_given_requests_on_their_way_when_the_process_ends_then_it_ends_without_a_crash() -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from models import tiny_model
from kvpool.engine import Engine, SamplingParams
engine = Engine(tiny_model("llama"), kv_blocks=64)
engine.submit({PROMPT}, SamplingParams(max_new_tokens=400, ignore_eos=True))
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_given_requests_on_their_way_when_it_is_closed_then_each_of_them_hears_of_it() -> None:
    engine = make_engine()
    step = HeldStep()
    running = engine.submit(PROMPT, params(400), on_chunk=step)
    step.begun.wait(SECONDS)
    waiting = engine.submit(PROMPT, params(4))  # the engine's thread has not looked at it when it ends
    closer = threading.Thread(target=engine.close)
    closer.start()
    assert engine._thread._inbox.closed.wait(SECONDS)
    step.may_end.set()
    for generation in (running, waiting):
        with pytest.raises(SequenceStateError, match="closed before"):
            generation.result(SECONDS)
    closer.join(SECONDS)
    assert not closer.is_alive()


@pytest.mark.parametrize("overlap", [False, True])
def test_given_a_step_that_fails_then_its_requests_end_with_the_reason_and_the_engine_goes_on(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(overlap=overlap) as engine:
        expected = engine.generate([PROMPT], params(9))[0].token_ids
        poison = next(token for token in range(100) if token not in (*PROMPT, *expected))
        fail_at(engine, poison)
        step = HeldStep()
        beside = engine.submit(PROMPT, params(9), on_chunk=step)
        step.begun.wait(SECONDS)
        broken = [engine.submit([*PROMPT, poison, number], params(9)) for number in range(2)]
        step.may_end.set()
        for generation in (beside, *broken):  # one step had all of them
            with pytest.raises(StepError, match="RuntimeError: the device is on fire"):
                generation.result(SECONDS)
        assert "a step of 3 sequences failed; their requests end" in caplog.messages
        assert beside.samples[0].token_ids == expected[: len(beside.samples[0].token_ids)]
        assert engine.generate([PROMPT], params(9))[0].token_ids == expected
        assert engine.stats().num_running == 0
        engine.manager.check()
        assert engine.manager.stats().num_sequences == 0


def test_given_a_failed_step_with_copies_then_what_others_swapped_in_is_there() -> None:
    limits = SchedulerConfig(max_tokens_per_step=64, max_sequences=4, preemption="swap")
    options: dict[str, Any] = dict(block_size=4, host_bytes=2**22, scheduler=limits, cache={"watermark": 0.0})
    prompts = [random_prompt(30, seed=seed).tolist() for seed in range(4)]
    with Engine(tiny_model("llama"), kv_blocks=256, block_size=4) as roomy:
        expected = [out.token_ids for out in roomy.generate(prompts, params(24))]
    poison = next(token for token in range(160) if not any(token in tokens for tokens in (*prompts, *expected)))
    with Engine(tiny_model("llama"), kv_blocks=32, **options) as engine:
        fail_at(engine, poison)
        generations = [engine.submit(prompt, params(24)) for prompt in prompts]
        ended = [engine.submit([poison] * number, params(2), priority=9) for number in range(1, 9)]
        for generation, tokens in zip(generations, expected, strict=True):
            try:
                assert generation.result(SECONDS).token_ids == tokens
            except StepError:
                got = generation.samples[0].token_ids if generation.samples else []
                assert got == tokens[: len(got)]
        for generation in ended:
            with pytest.raises(StepError):
                generation.result(SECONDS)
        engine.manager.check()
        assert [out.token_ids for out in engine.generate(prompts, params(24))] == expected


def test_given_an_engine_that_fails_by_itself_then_all_requests_end_and_the_memory_comes_back() -> None:
    engine = make_engine()
    step = HeldStep()
    generations = [engine.submit(PROMPT, params(9), on_chunk=step)]
    step.begun.wait(SECONDS)

    def broken(launched: Any) -> None:
        raise RuntimeError("the device is on fire")

    engine._loop._finish = broken  # type: ignore[method-assign]
    generations += [engine.submit(PROMPT, params(9)) for _ in range(2)]
    step.may_end.set()
    for generation in generations:
        with pytest.raises(KVPoolError, match="on fire"):
            generation.result(SECONDS)
    assert engine._thread._inbox.closed.wait(SECONDS)
    with pytest.raises(SequenceStateError, match="on fire"):
        engine.submit(PROMPT)
    engine.cancel(generations[0])
    assert engine.stats().num_running == 3  # as the failure left them
    engine.close()
    assert sum(engine.memory.values()) == 0


@pytest.mark.parametrize("error", [ValueError("not now"), SystemExit(1), asyncio.CancelledError()])
def test_given_callbacks_that_raise_then_the_engine_goes_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*chunk: Chunk) -> None:
        raise error

    with make_engine() as engine:
        assert len(engine.submit(PROMPT, params(3), on_chunk=refuse, on_end=refuse).result(SECONDS).token_ids) == 3
        assert len(engine.generate([PROMPT], params(2))[0].token_ids) == 2
    assert [record.message.split(" of ")[0] for record in caplog.records] == ["the callback", "the listener to the end"]


def test_given_a_request_of_another_engine_when_it_is_cancelled_then_ours_of_the_same_id_goes_on() -> None:
    held = HeldStep()
    with make_engine() as engine, make_engine() as other:
        ours, theirs = engine.submit(PROMPT, params(8), on_chunk=held), other.submit(PROMPT, params(400))
        assert ours.id == theirs.id
        assert held.begun.wait(SECONDS)
        engine.cancel(theirs)
        held.may_end.set()
        assert ours.result(SECONDS).finish_reason == "length"


def test_given_a_callback_then_it_may_ask_for_numbers_but_not_close_the_engine() -> None:
    seen: list[int] = []

    def look(chunk: Chunk) -> None:
        seen.append(engine.stats().num_running)
        with pytest.raises(SequenceStateError, match="another thread"):
            engine.close()

    with make_engine() as engine:
        engine.submit(PROMPT, params(2), on_chunk=look).result(SECONDS)
    assert seen[0] == 1


def test_given_a_callback_that_waits_for_a_result_then_it_is_told_instead_of_waiting_for_ever() -> None:
    seen: list[str] = []

    def wait(chunk: Chunk) -> None:
        with pytest.raises(SequenceStateError, match="another thread"):
            other.result()
        seen.append("refused")

    with make_engine() as engine:
        step = HeldStep()
        other = engine.submit(PROMPT, params(20), on_chunk=step)
        step.begun.wait(SECONDS)
        waiting = engine.submit(PROMPT, params(2), on_chunk=wait)
        step.may_end.set()
        assert len(waiting.result(SECONDS).token_ids) == 2
        assert len(other.result(SECONDS).token_ids) == 20
    assert seen[0] == "refused"


def test_given_callbacks_of_a_step_then_what_they_have_called_after_it_comes_once_all_have_heard() -> None:
    heard: list[str] = []
    with make_engine() as engine:

        def listen(chunk: Chunk) -> None:
            if chunk.token_ids:
                heard.append("chunk")
                engine.after_step(partial(heard.append, f"after {chunk.sample}"))

        engine.submit(PROMPT, params(2, n=2), on_chunk=listen).result(SECONDS)
        engine.stats()  # as of between two steps: what was to be called has been
    assert heard == ["chunk", "chunk", "after 0", "after 1"] * 2


def test_given_a_call_after_a_step_that_raises_then_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with make_engine() as engine:
        engine.after_step(sys.exit)
        assert engine.generate([PROMPT], params(1))[0].token_ids
    assert "what was to be called after a step raised" in caplog.text
    heard: list[int] = []
    engine.after_step(partial(heard.append, 1))  # nothing can follow: at once
    assert heard == [1]
    with pytest.raises(InvalidArgumentError, match="got 3"):
        engine.after_step(3)  # type: ignore[arg-type]


def test_given_an_event_loop_that_is_gone_then_the_engine_goes_on() -> None:
    async def take_one(engine: Engine) -> None:
        async for _ in engine.stream(PROMPT, params(300)):
            break

    with make_engine() as engine:
        asyncio.run(take_one(engine))
        assert len(engine.generate([PROMPT], params(2))[0].token_ids) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_given_a_request_at_its_deadline_when_it_is_cancelled_too_then_it_ends_and_others_go_on(overlap: bool) -> None:
    with make_engine(overlap=overlap) as engine:
        now = 0.0
        engine._loop.scheduler.clock = lambda: now
        chunks = iter(range(99))

        def pass_the_deadline_and_cancel(chunk: Chunk) -> None:
            nonlocal now
            number = next(chunks)
            if number == 5:
                now = 1.0
            elif number == 6:  # the deadline has passed in the planning of a step that is on its way
                engine.cancel(late)

        late = engine.submit(PROMPT, params(400), deadline=0.5)
        other = engine.submit(PROMPT, params(20), on_chunk=pass_the_deadline_and_cancel)
        assert late.result(SECONDS).finish_reason == "deadline"
        assert len(other.result(SECONDS).token_ids) == 20
        assert engine.stats().cache.num_sequences == 0


def test_given_steps_then_the_scheduler_learns_how_long_those_without_copies_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_engine() as engine:
        observed: list[bool] = []
        monkeypatch.setattr(
            engine._loop.scheduler, "observe", lambda plan, seconds: observed.append(bool(plan.copies) or seconds <= 0)
        )
        engine.generate([PROMPT], params(6))
        assert len(observed) >= 5
        assert not any(observed)


class Words:
    """Every token is a word of its own."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def test_given_a_stop_string_in_the_step_in_which_a_sibling_ends_then_no_token_is_lost() -> None:
    sampled = dict(temperature=1.5, seed=3, n=2)
    with make_engine(tokenizer=Words()) as engine:
        whole = [sample.token_ids for sample in engine.generate([PROMPT], params(8, **sampled))[0].samples]
        last = next(at for at in range(1, 8) if all(ids[at] not in whole[0][:at] + whole[1][:at] for ids in whole))
        for one, other in (whole, whole[::-1]):
            stopping = params(8, stop=f"<{one[last]}>", stop_token_ids=[other[last]], **sampled)
            samples = engine.generate([PROMPT], stopping)[0].samples
            assert [sample.token_ids for sample in samples] == [ids[: last + 1] for ids in whole]
            assert [sample.finish_reason for sample in samples] == ["stop", "stop"]


def test_given_a_stop_string_in_the_first_token_of_a_sample_then_it_ends_there_and_its_sibling_goes_on() -> None:
    sampled = dict(temperature=1.5, seed=3, n=2)
    with make_engine(tokenizer=Words()) as engine:
        whole = [sample.token_ids for sample in engine.generate([PROMPT], params(4, **sampled))[0].samples]
        assert whole[0][0] not in whole[1]
        before = engine.stats().scheduler.decode_tokens
        samples = engine.generate([PROMPT], params(4, stop=f"<{whole[0][0]}>", **sampled))[0].samples
        computed = engine.stats().scheduler.decode_tokens - before
    assert [sample.token_ids for sample in samples] == [whole[0][:1], whole[1]]
    assert computed < 3 + 3  # nothing more of the first
    assert [sample.finish_reason for sample in samples] == ["stop", "length"]


def test_given_a_sample_that_is_over_then_it_says_so_before_its_siblings_are() -> None:
    sampled = dict(temperature=1.5, seed=3, n=2)
    chunks: list[Chunk] = []
    with make_engine() as engine:
        first, second = (sample.token_ids for sample in engine.generate([PROMPT], params(8, **sampled))[0].samples)
        assert first[2] not in second
        engine.submit(PROMPT, params(8, stop_token_ids=[first[2]], **sampled), on_chunk=chunks.append).result(SECONDS)
    ends = [at for at, chunk in enumerate(chunks) if chunk.finish_reason is not None]
    assert [chunks[at].sample for at in ends] == [0, 1]
    assert ends[1] - ends[0] > 5
