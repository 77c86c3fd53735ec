"""The section `[tiers]` of a configuration file, the environment over it, options over both."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.fields import Given
from kvpool.tiers import DiskTier, TierConfig, open_tier, read_tiers
from kvpool.tiers.options import count, text
from kvpool.tiers.settings import COMMAND_OPTIONS, PREFIX, help_of

WHOLE = """
title = "not ours"

[tiers]
timeout = 0.5
min_uses = 2
host_bytes = "8GB"
offload_on_evict = true
offload_min_priority = 30
host_write = "through"
disk = "DIRECTORY"
disk_bytes = "1MB"
disk_threads = 2
disk_direct = false
disk_read_only = false
disk_timeout = 0.25
disk_compression = "fp8"
disk_dtype = "float16"
remote = "redis://user:secret@cache:6379/1?connections=3"
remote_namespace = "team-a"
remote_ttl = 3600
remote_timeout = 0.1
remote_max_value_bytes = "4MB"
remote_compression = "zstd"
remote_dtype = "bfloat16"

[other]
key = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvpool.toml"
    path.write_text(WHOLE.replace("DIRECTORY", str(tmp_path / "blocks")))
    return path


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "kvpool.toml"
    path.write_text("\n".join(["[tiers]", *lines]))
    return path


def variables(**settings: str) -> dict[str, str]:
    return {PREFIX + name.upper(): value for name, value in settings.items()}


def test_given_a_file_then_every_setting_is_read(file: Path, tmp_path: Path) -> None:
    found = read_tiers(file, {})
    assert all(getattr(found, field.name) is not None for field in fields(TierConfig))
    assert (found.timeout, found.min_uses, found.host_bytes, found.disk_bytes) == (0.5, 2, 2**33, 2**20)
    assert found.disk_address == (
        f"disk:{tmp_path}/blocks?bytes=1048576&threads=2&direct=0&read_only=0&timeout=0.25&compress=fp8&dtype=float16"
    )
    assert found.remote_address == (
        "redis://user:secret@cache:6379/1?connections=3&namespace=team-a&ttl=3600.0&timeout=0.1&max_value_bytes=4194304"
        "&compress=zstd&dtype=bfloat16"
    )
    assert found.engine_options() == {
        "disk": found.disk_address,
        "remote": found.remote_address,
        "tier_timeout": 0.5,
        "tier_min_uses": 2,
        "host_bytes": 2**33,
        "cache": {"offload_on_evict": True, "offload_min_priority": 30, "host_write": "through"},
    }


def test_given_a_file_then_the_tiers_at_its_addresses_can_be_opened(tmp_path: Path) -> None:
    path = written(tmp_path, f'disk = "{tmp_path / "blocks"}"', 'disk_bytes = "1MB"', "disk_timeout = 0.25")
    address = read_tiers(path, {}).disk_address
    assert address is not None
    with open_tier(address) as tier:
        assert isinstance(tier, DiskTier)
        assert (tier.stats().capacity_bytes, tier.timeout) == (2**20, 0.25)


def test_given_the_example_of_the_documentation_then_it_is_read_and_holds_every_setting(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "tiers.md"
    example = tmp_path / "kvpool.toml"
    example.write_text(page.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0])
    found = read_tiers(example, {})
    assert all(getattr(found, field.name) is not None for field in fields(TierConfig))


def test_given_nothing_then_nothing_is_set() -> None:
    assert read_tiers(None, {}) == TierConfig()
    assert read_tiers(None, {}).engine_options() == {}


def test_given_variables_then_they_override_the_file_and_options_override_them(file: Path) -> None:
    environ = variables(
        timeout="1.5", disk_bytes="3MB", disk_direct="yes", min_uses="4", remote_ttl="60", host_write="through"
    )
    found = read_tiers(file, environ, {"timeout": 9.0, "disk_bytes": "5MB", "disk": None})
    assert (found.timeout, found.disk_bytes, found.min_uses) == (9.0, 5 * 2**20, 4)
    assert (found.disk_direct, found.remote_ttl, found.remote_namespace) == (True, 60.0, "team-a")
    assert found.host_write == "through"
    assert read_tiers(file, variables(host_write="through")).host_write == "through"


def test_given_an_empty_variable_then_a_tier_of_the_file_goes_with_all_that_belongs_to_it(file: Path) -> None:
    found = read_tiers(file, variables(remote="", timeout=""))
    assert (found.remote_address, found.remote_ttl, found.timeout) == (None, None, None)
    assert found.disk_address is not None


