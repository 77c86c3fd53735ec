"""The programs that people use, against two servers of a tiny model behind `kvpool route`. `make test-agents` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(os.environ.get("KVPOOL_AGENTS", "/nowhere"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("KVPOOL_AGENTS" not in os.environ, reason="make test-agents installs them and runs this"),
]
sys.path.append(str(Path(__file__).parents[1] / "cluster"))
HERE = Path(__file__).parent
SECONDS = 500


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from agent_model import brief_model, save_agent, words_tokenizer
    from real_cluster import RealCluster

    pages = [page.read_text(encoding="utf-8") for page in (HERE.parents[1] / "docs").glob("*.md")]
    tokenizer = words_tokenizer(pages)
    directory = tmp_path_factory.mktemp("model")
    save_agent(directory, tokenizer, brief_model(tokenizer))
    made = RealCluster(str(directory), 2, "512MiB")
    yield made
    made.close()


@pytest.fixture
def between(cluster: Any) -> Iterator[Any]:
    from requests_seen import Between

    made = Between(cluster.proxy_url)
    yield made
    made.close()


def run(command: list[str], folder: Path, **environment: str) -> None:
    """Runs a program with a home of its own."""
    if not Path(command[0]).exists():
        pytest.skip(f"there is no {command[0]}: make agents-site could not install it")
    paths = {"HOME": str(folder), "PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        command, cwd=folder, env=paths, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])


def check(between: Any, name: str, num_turns: int) -> None:
    """No request was refused, and each turn hit nine tenths of what it has in common with one before."""
    assert [(seen.path, seen.answer[:500]) for seen in between.seen if seen.status >= 400] == []
    turns = between.turns()
    print(json.dumps({name: turns}))
    assert len(turns) >= num_turns
    assert [turn for turn in turns if turn[1] < 0.9 * turn[0]] == []


def test_given_claude_code_then_its_turns_are_answered_and_hit(between: Any, tmp_path: Path) -> None:
    told = {"ANTHROPIC_BASE_URL": between.live.url, "ANTHROPIC_API_KEY": "none"}
    told |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    command = [str(SITE / "npm/node_modules/.bin/claude"), "--model", "tiny", "-p"]
    run([*command, "What does a.py do?"], tmp_path, **told)
    for said in ("Who calls it?", "Rename it, please."):
        run([*command, said, "--continue"], tmp_path, **told)
    run([*command, "Is there a b.py?"], tmp_path, **told)  # another session
    check(between, "Claude Code", 3)


def test_given_codex_then_its_turns_are_answered_and_hit(between: Any, tmp_path: Path) -> None:
    provider = f'model_providers.kvpool={{name="kvpool",base_url="{between.live.url}/v1",wire_api="responses"}}'
    options = ["-c", 'model_provider="kvpool"', "-c", provider, "-m", "tiny", "--skip-git-repo-check"]
    command = [str(SITE / "npm/node_modules/.bin/codex"), "exec", *options]
    run([*command, "What does a.py do?"], tmp_path)
    for said in ("Who calls it?", "Rename it, please."):
        run([*command, "resume", "--last", said], tmp_path)
    run([*command, "Is there a b.py?"], tmp_path)
    check(between, "Codex", 3)


@pytest.mark.parametrize("name", ["openai_agents", "langgraph", "litellm"])
def test_given_a_library_of_agents_then_its_turns_are_answered_and_hit(between: Any, tmp_path: Path, name: str) -> None:
    run([str(SITE / "bin/python"), str(HERE / "agent_programs.py"), name, between.live.url], tmp_path)
    check(between, name, 5)
