"""What these tests share. The toy engine is beside them: they are collected with --import-mode=importlib."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from toy import ToyEngine


@pytest.fixture
def engine() -> Iterator[Callable[..., ToyEngine]]:
    """Makes toy engines, and closes them at the end."""
    from toy import ToyEngine  # which needs torch; not all of these tests do

    opened: list[ToyEngine] = []

    def make(kind: type[ToyEngine] = ToyEngine, **options: Any) -> ToyEngine:
        opened.append(kind(**options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server that nobody else uses."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiers"))
    from servers import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield f"redis://127.0.0.1:{server.port}"
    server.kill()
