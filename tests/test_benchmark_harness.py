"""The benchmark harness: alternating repeats, bars, absent peers, JSON. Nothing here looks at a clock."""

from __future__ import annotations

import gc
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from harness import (
    RECORDED,
    Case,
    PeerAbsentError,
    PeerCase,
    Recorded,
    Result,
    Times,
    TimesRecorded,
    argument_parser,
    freeze_heap,
    machine_scale,
    main,
    measure,
    random_tokens,
    report,
    table,
)
from peers import PeerProcess, vllm_peer
from peers.recorded_figures import FIGURES

BENCHMARKS = sys.path[0]


class FakePeer:
    """A peer that needs 10 ms for everything; `missing` and `dies_after` make it absent at once or half-way."""

    name = "vllm"

    def __init__(self, log: list[str] | None = None, missing: bool = False, dies_after: int | None = None) -> None:
        self.log = log if log is not None else []
        self.missing = missing
        self.lives = dies_after
        self.closed = False

    def start(self) -> str:
        if self.missing:
            raise PeerAbsentError("not installed")
        return "0.32.0"

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        if self.missing:
            raise PeerAbsentError("not installed")
        self.log.append(f"setup {case}")

    def repeat(self) -> Sequence[float]:
        if self.lives is not None:
            if self.lives == 0:
                raise PeerAbsentError("stopped")
            self.lives -= 1
        self.log.append("vllm")
        return [10.0]

    def close(self) -> None:
        self.closed = True


def recorded(value: float, peer: str = "nano-vllm") -> Recorded:
    return Recorded(peer=peer, value=value, variant="v1", machine="another machine", date="2026-10")


def make_case(*bars: Any, value: float = 1.0, log: list[str] | None = None, **options: Any) -> Case:
    def run() -> list[float]:
        if log is not None:
            log.append("kvpool")
        return [value]

    defaults: dict[str, Any] = dict(peer_case=PeerCase("decode"), repeats=3, warmups=0)
    return Case("a case", "ms", options.pop("better", "lower"), lambda: run, bars, **{**defaults, **options})


def run_main(cases: Sequence[Case], peer: FakePeer, *arguments: str) -> int:
    return main(cases, [peer], argument_parser("a benchmark").parse_args(arguments), {"kvpool": "0.1.0"})


def judged(case: Case, peer: FakePeer) -> dict[str, Any]:
    result: dict[str, Any] = report([measure(case, [peer])], {})["cases"][0]
    return result


class TestRepeats:
    def test_kvpool_and_the_peer_alternate(self) -> None:
        log: list[str] = []
        measure(make_case(log=log), [FakePeer(log)])
        assert log == ["setup decode", *["kvpool", "vllm"] * 3]

    def test_warmups_are_run_by_all_and_counted_for_none(self) -> None:
        log: list[str] = []
        result = measure(make_case(log=log, warmups=2), [FakePeer(log)])
        assert log.count("kvpool") == log.count("vllm") == 5
        assert {name: len(samples) for name, samples in result.samples.items()} == {"kvpool": 3, "vllm": 3}

    def test_a_slow_peer_may_run_fewer_repeats(self) -> None:
        result = measure(make_case(peer_case=PeerCase("decode", max_repeats=1)), [FakePeer()])
        assert {name: len(samples) for name, samples in result.samples.items()} == {"kvpool": 3, "vllm": 1}

    def test_quick_runs_one_repeat(self) -> None:
        log: list[str] = []
        measure(make_case(log=log), [], quick=True)
        assert log == ["kvpool"]

    def test_a_peer_takes_no_part_in_a_case_it_does_not_have(self) -> None:
        peer = FakePeer()
        assert judged(make_case(peer_case=None), peer)["peers"] == {}
        assert peer.log == []

    def test_the_heap_is_given_back_to_the_collector_after_a_case(self) -> None:
        def setup() -> Callable[[], list[float]]:
            freeze_heap()
            assert gc.isenabled()
            return lambda: [float(gc.get_freeze_count() > 0)]

        result = measure(Case("frozen", "x", "higher", setup, repeats=1), [])
        assert result.samples["kvpool"] == [1.0]
        assert gc.get_freeze_count() == 0


