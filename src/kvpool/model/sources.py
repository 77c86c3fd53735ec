"""What can be said of a model before torch is imported: whether it is there."""

from __future__ import annotations

from pathlib import Path

from kvpool.errors import ModelLoadError


def check_source(name: str) -> None:
    """Refuses what can only be a path and leads to no model. Other names may be on the Hugging Face hub."""
    path = Path(name).expanduser()
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".gguf", ".json"))
    if is_path and not (path.is_dir() or (path.is_file() and path.suffix in (".gguf", ".json"))):
        raise ModelLoadError(f"there is no file or directory {name}")
