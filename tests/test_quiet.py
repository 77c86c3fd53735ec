"""Log lines that come at most once a minute."""

from __future__ import annotations

import logging
import time

import pytest

from kvpool.quiet import QuietLog


def test_given_many_lines_then_one_a_minute_is_written_and_says_how_many_were_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    quiet = QuietLog(logging.getLogger("kvpool"))
    for number in range(1500):
        quiet.warning("%s is wrong with 100%%", number)
    now += 59.9
    quiet.warning("%s is wrong with 100%%", "nothing")
    now += 0.1
    quiet.warning("%s is wrong with 100%%", "this")
    now += 60
    quiet.warning("fine")
    assert [record.getMessage() for record in caplog.records] == [
        "0 is wrong with 100%",
        "this is wrong with 100% (1,500 more such lines were left out before)",
        "fine",
    ]
