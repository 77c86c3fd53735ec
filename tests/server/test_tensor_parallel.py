"""`kvpool serve --tensor-parallel 2` as real processes: it answers, and a rank that is killed ends it with one error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

SRC = str(Path(__file__).resolve().parents[2] / "src")
PATIENCE = 900


@pytest.mark.slow
def test_given_two_ranks_then_the_server_answers_and_a_killed_rank_ends_it_with_one_error(tmp_path: Path) -> None:
    from live import word_tokenizer
    from models import random_prompt, tiny_model

    model = tiny_model("llama", max_position_embeddings=2**14)
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    prompt = random_prompt(20)
    tokens = model.generate(prompt[None], max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, 20:]
    expected = " ".join(f"w{token}" for token in tokens)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "kvpool", "serve", str(tmp_path / "model"), "--tensor-parallel", "2"]
    options = ["--device", "cpu", "--memory", "64MiB", "--port", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r" at (http://127.0.0.1:\d+)/v1", line)))
        body: dict[str, Any] = {"prompt": prompt.tolist(), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
        assert answer.json()["choices"][0]["text"].strip() == expected
        (rank,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        long = {**body, "max_tokens": 10_000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=PATIENCE, trust_env=False) as stream:
            events = stream.iter_lines()
            next(events)
            os.kill(rank, signal.SIGKILL)
            problems = [event for event in events if '"error"' in event]
        (problem,) = (json.loads(event.removeprefix("data: "))["error"] for event in problems)
        assert "rank 1 was killed by signal 9" in problem["message"]
        said = process.communicate(timeout=PATIENCE)[1].splitlines()
        assert process.returncode == 2
        assert sum("rank 1 was killed by signal 9" in line for line in said) == 1
    finally:
        process.kill()
        process.communicate()
    assert list(temporary.glob("kvpool-ranks-*")) == []
