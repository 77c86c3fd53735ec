"""npm's `openai` client, unmodified, against a real server. `make npm` installs it; without it the test is skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from live import Live, until

HERE = Path(__file__).parent
MODULES = Path(os.environ.get("KVPOOL_NODE_MODULES", HERE.parents[1] / ".venv" / "npm" / "node_modules"))
NODE, ENTRY = shutil.which("node"), MODULES / "openai" / "index.mjs"


@pytest.mark.skipif(NODE is None, reason="no node: install Node.js 20 or newer")
@pytest.mark.skipif(not ENTRY.is_file(), reason=f"no npm package openai in {MODULES}: `make npm` installs it")
def test_given_npms_client_then_it_is_answered_as_pythons_is(live: Live, client: Any, engine: Any) -> None:
    run = subprocess.run(
        [str(NODE), str(HERE / "npm_client.mjs"), str(ENTRY), f"{live.url}/v1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    messages = [{"role": "user", "content": "w5 w6 w7 w8 w9 w10 w11 w12 w13"}]
    told = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=4, temperature=0)
    text = told.choices[0].message.content
    assert seen["models"] == ["tiny"]
    assert seen["completion"]["choices"][0]["text"] == seen["again"]["choices"][0]["text"]
    cached = [seen[name]["usage"]["prompt_tokens_details"]["cached_tokens"] for name in ("completion", "again")]
    assert cached == [0, 8]
    assert seen["chat"]["choices"][0]["message"]["content"] == text
    assert (seen["streamed"]["text"], seen["streamed"]["usage"]["completion_tokens"]) == (text, 4)
    assert (seen["response"], seen["responseStream"]) == (text, text)
    refused = seen["refused"]
    assert (refused["kind"], refused["status"], refused["code"]) == ("NotFoundError", 404, "model_not_found")
    assert refused["id"].startswith("req-")
    until(lambda: engine.stats().num_running == 0)
