"""Log lines that come at most once a minute."""

from __future__ import annotations

import logging
import time

import pytest

from kvpool.quiet import QuietErrors, QuietLog


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


def test_given_several_lines_a_minute_then_the_first_are_written_and_the_next_minute_begins_with_the_next_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    quiet = QuietLog(logging.getLogger("kvpool"), lines=2)
    written = []
    for _ in range(3):
        for _ in range(4):
            now += 10.0
            written.append(quiet.is_due)
            quiet.warning("line at %d", now)
        now += 60.0
    assert [record.getMessage() for record in caplog.records] == [
        "line at 110",
        "line at 120",
        "line at 210 (2 more such lines were left out before)",
        "line at 220",
        "line at 310 (2 more such lines were left out before)",
        "line at 320",
    ]
    assert written == [True, True, False, False] * 3


def test_given_errors_of_two_lines_of_code_then_each_is_written_once_a_minute_with_its_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    quiet = QuietErrors(logging.getLogger("kvpool"))

    def divide(by: int) -> float:
        return 1 / by

    def fail(number: int) -> None:
        try:
            divide(0) if number % 2 else int("none")
        except (ArithmeticError, ValueError) as error:
            quiet.error(error, "request %d failed", number)

    for number in range(10):
        fail(number)
    now += 60
    fail(10)
    assert [record.getMessage() for record in caplog.records] == [
        "request 0 failed",
        "request 1 failed",
        "request 10 failed (4 more such lines were left out before)",
    ]
    assert "ValueError: invalid literal" in caplog.text
    assert "ZeroDivisionError" in caplog.text
