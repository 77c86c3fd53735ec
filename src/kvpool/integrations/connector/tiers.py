"""The tiers of a connector, opened and asked. Each worker writes to a directory of its own; others read beside it."""

from __future__ import annotations

from pathlib import Path

from kvpool.errors import ConfigError
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.connector.step_orders import Introduction
from kvpool.tiers import DiskTier, KeyedTier, KeySpace, open_tier


def worker_directory(disk: str, rank: int, num_workers: int) -> Path:
    """Where a worker keeps its part: the directory itself for a single one."""
    return Path(disk) if num_workers == 1 else Path(disk) / f"rank-{rank}-of-{num_workers}"


def open_tiers(settings: ConnectorSettings, worker: Introduction, *, is_reader: bool = False) -> list[KeyedTier]:
    """The tiers of one worker, fastest first. A reader stores nothing, and needs no lock on the disk."""
    opened: list[KeyedTier] = []
    try:
        if settings.disk is not None:
            directory = worker_directory(settings.disk, worker.rank, worker.num_workers)
            opened.append(_open_disk(settings, directory, is_reader=is_reader))
        if settings.remote is not None:
            opened.append(open_tier(settings.remote))
        for tier in opened:
            tier.introduce(KeySpace(worker.fingerprint))
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return opened


def _open_disk(settings: ConnectorSettings, directory: Path, *, is_reader: bool) -> DiskTier:
    if settings.read_only and not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}, and read_only=True makes none")
    try:
        directory.mkdir(0o700, parents=True, exist_ok=True)
        return DiskTier(directory, settings.disk_bytes, read_only=is_reader or settings.read_only)
    except OSError as error:
        raise ConfigError(f"disk={settings.disk!r} cannot be used: {error.strerror or error}") from None
