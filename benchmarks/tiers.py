"""Speed of tiers that outlive a process, each beside the same bytes moved without kvpool, in the same run.

    python benchmarks/tiers.py [--json FILE] [--check] [--quick] [--only WORD]

Blocks are those of a model of 32 layers, 8 KV heads of 128, bfloat16, 16 tokens: 2 MiB each. Figures in GB/s and s are
wall-clock times, look-ups on a disk are CPU time of the calling thread, and `CPU` is that of this process and of the server.
Files lie below TMPDIR: name a directory on the disk that you want to know about. The rows of each tier are in a file of their
own; what they are measured against is there too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import harness
import kvpool
from cases.tiers_compression import compression_cases
from cases.tiers_disk import BARE, BARE_RUNS, disk_cases
from cases.tiers_engine import ENGINE_RUNS, engine_cases
from cases.tiers_redis import PLAIN_RUNS, redis_cases
from harness import NoPartError, Runner

RUNS: dict[str, Any] = {**BARE_RUNS, **PLAIN_RUNS, **ENGINE_RUNS}
"""Functions that return the runner of a case without kvpool."""


class Bare:
    """The same bytes without kvpool: system calls for the disk, the plain client for a server."""

    name = BARE

    def start(self) -> str:
        return "this machine"

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        if case not in RUNS:
            raise NoPartError(f"{case} has no counterpart")
        self._run: Runner = RUNS[case](**params)

    def repeat(self) -> Sequence[float]:
        return self._run()

    def close(self) -> None:
        return None


if __name__ == "__main__":
    options = harness.argument_parser(__doc__.splitlines()[0]).parse_args()
    versions = {"kvpool": kvpool.__version__}
    cases = [*disk_cases(), *compression_cases(), *redis_cases(), *engine_cases()]
    sys.exit(harness.main(cases, [Bare()], options, versions, clock="as benchmarks/tiers.py says at its head"))
