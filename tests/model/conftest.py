"""Tests of models import the tiny models that tests/engine makes, and gguf_files.py beside them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine"))

# What a model computes must not depend on how many cores the machine has.
if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
