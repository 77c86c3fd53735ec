"""Formats that outlive a process: samples of every release are read, and what is newer than this kvpool is called so.

tools/format_samples.py made what lies in tests/formats, one folder per release.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import logging
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ConfigError, InvalidArgumentError, TraceError
from kvpool.integrations.llama_states import SIGNPOST_BYTES, Signpost, StateBlob
from kvpool.recording import operations
from kvpool.replay import read_trace, replay_recording
from kvpool.scheduling import cost_model
from kvpool.scope import ReuseScope
from kvpool.tiers import CompressedTier, DiskTier, Fingerprint, KeyedTier, KeySpace, Outcome, keys, open_tier, settings
from kvpool.tiers.disk import slab
from kvpool.tiers.disk.upkeep import Upkeep

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = sorted(path for path in (ROOT / "tests" / "formats").iterdir() if path.is_dir())
sys.path.insert(0, str(ROOT / "tests" / "tiers"))


@pytest.fixture(params=SAMPLES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def expected(release: Path, name: str) -> Any:
    return json.loads((release / "expected.json").read_text())[name]


def unpacked(release: Path, target: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress((release / "disk.tar.gz").read_bytes()))) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            (target / member.name).write_bytes(content.read())
    return target


def loaded(tier: KeyedTier, name: str, size: int) -> str:
    """The digest of a value that must be there."""
    out = bytearray(size)
    assert tier.load([bytes.fromhex(name)], [out], timeout=30) == [Outcome.OK]
    return hashlib.sha256(out).hexdigest()


# --- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_only", [False, True])
def test_given_a_directory_of_an_earlier_release_then_every_value_is_found_in_it(
    release: Path, tmp_path: Path, read_only: bool
) -> None:
    wanted = expected(release, "disk")
    with DiskTier(unpacked(release, tmp_path), 2**20, read_only=read_only) as tier:
        assert tier.notes == []
        for name, (size, digest) in wanted["values"].items():
            assert loaded(tier, name, size) == digest
        for codec, (name, size, digest) in wanted["compressed"].items():
            assert loaded(CompressedTier(tier, codec), name, size) == digest
        assert list(tier.directory.descriptions().values()) == [wanted["description"]]
    with Upkeep(tmp_path) as upkeep:
        assert upkeep.verify(lambda _: None).damaged == []


def test_given_the_index_of_an_earlier_release_is_lost_then_its_headers_are_read(release: Path, tmp_path: Path) -> None:
    for index in unpacked(release, tmp_path).glob("*.kvindex"):
        index.unlink()
    with DiskTier(tmp_path, 2**20) as tier:
        for name, (size, digest) in expected(release, "disk")["values"].items():
            assert loaded(tier, name, size) == digest


def test_given_the_description_of_an_earlier_release_then_its_keys_are_made_again_or_it_is_refused(
    release: Path,
) -> None:
    wanted = expected(release, "disk")
    tokens, scope = np.array(wanted["tokens"], np.int32), ReuseScope(tenant=wanted["tenant"])
    if wanted["description"]["version"] != keys.FORMAT_VERSION:
        with pytest.raises(InvalidArgumentError, match="purge its values by --space"):
            Fingerprint.from_description(wanted["description"])
        return
    space = KeySpace(Fingerprint.from_description(wanted["description"]))
    assert [key.hex() for key in space.of_tokens(tokens, scope)] == wanted["keys"]


def test_given_a_value_in_redis_of_an_earlier_release_then_it_is_found(release: Path, tmp_path: Path) -> None:
    glide = pytest.importorskip("glide_sync")
    from servers import RedisServer, running

    wanted, server = expected(release, "stores"), RedisServer(tmp_path)
    with running(server):
        address = glide.NodeAddress("127.0.0.1", server.port)
        client = glide.GlideClient.create(glide.GlideClientConfiguration([address]))
        for name, data in json.loads((release / "stores.json").read_text())["redis"].items():
            client.set(name, base64.b64decode(data))
        client.close()
        with open_tier(f"{server.url}?timeout=30") as tier:
            assert loaded(tier, wanted["key"], wanted["size"]) == wanted["sha256"]


def test_given_a_value_in_s3_of_an_earlier_release_then_it_is_found(release: Path, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    from servers import MotoServer, running

    wanted, server = expected(release, "stores"), MotoServer(tmp_path)
    with running(server):
        address = server.make_bucket("values")
        for path, data in json.loads((release / "stores.json").read_text())["s3"].items():
            server.bucket("values").put(f"some/where/{path}", base64.b64decode(data))
        with open_tier(f"{address}&timeout=30") as tier:
            assert loaded(tier, wanted["key"], wanted["size"]) == wanted["sha256"]


def test_given_a_recording_of_an_earlier_release_then_it_is_played_back_and_read_as_a_trace(release: Path) -> None:
    wanted = expected(release, "recording")
    stats = replay_recording(release / "recording.kvtrace")
    same = wanted.keys() - {"hit_tokens", "evictions"}  # the policy of today may keep other runs
    assert {name: getattr(stats, name) for name in same} == {name: wanted[name] for name in same}
    trace = read_trace(release / "recording.kvtrace")
    assert (trace.format, len(trace)) == ("recording", wanted["requests"])


def test_given_events_of_an_earlier_release_then_they_are_understood(release: Path) -> None:
    pytest.importorskip("msgspec")
    from kvpool.cluster.wire_events import decode_batch

    batch = decode_batch((release / "events.msgpack").read_bytes())
    assert [repr(event) for event in batch.events] == expected(release, "events")
    assert (batch.timestamp, batch.rank, batch.unknown) == (12.5, 1, ())


def test_given_a_state_of_llama_cpp_of_an_earlier_release_then_it_is_whole(release: Path) -> None:
    content, wanted = gzip.decompress((release / "llama.bin.gz").read_bytes()), expected(release, "llama")
    signpost = Signpost.read(content[:SIGNPOST_BYTES])
    assert signpost is not None
    blob, at = StateBlob(signpost), SIGNPOST_BYTES
    for piece in blob.pieces:
        piece[:] = np.frombuffer(content, np.uint8, len(piece), at)
        at += len(piece)
    assert blob.is_whole()
    assert blob.tokens.tolist() == wanted["tokens"]
    assert hashlib.sha256(blob.state.tobytes()).hexdigest() == wanted["sha256"]


def test_given_settings_and_a_measurement_of_an_earlier_release_then_they_are_read(release: Path) -> None:
    found = settings.read_tiers(release / "settings.toml", environ={})
    assert (found.disk, found.disk_bytes, found.remote_ttl) == ("/var/cache/kvpool", 50 * 2**30, 3600.0)
    assert cost_model.read_costs(release / "costs.json").to_dict() == expected(release, "costs")


# --- newer formats ---------------------------------------------------------------------------------------------------


def changed(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def test_given_a_slab_of_a_newer_format_then_it_is_named_and_stays_as_it_is(tmp_path: Path) -> None:
    paths = sorted(unpacked(SAMPLES[-1], tmp_path).glob("*.kv*"))
    before = {path: changed(path, lambda data: data[:7] + b"\x07" + data[8:]).read_bytes() for path in paths}
    for read_only in (True, False):
        with DiskTier(tmp_path, 2**20, read_only=read_only) as tier:
            assert tier.stats().num_values == 0
            for slab_path in tmp_path.glob("*.kvslab"):
                said = f"{slab_path.name} has format 7; this kvpool reads {slab.VERSION}: update kvpool: skipped"
                assert said in tier.notes
    assert {path: path.read_bytes() for path in paths} == before


@pytest.mark.parametrize("read", [replay_recording, read_trace])
def test_given_a_recording_of_a_newer_format_then_it_is_called_so(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    path = tmp_path / "new.kvtrace"
    path.write_bytes((SAMPLES[-1] / "recording.kvtrace").read_bytes())
    for version, said in ((7, "update kvpool"), (0, "record it again"), ('"x"', "no whole number")):
        changed(
            path, lambda data, v=version: re.sub(rb'"kvpool_recording":[^,]*', f'"kvpool_recording":{v}'.encode(), data)
        )
        with pytest.raises(TraceError, match=rf"new.kvtrace has format .*{said}"):
            read(path)
    assert operations.VERSION < 7


def test_given_settings_of_a_newer_format_then_they_are_called_so(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    for line, said in (
        ("format = 7", "has format 7; this kvpool reads 1: update kvpool"),
        ("format = 0", "has format 0; this kvpool reads 1: write it anew"),
        ('format = "new"', "has format 'new', which is no whole number"),
    ):
        path.write_text(f'{line}\n[tiers]\ndisk = "cache"\nof_the_future = 1\n')
        with pytest.raises(ConfigError, match=re.escape(f"the configuration {path} {said}")):
            settings.read_tiers(path, environ={})


def test_given_a_measurement_of_a_newer_format_then_it_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    plain = {**expected(SAMPLES[-1], "costs"), "format": 7}
    path.write_text(json.dumps({"measurement": plain}))
    with pytest.raises(InvalidArgumentError, match="has format 7; this kvpool reads 1: update kvpool"):
        cost_model.read_costs(path)


def test_given_the_description_of_a_newer_model_then_no_keys_are_made_of_it() -> None:
    fields = {**expected(SAMPLES[-1], "disk")["description"], "version": 7, "of_the_future": 1}
    said = f"the model 'tiny' has format 7; this kvpool reads {keys.FORMAT_VERSION}: update kvpool"
    with pytest.raises(InvalidArgumentError, match=said):
        Fingerprint.from_description(fields)


def test_given_newer_states_of_llama_cpp_then_they_are_not_taken_for_ours() -> None:
    content = gzip.decompress((SAMPLES[-1] / "llama.bin.gz").read_bytes())
    assert Signpost.read(content[:7] + b"\x02" + content[8:SIGNPOST_BYTES]) is None


def test_given_events_of_an_unknown_kind_then_the_others_count_and_one_line_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    zmq, msgspec = pytest.importorskip("zmq"), pytest.importorskip("msgspec")
    from servers import eventually

    from kvpool.cluster.index import ClusterIndex
    from kvpool.cluster.subscriber import NodeSubscriber

    batch = msgspec.msgpack.decode((SAMPLES[-1] / "events.msgpack").read_bytes())
    batch[1] = [{"type": "BlockTeleported", "where": "elsewhere"}, *batch[1][:1], ["BlockFrozen", 1]]
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        follower = NodeSubscriber(ClusterIndex(4), "a", f"tcp://127.0.0.1:{port}")
        publisher.recv()  # it listens
        for number in range(3):
            publisher.send_multipart([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch)])
        eventually(lambda: follower.num_unknown == 3, "all are read")
        follower.close()
    said = f"tcp://127.0.0.1:{port} sends events that are left out ('BlockFrozen', 'BlockTeleported'): update kvpool"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [said]


# --- the list --------------------------------------------------------------------------------------------------------


def test_given_the_page_of_formats_then_it_says_the_versions_of_today() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `?([^|`]+)`? \|", (ROOT / "docs" / "formats.md").read_text(), re.MULTILINE)
    found = {name.strip(): version.strip() for name, version in rows}
    assert found["Slab of a disk tier (`.kvslab`)"] == found["Index of a slab (`.kvindex`)"] == str(slab.VERSION)
    assert found["Keys and fingerprints"] == str(keys.FORMAT_VERSION)
    assert found["Recording (`.kvtrace`)"] == str(operations.VERSION)
    assert found["Settings (TOML)"] == str(settings.FORMAT)
    assert found["Measurement of `kvpool bench`"] == str(cost_model.FORMAT)
