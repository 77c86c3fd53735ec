"""Tiers by address: the right class, and errors that name what is wrong and never a password."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool import KVCacheConfig, LayerSpec
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.testing import load, store, value
from kvpool.tiers import (
    CompressedTier,
    DiskTier,
    Fingerprint,
    KeyedTier,
    KeySpace,
    MemoryTier,
    Outcome,
    RedisTier,
    S3Tier,
    TierConfig,
    open_tier,
    opening,
    register_tier,
)


@pytest.mark.parametrize("form", ["disk:{}?bytes=8MB&threads=2&direct=0", "{}?bytes=8MiB"])
def test_given_a_directory_then_a_disk_tier_keeps_values_there(tmp_path: Path, form: str) -> None:
    address = form.format(tmp_path / "cache")
    with open_tier(address) as tier:
        assert isinstance(tier, DiskTier)
        assert store(tier, [1]) == [Outcome.OK]
        assert tier.stats().capacity_bytes == 8 << 20
    with open_tier(address) as tier:
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])


def test_given_an_s3_address_then_an_s3_tier_opens_although_nobody_listens() -> None:
    with open_tier("s3://key:hidden@bucket/some/where?endpoint=http://127.0.0.1:1&timeout=0.1") as tier:
        assert isinstance(tier, S3Tier)
        assert tier.name == "s3://bucket/some/where"
        assert tier.stats().problem


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_given_a_redis_address_then_a_redis_tier_opens_although_nobody_listens(scheme: str) -> None:
    with open_tier(f"{scheme}://127.0.0.1:1?timeout=0.1") as tier:
        assert isinstance(tier, RedisTier)
        assert tier.name == f"{scheme}://127.0.0.1:1"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ftp://user:hidden@host", "this one begins with 'ftp'"),
        ("hidden", "this one has no scheme, and no slash"),
        ("", "this one has no scheme"),
        ("mooncake://host/path", "mooncake://master:port"),
        ("mooncake://host?protocol=udp", "must be tcp or rdma"),
        ("mooncake://host?buffer=1MB", "buffer='1MB' of mooncake://host must be 67,239,936 to"),
        ("mooncake://host?segment=lots", "segment of mooncake://host is 'lots'"),
        ("mooncake://host?ttl=1", "no option 'ttl'"),
        ("disk:", "needs a directory"),
        ("disk:some/where", "needs the room that it may take, such as disk:some/where?bytes=50GB"),
        ("./somewhere", "such as disk:./somewhere?bytes=50GB"),
        ("disk:x?bytes=much", "bytes of disk:x is 'much'"),
        ("disk:x?bytes=1GB&ttl=3", "disk:x has no option 'ttl'; it has bytes, threads"),
        ("disk:x?bytes=1GB&bytes=1GB", "stands twice in the address disk:x"),
        (None, "is a string, got None"),
        (b"redis://host", "is a string"),
    ],
)
def test_given_no_address_of_a_tier_then_the_error_says_what_there_is(address: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        open_tier(address)
    assert says in str(caught.value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "package", "extra"),
    [
        ("redis://host", "glide_sync", "redis"),
        ("s3://bucket", "obstore", "s3"),
        ("mooncake://m", "mooncake", "mooncake"),
    ],
)
def test_given_a_missing_package_then_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, address: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install '\.\[{extra}\]' in a checkout"):
        open_tier(address)


def test_given_tiers_of_which_one_cannot_be_opened_then_the_others_are_closed(tmp_path: Path) -> None:
    space = KeySpace(
        Fingerprint.of(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], gpu_blocks=1), "model", "weights")
    )
    disk = f"disk:{tmp_path}?bytes=16MB"
    with pytest.raises(InvalidArgumentError, match="nothing"):
        opening.open_tiers([None, disk, "nothing://there"], space)
    [tier] = opening.open_tiers([disk, None], space)
    assert store(tier, [1]) == [Outcome.OK]
    tier.close()


def test_given_no_checksums_then_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[tiers\]' in a checkout"):
        open_tier("redis://host")


def install(folder: Path, name: str, entry_points: str) -> None:
    """Puts a package with a tier into a folder, as pip does."""
    source = "from kvpool.tiers import MemoryTier\ndef open_mine(address):\n    return MemoryTier(2**20)\n"
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[kvpool.tiers]\n{entry_points}\n")


class TestRegisteredScheme:
    @pytest.fixture(autouse=True)
    def _restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(opening, "_OPENERS", dict(opening._OPENERS))

    def test_given_a_registered_scheme_then_its_address_opens_a_tier_of_ones_own(self) -> None:
        seen: list[str] = []

        @register_tier("mine")
        def open_mine(address: str) -> KeyedTier:
            seen.append(address)
            return MemoryTier(2**20)

        with open_tier("mine://somewhere?compress=zstd") as tier:
            assert isinstance(tier, CompressedTier)
            assert store(tier, [1]) == [Outcome.OK]
        assert seen == ["mine://somewhere"]
        assert TierConfig.of(remote="mine:somewhere", remote_ttl=5).remote_address == "mine:somewhere?ttl=5.0"
        with pytest.raises(ConfigError, match=r"s3:, mooncake:, mine:$"):
            TierConfig.of(remote="other://somewhere")

    def test_given_a_package_that_names_its_opener_then_every_process_opens_its_addresses(self, tmp_path: Path) -> None:
        install(tmp_path, "own_tier", "mine = own_tier:open_mine\nbroken = own_tier:missing")
        script = """
            from kvpool.errors import KVPoolError
            from kvpool.tiers import TierConfig, open_tier
            print(TierConfig.of(remote="mine:a").remote_address, open_tier("mine:a").name)
            for address in ("broken:", "other:"):
                try:
                    open_tier(address)
                except KVPoolError as error:
                    print(error)
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        command = [sys.executable, "-c", textwrap.dedent(script)]
        lines = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
        assert lines[0] == "mine:a memory"
        assert lines[1].startswith("own_tier:missing, which opens broken: addresses, cannot be loaded: ")
        assert "mooncake:, mine:, broken:; this one begins with 'other'" in lines[2]

    def test_given_two_packages_with_one_scheme_then_both_are_refused_by_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("first_tier", "second_tier"):
            install(tmp_path, name, f"twice = {name}:open_mine")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(InvalidArgumentError, match="the scheme 'twice' is taken by open_mine"):
            open_tier("twice:")

    def test_given_the_scheme_of_another_opener_then_it_is_refused_and_stays(self) -> None:
        with pytest.raises(InvalidArgumentError, match="the scheme 'redis' is taken by RedisTier; choose another"):
            register_tier("redis")(lambda address: MemoryTier(2**20))
        assert opening._OPENERS["redis"] is RedisTier

    def test_given_the_same_opener_twice_then_the_second_replaces_the_first(self) -> None:
        def make() -> Callable[[str], KeyedTier]:
            def open_mine(address: str) -> KeyedTier:
                return MemoryTier(2**20)

            return register_tier("mine")(open_mine)

        make()
        assert make() is opening._OPENERS["mine"]

    @pytest.mark.parametrize("scheme", ["", "Mine", "mine:", "a b", 7])
    def test_given_no_scheme_then_it_is_refused_by_name(self, scheme: object) -> None:
        with pytest.raises(InvalidArgumentError, match="is no scheme of an address"):
            register_tier(scheme)  # type: ignore[arg-type]
