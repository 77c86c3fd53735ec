"""The wild machine for as long as you like: `make fuzz ARGS="--operations 1000000 --seed 7"`.

Run r of seed s is number s * 1,000,000 + r; a failure is reduced and printed with the calls that lead to it, and the run's
number with its operations repeats it: `--repeat NUMBER --only 3,17,29`. Strings hash alike in every process here, since some
policies go by hashes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
sys.path[:0] = [str(Path(__file__).resolve().parent)]

from wild_runs import Failure, reduced, report, run  # noqa: E402


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
    parser.add_argument("--repeat", type=int, default=None, help="run this number again")
    parser.add_argument("--only", default="", help="with --repeat: these operations, as a failure lists them")
    args = parser.parse_args()
    if args.repeat is not None:
        return repeat(args.repeat, args.only, args.length)
    seed = int(time.time()) if args.seed is None else args.seed
    num_done, number, failures, start = 0, seed * 1_000_000, [], time.process_time()
    while num_done < args.operations and len(failures) < args.failures:
        failure: Failure | None = run(number, range(args.length), check_every=args.check_every)
        num_done += args.length if failure is None else len(failure.numbers)
        if failure is not None:
            failures.append(failure)
            print(report(reduced(failure)), flush=True)
        number += 1
    seconds = time.process_time() - start
    num_settings = number - seed * 1_000_000
    print(f"seed {seed}: {num_done} operations in {num_settings} settings, {len(failures)} failures, {seconds:.0f} s")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