class TestStatistics:
    def test_p99_is_the_bad_end_whatever_is_better(self) -> None:
        samples = {"kvpool": [float(number) for number in range(1, 201)]}
        assert Result(make_case(), samples).p99() == 198.0
        assert Result(make_case(better="higher"), samples).p99() == 3.0
        assert Result(make_case(), {"kvpool": [4.0]}).p99() == 4.0

    def test_the_same_seed_gives_the_same_prompts(self) -> None:
        assert (random_tokens(3, 2, 8) == random_tokens(3, 2, 8)).all()
        assert random_tokens(3, 2, 8).dtype == "int32"

    def test_the_scale_is_the_peers_time_here_over_its_recorded_time(self) -> None:
        case = make_case(recorded=(recorded(20.0, "vllm"), recorded(1.0)))
        assert machine_scale([measure(case, [FakePeer()])]) == 0.5
        assert machine_scale([measure(case, [FakePeer(missing=True)])]) == 1.0


class TestBars:
    @pytest.mark.parametrize(("better", "bar", "ok"), [("lower", 1.0, True), ("lower", 0.9, False)])
    def test_a_number_bounds_from_above_where_lower_is_better(self, better: str, bar: float, ok: bool) -> None:
        assert judged(make_case(bar, better=better), FakePeer())["ok"] is ok

    @pytest.mark.parametrize(("bar", "ok"), [(1.0, True), (1.1, False)])
    def test_a_number_bounds_from_below_where_higher_is_better(self, bar: float, ok: bool) -> None:
        assert judged(make_case(bar, better="higher"), FakePeer())["ok"] is ok

    @pytest.mark.parametrize(("factor", "ok"), [(10, True), (11, False)])
    def test_a_ratio_is_taken_to_the_peer_of_the_same_run(self, factor: float, ok: bool) -> None:
        case = judged(make_case(Times(factor, "vllm")), FakePeer())
        assert case["ok"] is ok
        assert case["bars"][0]["basis"] == "same run"
        assert case["peers"] == {"vllm": 10.0}

    def test_a_ratio_of_rates_is_the_other_way_round(self) -> None:
        assert judged(make_case(Times(2, "vllm"), value=20.0, better="higher"), FakePeer())["ok"] is True
        assert judged(make_case(Times(3, "vllm"), value=20.0, better="higher"), FakePeer())["ok"] is False

    def test_all_bars_must_be_reached(self) -> None:
        assert judged(make_case(1.0, Times(11, "vllm")), FakePeer())["ok"] is False

    def test_no_bar_decides_nothing(self) -> None:
        case = judged(make_case(), FakePeer())
        assert (case["bar"], case["ok"]) == (None, None)


