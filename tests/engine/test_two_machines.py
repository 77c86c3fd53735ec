"""Ranks of one engine on two machines, which torchrun has started: the tokens of one process, and one error when one is lost.

The machines are network namespaces with a link between them. They need root.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).resolve().parents[1] / "tiers"))

from hosts import Hosts, two_hosts
from models import random_prompt, tiny_config
from servers import eventually

from kvpool.engine import Engine, SamplingParams

pytestmark = pytest.mark.slow

PATIENCE = 600.0  # torchrun starts four processes one after the other
SECONDS = 20.0
PROMPT = random_prompt(20).tolist()
SIX = SamplingParams(max_new_tokens=6)
SCRIPT = """
import json, os, sys, time
from pathlib import Path

folder, size, busy = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "busy"
rank = int(os.environ["RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
sys.path.insert(0, sys.argv[4])
from models import tiny_config

from kvpool.engine import Engine, SamplingParams
from kvpool.engine.rank_meeting import LaunchedRanks
from kvpool.errors import KVPoolError

def say(name, what):
    (folder / "new").write_text(json.dumps(what))
    (folder / "new").rename(folder / name)

prompt = json.loads(sys.argv[5])
ranks = size if rank else LaunchedRanks(size, device="cpu", seconds=float(sys.argv[6]))
with Engine(tiny_config("llama"), device="cpu", kv_blocks=64, tensor_parallel=ranks, disk=folder / f"disk-{rank}") as engine:
    found = engine.generate([prompt], SamplingParams(max_new_tokens=6))[0].token_ids
    shared = [channel.memory is not None for channel in ranks.channels]
    say("tokens", [found, shared, ranks.machines])
    try:
        while busy:
            engine.generate([prompt], SamplingParams(max_new_tokens=200, ignore_eos=True))
        engine._thread._inbox.closed.wait()
        engine.submit(prompt)
    except KVPoolError as error:
        say("error", str(error))
"""


class Launched:
    """The processes of torchrun on both hosts."""

    def __init__(self, hosts: Hosts, folder: Path, num_each: int, is_busy: bool) -> None:
        self.hosts, self._folder = hosts, folder
        script = folder / "script.py"
        script.write_text(SCRIPT)
        tests = str(Path(__file__).parent)
        given = [str(folder), str(2 * num_each), "busy" if is_busy else "idle", tests, json.dumps(PROMPT), str(SECONDS)]
        where = ["--nproc-per-node", str(num_each), "--master-addr", hosts.addresses[0], "--master-port", "29517"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *where]
        self.agents = [
            hosts.start(
                host,
                [*command, "--node-rank", str(host), str(script), *given],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            for host in range(2)
        ]

    def said(self, name: str) -> Any:
        """What rank 0 has said, once it has."""
        path = self._folder / name

        def is_there() -> bool:
            assert path.exists() or self.agents[0].poll() is None, "torchrun has ended"
            return path.exists()

        eventually(is_there, f"rank 0 says {name}", PATIENCE)
        return json.loads(path.read_text())

    def pid(self, rank: int) -> int:
        return int((self._folder / f"pid-{rank}").read_text())

    def close(self) -> None:
        for pid in [agent.pid for agent in self.agents] + [
            int(each.read_text()) for each in self._folder.glob("pid-*")
        ]:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # torchrun gives every rank a group of its own
        for agent in self.agents:
            agent.wait()


@contextmanager
def launched(folder: Path, num_each: int, is_busy: bool) -> Iterator[Launched]:
    with two_hosts() as hosts:
        made = Launched(hosts, folder, num_each, is_busy)
        try:
            yield made
        finally:
            made.close()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with Engine(tiny_config("llama"), device="cpu", kv_blocks=64) as one:
        return one.generate([PROMPT], SIX)[0].token_ids


def test_given_two_machines_with_two_ranks_each_then_tokens_are_equal_and_a_killed_rank_ends_the_engine(
    tmp_path: Path, expected: list[int]
) -> None:
    with launched(tmp_path, 2, is_busy=True) as torchrun:
        first, second = torchrun.hosts.names
        # Steps travel through memory to the rank on rank 0's machine, and over sockets to the others.
        assert torchrun.said("tokens") == [expected, [True, False, False], [first, first, second, second]]
        os.kill(torchrun.pid(3), signal.SIGKILL)
        # torchrun ends rank 2 when it finds rank 3 killed: rank 0 may find one of them gone, or both.
        assert re.search(rf"rank 3 on {second} ha(s|ve) ended; no rank can go on", torchrun.said("error"))
        for rank in range(4):
            eventually(lambda rank=rank: is_gone(torchrun.pid(rank)), f"rank {rank} ends")


def test_given_a_link_that_is_cut_while_nothing_runs_then_both_sides_end_within_the_deadline(
    tmp_path: Path, expected: list[int]
) -> None:
    with launched(tmp_path, 1, is_busy=False) as torchrun:
        second = torchrun.hosts.names[1]
        assert torchrun.said("tokens")[0] == expected
        torchrun.hosts.cut()
        assert f"rank 1 on {second} cannot be reached (" in torchrun.said("error")  # timed out, or no route to host
        for rank in range(2):
            eventually(lambda rank=rank: is_gone(torchrun.pid(rank)), f"rank {rank} ends")
