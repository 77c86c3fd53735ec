"""`kvpool tier`: what people do to a directory, also while an engine uses it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import PATIENCE, MotoServer, RedisCluster, RedisServer, running

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer import Exit

from kvpool import KVCacheConfig, LayerSpec
from kvpool.cli import main
from kvpool.errors import InvalidArgumentError
from kvpool.scope import ReuseScope
from kvpool.testing import key, load, store, value
from kvpool.tiers import (
    DiskTier,
    Fingerprint,
    KeyedTier,
    KeyPattern,
    KeySpace,
    MemoryTier,
    Outcome,
    Purged,
    open_tier,
    opening,
    tier_command,
    upkeep,
)
from kvpool.tiers.contract import Listing, Room, TierStats
from kvpool.tiers.disk.upkeep import Checked, Upkeep
from kvpool.tiers.tier_command import shown_time
from kvpool.tiers.upkeep import BATCH_BYTES, BATCH_KEYS, verify_store

SPACE = KeySpace(
    Fingerprint.of(
        KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=8), model="tiny", weights="v1"
    )
)
CAPACITY = 2**21


def own_keys(count: int) -> list[bytes]:
    return SPACE.keys([key(number) for number in range(count)])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Forty values of a known model and ten of an unknown one."""
    path = tmp_path / "cache"
    with DiskTier(path, CAPACITY, timeout=PATIENCE) as tier:  # a machine that stalls must not cost values
        tier.introduce(SPACE)
        assert tier.store(own_keys(40), [value(number) for number in range(40)]) == [Outcome.OK] * 40
        assert store(tier, list(range(10))) == [Outcome.OK] * 10
    return path


