"""Makes the slow simulator beside these tests importable, and gives them small traces made here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conversations import conversations

from kvpool.replay import Trace


@pytest.fixture(scope="session")
def chat_trace() -> Trace:
    return conversations(400)
