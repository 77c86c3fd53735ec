"""What `kvpool prove` finds: published faults, planted in a real server, and nothing in a server without them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import FAULTS
from served import served

from kvpool.cli import main
from kvpool.prove.checks import forgotten
from kvpool.prove.endpoint import Endpoint
from kvpool.prove.prove_command import first_half
from kvpool.prove.trial import RIGHT, WRONG, Plan, Trial
from live_app import Live

SMALL = Plan(num_probes=4, num_tokens=96, fill_seconds=math.inf, num_judged=100, num_new=4, crowds=1)
SMALL_SERVER: dict[str, Any] = dict(kv_blocks=26, cache={"host_blocks": 60})  # the device keeps three prompts of SMALL
FOUND_BY = {
    "freed_pages_read": "after other traffic, from host",
    "stale_after_a_reset": "after a reset",
    "salts_ignored": "other salts",
    "table_off_by_one": "begins like another",
    "scale_lost": "after other traffic, from host",
    "load_truncated": "after other traffic, from host",
    "adapters_mixed": "other adapters",
    "ranks_swapped": "after other traffic, from host",
}


@pytest.fixture(autouse=True)
def quiet(one_self_check: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Live]:
    with served(tmp_path, **request.param) as made:
        yield made


def small(live: Live) -> Trial:
    """A whole run of few short prompts."""
    endpoint = Endpoint(live.url)
    endpoint.negotiate()
    trial = Trial(endpoint, SMALL, seed=7)
    first_half(trial, ["sql", "poems"])
    forgotten(trial)
    return trial


def wrong(checks: list[dict[str, Any]]) -> list[str]:
    return [check["name"] for check in checks if check["verdict"] == WRONG]


@pytest.mark.parametrize("live", [SMALL_SERVER], indirect=True, ids=["small"])
def test_given_no_fault_then_every_place_was_hit_and_all_of_it_is_right(live: Live) -> None:
    trial = small(live)
    verdicts = {check.name: check.verdict for check in trial.checks}
    assert trial.verdict == RIGHT, trial.checks
    assert verdicts.pop("asked for what was never said") == "not tested"
    assert set(verdicts.values()) == {RIGHT}
    assert set(FOUND_BY.values()) <= set(verdicts)
    assert {source for check in trial.checks for source in check.hits} == {"gpu", "host"}
    assert not trial.scale.is_blind


@pytest.mark.quick("load_truncated", "salts_ignored")
@pytest.mark.parametrize("name", FAULTS)
def test_given_a_fault_then_the_check_of_its_kind_finds_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"kv_dtype": "int8"} if name == "scale_lost" else {}
    with served(tmp_path, **SMALL_SERVER, **more) as live:
        FAULTS[name](monkeypatch)
        trial = small(live)
        monkeypatch.undo()
    found = [check.name for check in trial.checks if check.verdict == WRONG]
    assert FOUND_BY[name] in found, trial.checks
    assert trial.verdict == WRONG


def test_given_a_cache_smaller_than_the_probes_then_each_check_still_finds_something(tmp_path: Path) -> None:
    with served(tmp_path, kv_blocks=26, cache={}) as live:
        trial = small(live)
    shared = {check.name: max(check.hits.values(), default=0) for check in trial.checks}
    assert shared["begins like another"] > 4 * 96 / 2
    assert trial.verdict == RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_given_a_fault_then_the_quick_command_says_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"kv_dtype": "int8"} if name == "scale_lost" else {}
    with served(tmp_path, **more) as live:
        FAULTS[name](monkeypatch)
        path = tmp_path / "report.json"
        status = main(["prove", live.url, "--quick", "--adapters", "sql,poems", "--json", str(path)])
        monkeypatch.undo()
    assert (status, bool(wrong(json.loads(path.read_text())["checks"]))) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("live", [{}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}], indirect=True, ids=str)
def test_given_no_fault_then_the_quick_command_says_right(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    status = main(["prove", live.url, "--quick", "--adapters", "sql,poems", "--json", str(path)])
    report = json.loads(path.read_text())
    assert (status, report["verdict"], wrong(report["checks"])) == (0, "right", []), report
    assert "right: every answer from the cache was as the one computed" in capsys.readouterr().out
