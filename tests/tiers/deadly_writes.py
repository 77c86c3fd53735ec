"""A process that kills itself in the middle of a system call that changes files: halfway through it, or before it."""

from __future__ import annotations

import os
import random
import signal
from typing import Any


def die_in_a_write(rng: random.Random, left: int) -> None:
    """From now on, the `left`-th write, file creation, renaming or deletion ends this process with SIGKILL."""

    def deadly(call: Any, cut: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                if cut is not None and rng.random() < 0.7:
                    call(*cut(args), **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    def half_of_pages(args: Any) -> Any:
        fd, (memory,), offset = args
        return fd, [memory[: max(1, memory.nbytes // 4096 // 2) * 4096]], offset

    def half_of_bytes(args: Any) -> Any:
        fd, row, offset = args
        return fd, row[: len(row) // 2], offset

    os.pwritev = deadly(os.pwritev, half_of_pages)
    os.pwrite = deadly(os.pwrite, half_of_bytes)
    os.posix_fallocate = deadly(os.posix_fallocate, lambda args: (*args[:2], args[2] // 2))
    os.replace = deadly(os.replace, None)
    os.unlink = deadly(os.unlink, None)
