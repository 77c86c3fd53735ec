"""Which vLLM? An unknown one, or one whose interface moved, gets one clear line and never a wrong answer."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from kvpool.errors import ConfigError
from kvpool.integrations.vllm_versions import installed
from kvpool.integrations.vllm_versions.installed import ADAPTERS, adapter_name, check_signatures


class Base:
    def load(self, context: object, **kwargs: object) -> None: ...

    @classmethod
    def metrics(cls, labels: list[str]) -> None: ...


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1", "0.32.0+cpu", "0.33.0"])
def test_given_a_known_minor_version_then_its_adapter_is_taken(version: str) -> None:
    assert adapter_name(version) == ADAPTERS[version[:4]]


@pytest.mark.parametrize("version", ["0.34.0", "0.40.1", "1.0.0rc1"])
def test_given_a_later_version_then_the_newest_adapter_is_taken_if_signatures_match_and_one_line_says_so(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base, newest = SimpleNamespace(KVConnectorBase_V1=Base), list(ADAPTERS.values())[-1]
    adapter = SimpleNamespace(EXPECTED={"load": ("context", "kwargs")})
    monkeypatch.setattr(installed, "installed_version", lambda: version)
    monkeypatch.setattr(installed, "import_module", {installed.BASE: base, newest: adapter}.__getitem__)
    assert installed.load_adapter() is adapter
    (line,) = caplog.messages
    assert version in line
    adapter.EXPECTED = {"load": ("context",)}
    with pytest.raises(ConfigError, match="takes"):
        installed.load_adapter()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("version", ["0.30.4", "0.3.2", "unknown"])
def test_given_another_version_then_the_ones_that_work_are_named(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM {version}; versions that work: 0\.31\.x, 0\.32\.x, 0\.33\.x"):
        adapter_name(version)


def test_given_no_vllm_then_one_line_says_so() -> None:
    with pytest.raises(ConfigError, match="not installed; versions that work"):
        adapter_name(None)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_given_no_vllm_when_the_connector_is_imported_then_the_line_is_raised() -> None:
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        importlib.import_module("kvpool.integrations.vllm")


def test_given_the_expected_signatures_then_nothing_is_said() -> None:
    check_signatures(Base, {"load": ("context", "kwargs"), "metrics": ("labels",)}, "0.32.0")


@pytest.mark.parametrize(
    ("expected", "message"),
    [({"load": ("context",)}, r"takes \(context, kwargs\)"), ({"store": ()}, "store is gone")],
)
def test_given_other_signatures_then_the_method_is_named(expected: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_signatures(Base, expected, "0.32.0")
