"""`make models`: the tool tries families and writes the table of benchmarks/figures/families.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tool_files import load_tool

pytest.importorskip("transformers")

from kvpool.config import KVCacheConfig, Tier
from kvpool.config.model_config import layers_from_hf, max_positions
from kvpool.errors import ConfigError

PAGE = Path(__file__).parent.parent / "benchmarks" / "figures" / "families.md"
SERVED = [
    family
    for _, families in re.findall(r"^\| (equal tokens.*) \(\d+\) \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    for family in families.split(", ")
]
NOT_PLANNED = {  # what their configurations say of the cache is not read, and the error says so
    "gemma3n_text": "num_kv_shared_layers",
    "minimax_m3_vl": "index_head_dim",
    "minimax_m3_vl_text": "index_head_dim",
}


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


@pytest.mark.quick("llama", "deepseek_v3", "kimi_linear", "mimo_v2_flash", "jetmoe", "gemma3", "gemma3n_text")
@pytest.mark.parametrize("family", SERVED)
def test_a_plan_of_a_configuration_has_the_bytes_that_an_engine_of_the_model_allocates(
    family: str, tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens, checkpoints and sequences of a plan, and all bytes of the GPU tier, which has a checkpoint more."""
    monkeypatch.setattr("kvpool.model.probing.check_against_eager", lambda *_: None)
    pictured = family in tool.vision_models.CONFIGS
    with tool._quiet():
        takes_images = family in tool.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        model = tool.vision_models.vision_model(family) if pictured else tool.tiny_model(family, takes_images)
    saved = json.loads(model.config.to_json_string(use_diff=False)) | {"dtype": "float32"}
    if family in NOT_PLANNED:
        with pytest.raises(ConfigError, match=NOT_PLANNED[family]):
            layers_from_hf(saved)
        return
    budget = 4 << 20
    planned = KVCacheConfig(layers_from_hf(saved), 8, gpu_bytes=budget, max_seq_len=max_positions(saved))
    with tool.Engine(model, block_size=8, kv_bytes=budget, model_defaults=False) as engine:
        kept = engine.config
        assert _sizes(planned) == _sizes(kept)
        states = 0 if kept.state_group is None else kept.state_group.block_bytes
        allocated = engine.plane.num_bytes[Tier.GPU] - states
        assert abs(planned.pool_bytes(Tier.GPU) - allocated) <= 0.02 * allocated


def _sizes(config: KVCacheConfig) -> dict[str, Any]:
    return {
        "bytes of a token": config.bytes_per_token,
        "bytes of a checkpoint": None if config.state_group is None else config.state_group.block_bytes,
        "bytes of a sequence": config.sequence_bytes(100),
        "sequences, with the watermark": config.max_sequences(100),
    }
