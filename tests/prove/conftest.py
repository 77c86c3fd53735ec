"""Where the tests of `kvpool prove` find the tiny models and servers of other folders."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).parent

for package in ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client", "openai", "typer"):
    if importlib.util.find_spec(package) is None:
        collect_ignore_glob = ["test_*.py"]

sys.path[:0] = [str(_HERE), *(str(_HERE.parent / name) for name in ("server", "engine"))]
