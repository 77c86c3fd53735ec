"""Every example runs and shows what it promises; the Python of README.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# One line of the output of each example that would be wrong if the example were.
EXPECTED = {
    "quickstart.py": "992 tokens of the next prompt are cached",
    "async_requests.py": "served in order: True",
    "custom_policy.py": "two-class: 256 of 256 tokens still cached",
    "compare_policies.py": "4,000 blocks: lru 0.197, adaptive 0.203, optimum 0.289",
    "own_engine.py": "12 requests are as they would be alone: True",
    "data_plane.py": "intact after the journey: True",
    "compat/pyagent.py": "49 tokens: [0, 1, 2, 3] free 96",
    "compat/vllm_v0.py": "copies: {'s0': [(2, 3)], 's1': [(2, 4)], 's2': []}",
    "compat/ferrum.py": "clone: [0, 1, 2, 3, 4] shared by 2",
    "compat/trtllm.py": "system prompt kept: 64 of 64 tokens",
}
NEED_TORCH = [
    name for name in EXPECTED if name == "data_plane.py" or name.startswith("compat/")
]  # it need not be there
EXAMPLES = sorted(path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.py"))
README_BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"},
    )


RUN_EACH = """
import runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
    print("-- end", flush=True)
"""


def outputs_of(names: list[str]) -> dict[str, list[str]]:
    """The lines of each example, run one after the other in one process."""
    result = run_python("-c", RUN_EACH, *(str(ROOT / "examples" / name) for name in names))
    assert result.returncode == 0, result.stderr
    parts = result.stdout.split("-- end\n")
    return dict(zip(names, map(str.splitlines, parts[:-1]), strict=True))


@pytest.fixture(scope="module")
def torch_outputs() -> dict[str, list[str]]:
    """What the examples say that need torch. To import it takes longer than to run them, so one process runs them all."""
    pytest.importorskip("torch")
    return outputs_of(NEED_TORCH)


@pytest.mark.parametrize("name", EXAMPLES)
def test_given_an_example_when_it_runs_then_it_shows_what_it_promises(
    name: str, request: pytest.FixtureRequest
) -> None:
    outputs = request.getfixturevalue("torch_outputs") if name in NEED_TORCH else outputs_of([name])
    assert EXPECTED[name] in outputs[name]


@pytest.mark.parametrize("number", range(len(README_BLOCKS)))
def test_given_a_python_block_of_the_readme_when_it_runs_then_it_works(number: int) -> None:
    result = run_python("-c", README_BLOCKS[number])
    assert result.returncode == 0, result.stderr


def test_given_the_readme_then_it_has_a_quick_start() -> None:
    assert any("KVCacheManager(" in block for block in README_BLOCKS)


def test_given_the_readme_then_its_quick_start_is_the_tested_example() -> None:
    example = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert README_BLOCKS[0] == example.partition("\n\n")[2]


@pytest.mark.parametrize("name", ["guide.md", "blocks.md", "threads.md"])
def test_given_a_page_when_its_python_runs_from_top_to_bottom_then_it_works(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    recipes = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    result = run_python("-c", recipes)
    assert recipes
    assert result.returncode == 0, result.stderr
