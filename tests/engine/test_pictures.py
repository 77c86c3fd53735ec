"""Images in the engine: tokens equal those of transformers, pictures are encoded once and cached by content."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
image_library = pytest.importorskip("PIL.Image")

from fake_graphs import FakeRecorder, graph_runner  # noqa: E402
from models import tiny_model  # noqa: E402
from vision_models import (  # noqa: E402
    BOTH_WAYS,
    CONFIGS,
    IMAGE,
    SERVED,
    VIDEO,
    own_answer,
    prompt,
    tiny_processor,
    vision_model,
)

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.engine.text_commands import Conversation  # noqa: E402
from kvpool.errors import InvalidArgumentError, NeverFitsError, UnsupportedModelError  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402
from kvpool.scope import ReuseScope  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

COUNT = 10
GREEDY = SamplingParams(max_new_tokens=COUNT)
WIDE = frozenset({8})
BEFORE, BEHIND = [1, 2, 3], [7, 8, 9, 10]


@pytest.fixture(scope="module", params=SERVED)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Models by family, made when they are first used."""

    class Models(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            self[name] = vision_model(name)
            return self[name]

    return Models()


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, **{"kv_blocks": 64, "block_size": 4, "device": "cpu", **options})


def several(family: str) -> list[dict[str, Any]]:
    """Prompts with one image, another one in its place, two images of different shapes, and none."""
    return [
        prompt(family, BEFORE, 5, BEHIND),
        prompt(family, BEFORE, 6, BEHIND),
        prompt(family, [4], 5, [7], 8, [9, 11, 12], wide=WIDE),
        prompt(family, [1, 2, 3, 4]),
    ]


