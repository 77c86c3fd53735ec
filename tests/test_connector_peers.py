"""The comparison of connectors in vLLM, with engines that only pretend: who is asked what, and what the table says."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import harness
from cases.connector_engines import Answer, Place, end_session, processes
from cases.connector_stages import Comparison, Sizes, trace
from connector_peers import Lines, Told, overhead_of
from harness import PeerAbsentError
from peers import PeerProcess

DRIVER = """
import sys
sys.path.insert(0, {benchmarks!r})
from peers import serve
serve(lambda: "1.0", {{}}, {{"twice": lambda number: 2 * number}})
"""


class Pretended:
    """An engine that finds what it was asked before; `lies` changes its second answers, `dies` ends it there."""

    def __init__(self, name: str, *, lies: bool = False, dies: bool = False) -> None:
        self.name = name
        self.log: list[str] = []
        self._seen: set[tuple[int, ...]] = set()
        self._lies, self._dies = lies, dies
        self._cpu = 0.0

    def ask(self, prompts: Sequence[Sequence[int]], num_new: int = 8) -> list[Answer]:
        answers = []
        for prompt in map(tuple, prompts):
            blocks = [prompt[:end] for end in range(32, len(prompt), 32)]
            cached = 32 * sum(block in self._seen for block in blocks)
            if cached and self._dies:
                raise PeerAbsentError("it stopped")
            self._seen.update(blocks)
            self.log.append("warm" if cached else "cold")
            answers.append(Answer(0.1 if cached else 1.0, cached, (int(cached > 0 and self._lies),)))
        self._cpu += 2.0 if self.name == "vllm" else 2.1
        return answers

    def forget(self) -> None:
        self.log.append("forget")

    def cpu_seconds(self) -> float:
        return self._cpu

    def memory_mib(self) -> float:
        return 100.0


def comparison(*engines: Pretended) -> Comparison:
    """A short comparison of these engines."""
    found = Comparison(Place("python", "model", None, Path()), Sizes(quick=True))
    found.__dict__["_near_engines"] = list(engines)  # where a stage would start real ones
    return found


def told(found: Comparison, word: str, tmp_path: Path) -> dict[str, Any]:
    """The line of the table whose name contains a word."""
    lines = Lines(found, quick=True)
    lines.all()
    options = argparse.Namespace(only=word, quick=True, json=str(tmp_path / "out.json"), check=False)
    peers = [Told(name, "1.0", found, lines.figures) for name in ("vllm", "lmcache")]
    harness.main(lines.cases, peers, options, {})
    (line,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    return dict(line)


class TestStages:
    def test_given_a_second_question_then_only_vllm_alone_keeps_its_own_cache(self) -> None:
        alone, ours = Pretended("vllm"), Pretended("kvpool")
        seen = comparison(alone, ours).near
        assert alone.log == ["cold", "forget", "cold", "warm"]
        assert ours.log == ["cold", "forget", "cold", "forget", "warm"]
        assert seen["host ms"] == {"vllm": [100.0], "kvpool": [100.0]}
        assert seen["host hit"] == {"vllm": [288], "kvpool": [288]}

    def test_given_an_answer_that_differs_from_the_first_then_it_is_counted_as_wrong(self) -> None:
        seen = comparison(Pretended("vllm"), Pretended("kvpool", lies=True)).near
        assert seen["host wrong"] == {"vllm": [0.0], "kvpool": [1.0]}

    def test_given_batches_that_share_nothing_then_overhead_is_what_vllm_alone_did_not_need(self) -> None:
        found = comparison(Pretended("vllm"), Pretended("kvpool"))
        assert overhead_of(found, "batch cpu")("kvpool") == pytest.approx([5.0])

    def test_given_kvpool_that_stops_then_the_run_fails(self) -> None:
        with pytest.raises(RuntimeError, match="it stopped"):
            _ = comparison(Pretended("vllm"), Pretended("kvpool", dies=True)).near


class TestProcesses:
    def test_given_a_session_then_ending_it_ends_its_processes_and_no_others(self) -> None:
        code = (
            "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        )
        code += "print('both', flush=True); time.sleep(600)"
        one = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        assert one.stdout is not None
        assert one.stdout.readline() == b"both\n"
        end_session(one.pid)
        assert one.wait(60) == -signal.SIGKILL
        one.stdout.close()
        assert one.pid not in {session for _, session in processes()}
        assert other.poll() is None
        end_session(other.pid)
        assert other.wait(60) == -signal.SIGKILL


class TestTable:
    def test_given_a_peer_that_stops_then_its_column_says_why_and_kvpools_stands(self, tmp_path: Path) -> None:
        found = comparison(Pretended("vllm"), Pretended("kvpool"), Pretended("lmcache", dies=True))
        line = told(found, "first token, from the host", tmp_path)
        assert line["kvpool"] == 100.0
        assert line["peers"] == {"vllm": 100.0, "lmcache": "absent"}
        assert line["absent"] == {"lmcache": "it stopped"}

    def test_given_a_trace_then_the_hit_rate_is_over_all_its_tokens(self, tmp_path: Path) -> None:
        line = told(comparison(Pretended("vllm"), Pretended("kvpool")), "hit rate", tmp_path)
        sizes = Sizes(quick=True)
        asked = trace(4, sizes.requests, sizes.documents, sizes.document)
        again = len(asked) - len({tuple(each[: sizes.document]) for each in asked})
        assert again > 0
        assert (
            line["kvpool"]
            == line["peers"]["vllm"]
            == pytest.approx(100 * again * sizes.document / sum(map(len, asked)))
        )


class TestTrace:
    def test_given_the_same_seed_then_the_requests_are_the_same_and_share_their_beginnings(self) -> None:
        asked = trace(1, 60, 5, 64)
        assert asked == trace(1, 60, 5, 64) != trace(2, 60, 5, 64)
        begins = [tuple(each[:64]) for each in asked]
        assert len(set(map(tuple, asked))) == 60
        assert 5 < len(set(begins)) < 30  # five documents, and those that are asked about once


class TestCalls:
    def test_given_a_driver_with_calls_then_it_answers_them(self, tmp_path: Path) -> None:
        script = tmp_path / "driver.py"
        script.write_text(DRIVER.format(benchmarks=str(Path(harness.__file__).parent)))
        peer = PeerProcess("peer", script, sys.executable, "")
        assert peer.start() == "1.0"
        assert peer.call("twice", number=21) == 42
        with pytest.raises(PeerAbsentError, match="KeyError"):
            peer.call("thrice", number=1)
        peer.close()
