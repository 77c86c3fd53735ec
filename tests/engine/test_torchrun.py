"""`torchrun script.py`: rank 0 leads and goes on with the script, the other process serves its engines and ends with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_config

from kvpool.engine import Engine, SamplingParams
from kvpool.engine.rank_meeting import launched
from kvpool.errors import ConfigError

SECONDS = 240.0
PROMPT = random_prompt(20).tolist()
SCRIPT = """
import json, os, sys

sys.path.insert(0, {tests!r})
from models import tiny_config

from kvpool.engine import Engine, SamplingParams

answers = []
for family in ("llama", "qwen2"):
    with Engine(tiny_config(family), device="cpu", kv_blocks=64, tensor_parallel=2) as engine:
        assert os.environ["RANK"] == "0"
        answers.append(engine.generate([{prompt!r}], SamplingParams(max_new_tokens=6))[0].token_ids)
with open({out!r}, "x") as file:
    json.dump(answers, file)
"""


@pytest.mark.slow
def test_given_a_script_under_torchrun_then_rank_0_runs_it_with_the_other_rank(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "answers.json"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), prompt=PROMPT, out=str(out)))
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        check=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    expected = []
    for family in ("llama", "qwen2"):
        with Engine(tiny_config(family), device="cpu", kv_blocks=64) as one:
            expected.append(one.generate([PROMPT], SamplingParams(max_new_tokens=6))[0].token_ids)
    assert json.loads(out.read_text()) == expected


def test_given_another_number_of_processes_then_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(2) is None
    for name, value in {
        "RUN_ID": "1",
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv("TORCHELASTIC_RUN_ID" if name == "RUN_ID" else name, value)
    with pytest.raises(ConfigError, match=r"torchrun has started 4 processes; --nproc-per-node .* must be 2"):
        launched(2)
    assert launched(4) == (2, 4, 0, 2)
