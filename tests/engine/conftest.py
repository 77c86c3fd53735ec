"""Makes the tiny models beside these tests importable (tests are collected with --import-mode=importlib)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# What a model computes must not depend on how many cores the machine has.
if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
