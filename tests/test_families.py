"""`make models`: the tool tries families and writes the table of benchmarks/figures/families.md."""

from __future__ import annotations

import json
import re
from types import ModuleType

import pytest

from tool_files import load_tool

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("families")


@pytest.mark.slow
def test_a_family_is_equal_refused_or_not_tried(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--only", "llama,xglm,qwen4_exp_text,blt", "--json"]) == 0
    found = {each["family"]: each for each in json.loads(capsys.readouterr().out)["families"]}
    assert found["llama"]["result"] == "equal"
    assert (found["xglm"]["result"], "AttentionInterface" in found["xglm"]["reason"]) == ("refused", True)
    assert (found["qwen4_exp_text"]["result"], "indexer" in found["qwen4_exp_text"]["reason"]) == ("refused", True)
    assert found["blt"]["result"] == "untried"


@pytest.mark.slow
def test_a_model_whose_answers_are_alike_is_not_tried(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool.tried("bert", False).result == "equal"
    monkeypatch.setattr(tool, "MOST_GROWTHS", 0)
    assert tool._heading(tool.tried("bert", False)) == "not tried: its answers to all prompts are alike"


@pytest.mark.slow
def test_equal_tokens_of_other_log_probabilities_are_found(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    own_answer = tool._own_answer

    def less_likely(*given: object) -> object:
        answer = own_answer(*given)
        return answer._replace(logprobs=[*answer.logprobs[:-1], answer.logprobs[-1] - 0.01])

    monkeypatch.setattr(tool, "_own_answer", less_likely)
    assert tool._heading(tool.tried("llama", False)) == "other tokens: in log probabilities"


def test_the_table_of_the_page_has_the_form_that_the_tool_writes(tool: ModuleType) -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    rows = page.partition(tool.BEGIN)[2].partition(tool.END)[0].strip()
    assert tool.written(page, rows) == page
    told = re.match(r"transformers \S+, torch \S+: (\d+) families, (\d+) of them served", rows)
    assert told is not None
    counts = {heading: int(count) for heading, count in re.findall(r"^\| (.*) \((\d+)\) \|", rows, re.MULTILINE)}
    assert sum(counts.values()) == int(told[1])
    assert sum(count for heading, count in counts.items() if heading.startswith("equal")) == int(told[2])
    assert not any(heading.startswith("other tokens") for heading in counts)
