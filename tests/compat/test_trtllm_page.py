"""The page for users of TensorRT-LLM names what there is, and its program runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from kvpool.compat import trtllm
from kvpool.compat.trtllm_settings import ELSEWHERE

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "compat-tensorrt-llm.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", PAGE))))

# Every name of TensorRT-LLM's document on pools, blocks and events.
DOCUMENT = [
    *(
        "KVCacheBlock",
        "tokensPerBlock",
        "KVCacheBlockPool",
        "WindowBlockManager",
        "BlockManager",
        "KVCacheEventManager",
    ),
    *("page", "primary pool", "secondary pool", "created event", "updated event", "removed event", "stored event"),
    *("allocation", "deallocation", "eviction", "reuse", "movement", "priority", "storage"),
]


def test_given_the_page_then_it_has_every_name_of_the_document() -> None:
    first = PAGE.partition("## Names of the document")[2].partition("## Calls")[0]
    left_column = "\n".join(line.split(" | ")[0] for line in first.splitlines())
    assert [name for name in DOCUMENT if name not in left_column] == []


def test_given_its_objects_then_the_page_names_each_and_all_that_they_can_be_asked() -> None:
    cache = trtllm.TrtLlmKVCacheManager([2], 8, 4, 8, event_buffer_max_size=8)
    (window,) = cache.block_manager.window_block_managers
    block = window.get_block_by_id(0)
    for thing in (cache, cache.block_manager, window, window.pools[0], block, cache.event_manager):
        names = {*vars(type(thing)), *vars(thing)} if thing is not block else {*vars(type(block)), *block._fields}
        asked = {name for name in names if not name.startswith("_")} - {"manager"}
        assert sorted(asked - WORDS) == []
    assert set(trtllm.__all__) - WORDS == set()


def test_given_the_settings_then_the_page_has_each() -> None:
    settings = set(inspect.signature(trtllm.TrtLlmKVCacheManager).parameters) | set(ELSEWHERE)
    assert sorted(settings - WORDS - {"settings", "device"}) == []


def test_given_the_program_of_the_page_then_it_runs() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    names: dict[str, Any] = {}
    exec(program, names)
    names["cache"].manager.check()
