"""States of llama.cpp on our tiers, with a stand-in for llama-cpp-python. The real one: test_llama_cpp_real.py."""

from __future__ import annotations

import gc
import importlib
import logging
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError, KVPoolError, UnsupportedModelError
from kvpool.tiers import KeyedTier, MemoryTier, Outcome

pytest.importorskip("xxhash")

import fake_llama

MODULE = "kvpool.integrations.llama_cpp"
PROMPT = [index * 7 % 4999 for index in range(400)]
OTHER = [3 + index * 11 % 4999 for index in range(400)]
ROOM = "64MB"


@pytest.fixture
def load_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Imports the integration beside a stand-in of a version, with a library of some content."""
    library = tmp_path / "libllama.so"
    before = sys.modules.get(MODULE)

    def load(version: str = "0.3.36", content: str = "a library") -> Any:
        library.write_text(content)
        for name, module in fake_llama.make_module(library, version).items():
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules.pop(MODULE, None)
        return importlib.import_module(MODULE)

    yield load
    sys.modules.pop(MODULE, None)
    if before is not None:
        sys.modules[MODULE] = before


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return str(path)


class Life:
    """One process: a Llama with a cache on a disk."""

    def __init__(self, module: Any, path: str, disk: Path, cache: dict[str, Any] | None = None, **llama: Any) -> None:
        self.llama = fake_llama.Llama(path, **llama)
        settings = {"disk": str(disk), "disk_bytes": ROOM, **(cache or {})}
        self.cache = module.KVPoolCache(self.llama, **settings)
        self.llama.set_cache(self.cache)

    def answer(self, prompt: Sequence[int]) -> tuple[bool, int]:
        """Whether the answer is that of a Llama without a cache, and how many tokens of the prompt were computed."""
        right = fake_llama.Llama("plain").answer(prompt)
        return self.llama.answer(prompt) == right, self.llama.num_prompt


@pytest.fixture
def live(load_module: Callable[..., Any], model: str, tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """Begins another life on the same disk; the one before it ends."""
    lives: list[Life] = []

    def begin(cache: dict[str, Any] | None = None, version: str = "0.3.36", content: str = "a", **llama: Any) -> Life:
        if lives:
            lives[-1].cache.close()
        path = llama.pop("model_path", model)
        lives.append(Life(load_module(version, content), path, tmp_path / "disk", cache, **llama))
        return lives[-1]

    yield begin
    for life in lives:
        life.cache.close()


# --- what is found -------------------------------------------------------------------------------------------------------


def test_given_a_restart_then_a_prompt_starts_warm_with_the_same_answer(live: Callable[..., Life]) -> None:
    assert live().answer(PROMPT) == (True, 400)
    life = live()
    assert life.answer(PROMPT) == (True, 1)
    assert (life.cache.stats().hits, life.cache.stats().tokens_loaded) == (1, 399)


def test_given_a_directory_as_a_path_then_it_is_taken(live: Callable[..., Life], tmp_path: Path) -> None:
    live({"disk": tmp_path / "disk"}).answer(PROMPT)
    assert live().answer(PROMPT) == (True, 1)


def test_given_a_prompt_that_goes_on_then_only_the_rest_is_computed(live: Callable[..., Life]) -> None:
    first = live()
    conversation = [*PROMPT, *first.llama.answer(PROMPT), *OTHER[:30]]
    assert live().answer(conversation) == (True, 31)


def test_given_a_prompt_that_begins_alike_then_the_common_part_is_reused(live: Callable[..., Life]) -> None:
    live().answer(PROMPT)
    assert live().answer([*PROMPT[:330], *OTHER]) == (True, 400)


@pytest.mark.parametrize("length", [320, 321, 383, 384])
def test_given_a_prompt_that_is_all_in_a_tier_then_its_last_token_is_computed(
    live: Callable[..., Life], length: int
) -> None:
    live().answer(PROMPT)
    assert live().answer(PROMPT[:length]) == (True, 1)


def test_given_two_texts_then_each_is_found(live: Callable[..., Life]) -> None:
    first = live()
    first.answer(PROMPT)
    first.answer(OTHER)
    life = live()
    assert [life.answer(prompt) for prompt in (PROMPT, OTHER, PROMPT)] == [(True, 1)] * 3
    assert PROMPT in life.cache
    assert PROMPT[1:] not in life.cache


def test_given_the_same_process_then_what_its_memory_has_is_not_loaded(live: Callable[..., Life]) -> None:
    life = live()
    life.answer(PROMPT)
    assert life.answer(PROMPT) == (True, 1)
    (tier,) = life.cache.stats().tiers
    assert tier.bytes_loaded == 0


def test_given_too_little_to_gain_then_nothing_is_stored_or_loaded(live: Callable[..., Life]) -> None:
    life = live()
    life.answer(PROMPT[:200])
    assert life.cache.stats().stored == 0
    life.answer(PROMPT)
    assert live({"min_tokens": 400}).answer(PROMPT) == (True, 400)


# --- what is stored ------------------------------------------------------------------------------------------------------


def test_given_a_prefix_that_is_stored_then_it_is_not_stored_again(live: Callable[..., Life]) -> None:
    first = live()
    for _ in range(2):
        first.answer(PROMPT)
        first.answer(OTHER)
    assert first.cache.stats().stored == 2
    second = live()
    second.answer([*PROMPT, *OTHER[:100]])
    assert second.cache.stats().stored == 0


def test_given_a_conversation_that_grows_then_its_last_state_replaces_the_one_before(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = MemoryTier(2**26)
    given(monkeypatch, tier)
    life, conversation = live(), list(PROMPT)
    for turn in range(4):
        asked = list(conversation)
        conversation += [*life.llama.answer(asked), *OTHER[turn : 300 + turn]]
    assert life.cache.stats().stored == 4
    signposts, pieces = signposts_and_pieces(tier)
    assert len(signposts) == life.llama.n_tokens // 64
    assert len(pieces) == 8 * fake_llama.CELL_WORDS * life.llama.n_tokens // 2**20 + 1
    assert live().answer(asked) == (True, 1)


def test_given_a_state_that_is_too_large_then_it_is_counted_and_not_stored(
    live: Callable[..., Life], caplog: pytest.LogCaptureFixture
) -> None:
    for settings, remedy in (
        ({"max_bytes": "1MB"}, "more than max_bytes=1,048,576"),
        ({"disk_bytes": "2MB"}, "half of the tier's 2,097,152"),
    ):
        caplog.clear()
        life = live(settings)
        assert life.answer(PROMPT) == (True, 400)
        assert (life.cache.stats().too_large, life.cache.stats().stored) == (1, 0)
        (line,) = (record.message for record in caplog.records if "is not stored" in record.message)
        assert remedy in line


def test_given_a_state_that_is_too_large_for_one_process_then_others_still_find_it(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, MemoryTier(2**26))
    live().answer(PROMPT)
    small = live({"max_bytes": "1MB"})
    assert small.answer(PROMPT) == (True, 400)
    assert (small.cache.stats().hits, small.cache.stats().failed) == (0, 1)
    assert live().answer(PROMPT) == (True, 1)


def test_given_a_state_that_is_too_large_for_one_process_then_it_stores_its_own_beside_it(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, MemoryTier(2**26))
    longer = [*PROMPT, *OTHER]
    live().answer(longer)
    small = live({"max_bytes": "2MB"})
    assert small.answer(PROMPT) == (True, 400)
    assert small.cache.stats().stored == 1
    assert live({"max_bytes": "2MB"}).answer(PROMPT) == (True, 1)
    assert live().answer(longer) == (True, 1)


def test_given_a_reader_then_it_finds_what_another_process_stores_and_stores_nothing(
    load_module: Callable[..., Any], live: Callable[..., Life], model: str, tmp_path: Path
) -> None:
    writer = live()
    writer.answer(PROMPT)
    reader = Life(load_module(content="a"), model, tmp_path / "disk", {"read_only": True})
    assert reader.answer(PROMPT) == (True, 1)
    reader.answer(OTHER)
    assert reader.cache.stats().stored == 0
    reader.cache.close()


def test_given_two_tiers_then_the_longer_prefix_wins_and_both_have_it_then(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = (MemoryTier(2**26, name=name) for name in ("near", "far"))
    given(monkeypatch, far)
    live().answer([*PROMPT, *OTHER])
    given(monkeypatch, near)
    live().answer(PROMPT)
    given(monkeypatch, near, far)
    life = live()
    assert life.answer([*PROMPT, *OTHER]) == (True, 1)
    assert life.cache.stats().stored == 1
    given(monkeypatch, near)
    assert live().answer([*PROMPT, *OTHER]) == (True, 1)


def given(monkeypatch: pytest.MonkeyPatch, *tiers: KeyedTier) -> None:
    """These tiers, which stay open when a life ends."""
    for tier in tiers:
        monkeypatch.setattr(tier, "close", lambda: None)
    monkeypatch.setattr("kvpool.integrations.llama_states.open_worker_tiers", lambda *args: list(tiers))


# --- whose it is ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        dict(version="0.3.37"),
        dict(content="another build"),
        dict(n_ctx=8192),
        dict(type_k=8),
        dict(flash_attn_type=1),
        dict(rope_freq_scale=0.5),
        dict(kv_overrides={"a": 1}),
        dict(cache={"model_id": "v2"}),
    ],
    ids=lambda other: next(iter(other)),
)
def test_given_another_llama_cpp_context_or_model_then_nothing_is_found(
    live: Callable[..., Life], other: dict[str, Any]
) -> None:
    live().answer(PROMPT)
    assert live(**other).answer(PROMPT) == (True, 400)
    assert live().answer(PROMPT) == (True, 1)


def test_given_other_weights_or_another_adapter_then_nothing_is_found(
    live: Callable[..., Life], model: str, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter.gguf"
    adapter.write_bytes(b"one")
    live(lora_path=str(adapter)).answer(PROMPT)
    assert live(lora_path=str(adapter), lora_scale=0.5).answer(PROMPT) == (True, 400)
    assert live(lora_path=str(adapter)).answer(PROMPT) == (True, 1)
    adapter.write_bytes(b"two")
    assert live(lora_path=str(adapter)).answer(PROMPT) == (True, 400)
    Path(model).write_bytes(b"WEIGHTS")
    assert live(lora_path=str(adapter)).answer(PROMPT) == (True, 400)


def test_given_a_model_in_several_files_then_each_of_them_counts(live: Callable[..., Life], tmp_path: Path) -> None:
    first, second = (tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"first")
    second.write_bytes(b"second")
    live(model_path=str(first)).answer(PROMPT)
    assert live(model_path=str(first)).answer(PROMPT) == (True, 1)
    second.write_bytes(b"SECOND")
    assert live(model_path=str(first)).answer(PROMPT) == (True, 400)


@pytest.mark.parametrize("name", ["big[q4]", "big*"])
def test_given_a_model_in_several_files_whose_name_reads_like_a_pattern_then_its_files_count(
    live: Callable[..., Life], tmp_path: Path, name: str
) -> None:
    for number in (1, 2):
        (tmp_path / f"{name}-0000{number}-of-00002.gguf").write_bytes(b"small")
    first = str(tmp_path / f"{name}-00001-of-00002.gguf")
    live(model_path=first).answer(PROMPT)
    (tmp_path / "bigger-00001-of-00002.gguf").write_bytes(b"of another model")
    assert live(model_path=first).answer(PROMPT) == (True, 1)
    Path(first).write_bytes(b"SMALL")
    assert live(model_path=first).answer(PROMPT) == (True, 400)


# --- faults --------------------------------------------------------------------------------------------------------------


def signposts_and_pieces(tier: MemoryTier) -> tuple[list[bytes], list[bytes]]:
    """The keys in a tier, by what they lead to."""
    signposts = [key for key, value in tier._values.items() if len(value) == 64]
    return signposts, [key for key in tier._values if key not in signposts]


def flip(position: int) -> Callable[[MemoryTier], None]:
    """Changes one byte of the first piece and lets the tier find nothing wrong with it."""

    def spoil(tier: MemoryTier) -> None:
        piece = signposts_and_pieces(tier)[1][0]
        value = bytearray(tier._values[piece])
        value[position] ^= 1
        tier._values[piece] = bytes(value)

    return spoil


def lose(which: int) -> Callable[[MemoryTier], None]:
    def spoil(tier: MemoryTier) -> None:
        tier.remove([signposts_and_pieces(tier)[1][which]])

    return spoil


def truncate(tier: MemoryTier) -> None:
    piece = signposts_and_pieces(tier)[1][-1]
    tier._values[piece] = tier._values[piece][:1000]  # less than the zeros at its end


def zero_signposts(tier: MemoryTier) -> None:
    for key in signposts_and_pieces(tier)[0]:
        tier._values[key] = bytes(64)


FAULTS = {
    "head": flip(9),
    "tokens": flip(40),
    "state": flip(5000),
    "first piece lost": lose(0),
    "last piece lost": lose(-1),
    "last piece short": truncate,
    "signposts of nobody": zero_signposts,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_given_a_state_that_is_not_whole_then_it_is_a_miss_that_heals(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    tier = MemoryTier(2**26)
    given(monkeypatch, tier)
    live().answer(PROMPT)
    FAULTS[fault](tier)
    life = live()
    with caplog.at_level(logging.WARNING, "kvpool"):
        assert life.answer(PROMPT) == (True, 400)
    assert (life.cache.stats().failed, life.cache.stats().hits) == (1, 0)
    (line,) = (record.message for record in caplog.records if "computed again" in record.message)
    assert ("pieces are missing" in line) == ("lost" in fault)
    assert live().answer(PROMPT) == (True, 1)


def test_given_one_state_that_is_not_whole_then_a_shorter_one_serves(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = MemoryTier(2**26)
    given(monkeypatch, tier)
    live().answer([*PROMPT, *OTHER])
    tier_of_longer = signposts_and_pieces(tier)
    live().answer([*PROMPT[:384], *[9] * 300])  # its signposts are now those of the first 384 tokens
    tier.remove(tier_of_longer[1])
    life = live()
    assert life.answer([*PROMPT, *OTHER]) == (True, 416)
    assert life.cache.stats().failed == 1


def test_given_signposts_to_a_state_of_another_prompt_then_it_is_a_miss(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = MemoryTier(2**26)
    given(monkeypatch, tier)
    live().answer(PROMPT)
    mine = {*signposts_and_pieces(tier)[0]}
    live().answer(OTHER)
    theirs = next(tier._values[key] for key in signposts_and_pieces(tier)[0] if key not in mine)
    for key in mine:
        tier._values[key] = theirs
    life = live()
    assert life.answer(PROMPT) == (True, 400)
    assert life.cache.stats().failed == 1
    assert "it holds other tokens" in caplog.text


@pytest.mark.parametrize("broken", ["refuses", "raises", "cannot cut"])
def test_given_a_llama_cpp_that_cannot_take_a_state_then_the_prompt_is_computed(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    live().answer(PROMPT)
    life = live()
    life.llama.eval(OTHER)

    def set_data(ctx: list[int], *args: Any) -> int:
        ctx[:] = [1, 2, 3]  # what is half read
        if broken == "raises":
            raise OSError("access violation")
        return 0

    if broken == "cannot cut":
        monkeypatch.setattr(sys.modules["llama_cpp"], "llama_memory_seq_rm", lambda *args: False)
    else:
        monkeypatch.setattr(sys.modules["llama_cpp"], "llama_state_seq_set_data", set_data)
    assert life.answer(PROMPT) == (True, 400)
    assert (life.cache.stats().failed, life.cache.stats().hits) == (1, 0)
    (line,) = (record.message for record in caplog.records if "computed again" in record.message)
    assert ("OSError: access violation" in line) == (broken == "raises")


def refusing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A llama.cpp that takes no state; the list grows with every one that it is given."""
    given: list[int] = []
    monkeypatch.setattr(
        sys.modules["llama_cpp"], "llama_state_seq_set_data", lambda ctx, data, size, sequence: given.append(size) or 0
    )
    return given


