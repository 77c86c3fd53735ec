"""`make pictures`: the picture of the pool is drawn from the real manager and fits on a page."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tool_files import load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("pool_picture")


def test_given_the_manager_when_a_moment_is_read_then_its_blocks_are_those_that_it_counts(tool: ModuleType) -> None:
    traffic = tool.Traffic()
    for _ in range(40):
        traffic.frame()
        frame, stats = tool.look(traffic.manager), traffic.manager.stats()
        gpu, host = stats.pool(), stats.pool(tier=tool.Tier.HOST)
        assert frame.counts[tool.OWN] + frame.counts[tool.SHARED] == gpu.referenced
        assert (frame.counts[tool.FREE], frame.counts[tool.CACHED]) == (gpu.free, gpu.cached)
        assert frame.counts[tool.HOST] == host.cached
    assert all(frame.counts[state] for state in (tool.OWN, tool.SHARED, tool.CACHED, tool.HOST))


def test_given_the_tool_when_it_draws_then_the_file_is_small_and_well_formed(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "pool.svg"
    monkeypatch.setattr(sys, "argv", ["pool_picture.py", str(target)])
    tool.main()
    assert "hit rate" in capsys.readouterr().out
    assert target.stat().st_size < 200_000
    groups = ElementTree.parse(target).getroot().iter("{http://www.w3.org/2000/svg}g")
    assert sum("frame" in group.get("class", "").split() for group in groups) == tool.NUM_FRAMES
