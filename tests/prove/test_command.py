"""`kvpool prove` as it is called: needles, chats, two halves around a restart, and when nothing can be said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub import Stub, stubbed

from kvpool.cli import main
from kvpool.prove.endpoint import Endpoint
from kvpool.prove.trial import FULL, LEAST_TOKENS, Trial

QUICK = ("--quick", "--fill-seconds", "0")


@pytest.fixture
def stub() -> Iterator[tuple[Stub, str]]:
    with stubbed() as made:
        yield made


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The status of a call and what it wrote as JSON."""
    status = main(["prove", *words, "--json", "-"])
    return status, json.loads(capsys.readouterr().out)


def verdict_of(found: dict[str, Any], name: str) -> tuple[str, str]:
    (check,) = [check for check in found["checks"] if check["name"] == name]
    return check["verdict"], check["why"]


def test_given_a_model_that_reads_then_needles_are_asked_and_all_is_right(
    stub: tuple[Stub, str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = report(capsys, stub[1], *QUICK)
    assert (status, found["verdict"], found["cold_by"]) == (0, "right", "salt")
    assert found["compared"] == "needles, texts alone"
    assert verdict_of(found, "asked again") == ("right", "")


def test_given_an_answer_with_the_code_of_another_prompt_then_it_is_named(
    stub: tuple[Stub, str], capsys: pytest.CaptureFixture[str]
) -> None:
    stub[0].leaks_every = 5
    status, found = report(capsys, stub[1], *QUICK)
    assert status == 1
    wrong = [words for check in found["checks"] for words in check["wrong"]]
    assert any("which only another prompt says" in words for words in wrong)


def test_given_texts_alone_then_few_that_differ_are_chance_and_many_are_not(
    stub: tuple[Stub, str], capsys: pytest.CaptureFixture[str]
) -> None:
    stub[0].flips_every = 4
    assert report(capsys, stub[1], *QUICK)[0] == 0
    stub[0].flips_every = 1
    assert report(capsys, stub[1], *QUICK)[0] == 1


def test_given_an_endpoint_of_chats_that_refuses_fields_then_it_is_asked_without_them(
    stub: tuple[Stub, str], capsys: pytest.CaptureFixture[str]
) -> None:
    stub[0].is_chat, stub[0].refused = True, {"ignore_eos", "logprobs", "seed", "cache_salt"}
    status, found = report(capsys, stub[1], *QUICK)
    assert (status, found["cold_by"]) == (0, None)
    assert verdict_of(found, "other salts")[0] == "not tested"
    assert "no prompt can be made cold" in verdict_of(found, "cold, many at once")[1]


def test_given_no_cache_or_no_word_of_it_then_nothing_is_right(
    stub: tuple[Stub, str], capsys: pytest.CaptureFixture[str]
) -> None:
    stub[0].caches = False
    status, found = report(capsys, stub[1], *QUICK)
    assert (status, found["verdict"]) == (2, "not tested")
    stub[0].reports = False
    assert main(["prove", stub[1], *QUICK]) == 2
    assert "--enable-prompt-tokens-details" in capsys.readouterr().err


def test_given_a_restart_between_two_halves_then_what_outlived_it_is_judged(
    stub: tuple[Stub, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state = str(tmp_path / "state.json")
    assert report(capsys, stub[1], *QUICK, "--before", state)[0] == 0
    status, found = report(capsys, stub[1], *QUICK, "--after", state)
    assert (status, verdict_of(found, "after a restart")) == (0, ("right", ""))
    stub[0].flips_every = 1
    assert report(capsys, stub[1], *QUICK, "--after", state)[0] == 1
    stub[0].seen.clear()
    status, found = report(capsys, stub[1], *QUICK, "--after", state)
    assert (status, verdict_of(found, "after a restart")) == (2, ("not tested", "nothing was found in the cache"))


def test_given_a_command_that_restarts_then_it_runs_and_its_failure_is_told(
    stub: tuple[Stub, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, found = report(capsys, stub[1], *QUICK, "--restart-command", f"touch {tmp_path}/restarted")
    assert (status, verdict_of(found, "after a restart")[0]) == (0, "right")
    assert (tmp_path / "restarted").exists()
    assert main(["prove", stub[1], *QUICK, "--restart-command", "exit 3"]) == 2
    assert "ended with status 3" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, LEAST_TOKENS), (None, 900), (3600.0, 900)])
def test_given_an_endpoint_that_takes_long_for_a_prompt_then_prompts_are_shorter(
    seconds: float | None, tokens: int, stub: tuple[Stub, str]
) -> None:
    endpoint = Endpoint(stub[1])
    endpoint.negotiate()
    trial = Trial(endpoint, FULL._replace(num_tokens=900, cold_seconds=seconds), seed=1)
    trial.begin()
    assert trial.prompts.num_tokens == tokens
    assert len(trial.prompts.probe().lines) == pytest.approx(tokens / 10, rel=0.3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "is no address"),
        (["http://127.0.0.1:9"], "does not answer"),
        (["URL", "--model", "other"], "serves stub"),
        (["URL", "--before", "a", "--after", "b"], "give one of them"),
        (["URL", "--after", "/nowhere/state.json"], "cannot read"),
    ],
)
def test_given_a_wrong_option_then_the_message_names_it(
    words: list[str], message: str, stub: tuple[Stub, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [stub[1] if word == "URL" else str(tmp_path / word) if word in "ab" else word for word in words]
    assert main(["prove", *given]) == 2
    assert message in capsys.readouterr().err