def ask_anew(life: Life, times: int) -> None:
    """The same prompt so often, with a memory that has nothing of it."""
    for _ in range(times):
        life.llama.reset()
        life.llama.ctx.clear()
        assert life.answer(PROMPT) == (True, 400)


def test_given_a_state_that_llama_cpp_refuses_then_it_is_replaced_and_tried_no_more_if_that_is_refused_as_well(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, MemoryTier(2**26))
    live().answer(PROMPT)
    life = live()
    tried = refusing(monkeypatch)
    ask_anew(life, 5)
    assert len(tried) == 2
    assert (life.cache.stats().failed, life.cache.stats().stored) == (2, 1)
    assert live().answer(PROMPT) == (True, 1), "what was stored instead is there for others"


def test_given_a_state_that_llama_cpp_refuses_when_only_reading_then_it_is_tried_once_and_stays(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    live().answer(PROMPT)
    reader = live({"read_only": True})
    tried = refusing(monkeypatch)
    ask_anew(reader, 5)
    assert len(tried) == reader.cache.stats().failed == 1
    assert live().answer(PROMPT) == (True, 1)


def test_given_a_state_that_llama_cpp_refuses_then_a_shorter_one_serves(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, MemoryTier(2**26))
    live().answer([*PROMPT, *OTHER])
    live().answer([*PROMPT[:384], *[9] * 300])  # its signposts are now those of the first 384 tokens
    life = live()
    module = sys.modules["llama_cpp"]
    take, sizes = module.llama_state_seq_set_data, []

    def refuse_first(ctx: Any, data: Any, size: int, sequence: int) -> int:
        sizes.append(size)
        return 0 if len(sizes) == 1 else take(ctx, data, size, sequence)

    monkeypatch.setattr(module, "llama_state_seq_set_data", refuse_first)
    assert life.answer([*PROMPT, *OTHER]) == (True, 416)
    assert (life.cache.stats().hits, life.cache.stats().failed) == (1, 1)


@pytest.mark.parametrize("what", ["load", "store"])
def test_given_something_that_fails_for_every_prompt_then_one_line_a_minute_tells(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(f"kvpool.integrations.llama_states.StateStore.{what}", fail)
    life = live()
    for prompt in (PROMPT, OTHER, PROMPT):
        assert life.answer(prompt)[0]
    assert getattr(life.cache.stats(), {"load": "failed", "store": "store_failures"}[what]) == 3
    assert len([record for record in caplog.records if "out of memory" in record.message]) == 1


@pytest.mark.parametrize("after", [0, 1])
def test_given_a_store_that_breaks_off_then_nothing_of_it_is_found(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, after: int
) -> None:
    tier = MemoryTier(2**26)
    given(monkeypatch, tier)
    store, calls = tier._store, iter(range(9))

    def once(keys: Any, data: Any, deadline: float) -> list[Outcome]:
        if next(calls) >= after:
            raise OSError("the disk is gone")
        return store(keys, data, deadline)

    monkeypatch.setattr(tier, "_store", once)
    life = live()
    assert life.answer(PROMPT) == (True, 400)
    assert (life.cache.stats().store_failures, life.cache.stats().stored) == (1, 0)
    monkeypatch.setattr(tier, "_store", store)
    again = live()
    assert again.answer(PROMPT) == (True, 400)
    assert (again.cache.stats().failed, again.cache.stats().stored) == (0, 1)
    assert "the disk is gone" in caplog.text


def test_given_a_tier_that_is_late_then_the_prompt_is_computed_and_the_state_stays(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = MemoryTier(2**26)
    given(monkeypatch, tier)
    live().answer(PROMPT)
    load = tier._load
    monkeypatch.setattr(
        tier, "_load", lambda keys, out, due: load(keys, out, due) if len(out[0]) == 64 else [Outcome.LATE] * len(keys)
    )
    life = live()
    assert life.answer(PROMPT) == (True, 400)
    assert (life.cache.stats().late, life.cache.stats().failed) == (1, 0)
    monkeypatch.setattr(tier, "_load", load)
    assert live().answer(PROMPT) == (True, 1)


def test_given_a_memory_that_does_not_belong_to_its_tokens_then_it_is_not_stored(live: Callable[..., Life]) -> None:
    life = live()
    life.llama.answer(PROMPT)
    before = life.cache.stats().stored
    life.llama.eval(OTHER)
    life.llama.ctx.pop()  # as after a shift of the context
    life.cache[PROMPT] = None
    assert life.cache.stats().stored == before


def test_given_a_llama_that_cannot_write_its_state_then_the_answer_is_given(
    live: Callable[..., Life], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life = live()
    monkeypatch.setattr(sys.modules["llama_cpp"], "llama_state_seq_get_data", lambda *args: 0)
    assert life.answer(PROMPT) == (True, 400)
    assert life.cache.stats().store_failures == 1
    assert "was not stored" in caplog.text


def test_given_a_closed_cache_then_nothing_is_found_and_nothing_raises(live: Callable[..., Life]) -> None:
    life = live()
    life.answer(PROMPT)
    life.cache.close()
    assert life.answer(OTHER) == (True, 400)


def test_given_a_cache_then_its_llama_is_freed_when_nobody_else_wants_it(live: Callable[..., Life]) -> None:
    life = live()
    seen = weakref.ref(life.llama)
    gc.disable()
    try:
        del life.llama
        assert seen() is None
    finally:
        gc.enable()
    with pytest.raises(KeyError):
        life.cache[PROMPT]


def test_given_a_cache_that_nobody_has_any_more_then_its_directory_is_free(
    load_module: Callable[..., Any], model: str, tmp_path: Path
) -> None:
    module = load_module()
    for expected in (400, 1):  # as when a cell of a notebook is run again
        life = Life(module, model, tmp_path / "disk")
        assert life.answer(PROMPT) == (True, expected)
        del life
    Life(module, model, tmp_path / "disk").cache.close()


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(disk=None, disk_bytes=None), "needs disk= or remote="),
        (dict(disk=None), "disk_bytes=67108864 needs disk as well"),
        (dict(disk_bytes="much"), "disk_bytes='much' must be a size above 0"),
        (dict(disk=""), "disk must be text"),
        (dict(timeout=0), "timeout=0 must be a number of seconds from 0.001"),
        (dict(min_tokens=10), "min_tokens=10"),
        (dict(max_bytes=0), "max_bytes=0"),
        (dict(max_bytes="large"), "max_bytes is 'large'"),
        (dict(read_only="yes"), "read_only='yes'"),
        (dict(remote="nonsense"), "address of a tier"),
        (dict(remote="redis://127.0.0.1:1?timeout=0.05&compress=fp8"), "take zstd or lz4"),
        (dict(remote="redis://127.0.0.1:1?timeout=0.05&max_value_bytes=1000"), "max_value_bytes=1000 is too small"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_given_settings_that_cannot_work_then_one_line_says_so(
    live: Callable[..., Life], settings: dict[str, Any], message: str
) -> None:
    if "redis" in str(settings.get("remote")):
        pytest.importorskip("glide_sync")
    with pytest.raises(KVPoolError, match=message) as caught:
        live(settings)
    assert "\n" not in str(caught.value)
    assert live().answer(PROMPT)[0], "the directory is not locked"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model={"recurrent": True}), "layers that keep a state"),
        (dict(model={"hybrid": True}), "layers that keep a state"),
        (dict(model={"n_swa": 512}), "sliding windows"),
        (dict(model={"encoder": True}), "an encoder"),
        (dict(embeddings=True), "embeddings"),
        (dict(logits_all=True), "logits_all"),
        (dict(chat_handler=type("Handler", (), {"clip_model_path": ""})()), "images"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_given_a_model_that_is_not_served_then_one_line_says_so(
    live: Callable[..., Life], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        live(**options)


@pytest.mark.parametrize("version", ["0.3.35", "0.2.90", "0.4.0"])
def test_given_a_llama_cpp_python_that_is_not_known_then_one_line_says_so(
    live: Callable[..., Life], version: str
) -> None:
    with pytest.raises(ConfigError, match=rf"llama-cpp-python {version}: .*>=0\.3\.36,<0\.4"):
        live(version=version)


def test_given_a_reader_of_a_directory_that_is_not_there_then_it_is_not_made(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"there is no directory .*mistyped"):
        live({"read_only": True, "disk": str(tmp_path / "mistyped")})
    assert not (tmp_path / "mistyped").exists()


def test_given_two_caches_of_one_process_on_one_directory_then_one_line_says_so(
    load_module: Callable[..., Any], live: Callable[..., Life], model: str, tmp_path: Path
) -> None:
    live()
    with pytest.raises(ConfigError, match=r"this process writes to .*disk already") as caught:
        Life(load_module(content="a"), model, tmp_path / "disk")
    assert "\n" not in str(caught.value)


def test_given_something_that_is_no_llama_then_one_line_says_so(
    load_module: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="needs the Llama that it will be set on, got str"):
        load_module().KVPoolCache("model.gguf", disk=str(tmp_path))


@pytest.mark.parametrize("name", [*vars(fake_llama.ContextParams()), "n_threads", "n_batch", "a_new_one"])
def test_given_any_parameter_of_a_context_when_it_changes_then_the_fingerprint_does_or_it_is_in_the_short_list(
    load_module: Callable[..., Any], model: str, name: str
) -> None:
    from kvpool.integrations.llama_identity import IRRELEVANT, fingerprint_of

    api = load_module().llama_cpp
    one, other = (fingerprint_of(api, fake_llama.Llama(model, **{name: value}), None).digest for value in (5, 6))
    assert (one != other) == (f"context.{name}" not in IRRELEVANT)


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="a node needs Linux")
def test_given_a_node_then_what_one_process_stored_the_next_continues(live: Callable[..., Life]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiers"))
    from nodes import node_folder, node_thread

    with node_folder() as folder, node_thread(folder, 64 * 2**20) as server:
        settings = {"disk": None, "disk_bytes": None, "remote": f"node:{folder}?timeout=30", "timeout": 30}
        first = live(settings)
        assert first.answer(PROMPT) == (True, len(PROMPT))
        first.cache.close()
        assert server.call(server.stats, 30)["num_values"] > 0
        right, num_computed = live(settings).answer(PROMPT)
        assert right
        assert num_computed < len(PROMPT)
