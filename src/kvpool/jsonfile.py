"""Reading JSON that others wrote: of bounded size, and with one line of text about what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgumentError, KVPoolError
from kvpool.plainfile import read_plain

MAX_FILE_BYTES = 16 * 2**20  # a config.json or a measurement has some kilobytes


def parse_json(data: bytes) -> Any:
    """The value in a text; `InvalidArgumentError` says what is wrong with it, and the caller where it stands."""
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        reason = f"{error.msg} at {line}column {error.colno}"
    except UnicodeDecodeError as error:
        reason = f"no UTF-8 text: {error.reason} at byte {error.start + 1}"
    except RecursionError:
        reason = "it nests too deep"
    except ValueError:
        reason = "an integer has too many digits"
    raise InvalidArgumentError(f"it is not JSON ({reason})")


def read_json(path: Path, error: type[KVPoolError], remedy: str) -> Any:
    """The value in a small file; what is wrong with the file is an `error` that ends with the remedy."""
    try:
        data = read_plain(path, MAX_FILE_BYTES + 1)
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror or failure}; {remedy}") from None
    if len(data) > MAX_FILE_BYTES:
        raise error(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB; {remedy}")
    try:
        return parse_json(data)
    except InvalidArgumentError as failure:
        raise error(f"cannot read {path}: {failure}; {remedy}") from None