class TestAbsentPeers:
    def test_an_absent_peer_is_absent_and_its_bar_is_undecided(self) -> None:
        case = judged(make_case(Times(2, "vllm")), FakePeer(missing=True))
        assert case["peers"] == {"vllm": "absent"}
        assert case["absent"] == {"vllm": "not installed"}
        assert case["bars"][0]["ok"] is None
        assert case["ok"] is None

    @pytest.mark.parametrize(("limit", "ok"), [(1.0, True), (0.5, False)])
    def test_absolute_bars_decide_without_the_peer(self, limit: float, ok: bool) -> None:
        assert judged(make_case(limit, Times(2, "vllm")), FakePeer(missing=True))["ok"] is ok

    def test_a_peer_that_stops_half_way_leaves_no_figure(self) -> None:
        case = judged(make_case(Times(2, "vllm")), FakePeer(dies_after=2))
        assert case["peers"] == {"vllm": "absent"}
        assert case["samples"] == {"kvpool": 3}
        assert case["ok"] is None

    def test_a_recorded_figure_does_not_stand_in_for_an_absent_peer(self) -> None:
        case = judged(make_case(Times(2, "vllm"), recorded=(recorded(100.0, "vllm"),)), FakePeer(missing=True))
        assert case["ok"] is None

    def test_a_bar_against_recorded_figures_says_so(self) -> None:
        figures = (recorded(9.0, "mini"), recorded(5.0))
        case = judged(make_case(TimesRecorded(5), recorded=figures), FakePeer(missing=True))
        assert case["ok"] is True
        assert case["bars"][0]["basis"] == RECORDED
        assert RECORDED in case["bar"]
        assert "nano-vllm" in case["bar"]
        assert {figure["status"] for figure in case["recorded"]} == {RECORDED}

    def test_a_bar_against_recorded_figures_is_scaled_to_this_machine(self) -> None:
        figures = (recorded(20.0, "vllm"), recorded(5.0))  # the peer runs here in half the time
        assert judged(make_case(TimesRecorded(5), recorded=figures), FakePeer())["ok"] is False
        assert judged(make_case(TimesRecorded(2.5), recorded=figures), FakePeer())["ok"] is True

    def test_a_case_without_recorded_figures_leaves_such_a_bar_undecided(self) -> None:
        assert judged(make_case(TimesRecorded(5)), FakePeer())["ok"] is None


