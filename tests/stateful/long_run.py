"""The wild machine for as long as you like: `make fuzz ARGS="--operations 1000000 --seed 7 --processes 4"`.

Run r of seed s is number s * 1,000,000 + r; a failure is reduced and printed with the calls that lead to it, and the run's
number with its operations repeats it: `--repeat NUMBER --only 3,17,29`. Strings hash alike in every process here, since some
policies go by hashes. It needs Python and numpy, and kvpool from where Python finds it, or from `src` beside these tests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

if os.environ.get("PYTHONHASHSEED") != "0":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
sys.path.append(str(HERE.parents[1] / "src"))

from wild_runs import reduced, report, run  # noqa: E402

PROGRESS_SECONDS = 60


class Outcome(NamedTuple):
    num_operations: int
    seconds: float  # of the processor
    failure: str | None  # reduced, in words


def outcome(length: int, check_every: int, number: int) -> Outcome:
    """One setting, in whichever process."""
    start = time.process_time()
    failure = run(number, range(length), check_every=check_every)
    num_done = length if failure is None else len(failure.numbers)
    text = None if failure is None else report(reduced(failure))
    return Outcome(num_done, time.process_time() - start, text)


@contextmanager
def outcomes(numbers: range, processes: int, length: int, check_every: int) -> Iterator[Iterator[Outcome]]:
    """What became of each number, in the order in which they are done."""
    one = partial(outcome, length, check_every)
    if processes == 1:
        yield map(one, numbers)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield pool.imap_unordered(one, numbers)


def repeat(number: int, only: str, length: int) -> int:
    """Runs one number again, all of it or some of its operations."""
    chosen = [int(part) for part in only.split(",")] if only else range(length)
    failure = run(number, chosen)
    print(report(failure) if failure is not None else "no failure")
    return failure is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000, help="how many in all (default %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="where to begin; by the clock if left out")
    parser.add_argument("--length", type=int, default=100, help="operations in one setting (default %(default)s)")
    parser.add_argument(
        "--check-every", type=int, default=4, help="operations between two checks (default %(default)s)"
    )
    parser.add_argument("--failures", type=int, default=1, help="stop after so many (default %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="that share the work (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=None, help="run this number again")
    parser.add_argument("--only", default="", help="with --repeat: these operations, as a failure lists them")
    args = parser.parse_args()
    if args.repeat is not None:
        return repeat(args.repeat, args.only, args.length)
    seed = int(time.time()) if args.seed is None else args.seed
    first = seed * 1_000_000
    numbers = range(first, first + -(-args.operations // args.length))
    print(f"seed {seed}: numbers {numbers.start} to {numbers.stop - 1}, {args.processes} processes", flush=True)
    num_done = num_settings = num_failures = 0
    seconds, told_at = 0.0, time.monotonic()
    with outcomes(numbers, args.processes, args.length, args.check_every) as found:
        for one in found:
            num_done, num_settings, seconds = num_done + one.num_operations, num_settings + 1, seconds + one.seconds
            if one.failure is not None:
                num_failures += 1
                print(one.failure, flush=True)
            if num_failures >= args.failures:
                break
            if time.monotonic() - told_at > PROGRESS_SECONDS:
                told_at = time.monotonic()
                print(f"{num_done} operations, {num_failures} failures", flush=True)
    print(f"seed {seed}: {num_done} operations in {num_settings} settings, {num_failures} failures, {seconds:.0f} s")
    return bool(num_failures)


if __name__ == "__main__":
    sys.exit(main())
