"""What commands share: sizes and addresses written by people, where JSON and CSV go, progress, tables."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from kvpool.errors import InvalidArgumentError

_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_count(text: str, name: str = "a number") -> int:
    """`10k` is 10,000, `1.5m` is 1,500,000."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmg]?)\s*", text.lower())
    if found is None or not float(found[1]) > 0:
        raise InvalidArgumentError(f"{name} is {text!r}; write a number above 0 such as 5000, 10k or 1.5m")
    return max(1, round(float(found[1]) * _FACTORS[found[2]]))


def parse_tokens(text: str, name: str) -> int:
    """Context lengths as people say them: `32k` is 32,768."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([km]?)\s*", text.lower())
    if found is None or not float(found[1]) > 0:
        raise InvalidArgumentError(f"{name} is {text!r}; write a number of tokens such as 4096 or 32k")
    return max(1, round(float(found[1]) * _BINARY[found[2]]))


def is_http(text: str) -> bool:
    """Whether this is an address such as http://HOST:PORT/PATH.

    >>> is_http("http://127.0.0.1:4318/v1"), is_http("127.0.0.1:4318"), is_http("http://[")
    (True, False, False)
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def parse_bytes(text: str, name: str) -> int:
    """`80GB`, `512GiB` and `512g` are binary: memory is sold that way."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)i?b?\s*", text.lower())
    if found is None:
        raise InvalidArgumentError(f"{name} is {text!r}; write a size such as 80GB or 2TB")
    return round(float(found[1]) * _BINARY[found[2]])


def write_json(target: str, value: Any) -> None:
    """To a file, or to stdout for `-`."""
    text = json.dumps(value, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        _write(Path(target), text)


def write_csv(target: str, rows: Sequence[dict[str, Any]]) -> None:
    """All rows with the union of their columns; to a file, or to stdout for `-`."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if target == "-":
        _write_rows(sys.stdout, columns, rows)
        return
    try:
        with Path(target).open("w", newline="", encoding="utf-8") as stream:
            _write_rows(stream, columns, rows)
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {target}: {error.strerror or error}") from None


def _write_rows(stream: Any, columns: list[str], rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(stream, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path}: {error.strerror or error}") from None


def check_folders(*targets: str | Path | None) -> None:
    """Refuses folders that results cannot be written to, before a long run and not after it."""
    for target in targets:
        if target is not None and str(target) != "-" and not Path(target).parent.is_dir():
            raise InvalidArgumentError(f"cannot write {target}: there is no folder {Path(target).parent}")


def check_files(*targets: str | Path | None) -> None:
    """`check_folders` for results that are one file each, another one for each, which we must be able to write."""
    check_folders(*targets)
    paths: dict[Path, str | Path] = {}
    for target in targets:
        if target is None or str(target) == "-":
            continue
        path = Path(target)
        other = paths.setdefault(path.resolve(), target)
        if other is not target and (path.is_file() or not path.exists()):  # not /dev/null
            raise InvalidArgumentError(f"{other} and {target} are one file; give each result a file of its own")
        if path.is_dir():
            raise InvalidArgumentError(f"cannot write {target!r}: that is a folder; name a file in it")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InvalidArgumentError(f"cannot write {target}: permission denied")


@contextmanager
def progress_bar(title: str, total: int, quiet: bool = False) -> Iterator[Any]:
    """A bar on stderr that is called with how much is done more; nothing when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def console(to_stderr: bool) -> Any:
    """Where tables go: stdout, or stderr when stdout carries JSON or CSV."""
    from rich.console import Console

    return Console(stderr=to_stderr, highlight=False, markup=False)  # a file may hold "[/b]"


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Raises an interrupt again, at its end, that something in it has swallowed. For work that takes seconds.

    Where Ctrl-C meets a destructor or a callback from C, Python prints the interrupt and goes on.
    """
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    has_come = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if has_come:
        raise KeyboardInterrupt
