"""Packages that make puts beside .venv: an installation that was interrupted is not taken for a whole one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SITES = {
    "llama-site": ("LLAMA_SITE", "llama_cpp"),
    "lmcache-site": ("LMCACHE_SITE", "lmcache"),
    "mooncake-site": ("MOONCAKE_SITE", "mooncake"),
    "transformers-site": ("TRANSFORMERS_SITE", "transformers"),
}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


class Sites:
    """make with a pip that installs nothing and writes down that it was called."""

    def __init__(self, folder: Path) -> None:
        self.calls = folder / "calls"
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\nexit "$PIP_STATUS"\n')
        self.python.chmod(0o755)

    def make(self, target: str, site: Path, *, status: int = 0) -> int:
        """How often pip was called; it fails where `status` is not 0."""
        self.calls.write_text("")
        variable = SITES[target][0]
        options = [
            f"{variable}={site}",
            f"PY={self.python}",
            f"VLLM_PYTHON={self.python}",
            "OFFLINE=1",
            "TRANSFORMERS=1",
        ]
        subprocess.run(
            ["make", "-o", ".venv/.stamp-dev", "-o", "vllm-site", target, *options],
            cwd=ROOT,
            env={**os.environ, "PIP_STATUS": str(status), "MAKEFLAGS": ""},
            capture_output=True,
            timeout=60,
            check=False,
        )
        return self.calls.read_text().count("pip install")


@pytest.mark.parametrize("target", SITES)
def test_given_an_installation_that_was_interrupted_then_make_installs_again_and_once(
    tmp_path: Path, target: str
) -> None:
    sites, site = Sites(tmp_path), tmp_path / "site"
    (site / SITES[target][1]).mkdir(parents=True)  # what an interrupted pip may leave
    assert [sites.make(target, site, status=status) for status in (1, 0, 0)] == [1, 1, 0]
