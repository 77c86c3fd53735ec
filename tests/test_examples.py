"""Every example runs and shows what it promises; the Python of README.md runs as it stands."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.testing import TierContract
from kvpool.tiers import KeyedTier

ROOT = Path(__file__).resolve().parent.parent

# One line of the output of each example that would be wrong if the example were.
EXPECTED = {
    "quickstart.py": "992 tokens of the next prompt are cached",
    "async_requests.py": "served in order: True",
    "custom_policy.py": "two-class: 256 of 256 tokens still cached",
    "compare_policies.py": "4,000 blocks: lru 0.197, adaptive 0.200, optimum 0.289",
    "own_engine.py": "12 requests are as they would be alone: True",
    "data_plane.py": "intact after the journey: True",
    "own_tier.py": "OK keys and values",
    "tiers.py": "second engine: 192 of 200 prompt tokens came from disk",
    "server.py": "second request: 192 of 200 prompt tokens were cached",
    "cluster.py": "a question about the manual of b goes to b: 992 tokens cached",
    "vllm_connector.py": "192 of 200 prompt tokens came from kvpool",  # when it is run for the second time
    "compat/pyagent.py": "49 tokens: [0, 1, 2, 3] free 96",
    "compat/vllm_v0.py": "copies: {'s0': [(2, 3)], 's1': [(2, 4)], 's2': []}",
    "compat/ferrum.py": "clone: [0, 1, 2, 3, 4] shared by 2",
    "compat/trtllm.py": "system prompt kept: 64 of 64 tokens",
}
NEEDS = {  # what need not be installed
    "data_plane.py": ("torch",),
    "tiers.py": ("torch", "transformers", "xxhash"),
    "server.py": ("torch", "transformers", "fastapi", "uvicorn", "openai"),
    "cluster.py": ("zmq", "msgspec"),
    **{name: ("torch",) for name in EXPECTED if name.startswith("compat/")},
}
EXAMPLES = sorted(
    path.relative_to(ROOT / "examples").as_posix()
    for path in (ROOT / "examples").rglob("*.py")
    if path.parent.name != "demos"  # test_tour.py and `make demo` run these
)
NO_OLD_NAMES = "error::DeprecationWarning:__main__"
VLLM_PYTHON = os.environ.get("KVPOOL_VLLM_PYTHON")
README_BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=900,  # many times what it takes on an idle machine
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONIOENCODING": "utf-8",
            "PYTHONWARNINGS": NO_OLD_NAMES,
        },
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
def together() -> dict[str, list[str]]:
    """What the examples say that need torch. To import it takes longer than to run them, so one process runs them all."""
    names = [name for name, packages in NEEDS.items() if "torch" in packages and not missing(name)]
    return outputs_of(names) if names else {}


def missing(name: str) -> list[str]:
    """The packages that an example needs and that are not installed."""
    return [package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]


def test_given_the_examples_then_each_has_a_line_that_would_be_wrong_if_it_were() -> None:
    assert sorted(EXPECTED) == EXAMPLES


@pytest.mark.quick(
    "quickstart.py", "async_requests.py", "custom_policy.py", "own_engine.py", "own_tier.py", "cluster.py"
)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "vllm_connector.py"])
def test_given_an_example_when_it_runs_then_it_shows_what_it_promises(
    name: str, request: pytest.FixtureRequest
) -> None:
    if missing(name):
        pytest.skip(f"needs {', '.join(missing(name))}")
    outputs = request.getfixturevalue("together") if "torch" in NEEDS.get(name, ()) else outputs_of([name])
    assert EXPECTED[name] in outputs[name]


class TestOwnTier(TierContract):
    """The tier of an example holds to the contract of all tiers."""

    def make_tier(self, tmp_path: Path) -> KeyedTier:
        tier: KeyedTier = runpy.run_path(str(ROOT / "examples" / "own_tier.py"))["FileTier"](tmp_path / "values")
        return tier


@pytest.mark.slow
@pytest.mark.skipif(not VLLM_PYTHON, reason="needs vLLM: run make test-vllm")
def test_given_vllm_when_its_example_runs_twice_then_the_second_run_finds_the_prompt_on_disk(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "integrations"))
    import tiny_models

    model, disk = tiny_models.write("llama", tmp_path / "model"), str(tmp_path / "disk")
    command = [str(VLLM_PYTHON), str(ROOT / "examples" / "vllm_connector.py"), model, disk]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **settings, "DO_NOT_TRACK": "1", "PYTHONPATH": str(ROOT / "src")}
    runs = [
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    first, second = ([line for line in run.splitlines() if line.startswith("answer:")] for run in runs)
    assert first == second
    assert EXPECTED["vllm_connector.py"] in runs[1].splitlines()


@pytest.mark.parametrize("number", range(len(README_BLOCKS)))
def test_given_a_python_block_of_the_readme_when_it_runs_then_it_works(number: int) -> None:
    result = run_python("-c", README_BLOCKS[number])
    assert result.returncode == 0, result.stderr


def test_given_the_readme_then_it_has_a_quick_start() -> None:
    assert any("KVCacheManager(" in block for block in README_BLOCKS)


def test_given_the_readme_then_its_quick_start_is_the_tested_example() -> None:
    example = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert README_BLOCKS[0] == example.partition("\n\n")[2]


@pytest.mark.parametrize(
    "name",
    [
        *("guide.md", "blocks.md", "threads.md", "rules.md", "reference.md"),
        *("compat.md", "compat-pyagent.md", "compat-vllm-v0.md", "compat-ferrum.md"),
    ],
)
def test_given_a_page_when_its_python_runs_from_top_to_bottom_then_it_works(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    recipes = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    result = run_python("-c", recipes)
    assert recipes
    assert result.returncode == 0, result.stderr
