"""For `sglang_gpu.py`, loaded by SGLang's scheduler: both backends; for each batch of theirs a line in the file $WATCHED."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from kvpool.integrations.sglang import KVPoolStorage

KVPool = KVPoolStorage


class File(HiCacheFile):  # type: ignore[misc]  # SGLang is untyped
    """SGLang's own backend, in a directory that the extra config names."""

    def __init__(self, config: Any, options: Any = None) -> None:
        super().__init__(config, config.extra_config["path"])


def watch(name: str) -> None:
    """Notes how many pages each call of a method moved, and how long it took."""
    plain = getattr(HiCacheController, name)

    def watched(self: Any, operation: Any) -> None:
        before, start = operation.completed_tokens, time.monotonic()
        try:
            plain(self, operation)
        finally:
            tokens = operation.completed_tokens - before
            seconds, num_bytes = time.monotonic() - start, tokens * self.mem_pool_host.size_per_token
            line = dict(what=name, pages=tokens // self.page_size, bytes=num_bytes, seconds=seconds)
            with open(os.environ["WATCHED"], "a") as file:
                file.write(json.dumps(line) + "\n")

    setattr(HiCacheController, name, watched)


watch("_page_backup")
watch("_page_transfer")
