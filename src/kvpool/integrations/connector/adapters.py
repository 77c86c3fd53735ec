"""Which adapter is this, down to its numbers? Its files say so, as they were when the engine began to use it."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.errors import ConfigError
from kvpool.quiet import QuietLog
from kvpool.tiers.identity import files_id, read_files, settings_id

_log = logging.getLogger("kvpool")

# The rest of a `LoRARequest` says how its files are read.
_OF_THIS_PROCESS = frozenset({"lora_int_id", "lora_path", "base_model_name", "load_inplace"})

_State = tuple[tuple[str, int, int], ...]


class _Known(NamedTuple):
    directory: Path | None
    state: _State
    content: str


class Adapters:
    """The adapters of one engine. What it loaded under a number stays that until it loads something else under another."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Known] = {}
        self._quiet = QuietLog(_log)

    def identity(self, adapter: Any) -> str | None:
        """Name and content of an adapter, by the attributes of vLLM's `LoRARequest`.

        Files that cannot be read here get an identity that no other process has. None: they have changed since the engine
        began to use them, and nobody knows which of them it computes with.
        """
        key = int(getattr(adapter, "lora_int_id", 0)), str(getattr(adapter, "lora_path", ""))
        known = self._known.get(key)
        if known is None:
            directory = _directory(key[1])
            known = self._known[key] = _Known(directory, _state(directory), _content(directory))
        elif known.state != _state(known.directory):
            self._quiet.warning(
                "kvpool connector: the files of adapter %s in %s have changed while the engine uses them: its requests "
                "are computed and not kept; load it under another name",
                adapter.lora_name,
                key[1],
            )
            return None
        return f"{adapter.lora_name}\0{known.content} {settings_id(adapter, _OF_THIS_PROCESS)}"


def _directory(path: str) -> Path | None:
    """Where the files are: the directory that was named, or the engine's download of it."""
    if path and Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception:  # not installed, no name of a repository, or not downloaded
        return None


def _state(directory: Path | None) -> _State:
    """What changes when files are written."""
    try:
        files = [] if directory is None else read_files(directory)
        return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError:
        return ()


def _content(directory: Path | None) -> str:
    try:
        return uuid.uuid4().hex if directory is None else files_id(directory)
    except (OSError, ConfigError):
        return uuid.uuid4().hex
