"""Files of LMCache: read where they mean the same, refused where they ask for something that would not happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from kvpool.errors import ConfigError
from kvpool.integrations.connector.settings import ConnectorSettings


def settings(tmp_path: Path, text: str, **beside: Any) -> ConnectorSettings:
    file = tmp_path / "lmcache.yaml"
    file.write_text(text, encoding="utf-8")
    return ConnectorSettings.of({"lmcache_config": str(file), **beside})


def test_given_a_file_of_lmcache_then_its_settings_are_ours(tmp_path: Path) -> None:
    text = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 2.5
local_disk: "file:///var/cache/lm%20cache"
max_local_disk_size: 20
remote_url: "redis://cache:6379"
remote_serde: "naive"
cache_policy: "LRU"
"""
    read = settings(tmp_path, text)
    assert (read.host_bytes, read.disk, read.disk_bytes) == (5 * 2**29, "/var/cache/lm cache", 20 * 2**30)
    assert (read.remote, read.policy) == ("redis://cache:6379", "lru")


def test_given_settings_beside_the_file_then_they_go_before_it(tmp_path: Path) -> None:
    read = settings(tmp_path, "max_local_cpu_size: 2\n", host_bytes="1GB", timeout=0.5)
    assert (read.host_bytes, read.timeout) == (2**30, 0.5)


def test_given_an_empty_file_or_a_size_of_a_disk_that_is_not_used_then_the_defaults_hold(tmp_path: Path) -> None:
    assert settings(tmp_path, "") == ConnectorSettings()
    assert settings(tmp_path, "local_disk: null\nmax_local_disk_size: 5\n") == ConnectorSettings()


@pytest.mark.parametrize(
    "text", ["enable_p2p: false", "enable_p2p: False\np2p_host: null", "extra_config: {}", "nixl_role: ''"]
)
def test_given_what_is_off_then_it_asks_for_nothing(tmp_path: Path, text: str) -> None:
    assert settings(tmp_path, text) == ConnectorSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enable_p2p: true", "enable_p2p=True has no counterpart"),
        ("blend_ratio: 0", "blend_ratio=0 has no counterpart"),
        ("enable_blending: true", "enable_blending=True has no counterpart in kvpool"),
        ("remote_url: lm://localhost:65432", "remote_url='lm://localhost:65432' must begin with redis://"),
        ("max_local_cpu_size: lots", "must be gigabytes above 0"),
        ("cache_policy: MRU", "cache_policy='MRU' must be one of LRU"),
        ("local_disk: 7", "local_disk=7 must be a directory"),
        ("- a list", "must hold settings"),
        ("a: [", "is no YAML"),
    ],
)
def test_given_what_has_no_meaning_here_then_one_line_says_so(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, text)


@pytest.mark.parametrize(("path", "message"), [("/nowhere/file", "cannot be read"), (5, "must be the path of a file")])
def test_given_no_file_then_one_line_says_so(path: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConnectorSettings.of({"lmcache_config": path})