def figures(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    capsys.readouterr()
    assert main(["tier", *map(str, words), "--json", "-"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def damage(directory: Path) -> None:
    """A flipped bit in the first slot of the first slab that holds something."""
    for path in sorted(directory.glob("*.kvslab")):
        content = bytearray(path.read_bytes())
        if content[4096:4102] == b"kvpool":
            content[4096 + 4096 + 7] ^= 1
            path.write_bytes(content)
            return
    raise AssertionError("no value")


def test_given_a_directory_then_ls_shows_whose_values_lie_in_it(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spaces = {space["prefix"]: space for space in figures(capsys, "ls", directory)["spaces"]}
    known = spaces.pop(SPACE.prefix.hex())
    assert (known["description"]["model"], known["num_values"], known["value_bytes"]) == ("tiny", 40, 200_000)
    assert len(spaces) == 10
    assert main(["tier", "ls", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "tiny" in shown
    assert "195.3 KiB" in shown


def test_given_weights_with_a_long_digest_then_ls_shows_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = "0123456789abcdef" * 4
    space = KeySpace(replace(SPACE.fingerprint, weights=digest))
    with DiskTier(tmp_path, CAPACITY) as tier:
        tier.introduce(space)
        assert tier.store(space.keys([key(1)]), [b"value"]) == [Outcome.OK]
    assert main(["tier", "ls", str(tmp_path)]) == 0
    assert digest[:16] in capsys.readouterr().out.split()


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "compact", "purge --unused-days 1", "warm"])
def test_given_a_file_that_is_no_slab_then_every_command_names_it(
    directory: Path, command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slab = min(directory.glob("*.kvslab"))
    slab.write_bytes(b"something else" * 1000)
    target = [f"disk:{tmp_path / 'other'}?bytes=64MiB"] if command == "warm" else []
    main(["tier", command.split()[0], str(directory), *command.split()[1:], *target])
    shown = "".join(capsys.readouterr().out.split())  # however wide the terminal is
    assert f"note:{slab.name}" in shown


def test_given_an_engine_that_uses_the_directory_then_ls_stat_and_verify_work_and_the_others_name_it(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DiskTier(directory, CAPACITY):
        assert figures(capsys, "stat", directory)["written_by"] == str(os.getpid())
        assert figures(capsys, "verify", directory)["damaged"] == []
        assert len(figures(capsys, "ls", directory)["spaces"]) == 11
        for command in (["compact"], ["purge", "--unused-days", "1"], ["verify", "--repair"], ["purge", "--all"]):
            assert main(["tier", command[0], str(directory), *command[1:]]) == 2
            assert f"this process writes to {directory} already" in capsys.readouterr().err
    assert figures(capsys, "stat", directory)["written_by"] == ""


def test_given_a_directory_then_stat_counts_slots_and_bytes(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(capsys, "stat", directory)
    assert (found["values"], found["value_bytes"], found["slot_sizes"]) == (50, 250_000, "12.0 KiB")
    assert found["slots"] == found["values"] + found["free_slots"]
    assert found["file_bytes"] == sum(
        path.stat().st_size for path in directory.iterdir() if path.suffix in (".kvslab", ".kvindex")
    )


def test_given_a_damaged_value_then_verify_names_it_and_repair_takes_it_out(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tier", "verify", str(directory)]) == 0
    damage(directory)
    assert main(["tier", "verify", str(directory)]) == 1
    assert "49 of 50 values are whole" in (shown := capsys.readouterr().out)
    assert "damaged: slot 0 of slab-" in shown
    assert main(["tier", "verify", str(directory), "--repair"]) == 0
    assert figures(capsys, "verify", directory)["num_values"] == 49


def test_given_a_purged_model_then_the_others_stay_and_compact_gives_the_space_back(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = figures(capsys, "stat", directory)["file_bytes"]
    assert main(["tier", "purge", str(directory), "--space", SPACE.prefix.hex()]) == 0
    assert "40 values removed" in capsys.readouterr().out
    result = figures(capsys, "compact", directory)
    after = figures(capsys, "stat", directory)
    assert result["given_back_bytes"] == before - after["file_bytes"] > 0
    assert after["values"] == result["num_values"] == 10
    assert main(["tier", "compact", str(directory)]) == 0
    assert "0 B given back, 10 values are left" in capsys.readouterr().out
    with DiskTier(directory, CAPACITY) as tier:
        assert tier.notes == []
        assert load(tier, list(range(10))) == ([Outcome.OK] * 10, [value(number) for number in range(10)])
        assert not any(tier.contains(own_keys(40)))


SCOPES = [ReuseScope("acme"), ReuseScope("acme", salt="chat-1"), ReuseScope("other")]
TEXTS = [SPACE.of_tokens(np.arange(12, dtype=np.int32), scope) for scope in SCOPES]


def fill(tier: KeyedTier) -> None:
    for keys in TEXTS:
        assert tier.store(keys, [value(number) for number in range(3)]) == [Outcome.OK] * 3


@pytest.fixture(params=["directory", "redis"])
def store_of_tenants(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A directory or the address of a server on loopback, with three blocks in each of some scopes."""
    if request.param == "directory":
        with DiskTier(tmp_path / "tenants", CAPACITY) as tier:
            fill(tier)
        yield str(tmp_path / "tenants")
        return
    pytest.importorskip("glide_sync")
    server = RedisServer(tmp_path)
    with running(server):
        with open_tier(server.url) as tier:
            fill(tier)
        yield server.url


def contained(address: str) -> list[int]:
    """How many of the three blocks of each scope a tier has."""
    with open_tier(address if "://" in address else f"disk:{address}?bytes=2MB") as tier:
        return [sum(tier.contains(keys, timeout=60.0)) for keys in TEXTS]


def test_given_a_store_of_many_tenants_then_a_text_a_session_and_a_tenant_can_be_taken_out(
    store_of_tenants: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, known = tmp_path / "ids.json", tmp_path / "known.json"
    ids.write_text(json.dumps(list(range(8))))
    known.write_text(json.dumps({"spaces": [{"description": SPACE.fingerprint.describe()}]}))
    for options, said, left in (
        (["--tenant", "nobody"], "0 values removed", [3, 3, 3]),
        (["--tenant", "acme", "--tokens", str(ids), "--fingerprints", str(known)], "2 values removed", [1, 3, 3]),
        (["--tenant", "acme", "--salt", "chat-1"], "3 values removed", [1, 0, 3]),
        (["--tenant", "acme", "--space", "00" * 8], "0 values removed", [1, 0, 3]),
        (["--tenant", "acme"], "1 values removed", [0, 0, 3]),
        (["--space", SPACE.prefix.hex()], "3 values removed", [0, 0, 0]),
    ):
        assert main(["tier", "purge", store_of_tenants, *options]) == 0
        assert said in capsys.readouterr().out
        assert contained(store_of_tenants) == left


def test_given_a_model_of_another_format_in_a_directory_then_a_text_is_taken_out_of_the_others_and_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, path = tmp_path / "ids.json", tmp_path / "tenants"
    ids.write_text(json.dumps(list(range(8))))
    with DiskTier(path, CAPACITY) as tier:
        tier.introduce(SPACE)
        fill(tier)
    old = {**SPACE.fingerprint.describe(), "model": "older", "version": 1}
    (path / f"space-{'0' * 16}.json").write_text(json.dumps(old))
    words = ["tier", "purge", str(path), "--tenant", "acme", "--tokens", str(ids)]
    assert main(words) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "2 values removed" in said
    assert "some may be left: the description of the model 'older' has format 1; this kvpool reads" in said
    assert contained(str(path)) == [1, 3, 3]
    assert main([*words, "--space", SPACE.prefix.hex()]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(
            (f"--all {other}", "--all takes everything; leave out the other options")
            for other in ("--tenant a", "--space 00", "--adapter a", "--salt a", "--tokens a", "--unused-days 0")
        ),
        ("", "say what to take out: --space, --tenant, --tokens, --unused-days or --all"),
        ("--fingerprints a", "say what to take out: --space, --tenant, --tokens, --unused-days or --all"),
        ("--adapter a", '--adapter and --salt are those of a --tenant; --tenant "" is no tenant'),
        ("--salt a", '--adapter and --salt are those of a --tenant; --tenant "" is no tenant'),
        ("--tenant a --fingerprints a", "--fingerprints says whose the --tokens are; without them it has no effect"),
        ("--space 00", "--space '00' must be 16 hexadecimal digits; see `kvpool tier ls`"),
        ("--space wrong", "--space 'wrong' must be 16 hexadecimal digits; see `kvpool tier ls`"),
    ],
)
def test_given_options_of_purge_that_do_not_go_together_then_one_line_says_exactly_this(
    options: str, said: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tier", "purge", str(directory), *options.split()]) == 2
    assert capsys.readouterr().err.removeprefix("kvpool: ").split() == said.split()


@pytest.mark.parametrize("end", [tier_command._end_with, lambda problem: upkeep._end_with([problem])])
def test_given_a_problem_with_brackets_then_it_is_shown_as_it_is(
    end: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exit) as caught:
        end("no answer from [red]a[/red]")
    captured = capsys.readouterr()
    assert caught.value.exit_code == 1
    assert "no answer from [red]a[/red]" in captured.out + captured.err


def test_given_a_store_that_cannot_list_then_the_error_says_what_can_be_done() -> None:
    stored: Any = Hollow()
    stored.can_list = False
    stored.name = "mooncake://h"
    with pytest.raises(InvalidArgumentError, match=r"^mooncake://h cannot list what it holds; `kvpool tier stat` says"):
        upkeep.listed(stored)


class Stubborn(MemoryTier):
    """Keeps what it is asked to remove at some places, and does not say why."""

    kept: tuple[int, ...] = ()

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        found = super()._remove(keys, deadline)
        return [Outcome.FAILED if at in self.kept else outcome for at, outcome in enumerate(found)]

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        return Purged(super()._purge(pattern, deadline).removed, not self.kept)


@pytest.mark.parametrize("by_text", [True, False])
@pytest.mark.parametrize("kept", [(), (0,), (1,), (0, 1)])
def test_given_a_store_that_keeps_some_values_then_the_command_counts_the_others_and_says_so(
    kept: tuple[int, ...],
    by_text: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = Stubborn(10**6)
    fill(tier)
    tier.kept = kept
    monkeypatch.setattr(upkeep, "open_tier", lambda address: tier)
    ids, known = tmp_path / "ids.json", tmp_path / "known.json"
    ids.write_text(json.dumps(list(range(8))))
    known.write_text(json.dumps({"spaces": [5, {}, {"description": SPACE.fingerprint.describe()}]}))
    options = ["--tokens", str(ids), "--fingerprints", str(known)] if by_text else []
    status = main(["tier", "purge", "redis://h", "--tenant", "acme", *options])
    said = " ".join(capsys.readouterr().out.split())
    removed = f"{2 - len(kept) if by_text else 6} values removed"
    assert (status, said) == ((1, f"{removed} some may be left: see the log; run it again") if kept else (0, removed))


def test_given_a_model_of_another_format_in_a_file_then_a_text_is_taken_out_of_the_others_and_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = MemoryTier(10**6)
    fill(tier)
    monkeypatch.setattr(upkeep, "open_tier", lambda address: tier)
    ids, known = tmp_path / "ids.json", tmp_path / "known.json"
    ids.write_text(json.dumps(list(range(8))))
    old = {**SPACE.fingerprint.describe(), "model": "older", "version": 1}
    known.write_text(json.dumps({"spaces": [{"description": old}, {"description": SPACE.fingerprint.describe()}]}))
    words = ["tier", "purge", "redis://h", "--tenant", "acme", "--tokens", str(ids), "--fingerprints", str(known)]
    assert main(words) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "2 values removed" in said
    assert "some may be left: the description of the model 'older' has format 1; this kvpool reads" in said


def test_given_a_store_that_is_down_then_the_command_says_that_some_may_be_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("glide_sync")
    assert main(["tier", "purge", "redis://127.0.0.1:1?timeout=0.2", "--tenant", "acme"]) == 1
    assert "some may be left" in capsys.readouterr().out


# --- stores --------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["redis", "cluster", "s3"])
def store_address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a store on loopback with nine values of one model, and what others keep beside them."""
    server: RedisServer | RedisCluster | MotoServer
    if request.param == "s3":
        pytest.importorskip("obstore")
        server = MotoServer(tmp_path)
    else:
        pytest.importorskip("glide_sync")
        server = RedisServer(tmp_path) if request.param == "redis" else RedisCluster(tmp_path)
    with running(server):
        if isinstance(server, MotoServer):
            address = f"{server.make_bucket('values')}&timeout=30"
            server.bucket("values").put("some/where/notes.txt", b"mine")
        else:
            address = f"{server.url}{'&' if '?' in server.url else '?'}timeout=30"
            first = server if isinstance(server, RedisServer) else server.nodes[0]
            first.ask("SET", "kvpool:default:{notes}", "mine")  # MOVED on a cluster
        with open_tier(address) as tier:
            fill(tier)
        yield address


@pytest.mark.quick("redis")
def test_given_a_store_then_stat_ls_and_verify_say_what_it_holds(
    store_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = store_address.partition("?")[0].replace("key:secret@", "")
    size = 3 * len(TEXTS) * len(value(0))
    assert figures(capsys, "stat", store_address) == {
        "store": shown,
        "values": 9,
        "value_bytes": size,
        "spaces": 1,
        "problem": "",
        "notes": [],
    }
    found = figures(capsys, "ls", store_address)
    assert (found["notes"], found["problem"]) == ([], "")
    (space,) = found["spaces"]
    assert (space["prefix"], space["num_values"], space["value_bytes"]) == (SPACE.prefix.hex(), 9, size)
    assert (space["description"], space["last_use"]) == (None, 0)
    found = figures(capsys, "verify", store_address)
    assert (found["num_values"], found["num_bytes"], found["damaged"], found["problem"]) == (9, size, [], "")
    for command in ("stat", "ls", "verify"):
        assert main(["tier", command, store_address]) == 0
        assert "secret" not in (said := capsys.readouterr().out)
        assert "9" in said


@pytest.mark.quick("redis")
def test_given_an_empty_store_then_it_holds_nothing_and_that_is_no_error(
    store_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tier", "purge", store_address, "--all"]) == 0
    capsys.readouterr()
    assert figures(capsys, "stat", store_address)["values"] == 0
    assert main(["tier", "ls", store_address]) == 0
    assert "holds no values" in capsys.readouterr().out
    assert main(["tier", "verify", store_address]) == 0


def test_given_a_damaged_value_in_a_store_then_verify_names_it_and_repair_takes_it_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("glide_sync")
    server = RedisServer(tmp_path)
    with running(server):
        with open_tier(server.url) as tier:
            fill(tier)
        name = TEXTS[0][1].hex()
        server.ask("SETRANGE", f"kvpool:default:{{{name}}}", "7", "?")
        assert main(["tier", "verify", server.url]) == 1
        assert f"damaged: {name}" in capsys.readouterr().out
        assert main(["tier", "verify", server.url, "--repair"]) == 0
        assert figures(capsys, "verify", server.url)["num_values"] == 8


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
@pytest.mark.parametrize(
    "address", ["redis://user:secret@127.0.0.1:1?timeout=0.2", "s3://bucket?endpoint=http://127.0.0.1:1"]
)
def test_given_a_store_that_does_not_answer_then_the_status_is_one_and_the_reason_is_told(
    command: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("glide_sync" if address.startswith("redis") else "obstore")
    assert main(["tier", command, address, "--json", "-"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["problem"]
    assert "the store does not answer: " in told.err
    assert "secret" not in told.out + told.err
    if command == "stat":
        assert json.loads(told.out)["values"] is None


def test_given_a_directory_with_its_scheme_and_options_then_it_is_that_directory(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in (f"disk:{directory}", f"disk:{directory}?bytes=5GB", f"{directory}?bytes=5GB"):
        assert figures(capsys, "stat", address)["values"] == 50


def test_given_recently_used_values_then_purge_of_unused_ones_leaves_them(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["tier", "purge", str(directory), "--unused-days", "1"]) == 0
    assert "0 values removed" in capsys.readouterr().out
    assert main(["tier", "purge", str(directory), "--unused-days", "0"]) == 0
    assert "50 values removed" in capsys.readouterr().out
    asked: list[Any] = []
    monkeypatch.setattr(Upkeep, "purge", lambda *_, **how: asked.append(how["used_before"]) or 0)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert main(["tier", "purge", str(directory), "--unused-days", "1.5"]) == 0
    assert asked == [(10**9 - 36 * 3600) * 10**6]


def test_given_a_number_of_days_then_what_was_used_before_them_is_taken_out(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, day = 1_500_000_000, 86_400 * 10**6
    with Upkeep(directory, writing=True) as opened:
        for number, slab in enumerate(opened.slabs):
            held = np.flatnonzero(slab.records["check"])
            slab.records["used"][held] = now * 10**6 - 3 * day
            slab.records["used"][held[:1]] -= not number  # the first of all
            slab.write_records()
    monkeypatch.setattr(time, "time", lambda: float(now))
    for days, removed in ((4, 0), (3, 1), (2.5, 49)):
        assert main(["tier", "purge", str(directory), "--unused-days", str(days), "--quiet"]) == 0
        assert capsys.readouterr().out.startswith(f"{removed} values removed; `kvpool tier compact")


def test_given_foreign_files_then_purge_of_everything_leaves_them(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    (directory / "slab-1.kvslab").write_bytes(b"kvslab\0\0 of an older format")
    assert main(["tier", "purge", str(directory), "--all"]) == 0
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def test_given_another_directory_then_warm_fills_it_with_what_was_used_last(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "new"
    assert figures(capsys, "warm", directory, f"disk:{other}?bytes=2MB&timeout={PATIENCE}") == {
        "stored": 50,
        "not_taken": 0,
        "problem": "",
    }
    assert figures(capsys, "ls", other)["spaces"][0]["num_values"] in (1, 40)
    with DiskTier(other, CAPACITY) as tier:
        assert tier.contains_prefix(own_keys(40)) == 40
        assert list(tier.directory.descriptions()) == [SPACE.prefix]
    third = tmp_path / "third"
    words = ["warm", directory, f"disk:{third}?bytes=2MB&timeout={PATIENCE}", "--space", SPACE.prefix.hex()]
    assert figures(capsys, *words)["stored"] == 40


def test_given_a_compressed_target_then_warm_tells_it_whose_values_they_are(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "smaller"
    assert (
        figures(capsys, "warm", directory, f"disk:{target}?bytes=2MB&compress=lz4&timeout={PATIENCE}")["stored"] == 50
    )
    spaces = {space["prefix"]: space for space in figures(capsys, "ls", target)["spaces"]}
    known = spaces[SPACE.prefix.hex()]
    assert (known["description"]["model"], known["num_values"]) == ("tiny", 40)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "nowhere"], "there is no directory 'nowhere'"),
        (["stat", "./nowhere/at/all"], "there is no directory 'nowhere/at/all'; the address of a store is as redis://"),
        (["stat", "nodir"], "there is no directory 'nodir'"),
        (["purge", "nodir", "--all"], "there is no directory 'nodir'"),
        (["verify", "ftp://host"], "the address of a tier begins with one of"),
        (["compact", "redis://host"], "`kvpool tier compact` is for directories: a store gives space back by itself"),
        (["warm", "redis://host", "redis://other"], "`kvpool tier warm` is for directories"),
        (["purge", "."], "say what to take out: --space, --tenant, --tokens, --unused-days or --all"),
        (["purge", ".", "--salt", "s"], "--adapter and --salt are those of a --tenant"),
        (["purge", ".", "--space", "0" * 16, "--fingerprints", "f"], "--fingerprints says whose the --tokens are"),
        (["purge", ".", "--tokens", "nowhere.json"], "cannot read nowhere.json"),
        (["purge", "redis://127.0.0.1:1", "--unused-days", "1"], "--unused-days is for directories"),
        (["purge", ".", "--space", "abc"], "--space 'abc' must be 16 hexadecimal digits"),
        (["purge", ".", "--all", "--unused-days", "3"], "--all takes everything"),
        (["purge", ".", "--unused-days", "inf"], "Invalid value for '--unused-days'"),
        (["warm", ".", "ftp://host"], "the address of a tier begins with one of"),
    ],
)
def test_given_a_wrong_argument_then_one_line_says_what_would_be_right(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tier", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "compact", "warm"])
def test_given_a_file_that_cannot_be_written_then_a_command_says_so_before_it_does_anything(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "nowhere" / "figures.json"
    assert main(["tier", command, "there is no such directory", "--json", str(target)]) == 2
    told = capsys.readouterr().err
    assert "figures.json" in told
    assert "no such directory" not in told


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "compact", "purge", "warm"])
def test_given_help_then_every_command_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", command, "--help"]) == 0
    assert "engine" in capsys.readouterr().out or command == "stat"


class Hollow:
    """A store of values that nobody looks at; it notes how many are loaded together."""

    timeout = 1.0

    def __init__(self) -> None:
        self.batches: list[int] = []

    def load(self, keys: list[bytes], out: list[bytearray], *, timeout: float) -> list[Outcome]:
        self.batches.append(len(keys))
        return [Outcome.OK] * len(keys)

    def stats(self) -> TierStats:
        return TierStats("hollow")


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ([BATCH_BYTES - 1, 1, 1], [2, 1]),
        ([1, BATCH_BYTES, 1], [1, 1, 1]),
        ([BATCH_BYTES + 1, BATCH_BYTES + 1], [1, 1]),
        ([0] * (2 * BATCH_KEYS + 1), [BATCH_KEYS, BATCH_KEYS, 1]),
        ([], []),
    ],
)
def test_given_values_of_a_store_then_verify_loads_only_so_many_bytes_and_keys_together(
    sizes: list[int], batches: list[int]
) -> None:
    hollow: Any = Hollow()
    listing = Listing({key(number): size for number, size in enumerate(sizes)}, "")
    checked, problem = verify_store(hollow, listing, lambda _: None, repair=False)
    assert (hollow.batches, problem) == (batches, "")
    assert checked == Checked(len(sizes), sum(sizes))


# --- every word that people see ------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], status: int, *words: object) -> tuple[list[str], list[str]]:
    """The lines of a command on stdout and stderr, without the numbers of slabs and the spaces that fill a line."""
    capsys.readouterr()
    assert main(["tier", *map(str, words)]) == status
    told = capsys.readouterr()
    out, err = (
        re.sub(r"slab-[0-9a-f]{16}", "slab-ID", re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "TIME", text)) for text in told
    )
    return [line.rstrip() for line in out.splitlines()], [line.rstrip() for line in err.splitlines()]


def test_given_a_directory_then_every_command_says_exactly_this(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path, prefix, other = tmp_path / "d", SPACE.prefix.hex(), key(0)[:8].hex()
    with DiskTier(path, CAPACITY, timeout=PATIENCE) as tier:
        tier.introduce(SPACE)
        assert tier.store(own_keys(2), [value(number) for number in range(2)]) == [Outcome.OK] * 2
        assert store(tier, [0], 3_000) == [Outcome.OK]
    (path / "notes.txt").write_text("mine")
    note = "note: not kvpool's and left alone: notes.txt"
    files = sum(each.stat().st_size for each in path.iterdir() if each.suffix in (".kvslab", ".kvindex"))
    with Upkeep(path) as upkeep:
        slots = sum(slab.num_slots for slab in upkeep.slabs)
    spaces = [f"{other}  ?      ?             1  2.9 KiB  TIME", f"{prefix}  tiny   v1            2  9.8 KiB  TIME"]
    head = "space             model  weights  values    bytes  last used"
    assert shown(capsys, 0, "ls", path) == ([head, *spaces, note], [])
    assert shown(capsys, 0, "stat", path) == (
        [
            "             slabs  2",
            f"        file bytes  {files:,}",
            f"             slots  {slots}",
            "            values  3",
            "       value bytes  13,000",
            f"        free slots  {slots - 3}",
            "        slot sizes  8.0 KiB, 12.0 KiB",
            note,
        ],
        [],
    )
    assert shown(capsys, 0, "verify", path, "--quiet") == (["3 of 3 values are whole, 12.7 KiB", note], [])
    damage(path)
    assert shown(capsys, 1, "verify", path, "--quiet")[0][:2] in (
        ["2 of 3 values are whole, 7.8 KiB", "damaged: slot 0 of slab-ID.kvslab"],
        ["2 of 3 values are whole, 9.8 KiB", "damaged: slot 0 of slab-ID.kvslab"],
    )
    assert (
        shown(capsys, 0, "verify", path, "--quiet", "--repair")[0][1] == "damaged: slot 0 of slab-ID.kvslab (taken out)"
    )
    assert shown(capsys, 0, "purge", path, "--space", "00" * 8, "--quiet")[0][0].startswith(
        "0 values removed; `kvpool tier compact "
    )
    assert shown(capsys, 0, "compact", path, "--quiet")[0][0].endswith("B given back, 2 values are left")
    given_back = shown(capsys, 0, "purge", path, "--all")
    assert given_back[0][0].endswith(" KiB removed")
    assert shown(capsys, 0, "ls", path)[0] == [f"{path} holds no values", note]


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "compact", "warm"])
def test_given_figures_on_stdout_then_what_people_read_is_on_stderr(
    directory: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, directory, *([f"disk:{tmp_path / 'new'}?bytes=2MB"] if command == "warm" else [])]
    plain, said = shown(capsys, 0, *words)
    assert (bool(plain), said) == (True, [])
    figures, told = shown(capsys, 0, *words, "--json", "-")
    json.loads("\n".join(figures))
    assert told[-len(plain) :] == plain


@pytest.mark.parametrize("quiet", [False, True])
def test_given_a_command_that_takes_long_then_a_bar_shows_its_progress_up_to_the_end(
    directory: Path, tmp_path: Path, quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars: list[tuple[Any, ...]] = []
    done: list[int] = []

    @contextmanager
    def bar(*given: Any) -> Iterator[Any]:
        done.clear()
        yield done.append
        bars.append((*given, sum(done)))

    for module in ("tier_command", "upkeep"):
        monkeypatch.setattr(f"kvpool.tiers.{module}.progress_bar", bar)
    for words in (["verify"], ["warm", f"disk:{tmp_path / 'new'}?bytes=2MB"], ["purge", "--unused-days", "1"]):
        shown(capsys, 0, words[0], directory, *words[1:], *["--quiet"] * quiet)
    assert bars == [(title, 50, quiet, 50) for title in ("verifying", "copying", "purging")]
    shown(capsys, 0, "compact", directory, *["--quiet"] * quiet)
    assert bars[3][:3] == ("moving", 50, quiet)


def test_given_no_command_then_all_of_them_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tier"])
    told = capsys.readouterr()
    for command in ("ls", "stat", "verify", "compact", "purge", "warm"):
        assert f" {command} " in told.out + told.err


def test_given_a_model_and_a_time_of_use_that_are_not_known_then_that_is_shown() -> None:
    assert shown_time(0) == "unknown"
    assert shown_time(1_700_000_000_000_000) == "2023-11-14 22:13 UTC"


class Full(MemoryTier):
    """Has room for some values and then refuses; notes how many came together, and how long they may take."""

    def __init__(self, room: int, problem: str = "") -> None:
        super().__init__(2**24)
        self.room, self._problem = room, problem
        self.batches: list[int] = []

    def store(self, keys: Any, data: Any, *, timeout: float | None = None, worths: Any = None) -> list[Outcome]:
        assert timeout == 60.0
        self.batches.append(len(keys))
        taken = min(self.room, len(keys))
        self.room -= taken
        return [*super().store(keys[:taken], data[:taken]), *[Outcome.REFUSED] * (len(keys) - taken)]

    def _look(self) -> Room:
        return Room(problem=self._problem)


@pytest.mark.parametrize(
    ("room", "batches", "figures_of", "status"),
    [
        (100, [32, 32, 6], (70, 0), 0),
        (64, [32, 32, 6], (64, 6), 0),
        (16, [32, 32], (16, 48), 0),  # as many were refused as were taken: it goes on
        (15, [32], (15, 17), 0),
        (0, [32], (0, 32), 1),
    ],
)
def test_given_a_target_then_warm_goes_on_until_it_refuses_more_than_it_takes(
    room: int, batches: list[int], figures_of: tuple[int, int], status: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with DiskTier(tmp_path / "d", CAPACITY, timeout=PATIENCE) as tier:
        assert store(tier, list(range(70))) == [Outcome.OK] * 70
    target = Full(room, "it is slow")
    monkeypatch.setitem(opening._OPENERS, "full", lambda address: target)
    stored, left = figures_of
    lines, _ = shown(capsys, status, "warm", tmp_path / "d", "full:user@there?x=y", "--json", tmp_path / "f", "--quiet")
    assert lines == [f"{stored} values are in there, {left} were not taken", "note: it is slow"]
    assert json.loads((tmp_path / "f").read_text()) == {"stored": stored, "not_taken": left, "problem": "it is slow"}
    assert target.batches == batches


class Listed(Hollow):
    """A store whose values have these outcomes, one after the other; it notes what is removed, and how long it may take."""

    def __init__(self, outcomes: list[Outcome], problem: str = "", timeout: float = 1.0) -> None:
        super().__init__()
        self.outcomes, self.problem, self.timeout = iter(outcomes), problem, timeout  # type: ignore[misc]
        self.removed: list[bytes] = []
        self.timeouts: list[float] = []

    def load(self, keys: list[bytes], out: list[bytearray], *, timeout: float) -> list[Outcome]:
        self.timeouts.append(timeout)
        return [next(self.outcomes) for _ in keys]

    def remove(self, keys: list[bytes], *, timeout: float) -> list[Outcome]:
        self.timeouts.append(timeout)
        self.removed += keys
        return [Outcome.OK if number else Outcome.FAILED for number in range(len(keys))]

    def stats(self) -> TierStats:
        return TierStats("listed", problem=self.problem)


OK, MISS, FAILED, LATE = Outcome.OK, Outcome.MISS, Outcome.FAILED, Outcome.LATE


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("given", ["", "only a part"])
@pytest.mark.parametrize(
    ("outcomes", "problem", "checked", "told"),
    [
        ([OK, FAILED, FAILED, OK, MISS], "", (5, 4, 1 + 4, [1, 2], 1), ""),
        ([OK, FAILED, OK, LATE, OK], "", (3, 3, 1 + 3, [1], 0), "some values did not come within a minute"),
        ([OK, OK, OK, OK, OK], "gone", (0, 0, 0, [], 0), "gone"),
    ],
)
def test_given_a_store_then_verify_counts_what_came_and_removes_what_is_damaged_only_to_repair(
    outcomes: list[Outcome], problem: str, checked: Any, told: str, given: str, repair: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvpool.tiers.upkeep.BATCH_KEYS", 3 if problem or LATE in outcomes else 5)
    stored: Any = Listed(outcomes, problem, timeout=90.0 if given else 1.0)
    sizes, progress = {key(number): number + 1 for number in range(5)}, list[int]()
    result, reason = verify_store(stored, Listing(sizes, given), progress.append, repair=repair)
    seen, num_values, num_bytes, damaged, removed = checked
    assert reason == (given or told)
    assert (sum(progress), result.num_values, result.num_bytes) == (seen, num_values, num_bytes)
    assert result.damaged == [key(number).hex() for number in damaged]
    assert stored.removed == [key(number) for number in damaged if repair]
    assert result.removed == (removed if repair else 0)
    assert set(stored.timeouts) == {90.0 if given else 60.0}
