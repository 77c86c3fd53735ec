"""A real llama.cpp with SmolLM2: the same greedy tokens, wherever a prefix comes from. `make test-llama`.

Every life is a process. Without llama-cpp-python the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "src"
PATIENCE = 300.0
MAGIC = b"kvllama\1"
Q8_0 = 8  # ggml's number
WORDS = ["river", "stone", "lamp", "green", "seven", "quiet", "forest", "paper", "cloud", "winter", "engine", "coffee"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python: run make test-llama"
    ),
]


def prompt(number: int, num_words: int = 220) -> str:
    """Some 350 tokens that differ from their first words on."""
    return " ".join(
        WORDS[(i * i + number * 7 + i // 5) % 12] + (f" {i}" if i % 8 == number else "") for i in range(num_words)
    )


PROMPTS = [prompt(0), prompt(1)]
ALIKE = PROMPTS[0] + " And what comes after the winter?"


@pytest.fixture(scope="module")
def model() -> str:
    pytest.importorskip("xxhash")
    pytest.importorskip("transformers")
    from kvpool.errors import ModelLoadError
    from kvpool.model.loading import gguf_file

    try:
        return str(gguf_file())
    except ModelLoadError as error:
        pytest.skip(str(error))


def live(model: str, prompts: list[str], cache: dict[str, Any] | None = None, fault: str = "", **options: Any) -> Any:
    """What a process of its own answers; None if it was killed."""
    task = json.dumps({"model": model, "prompts": prompts, "cache": cache, "fault": fault, "options": options})
    path = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / "llama_lives.py"), task]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    if fault == "die":
        assert done.returncode == -9, done.stderr[-4000:]
        return None
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def tokens(result: Any) -> list[list[int]]:
    return [answer["tokens"] for answer in result["answers"]]


@pytest.fixture(scope="module")
def plain(model: str) -> list[list[int]]:
    """What is right: the answers to both prompts and to one that goes on, without a cache."""
    result = live(model, [*PROMPTS, ALIKE])
    found = tokens(result)
    assert len({tuple(answer) for answer in found}) == 3
    assert all(answer["of"] > 300 for answer in result["answers"])
    return found


@pytest.fixture(scope="module")
def filled(model: str, plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk with the states of both prompts, from a process that had to compute them."""
    disk = tmp_path_factory.mktemp("disk")
    result = live(model, [*PROMPTS, PROMPTS[0]], on(disk))
    assert tokens(result) == [*plain[:2], plain[0]]
    assert [answer["computed"] for answer in result["answers"]][2] == 1, "the third comes from the disk"
    assert result["stats"]["stored"] == 2
    return disk


def on(disk: Path) -> dict[str, Any]:
    return {"disk": str(disk), "disk_bytes": "256MB"}


def copied(disk: Path, to: Path) -> Path:
    """A disk to spoil."""
    to.mkdir()
    for file in disk.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_given_a_restart_then_prompts_and_one_that_goes_on_come_from_the_disk(
    model: str, plain: list[list[int]], filled: Path
) -> None:
    result = live(model, [*PROMPTS, ALIKE], on(filled))
    assert tokens(result) == plain
    assert [answer["computed"] for answer in result["answers"]][:2] == [1, 1]
    assert result["answers"][2]["computed"] < 20
    assert result["stats"]["hits"] == 3
    assert result["stats"]["failed"] == 0


def test_given_a_redis_that_another_process_filled_then_prompts_come_from_it(
    model: str, plain: list[list[int]], redis: str
) -> None:
    first = live(model, PROMPTS, {"remote": redis})
    assert tokens(first) == plain[:2]
    assert [answer["computed"] for answer in first["answers"]] == [answer["of"] for answer in first["answers"]]
    second = live(model, PROMPTS, {"remote": redis})
    assert tokens(second) == plain[:2]
    assert [answer["computed"] for answer in second["answers"]] == [1, 1]


def test_given_flash_attention_and_quantised_values_then_only_a_context_alike_finds_them(
    model: str, filled: Path, tmp_path: Path
) -> None:
    disk = copied(filled, tmp_path / "disk")
    options = {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0}
    right = tokens(live(model, PROMPTS[:1], **options))
    first, second = (live(model, PROMPTS[:1], on(disk), **options) for _ in range(2))
    assert [tokens(first), tokens(second)] == [right, right]
    assert (first["stats"]["hits"], second["stats"]["hits"], second["answers"][0]["computed"]) == (0, 1, 1)


def test_given_states_whose_keys_are_zeros_then_all_answers_differ(
    model: str, plain: list[list[int]], filled: Path
) -> None:
    result = live(model, PROMPTS, on(filled), "poison")
    assert [answer["computed"] for answer in result["answers"]] == [1, 1]
    assert tokens(result)[0] != plain[0]
    assert tokens(result)[1] != plain[1]


def test_given_a_flipped_byte_in_each_state_then_the_prompts_are_computed(
    model: str, plain: list[list[int]], filled: Path, tmp_path: Path
) -> None:
    disk = copied(filled, tmp_path / "disk")
    flipped = 0
    for slab in disk.glob("*.kvslab"):
        content = bytearray(slab.read_bytes())
        for found in re.finditer(re.escape(MAGIC), bytes(content)):
            content[found.start() + 100_000] ^= 1
            flipped += 1
        slab.write_bytes(content)
    assert flipped == 2
    result = live(model, PROMPTS, on(disk))
    assert tokens(result) == plain[:2]
    assert (result["stats"]["hits"], result["stats"]["failed"]) == (0, 2)


def test_given_files_that_were_cut_off_then_the_prompts_are_computed(
    model: str, plain: list[list[int]], filled: Path, tmp_path: Path
) -> None:
    disk = copied(filled, tmp_path / "disk")
    for slab in disk.glob("*.kvslab"):
        os.truncate(slab, slab.stat().st_size // 2**20 * 2**19)
    assert tokens(live(model, PROMPTS, on(disk))) == plain[:2]


def test_given_a_process_that_was_killed_while_it_stored_then_the_next_one_computes_and_stores(
    model: str, plain: list[list[int]], tmp_path: Path
) -> None:
    live(model, PROMPTS[:1], on(tmp_path), "die")
    result = live(model, PROMPTS[:1], on(tmp_path))
    assert tokens(result) == plain[:1]
    assert result["answers"][0]["computed"] == result["answers"][0]["of"]
    assert result["stats"] == {"hits": 0, "failed": 0, "late": 0, "stored": 1, "tokens_loaded": 0}
    assert tokens(live(model, PROMPTS[:1], on(tmp_path))) == plain[:1]
