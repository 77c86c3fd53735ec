"""Several runs over one trace in processes of their own: when one ends early, all do."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.replay.runs import map_over
from kvpool.replay.synth import WorkloadModel, synthesise
from kvpool.replay.trace import Trace


def only_the_first_ends(_: Trace, item: int) -> int:
    if item:
        threading.Event().wait()
    return item


def the_first_fails(trace: Trace, item: int) -> int:
    if not item:
        raise InvalidArgumentError("item 0 is wrong")
    return only_the_first_ends(trace, item)


def interrupt(_: int) -> None:
    raise KeyboardInterrupt


def test_given_long_runs_when_interrupted_or_one_fails_then_the_others_are_not_waited_for() -> None:
    trace = synthesise(WorkloadModel(), num_requests=5)
    with pytest.raises(KeyboardInterrupt):
        map_over(trace, only_the_first_ends, range(8), workers=2, progress=interrupt)
    with pytest.raises(InvalidArgumentError, match="item 0"):
        map_over(trace, the_first_fails, range(8), workers=2)
    assert not multiprocessing.active_children()