class TestCommand:
    def test_json_has_the_documented_form(self, tmp_path: Path) -> None:
        target = tmp_path / "out.json"
        assert run_main([make_case(1.0)], FakePeer(), "--json", str(target)) == 0
        document = json.loads(target.read_text())
        assert set(document) == {"machine", "versions", "clock", "cases"}
        assert document["versions"]["vllm"] == "0.32.0"
        assert document["versions"]["kvpool"] == "0.1.0"
        (case,) = document["cases"]
        assert (
            case.items()
            >= {
                "name": "a case",
                "unit": "ms",
                "better": "lower",
                "kvpool": 1.0,
                "peers": {"vllm": 10.0},
                "ceiling": None,
                "bar": "<= 1 ms",
                "ok": True,
            }.items()
        )

    def test_a_case_whose_machine_is_missing_is_absent_and_neither_won_nor_an_error(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def needs_a_gpu() -> Any:
            raise PeerAbsentError("no GPU here")

        case = Case("a case", "ms", "lower", needs_a_gpu, bars=(1.0,))
        assert run_main([case], FakePeer(), "--check", "--json", "-") == 0
        captured = capsys.readouterr()
        (found,) = json.loads(captured.out)["cases"]
        assert (found["kvpool"], found["ok"], found["peers"]) == (None, None, {})
        assert "absent: kvpool: no GPU here" in captured.err

    def test_json_to_stdout_leaves_the_table_to_stderr(self, capsys: pytest.CaptureFixture[str]) -> None:
        run_main([make_case(1.0)], FakePeer(), "--json", "-")
        captured = capsys.readouterr()
        assert json.loads(captured.out)["cases"][0]["kvpool"] == 1.0
        assert "a case" in captured.err

    @pytest.mark.parametrize(
        ("bar", "arguments", "status"),
        [(1.0, ["--check"], 0), (0.5, ["--check"], 1), (0.5, [], 0), (Times(2, "other"), ["--check"], 0)],
        ids=["reached", "missed", "missed but not asked", "undecided"],
    )
    def test_check_fails_only_where_a_bar_is_missed(self, bar: Any, arguments: list[str], status: int) -> None:
        assert run_main([make_case(bar)], FakePeer(), *arguments) == status

    def test_a_failing_case_fails_the_run_and_not_the_other_cases(self, capsys: pytest.CaptureFixture[str]) -> None:
        def broken() -> Callable[[], list[float]]:
            raise RuntimeError("no such block")

        peer = FakePeer()
        assert run_main([Case("broken", "ms", "lower", broken), make_case()], peer, "--json", "-") == 1
        first, second = json.loads(capsys.readouterr().out)["cases"]
        assert (first["kvpool"], first["ok"], first["error"]) == (None, False, "RuntimeError: no such block")
        assert second["kvpool"] == 1.0
        assert peer.closed

    def test_only_chooses_cases_by_a_word(self, capsys: pytest.CaptureFixture[str]) -> None:
        run_main([make_case()], FakePeer(), "--only", "nothing", "--json", "-")
        assert json.loads(capsys.readouterr().out)["cases"] == []

    def test_the_table_names_absent_peers_and_recorded_figures(self, capsys: pytest.CaptureFixture[str]) -> None:
        case = make_case(0.5, Times(2, "vllm"), recorded=(recorded(5.0),))
        run_main([case], FakePeer(missing=True))
        shown = capsys.readouterr().out
        assert "absent: vllm: not installed" in shown
        assert f"{RECORDED}, not in this run: nano-vllm v1: another machine, 2026-10" in shown
        assert "MISSED" in shown

    def test_the_table_shows_how_many_times_better(self) -> None:
        shown = table(report([measure(make_case(), [FakePeer()])], {}))
        assert "10.0x" in shown


class TestPeerProcess:
    @pytest.fixture
    def driver(self, tmp_path: Path) -> Path:
        path = tmp_path / "driver.py"
        path.write_text(
            f"import sys; sys.path.insert(0, {BENCHMARKS!r})\n"
            "import os\n"
            "from peers import serve\n"
            "def good(size):\n"
            "    print('chatter on stdout is not an answer')\n"
            "    return lambda: [float(size)]\n"
            "def dying():\n"
            "    return lambda: os._exit(3)\n"
            "serve(lambda: '1.2.3', {'good': good, 'dying': dying})\n"
        )
        return path

    def test_speaks_with_its_driver(self, driver: Path) -> None:
        peer = PeerProcess("fake", driver, sys.executable, "")
        assert peer.start() == "1.2.3"
        peer.setup("good", {"size": 7})
        assert [peer.repeat(), peer.repeat()] == [[7.0], [7.0]]
        peer.close()

    def test_an_unknown_case_is_absent_and_the_next_case_works(self, driver: Path) -> None:
        peer = PeerProcess("fake", driver, sys.executable, "")
        peer.start()
        with pytest.raises(PeerAbsentError, match="unknown"):
            peer.setup("unknown", {})
        peer.setup("good", {"size": 7})
        assert peer.repeat() == [7.0]
        peer.close()

    def test_a_driver_that_ends_is_absent_from_then_on(self, driver: Path) -> None:
        peer = PeerProcess("fake", driver, sys.executable, "")
        peer.start()
        peer.setup("dying", {})
        for _ in range(2):
            with pytest.raises(PeerAbsentError, match="ended with status 3"):
                peer.repeat()
        peer.close()

    @pytest.mark.parametrize(("python", "reason"), [(None, "give --python"), ("/no/such/python", "does not run")])
    def test_without_an_interpreter_it_is_absent(self, driver: Path, python: str | None, reason: str) -> None:
        peer = PeerProcess("fake", driver, python, "give --python")
        for ask in (peer.start, peer.repeat):
            with pytest.raises(PeerAbsentError, match=reason):
                ask()
        peer.close()


def test_the_control_plane_cases_fit_the_drivers_of_the_peers() -> None:
    import control_plane  # the other tests need no kvpool

    cases = control_plane.cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        if case.peer_case is not None:
            driver_case = vllm_peer.CASES[case.peer_case.name]
            inspect.signature(driver_case).bind(**case.peer_case.params)


def test_every_recorded_figure_says_where_and_when_it_was_taken() -> None:
    for figures in FIGURES.values():
        assert figures
        for figure in figures:
            assert figure.value > 0
            assert figure.machine
            assert figure.date
            assert figure.variant