def answers(model: Any, prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [own_answer(model, given, COUNT) for given in prompts]


def served(engine: Engine, prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(prompts, GREEDY)]


# --- tokens are those of transformers ---------------------------------------------------------------------------------


@pytest.mark.quick("qwen2_vl", "gemma3", "llava")
@pytest.mark.transformers
def test_given_images_then_tokens_equal_those_of_transformers(family: str, models: dict[str, Any]) -> None:
    """With steps of 7 tokens, prompts are cut inside of pictures, unless the tokens of a picture see one another."""
    prompts = several(family)
    expected = answers(models[family], prompts)
    assert len({*map(tuple, expected)}) == len(prompts)  # images change the answer

    num_tokens = 48 if family == "paligemma" else 7  # a whole prompt goes into a step
    with engine_of(models[family], scheduler=SchedulerConfig(num_tokens, max_sequences=4)) as engine:
        assert served(engine, prompts) == expected
        assert served(engine, prompts) == expected  # from the cache
        engine.manager.check()


def test_given_large_steps_then_several_prompts_with_images_share_one(models: dict[str, Any]) -> None:
    prompts = several("qwen3_vl")
    expected = answers(models["qwen3_vl"], prompts)

    with engine_of(models["qwen3_vl"]) as engine:
        assert served(engine, prompts) == expected


@pytest.mark.quick("qwen2_vl-swap", "gemma3-recompute")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("family_name", ["llava", "qwen2_vl", "gemma3"])
def test_given_too_little_memory_then_preempted_requests_end_with_the_same_tokens(
    mode: str, family_name: str, models: dict[str, Any]
) -> None:
    prompts = [prompt(family_name, [number], number, BEHIND) for number in range(20, 26)]
    expected = answers(models[family_name], prompts)
    limits = SchedulerConfig(max_tokens_per_step=32, max_sequences=8, preemption=mode)
    blocks = {"llava": 30, "qwen2_vl": 16, "gemma3": 12}[family_name]
    memory = {"kv_blocks": blocks, "host_bytes": 2**20, "cache": {"watermark": 0.0}}

    with engine_of(models[family_name], scheduler=limits, **memory) as engine:
        assert served(engine, prompts) == expected
        assert engine.stats().scheduler.preemptions > 0


def test_given_drafts_or_several_samples_then_positions_go_on_behind_the_image(models: dict[str, Any]) -> None:
    prompts = several("qwen2_vl")
    expected = answers(models["qwen2_vl"], prompts)

    with engine_of(models["qwen2_vl"], draft_tokens=3) as engine:
        assert served(engine, prompts) == expected
    with engine_of(models["qwen2_vl"]) as engine:
        both = SamplingParams(max_new_tokens=COUNT, n=2)
        for result, tokens in zip(engine.generate(prompts, both), expected, strict=True):
            assert [sample.token_ids for sample in result.samples] == [tokens, tokens]


def test_given_a_fork_behind_an_image_then_it_goes_on_as_the_request_would(models: dict[str, Any]) -> None:
    given = prompt("qwen2_vl", BEFORE, 5, BEHIND)
    (expected,) = answers(models["qwen2_vl"], [given])

    with engine_of(models["qwen2_vl"]) as engine:
        first = engine.submit(given, SamplingParams(max_new_tokens=4))
        first.result()
        forked = engine.fork(first, SamplingParams(max_new_tokens=COUNT - 4)).result()
    assert forked.token_ids == expected[4:]


@pytest.mark.quick("llava")
@pytest.mark.parametrize("family_name", ["llava", "qwen2_vl", "qwen3_vl"])
def test_given_graphs_then_steps_without_pictures_replay_with_the_positions_of_the_image(
    family_name: str, models: dict[str, Any]
) -> None:
    prompts = several(family_name)
    expected = answers(models[family_name], prompts)
    recorder = FakeRecorder()
    limits = SchedulerConfig(max_tokens_per_step=64, max_sequences=8)

    with engine_of(models[family_name], scheduler=limits, overlap=True) as engine:
        runner = graph_runner(
            engine,
            max_sequences=8,
            max_tokens=64,
            num_axes=engine._loop.runner.num_axes,
            recorder=recorder,
        )
        runner.warm_up()
        engine._loop.runner = runner
        assert served(engine, prompts) == expected
    assert recorder.num_replays >= COUNT - 1


# --- attention in both directions -------------------------------------------------------------------------------------


@pytest.mark.quick("gemma3")
@pytest.mark.parametrize("family_name", BOTH_WAYS)
def test_given_no_token_types_then_attention_is_causal_and_shares_nothing_with_the_other_kind(
    family_name: str, models: dict[str, Any]
) -> None:
    both = [prompt(family_name, BEFORE, seed, BEHIND) for seed in (5, 15, 16)]
    causal = [{name: value for name, value in given.items() if name != "token_type_ids"} for given in both]
    expected = answers(models[family_name], [*both, *causal])
    assert expected[:3] != expected[3:]

    steps = SchedulerConfig(26 if family_name == "paligemma" else 7, max_sequences=4)
    with engine_of(models[family_name], scheduler=steps, kv_blocks=96) as engine:
        assert [*served(engine, both), *served(engine, causal)] == expected
        assert served(engine, both) == expected[:3]


def test_given_a_prefix_that_ends_among_such_tokens_then_the_others_are_computed_at_once(
    models: dict[str, Any],
) -> None:
    given = prompt("paligemma", BEFORE, 5, BEHIND)
    (expected,) = answers(models["paligemma"], [given])

    with engine_of(models["paligemma"]) as engine:
        engine.generate([given], SamplingParams(max_new_tokens=1))
        engine.manager.cache.evict(3)
        result = engine.generate([given], GREEDY)[0]
    assert 0 < result.num_cached_tokens < given["input_ids"].shape[1] - 1
    assert result.token_ids == expected


def test_given_a_prefix_of_both_directions_then_only_the_same_prompt_finds_it(models: dict[str, Any]) -> None:
    given, other = prompt("paligemma", BEFORE, 5, BEHIND), prompt("paligemma", BEFORE, 5, [7, 8, 9, 11])
    expected = answers(models["paligemma"], [given, other])
    text = prompt("paligemma", [1, 2, 3, 4, 5])
    text_expected = answers(models["paligemma"], [text])

    with engine_of(models["paligemma"]) as engine:
        results = [engine.generate([each], GREEDY)[0] for each in (given, other, given, text, text)]
    assert [result.token_ids for result in results] == [*expected, expected[0], *text_expected * 2]
    assert [result.num_cached_tokens for result in results] == [0, 0, given["input_ids"].shape[1] - 1, 0, 4]


# --- the encoder and the prefix cache ---------------------------------------------------------------------------------


def test_given_the_same_image_again_then_the_encoder_runs_once(models: dict[str, Any]) -> None:
    with engine_of(models["llava"], cache={"enable_prefix_caching": False}) as engine:
        served(engine, [prompt("llava", [number], 5, BEHIND) for number in range(4)])
        stats = engine.stats().encoder
    assert stats is not None
    assert (stats.num_encoded, stats.num_hits, stats.num_pictures) == (1, 3, 1)
    assert stats.num_bytes == 16 * 64 * 4


def test_given_little_memory_for_features_then_the_oldest_go_and_tokens_are_the_same(models: dict[str, Any]) -> None:
    prompts = [prompt("llava", [1], seed, BEHIND) for seed in (5, 6, 5, 7)]
    expected = answers(models["llava"], prompts)

    one = 16 * 64 * 4
    for room, held in ((2 * one + 1, 2), (one - 1, 0)):
        with engine_of(models["llava"], encoder_bytes=room, cache={"enable_prefix_caching": False}) as engine:
            limits = [engine.generate([given], GREEDY)[0].token_ids for given in prompts]
            stats = engine.stats().encoder
        assert limits == expected
        assert stats is not None
        assert (stats.num_pictures, stats.num_bytes) == (held, held * one)
        assert stats.num_encoded == (3 if held else 4)


def test_given_a_cached_prefix_then_equal_images_are_not_encoded_and_others_never_match(models: dict[str, Any]) -> None:
    given, other = prompt("llava", BEFORE, 5, BEHIND), prompt("llava", BEFORE, 6, BEHIND)
    length = given["input_ids"].shape[1]  # 3 + 16 + 4 tokens

    with engine_of(models["llava"]) as engine:
        first = engine.generate([given], GREEDY)[0]
        again = engine.generate([given], GREEDY)[0]
        different = engine.generate([other], GREEDY)[0]
        stats = engine.stats().encoder
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == length - 1
    assert different.num_cached_tokens == len(BEFORE)
    assert again.token_ids == first.token_ids != different.token_ids
    assert stats is not None
    assert stats.num_encoded == 2


def num_encoded(engine: Engine, seed: int, **options: Any) -> int:
    """How often the encoder runs for a prompt with this image, and how often it finds it encoded, as one number."""
    before = engine.stats().encoder
    engine.generate([prompt("llava", BEFORE, seed, BEHIND)], GREEDY, **options)
    after = engine.stats().encoder
    assert before is not None
    assert after is not None
    assert after.num_encoded + after.num_hits == before.num_encoded + before.num_hits + 1
    return after.num_encoded - before.num_encoded


@pytest.mark.quick("prober0")
@pytest.mark.parametrize("prober", [ReuseScope(tenant="b"), ReuseScope(tenant="a", salt="x"), ReuseScope(), None])
def test_given_an_image_of_another_tenant_or_salt_then_a_probe_for_it_is_encoded_as_an_unknown_one_is(
    models: dict[str, Any], prober: ReuseScope | None
) -> None:
    victim = ReuseScope(tenant="a")
    with engine_of(models["llava"], cache={"enable_prefix_caching": False}) as engine:
        assert num_encoded(engine, 5, scope=victim) == 1
        assert num_encoded(engine, 5, scope=victim) == 0
        assert num_encoded(engine, 5, scope=prober) == num_encoded(engine, 6, scope=prober) == 1
        assert num_encoded(engine, 5, scope=victim) == 0


@pytest.mark.quick("what0-a x", "what4-x")
@pytest.mark.parametrize(
    ("what", "gone"),
    [
        ({"tenant": "a"}, "a x"),
        ({"scope": ReuseScope(tenant="a")}, "a"),
        ({"scope": ReuseScope(tenant="a", salt="x"), "prefix": [1, 2, 3, 4]}, "x"),
        ({"prefix": [1, 2, 3, 4]}, "none"),
        ({"session": "s"}, "x"),
    ],
)
def test_given_what_is_invalidated_then_its_images_are_encoded_anew_and_no_others(
    models: dict[str, Any], what: dict[str, Any], gone: str
) -> None:
    requests: dict[str, dict[str, Any]] = {
        "a": {"scope": ReuseScope(tenant="a")},
        "x": {"scope": ReuseScope(tenant="a", salt="x"), "session": "s"},
        "b": {"scope": ReuseScope(tenant="b")},
        "none": {},
    }
    with engine_of(models["llava"], cache={"enable_prefix_caching": False}) as engine:
        for options in requests.values():
            assert num_encoded(engine, 5, **options) == 1
        engine.invalidate(**what)
        stats = engine.stats().encoder
        again = [name for name, options in requests.items() if num_encoded(engine, 5, **options)]
        assert stats is not None
        assert (stats.num_pictures, stats.num_bytes) == (4 - len(again), (4 - len(again)) * 16 * 64 * 4)
        assert again == gone.split()
        engine.reset_prefix_cache()
        assert [num_encoded(engine, 5, **options) for options in requests.values()] == [1, 1, 1, 1]


def test_given_a_private_request_then_nothing_is_kept_of_its_images(models: dict[str, Any]) -> None:
    scores = SamplingParams(max_new_tokens=1, prompt_logprobs=1)
    with engine_of(models["llava"]) as engine:
        engine.generate([prompt("llava", BEFORE, 5, BEHIND)], scores)
        stats = engine.stats().encoder
    assert stats is not None
    assert (stats.num_encoded, stats.num_pictures, stats.num_bytes) == (1, 0, 0)


def test_given_a_prefix_that_ends_inside_an_image_then_the_rest_of_the_image_is_computed(
    models: dict[str, Any],
) -> None:
    given = prompt("llava", BEFORE, 5, BEHIND)
    (expected,) = answers(models["llava"], [given])

    with engine_of(models["llava"], kv_blocks=10, cache={"watermark": 0.0}) as engine:
        engine.generate([given], SamplingParams(max_new_tokens=1))
        engine.generate([list(range(20, 44))], SamplingParams(max_new_tokens=1))  # evicts the last blocks of the first
        result = engine.generate([given], GREEDY)[0]
    assert result.num_cached_tokens == 16  # 13 of the 16 tokens of the image
    assert result.token_ids == expected


def test_given_a_disk_tier_then_another_engine_finds_the_image_by_content(
    models: dict[str, Any], tmp_path: Path
) -> None:
    given, other = prompt("qwen2_vl", BEFORE, 5, BEHIND * 2), prompt("qwen2_vl", BEFORE, 6, BEHIND * 2)
    expected = answers(models["qwen2_vl"], [given, other])
    with engine_of(models["qwen2_vl"], disk=tmp_path) as engine:
        assert engine.generate([given], GREEDY)[0].token_ids == expected[0]
    with engine_of(models["qwen2_vl"], disk=tmp_path, tier_timeout=60.0) as engine:
        engine.prefetch(given).result(60)
        found = engine.generate([given], GREEDY)[0]
        different = engine.generate([other], GREEDY)[0]
        stats = engine.stats().encoder
    assert (found.token_ids, different.token_ids) == (expected[0], expected[1])
    assert found.num_cached_tokens == 16
    assert different.num_cached_tokens == len([*BEFORE, 192])  # the text before the image
    assert stats is not None
    assert stats.num_encoded == 1


# --- the processor ----------------------------------------------------------------------------------------------------


def png(color: str, width: int = 20) -> bytes:
    file = BytesIO()
    image_library.new("RGB", (width, 30), color).save(file, "PNG")
    return file.getvalue()


def test_given_a_text_and_images_of_any_form_then_the_processor_reads_them(
    models: dict[str, Any], tmp_path: Path
) -> None:
    processor = tiny_processor()
    image = image_library.open(BytesIO(png("red")))
    given = processor(text=["w3 <image> w4"], images=[image], return_tensors="pt")
    (expected,) = answers(models["llava"], [dict(given)])
    path = tmp_path / "red.png"
    path.write_bytes(png("red"))

    with engine_of(models["llava"], processor=processor) as engine:
        for form in (image, path, str(path), png("red")):
            (result,) = engine.generate(["w3 <image> w4"], GREEDY, images=[[form]])
            assert result.token_ids == expected
        stats = engine.stats().encoder
        assert stats is not None
        assert stats.num_encoded == 1
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            engine.submit("w3 <image>", images=[b"no image"])
        with pytest.raises(InvalidArgumentError, match="go with a text"):
            engine.submit([1, 2], images=[image])
        with pytest.raises(InvalidArgumentError, match="2 images"):
            engine.submit("w3 <image>", images=[image, image])


def test_given_a_directory_with_a_processor_then_conversations_may_have_images(
    models: dict[str, Any], tmp_path: Path
) -> None:
    models["llava"].set_attn_implementation("sdpa")
    models["llava"].save_pretrained(tmp_path)
    processor = tiny_processor()
    processor.save_pretrained(tmp_path)
    parts = [{"type": "text", "text": "w5"}, {"type": "image", "image": png("blue")}, {"type": "text", "text": "w6"}]
    messages = [{"role": "user", "content": parts}]
    shown = image_library.open(BytesIO(png("blue")))
    given = processor(text=["w1 w5 <image> w6 w2"], images=[shown], return_tensors="pt")
    (expected,) = answers(models["llava"], [dict(given)])

    with engine_of(str(tmp_path)) as engine:
        asked = engine.chat_prompt(messages)
        assert len(asked) == given["input_ids"].shape[1]
        assert engine.generate([asked], GREEDY)[0].token_ids == expected
        assert engine.chat_prompt([{"role": "user", "content": "w7"}]).tolist() == [1, 7, 2]
        with pytest.raises(InvalidArgumentError, match=f"token {IMAGE}, a placeholder for image input"):
            engine.chat_prompt([{"role": "user", "content": "w7 <image>"}])


def test_given_an_image_for_a_conversation_then_the_first_question_shows_it(
    models: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(png("red"))
    asked = [{"type": "image", "image": path}, {"type": "text", "text": "w5"}]

    with engine_of(models["llava"], processor=tiny_processor()) as engine:
        first = engine.generate([engine.chat_prompt([{"role": "user", "content": asked}])], GREEDY)[0].text
        talk = Conversation(engine, "", GREEDY, [path])
        talk.turn("w5")
        talk.turn("w6")
    assert capsys.readouterr().out.startswith(f"{first}\n[")
    assert [message["content"] for message in talk.messages if message["role"] == "user"] == [asked, "w6"]


# --- recordings and events --------------------------------------------------------------------------------------------


def test_given_a_recording_then_its_replay_finds_what_images_shared(models: dict[str, Any], tmp_path: Path) -> None:
    from kvpool.replay import replay_recording

    file = tmp_path / "trace.kvt"
    with engine_of(models["llava"], record=file) as engine:
        for seed in (5, 6, 5):
            engine.generate([prompt("llava", BEFORE, seed, BEHIND)], GREEDY)
        live = engine.stats().cache
    again = replay_recording(file)
    assert again.hit_tokens == live.hit_tokens
    assert sum(live.hit_tokens.values()) > 0


def test_given_events_then_they_name_the_image_by_its_key(models: dict[str, Any]) -> None:
    given = prompt("llava", BEFORE, 5, BEHIND)
    with engine_of(models["llava"], cache={"event_buffer_size": 100}) as engine:
        with engine.manager.subscribe() as subscription:
            engine.generate([given], GREEDY)
            items = [item for event in subscription.poll().events for item in getattr(event, "multimodal", ())]
        pictures_read = engine.read_prompt(given).pictures
    assert pictures_read is not None
    assert set(items) == set(pictures_read.items)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"), [(25, "cannot encode an image of 16 x 16 pixels"), (9, "gives 16 features"), (5, "gives 4")]
)
def test_given_a_number_of_image_tokens_that_does_not_fit_then_the_model_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    monkeypatch.setitem(CONFIGS["gemma3"], "mm_tokens_per_image", number)
    with pytest.raises(UnsupportedModelError, match=words) as refused:
        engine_of(vision_model("gemma3"))
    assert f"mm_tokens_per_image={number}" in str(refused.value)


def test_given_a_placeholder_without_an_image_then_the_error_says_so(models: dict[str, Any]) -> None:
    with engine_of(models["qwen2_vl"]) as engine:
        with pytest.raises(InvalidArgumentError, match=f"token {IMAGE}, a placeholder for image input: give images"):
            engine.generate([[1, 2, IMAGE, 3]])
        with pytest.raises(
            InvalidArgumentError, match=f"token {VIDEO}, a placeholder for video input: .*cannot be served"
        ):
            engine.generate([[1, 2, VIDEO, 3]])


def test_given_wrong_inputs_then_the_error_names_them(models: dict[str, Any]) -> None:
    given = prompt("qwen2_vl", BEFORE, 5, BEHIND)
    grid, pixels, ids = given["image_grid_thw"], given["pixel_values"], given["input_ids"]
    cases = [
        ({"pixel_values": pixels}, "image_grid_thw is missing"),
        ({"pixel_values_videos": pixels}, "got pixel_values_videos, too"),
        ({"pixel_values": pixels[1:], "image_grid_thw": grid}, r"must have the shape \(16, any\), got \(15, 96\)"),
        ({"pixel_values": pixels, "image_grid_thw": grid[0]}, r"must have the shape \(any, 3\)"),
        ({"pixel_values": pixels[:3], "image_grid_thw": torch.tensor([[1, 1, 3]])}, "cannot merge"),
        (
            {"pixel_values": torch.cat([pixels] * 2), "image_grid_thw": torch.cat([grid] * 2)},
            "has 4 placeholders for images .* 2 images need 8",
        ),
        ({"attention_mask": torch.zeros_like(ids)}, "hides tokens"),
    ]
    with engine_of(models["qwen2_vl"]) as engine:
        for rest, words in cases:
            with pytest.raises(InvalidArgumentError, match=words):
                engine.submit({"input_ids": ids, **rest})
        with pytest.raises(InvalidArgumentError, match="several prompts"):
            engine.submit({"input_ids": torch.ones(2, 3)})
        with pytest.raises(InvalidArgumentError, match="with input_ids"):
            engine.submit({"pixel_values": pixels})
        with pytest.raises(InvalidArgumentError, match="came without a processor"):
            engine.submit("a text", images=[pixels])
        with pytest.raises(InvalidArgumentError, match="for each of the 1 prompts"):
            engine.generate([given], images=[[], []])
        assert engine.generate([given], GREEDY)[0].token_ids  # it goes on


def test_given_a_picture_that_fits_into_no_step_then_it_is_refused_with_the_remedy(models: dict[str, Any]) -> None:
    given = prompt("gemma3", BEFORE, 5, BEHIND)
    with engine_of(models["gemma3"], scheduler=SchedulerConfig(max_tokens_per_step=6, max_sequences=4)) as engine:
        with pytest.raises(NeverFitsError, match=r"compute 4 of its tokens at once.*max_tokens_per_step=7"):
            engine.generate([given], GREEDY)
        assert engine.generate([prompt("gemma3", [1, 2, 3, 4])], GREEDY)[0].token_ids


def test_given_wrong_token_types_then_a_prompt_is_refused(models: dict[str, Any]) -> None:
    given = prompt("gemma3", BEFORE, 5, BEHIND)
    types = given["token_type_ids"]
    with engine_of(models["gemma3"]) as engine:
        with pytest.raises(InvalidArgumentError, match="10 token_type_ids do not fit 11 input_ids"):
            engine.submit({**given, "token_type_ids": types[:, 1:]})
        with pytest.raises(InvalidArgumentError, match="divide an image"):
            engine.submit({**given, "token_type_ids": types.roll(1)})
    given = prompt("paligemma", BEFORE, 5, BEHIND)
    types = given["token_type_ids"].clone()
    types[0, 1] = 1
    with engine_of(models["paligemma"]) as engine, pytest.raises(InvalidArgumentError, match="one prefix"):
        engine.submit({**given, "token_type_ids": types})


def test_given_a_model_of_text_then_images_are_refused_and_every_token_is_text(models: dict[str, Any]) -> None:

    with engine_of(tiny_model("llama")) as engine:
        with pytest.raises(InvalidArgumentError, match="llama reads text only"):
            engine.submit({"input_ids": [1, 2], "pixel_values": torch.ones(1, 3, 4, 4)})
        assert engine.stats().encoder is None
        assert engine.generate([{"input_ids": [[1, 2, 3]]}], GREEDY)[0].token_ids
