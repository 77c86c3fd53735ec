"""Which GPU is the current one, and who may have it as a whole."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch

# Held while a graph is captured, and by whoever waits for all streams of a device: CUDA refuses that during a capture.
whole_device = threading.RLock()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU that of this thread while it is open: events, graphs and kernels go there, whatever their tensors say."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():  # asking is a tenth of changing it twice
        return nullcontext()
    return torch.cuda.device(device)
