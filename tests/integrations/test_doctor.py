"""`kvpool doctor`: what is installed decides what is said."""

from __future__ import annotations

import json
import shlex

import pytest

from kvpool.integrations.connector.connector_settings import ConnectorSettings
from kvpool.integrations.doctor import diagnosis


def test_given_everything_then_the_line_for_vllm_can_be_used_as_it_is() -> None:
    lines = diagnosis(lambda package: "1.0", lambda: "0.32.0")
    assert not [line for line in lines if line.startswith("  no ")]
    option, value = shlex.split(lines[-1])
    assert option == "--kv-transfer-config"
    assert ConnectorSettings.of(json.loads(value)["kv_connector_extra_config"]).disk == "/var/cache/kvpool"
    assert len(lines) <= 24


def test_given_nothing_then_each_part_says_what_to_install() -> None:
    lines = diagnosis(lambda package: None, lambda: None)
    assert "  no   engine: torch, transformers, safetensors are not installed; pip install 'kvpool[hf]'" in lines
    assert any("llama-cpp-python are not installed; pip install 'kvpool[llama]'" in line for line in lines)
    assert any("vLLM, which is not installed; versions that work: 0.31.x, 0.32.x" in line for line in lines)


def test_given_no_xxhash_then_vllm_gets_the_host_only() -> None:
    lines = diagnosis(lambda package: None if package == "xxhash" else "1.0", lambda: "0.32.0")
    assert '"disk"' not in "".join(lines)
    assert "kvpool[tiers]" in lines[-1]


def test_given_the_command_line_then_doctor_is_one_of_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    from kvpool.cli import main

    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("kvpool ")
