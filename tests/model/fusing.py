"""What holds for every change that makes layers faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvpool.model.probing import inspect_model, run_probe


def check_logits_stay(model: Any, fuse: Callable[[Any], int], number: int | None, tolerance: float = 1e-5) -> None:
    """Fuses parts of a model, so many if a `number` is given; its logits stay, and the second time nothing is left to do."""
    inspect_model(model)
    before, _ = run_probe(model)

    fused = fuse(model)

    assert number in (None, fused)
    after, _ = run_probe(model)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=tolerance)
    assert fuse(model) == 0