def test_given_a_password_then_it_is_in_no_repr_and_no_error(file: Path, tmp_path: Path) -> None:
    assert "secret" not in repr(read_tiers(file, {}))
    with pytest.raises(ConfigError, match="remote must be the address of a tier") as caught:
        read_tiers(written(tmp_path, 'remote = "user:secret@cache"'), {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("disc = 'x'", ["has no key 'disc'", "disk_bytes", "remote_ttl"]),
        ("timeout = 0", ["tiers.timeout = 0", "from 0.001 to 3600"]),
        ("timeout = true", ["tiers.timeout = True", "seconds"]),
        ("min_uses = 1.5", ["tiers.min_uses = 1.5", "a whole number from 1"]),
        ("min_uses = 2147483648", ["tiers.min_uses = 2147483648", "from 1 to 2147483647"]),
        ("disk = 7", ["tiers.disk = 7", "the path of a directory"]),
        ("disk = 'a?b'", ["tiers.disk = 'a?b'", "without a question mark"]),
        ("disk = 'd'\ndisk_bytes = 'much'", ["tiers.disk_bytes = 'much'", '"50GB"']),
        ("disk = 'd'\ndisk_bytes = 0", ["tiers.disk_bytes = 0", "above 0"]),
        ("disk = 'd'\ndisk_threads = 65", ["tiers.disk_threads = 65", "from 1 to 64"]),
        ("disk = 'd'\ndisk_direct = 'perhaps'", ["tiers.disk_direct = 'perhaps'", "true or false"]),
        ("disk = 'd'\ndisk_compression = 'zip'", ["tiers.disk_compression = 'zip'", "zstd, lz4, fp8"]),
        ("disk = 'd'\ndisk_dtype = 'float16'", ["tiers.disk_dtype = 'float16'", "needs tiers.disk_compression"]),
        ("disk_bytes = 5", ["tiers.disk_bytes = 5", "needs tiers.disk"]),
        ("offload_on_evict = false", ["tiers.offload_on_evict = False", "needs tiers.host_bytes"]),
        ("host_write = 'through'", ["tiers.host_write = 'through'", "needs tiers.host_bytes"]),
        (
            "host_bytes = 5\nhost_write = 'around'",
            ["tiers.host_write = 'around'", "back, through"],
        ),
        ("host_bytes = 5\nhost_write = 2", ["tiers.host_write = 2", "back, through"]),
        ("remote_ttl = 5", ["tiers.remote_ttl = 5", "needs tiers.remote"]),
        ("remote = 's3://bucket'\nremote_ttl = 5", ["tiers.remote_ttl = 5", "redis://, rediss://", "store is s3://"]),
        ("remote = 'redis://h?ttl=5'\nremote_ttl = 5", ["tiers.remote_ttl = 5", "say it once"]),
        ("remote = 'redis://h'\nremote_namespace = ''", ["tiers.remote_namespace = ''", "a name"]),
    ],
)
def test_given_a_wrong_setting_then_the_error_names_the_file_the_key_the_value_and_what_is_right(
    line: str, words: list[str], tmp_path: Path
) -> None:
    path = written(tmp_path, line)
    with pytest.raises(ConfigError) as caught:
        read_tiers(path, {})
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"KVPOOL_TIERS_DISC": "x"}, ["'KVPOOL_TIERS_DISC'", "KVPOOL_TIERS_DISK, KVPOOL_TIERS_DISK_BYTES"]),
        ({"KVPOOL_TIERS_MIN_USES": "few"}, ["KVPOOL_TIERS_MIN_USES = 'few'", "a whole number from 1"]),
        ({"KVPOOL_TIERS_DISK_BYTES": "5MB"}, ["KVPOOL_TIERS_DISK_BYTES = '5MB'", "needs tiers.disk"]),
    ],
)
def test_given_a_wrong_variable_then_the_error_names_it_and_what_is_right(
    environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tiers(None, environ)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"tier_timeout": None}, "tier_timeout=None must be a number of seconds from 0.001 to 3600"),
        ({"tier_min_uses": None}, "tier_min_uses=None must be a whole number from 1 to 2147483647"),
        ({"disk_bytes": 2**20}, "disk_bytes=1048576 needs disk as well"),
        ({"disk": "d", "disk_bytes": 2**20 - 1}, "disk_bytes=1048575 must be at least 1048576 bytes"),
        ({"offload_min_priority": 1}, "offload_min_priority=1 needs host_bytes as well"),
        ({"offload_on_evict": False, "host_bytes": 0}, "offload_on_evict=False needs host_bytes as well"),
        ({"host_write": "back"}, "host_write='back' needs host_bytes as well"),
        ({"disk": "d", "disk_dtype": "float16"}, "disk_dtype='float16' needs disk_compression as well"),
        ({"disk": "d", "remote_ttl": 5}, "remote_ttl=5 needs remote as well"),
        (
            {"remote": "redis://h?ttl=5", "remote_ttl": 5},
            "remote_ttl=5 is in the address of the store, too; say it once",
        ),
        ({"remote": "disk:d", "remote_ttl": 5}, "remote_ttl=5 is for redis://, rediss://, and the store is disk://"),
        ({"remote": 5}, "remote must be the address of a tier, such as node: or redis://HOST"),
        ({"remote": "redis:host"}, "remote must be the address of a tier, which begins with redis://"),
        (
            {"remote": "ftp://user:hidden@host"},
            "remote must be the address of a tier, which begins with one of disk:, node:, redis:, rediss:, s3:, mooncake:",
        ),
    ],
)
def test_given_a_wrong_keyword_then_the_error_says_exactly_this(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TierConfig.of(**keywords)
    assert str(caught.value) == said


def test_given_keywords_that_go_together_then_they_are_the_settings() -> None:
    assert TierConfig.of(disk=None, disk_bytes=None, remote=None) == TierConfig()
    assert TierConfig.of(tier_timeout=3, disk="d", disk_bytes=2**20) == TierConfig(
        timeout=3.0, disk="d", disk_bytes=2**20
    )
    assert TierConfig.of(host_bytes=1, host_write="back", remote="redis://h?a=1", remote_ttl=5) == TierConfig(
        host_bytes=1, host_write="back", remote="redis://h?a=1", remote_ttl=5.0
    )


def test_given_a_wrong_option_then_the_error_names_it_as_it_was_typed() -> None:
    with pytest.raises(ConfigError, match="--tier-timeout = 0 must be"):
        read_tiers(None, {}, {"timeout": 0})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[tiers\n", "is not TOML"),
        (b"[tier]\n", r"has an unknown section \[tier\]; did you mean \[tiers\]\?"),
        (b"[server]\n[tires]\ndisk = 'x'\n", r"did you mean \[tiers\]"),
        (b"[other]\ndisk = 'x'\n", r"no section \[tiers\]; it has other"),
        (b"tiers = 5\n", r"no section \[tiers\]"),
        (b"\xff\xfe", "no text in UTF-8"),
        (None, "cannot read the configuration"),
    ],
)
def test_given_a_file_that_is_no_configuration_then_the_error_names_it(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "kvpool.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_tiers(path, {})
    assert str(path) in str(caught.value)


def test_given_an_option_of_engines_then_its_help_says_what_it_is_for_and_what_it_is_without_it() -> None:
    texts = {option: help_of(setting) for option, setting in COMMAND_OPTIONS.items()}
    assert list(texts) == ["tier_timeout", "disk", "disk_bytes", "remote"]
    assert texts["tier_timeout"] == "Longest wait for --disk and --remote, in seconds (default 2)."
    assert texts["disk_bytes"].endswith("(default 10GiB).")


# --- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    pytest.importorskip("typer")
    from kvpool.cli import main

    def call(*words: object) -> tuple[int, str, str]:
        status = main(["tier", *map(str, words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_given_a_configuration_then_tier_commands_find_directory_and_store_in_it(run: Any, tmp_path: Path) -> None:
    with DiskTier(tmp_path / "blocks", 2**20) as tier:
        tier.store([bytes(32)], [b"some bytes" * 100])
    path = written(tmp_path, f'disk = "{tmp_path / "blocks"}"')
    for command in ("ls", "stat", "verify", "compact"):
        status, out, err = run(command, "--config", path, "--json", "-")
        assert status == 0, err
        assert json.loads(out)
    status, out, err = run("warm", tmp_path / "blocks", "--config", path, "--json", "-")
    assert (status, "set `remote`" in err) == (2, True)
    status, out, err = run("purge", "--config", path, "--all")
    assert (status, "removed" in out) == (0, True)


def test_given_a_variable_then_tier_commands_use_it(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskTier(tmp_path / "blocks", 2**20).close()
    monkeypatch.setenv("KVPOOL_TIERS_DISK", str(tmp_path / "blocks"))
    assert run("stat", "--json", "-")[0] == 0


def test_given_neither_argument_nor_setting_then_the_error_says_where_to_name_a_directory(run: Any) -> None:
    for words in (["ls"], ["stat"], ["purge", "--all"]):
        status, _, err = run(*words)
        assert (status, "KVPOOL_TIERS_DISK" in err, "--config FILE" in err) == (2, True, True)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (Given(3, "codec", is_keyword=True), text("be a name"), "codec must be a name, got 3"),
        (Given(3, "codec"), text("be a name"), "codec = 3 must be a name"),
        (Given(9, "ttl", is_keyword=True), count(1, 8), "ttl=9 must be a whole number from 1 to 8"),
        (Given("9", "KVPOOL_TTL"), count(1, 8), "KVPOOL_TTL = '9' must be a whole number from 1 to 8"),
        (Given(3, "password"), text("be a text", is_secret=True), "password must be a text"),
    ],
)
def test_given_a_wrong_value_then_the_error_shows_it_as_it_was_given_unless_it_is_secret(
    given: Given, kind: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        given.checked(kind)
    assert str(caught.value) == message


def test_given_a_number_as_text_then_a_file_may_have_it_and_a_keyword_may_not() -> None:
    assert Given("8", "ttl").checked(count(1, 8)) == Given(1, "ttl", is_keyword=True).checked(count(1, 8)) + 7
    with pytest.raises(ConfigError, match="ttl='8'"):
        Given("8", "ttl", is_keyword=True).checked(count(1, 8))
