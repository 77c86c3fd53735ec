"""Which weights are these? A digest of the files that an engine loads, for keys in tiers that outlive it.

Files of many gigabytes are not read whole: of every mebibyte the first 4 KiB count, and small files in full. A model that was
trained further differs everywhere; one of which a few small tensors were changed by hand may not, and needs a `model_id`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_STEP = 2**20
_SAMPLE = 4096
_SMALL = 64 * 2**20

# Fields of a configuration that change no key or value: names and versions.
_IRRELEVANT = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def config_id(config: Any) -> str:
    """A digest of a Hugging Face configuration: positions, norms and scales are nowhere else."""
    given = {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()


def weights_id(path: str | Path) -> str:
    """A digest of the files with weights below a directory, or of one file."""
    root = Path(path)
    files = [root] if root.is_file() else sorted(each for each in root.glob("*") if each.suffix in _SUFFIXES)
    if not files:
        raise ConfigError(
            f"{root} holds no files with weights ({', '.join(_SUFFIXES)}), so that its blocks in tiers could not be told "
            "from another model's; name it with model_id"
        )
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(json.dumps([file.name, file.stat().st_size]).encode())
            _sample(file, digest)
    except OSError as error:
        raise ConfigError(f"cannot read the weights in {root}: {error.strerror or error}") from None
    return digest.hexdigest()


def adapter_id(path: str) -> str:
    """A digest of the files of an adapter, taken again when they change; the path itself where there are none here."""
    root = Path(path) if path else None
    if root is None or not root.is_dir():
        return path
    try:
        files = sorted(each for each in root.iterdir() if each.suffix in _SUFFIXES)
        state = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
        return _adapter_digest(path, state) if files else path
    except (OSError, ConfigError):
        return path


@functools.lru_cache(maxsize=1024)
def _adapter_digest(path: str, state: tuple[tuple[str, int, int], ...]) -> str:
    return weights_id(path)


def _sample(file: Path, digest: Any) -> None:
    size = file.stat().st_size
    with file.open("rb", buffering=0) as stream:
        if size <= _SMALL:
            while chunk := stream.read(_STEP):
                digest.update(chunk)
            return
        for start in range(0, size, _STEP):
            stream.seek(start)
            digest.update(stream.read(_SAMPLE))
        stream.seek(max(0, size - _SAMPLE))
        digest.update(stream.read(_SAMPLE))
