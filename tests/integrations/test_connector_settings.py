"""Settings of a connector: what cannot work is refused with one line, before a model is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.integrations.connector.settings import ConnectorSettings


def test_given_sizes_as_text_then_they_are_bytes() -> None:
    settings = ConnectorSettings.of({"host_bytes": "2GB", "disk": "/somewhere", "disk_bytes": "50GB"})
    assert (settings.host_bytes, settings.disk_bytes) == (2 * 2**30, 50 * 2**30)
    assert settings.has_tiers


def test_given_no_size_then_the_host_fits_the_engine_and_the_machine() -> None:
    assert ConnectorSettings.of({}).sized(1000, 8000, 1).host_bytes == 1000
    assert ConnectorSettings.of({}).sized(1000, 8000, 4).host_bytes == 500
    assert ConnectorSettings.of({"host_bytes": 10}).sized(1000, 8000, 1).host_bytes == 10
    assert ConnectorSettings.of({"host_blocks": 3}).sized(1000, 8000, 1).num_rows(300) == 3


def test_given_host_bytes_then_rows_are_as_many_blocks_as_fit() -> None:
    assert ConnectorSettings.of({"host_bytes": 1000}).num_rows(300) == 3
    assert ConnectorSettings.of({"host_blocks": 7}).num_rows(300) == 7
    with pytest.raises(ConfigError, match="one has 2000 bytes"):
        ConnectorSettings.of({"host_bytes": 1000}).num_rows(2000)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host_byte": 1}, "did you mean host_bytes"),
        ({"zzz": 1}, "there are host_bytes, "),
        ({"host_bytes": "much"}, "host_bytes='much' must be a size above 0"),
        ({"host_bytes": 0}, "host_bytes"),
        ({"host_bytes": 10, "host_blocks": 10}, "give one of them"),
        ({"disk_bytes": "1GB"}, "needs disk"),
        ({"disk": "/cache", "disk_bytes": 1000}, "disk_bytes=1000 must be at least"),
        ({"disk": ""}, "disk must be text"),
        ({"remote": 7}, "remote must be text"),
        ({"timeout": 0}, "timeout=0"),
        ({"disk": "/cache", "read_only": "yes"}, "read_only='yes' must be true or false"),
        ({"read_only": True}, "needs disk or remote"),
        ({"ttl": -1}, "ttl must be seconds above 0.*got -1"),
        ({"quotas": {"ada": {"most": 1}}}, "guaranteed share, maximum share or both"),
        ({"quotas": 3}, "must map a salt"),
        ({"disk": "/cache", "disk_bytes": "much"}, "disk_bytes='much' must be a size above 0"),
        ({"host_write": "never"}, "host_write must be one of back, through, got 'never'"),
        ({"remote": ["redis://user:secret@host"]}, "^remote must be text that is not empty$"),
    ],
)
def test_given_settings_that_cannot_work_then_one_line_says_why(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ConnectorSettings.of(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["/var/cache/kvpool", ["disk"], None, 7])
def test_given_something_that_is_no_mapping_then_one_line_names_the_option(given: Any) -> None:
    with pytest.raises(ConfigError, match=r'^"kvpool" must be a mapping, as \{"disk": …\}; got '):
        ConnectorSettings.of(given, '"kvpool"')


def test_given_a_key_that_is_unknown_then_it_is_named_with_the_option_that_holds_it() -> None:
    with pytest.raises(ConfigError, match=r'^"kvpool" has no \'dsk\'; did you mean disk\?'):
        ConnectorSettings.of({"dsk": 1}, '"kvpool"')


def test_given_an_unknown_policy_then_the_known_ones_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"known: .*lru"):
        ConnectorSettings.of({"policy": "newest"})


def test_given_a_disk_that_is_a_file_then_one_line_says_so(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from toy import introduction

    from kvpool.integrations.connector.settings import open_worker_tiers

    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"disk='.*file' cannot be used: File exists"):
        open_worker_tiers(ConnectorSettings.of({"disk": str(file)}), introduction(4))


def test_given_a_disk_in_the_home_directory_then_it_is_not_a_folder_with_a_strange_name() -> None:
    assert ConnectorSettings.of({"disk": "~/blocks"}).disk == str(Path.home() / "blocks")


def test_given_more_of_the_host_than_there_is_then_one_line_says_how_much_would_fit() -> None:
    pytest.importorskip("torch")
    from kvpool.integrations.connector.pages import HostRows

    with pytest.raises(ConfigError, match=r"host_bytes: .* about [\d,]+ bytes are free; lower host_bytes") as caught:
        HostRows(10**9, 10**6)
    assert "\n" not in str(caught.value)


def test_given_several_engines_then_each_writes_to_a_directory_of_its_own() -> None:
    settings = ConnectorSettings(disk="/cache")
    assert [settings.of_engine(number).disk for number in range(3)] == ["/cache", "/cache/engine-1", "/cache/engine-2"]
    assert ConnectorSettings().of_engine(1) == ConnectorSettings()


def test_given_a_directory_that_somebody_writes_to_then_read_only_reads_it_and_stores_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from toy import introduction

    from kvpool.integrations.connector.settings import open_worker_tiers
    from kvpool.tiers import Outcome

    worker, settings = introduction(4), ConnectorSettings.of({"disk": str(tmp_path), "disk_bytes": "16MB"})
    (writer,) = open_worker_tiers(settings, worker)
    with pytest.raises(ConfigError, match="read_only=True"):
        open_worker_tiers(settings, worker)
    writer.store([bytes(32)], [bytes(4096)])
    (reader,) = open_worker_tiers(replace(settings, read_only=True), worker)
    assert list(reader.contains([bytes(32), bytes(31) + b"1"])) == [True, False]
    assert reader.store([bytes(31) + b"1"], [bytes(4096)]) != [Outcome.OK]
    for tier in (reader, writer):
        tier.close()
    with pytest.raises(ConfigError, match=r"there is no directory .*nowhere, and read_only=True makes none"):
        open_worker_tiers(ConnectorSettings.of({"disk": str(tmp_path / "nowhere"), "read_only": True}), worker)


def test_given_a_store_with_a_password_then_the_settings_do_not_show_it() -> None:
    assert "secret" not in repr(ConnectorSettings.of({"remote": "redis://user:secret@host"}))
