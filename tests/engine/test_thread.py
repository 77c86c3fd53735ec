"""The engine's thread by itself, with nothing to run."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvpool.engine import thread as thread_module  # noqa: E402
from kvpool.engine.thread import EngineThread, Inbox  # noqa: E402
from kvpool.errors import KVPoolError  # noqa: E402


def idle_loop() -> Any:
    runner = SimpleNamespace(device=torch.device("cpu"))
    nothing = {"has_work": False, "has_idle_work": False, "held": [], "patience": None, "tend": lambda: None}
    return SimpleNamespace(runner=runner, fail=lambda error: None, **nothing)


@pytest.mark.usefixtures("eager_thread_switches")
def test_given_many_callers_at_the_start_then_one_thread_answers_all() -> None:
    for _ in range(100):
        engine_thread = EngineThread(idle_loop(), Inbox())
        answers: list[int] = []
        together = threading.Barrier(6)

        def ask(number: int, own: EngineThread = engine_thread, to: list[int] = answers, start: Any = together) -> None:
            start.wait()
            to.append(own.ask(lambda: number))

        callers = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        engine_thread.close()
        assert sorted(answers) == list(range(6))


def test_given_the_end_of_the_process_then_all_threads_have_one_time_to_end_in(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited, asked = 100.0, list[float](), list[str]()

    def thread(seconds: float) -> Any:
        def join(timeout: float) -> None:
            nonlocal now
            waited.append(timeout)
            now += seconds

        return SimpleNamespace(join=join)

    monkeypatch.setattr(thread_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(thread_module, "_alive", [SimpleNamespace(end_soon=lambda: asked.append("end"))] * 2)
    monkeypatch.setattr(thread_module, "_threads", [thread(4.0), thread(7.0), thread(0.0)])
    thread_module._end_all()
    assert (asked, waited) == (["end", "end"], [10.0, 6.0, 0.0])


def test_given_a_step_that_raises_then_the_loop_is_told_what_stopped_the_engine_and_why() -> None:
    told: list[KVPoolError] = []
    stopped = threading.Event()

    def fail(error: KVPoolError) -> None:
        told.append(error)
        stopped.set()

    cause = ZeroDivisionError("no such number")

    def step() -> None:
        raise cause

    loop = idle_loop()
    loop.__dict__.update(has_work=True, step=step, fail=fail)
    engine_thread = EngineThread(loop, Inbox())
    with contextlib.suppress(KVPoolError):
        engine_thread.ask(lambda: None)
    assert stopped.wait(30)
    (error,) = told
    assert str(error) == "the engine stopped: ZeroDivisionError: no such number"
    assert error.__cause__ is cause
    with pytest.raises(KVPoolError, match="the engine stopped"):
        engine_thread.ask(lambda: None)
    engine_thread.close()
