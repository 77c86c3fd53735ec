"""Times as policies compute with them. Compiled, unlike `run`: a policy asks for one with every run that it meets."""

from __future__ import annotations

from typing import Final

MOMENTS_PER_SECOND: Final = 2**20


def moment_of(seconds: float) -> int:
    """A time as policies compute with it. Recordings write times on this grid, so that a replay decides the same again."""
    return int(seconds * MOMENTS_PER_SECOND + 0.5)
