"""Encoder-decoder models in the engine: tokens equal those of transformers, inputs are encoded once and cached by content."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from encoder_models import CONFIGS, encoder_model, own_answer, sound  # noqa: E402
from fake_graphs import FakeRecorder, ReplanningBackend  # noqa: E402
from models import tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.engine.runner import ModelRunner  # noqa: E402
from kvpool.errors import (  # noqa: E402
    ConfigError,
    InvalidArgumentError,
    NeverFitsError,
    StepError,
    UnsupportedModelError,
)
from kvpool.model.encoders import InputEncoder  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

COUNT = 12
GREEDY = SamplingParams(max_new_tokens=COUNT, ignore_eos=True)
NO_END = 120  # no token has this number
PREFIX = [7, 8, 9, 10, 11, 12, 13, 14]
FAMILIES = tuple(CONFIGS)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Models by family, made when they are first used."""

    class Models(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            self[name] = encoder_model(name)
            return self[name]

    return Models()


def source(family: str, number: int) -> dict[str, Any]:
    """What a tokenizer or a feature extractor gives. Texts have different lengths."""
    if family == "whisper":
        return {"input_features": sound(number)}
    generator = torch.Generator().manual_seed(number)
    return {"input_ids": torch.randint(3, 119, (1, 3 + 5 * number), generator=generator)}


def begun(family: str, number: int, *tokens: int) -> dict[str, Any]:
    """The same, with tokens for the decoder to begin with."""
    return {
        **source(family, number),
        "decoder_input_ids": torch.tensor([[CONFIGS[family]["decoder_start_token_id"], *tokens]]),
    }


def several(family: str) -> list[dict[str, Any]]:
    """Inputs of different lengths, one twice, and beginnings of the decoder: the same behind different inputs."""
    plain = [source(family, number) for number in (1, 4, 2, 1)]
    return [*plain, begun(family, 1, *PREFIX), begun(family, 2, *PREFIX)]


def answers(model: Any, prompts: list[dict[str, Any]], count: int = COUNT) -> list[list[int]]:
    return [own_answer(model, given, count, eos_token_id=NO_END) for given in prompts]


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, **{"kv_blocks": 160, "block_size": 4, "device": "cpu", **options})


def served(engine: Engine, prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(prompts, GREEDY)]


# --- tokens are those of transformers ---------------------------------------------------------------------------------


@pytest.mark.transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_given_several_inputs_then_tokens_equal_those_of_transformers(family: str, models: dict[str, Any]) -> None:
    """With steps of 5 tokens, the beginnings of the decoder are computed in chunks."""
    prompts = several(family)
    expected = answers(models[family], prompts)
    assert len({*map(tuple, expected[:4])}) == 3  # inputs change the answer

    limits = SchedulerConfig(max_tokens_per_step=5, max_sequences=4)
    with engine_of(models[family], scheduler=limits) as engine:
        assert served(engine, prompts) == expected
        assert served(engine, prompts) == expected  # from the cache
        engine.manager.check()


def test_sound_reaches_an_encoder_in_bfloat16() -> None:
    given = source("whisper", 1)
    assert given["input_features"].dtype == torch.float32
    with engine_of(encoder_model("whisper").to(torch.bfloat16)) as engine:
        assert len(served(engine, [given])[0]) == COUNT


@pytest.mark.parametrize("family", ["t5", "whisper"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_given_too_little_memory_then_preempted_requests_end_with_the_same_tokens(
    mode: str, family: str, models: dict[str, Any]
) -> None:
    prompts = [begun(family, 1 + number % 3, number + 5, *PREFIX) for number in range(6)]
    expected = answers(models[family], prompts)
    limits = SchedulerConfig(max_tokens_per_step=32, max_sequences=8, preemption=mode)
    memory = {"kv_blocks": 30 if family == "t5" else 40, "host_bytes": 2**20, "cache": {"watermark": 0.0}}

    with engine_of(models[family], scheduler=limits, **memory) as engine:
        all_there = threading.Event()
        engine.after_step(lambda: all_there.wait() and None)
        requests = [engine.submit(given, GREEDY) for given in prompts]
        all_there.set()
        assert [request.result().token_ids for request in requests] == expected
        assert engine.stats().scheduler.preemptions > 0
        engine.manager.check()


def test_given_samples_beams_and_drafts_then_tokens_are_those_of_transformers(models: dict[str, Any]) -> None:
    prompts = several("t5")
    expected = answers(models["t5"], prompts)
    by_beams = own_answer(models["t5"], prompts[1], COUNT, num_beams=3, eos_token_id=NO_END)

    with engine_of(models["t5"], draft_tokens=3) as engine:
        assert served(engine, prompts) == expected
        assert engine.stats().scheduler.draft_tokens > 0
    with engine_of(models["t5"]) as engine:
        both = replace(GREEDY, n=2)
        for result, tokens in zip(engine.generate(prompts, both), expected, strict=True):
            assert [sample.token_ids for sample in result.samples] == [tokens, tokens]
        (best,) = engine.generate(prompts[1:2], replace(GREEDY, num_beams=3))
        assert best.token_ids == by_beams
        engine.manager.check()


def test_given_a_fork_then_it_goes_on_with_the_same_input(models: dict[str, Any]) -> None:
    given = source("t5", 4)
    (expected,) = answers(models["t5"], [given])

    with engine_of(models["t5"]) as engine:
        first = engine.submit(given, replace(GREEDY, max_new_tokens=4))
        first.result()
        assert engine.fork(first, replace(GREEDY, max_new_tokens=COUNT - 4)).result().token_ids == expected[4:]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_given_graphs_then_steps_replay_with_the_inputs_of_their_sequences(
    family: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FakeRecorder()

    class Recorded(ModelRunner):
        def __init__(self, model: Any, shape: Any, plane: Any, backend: Any, **options: Any) -> None:
            graphs = {"recorder": recorder, "cuda_graphs": True}
            super().__init__(model, shape, plane, ReplanningBackend(), **{**options, **graphs})

    monkeypatch.setattr("kvpool.engine.engine_parts.ModelRunner", Recorded)
    prompts = several(family)

    with engine_of(models[family]) as engine:
        assert served(engine, prompts) == answers(models[family], prompts)
    assert recorder.num_replays > 0


def test_given_an_end_token_then_the_answer_ends_there(models: dict[str, Any]) -> None:
    given = source("t5", 4)
    whole = own_answer(models["t5"], given, COUNT, eos_token_id=NO_END)
    cut = SamplingParams(max_new_tokens=COUNT, stop_token_ids=whole[5:6])

    with engine_of(models["t5"]) as engine:
        (result,) = engine.generate([given], cut)
    assert result.finish_reason == "stop"
    assert result.token_ids == own_answer(models["t5"], given, COUNT, eos_token_id=[1, whole[5]])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_given_a_gpu_then_tokens_equal_those_of_transformers(family: str, models: dict[str, Any]) -> None:
    prompts = several(family)
    expected = answers(models[family], prompts)

    with engine_of(models[family], device="cuda") as engine:
        assert served(engine, prompts) == expected
        assert served(engine, prompts) == expected  # from the cache
        assert engine.graphs.num_graphs > 0
        engine.manager.check()


def test_given_tokens_that_the_model_must_not_write_then_it_does_not(models: dict[str, Any]) -> None:
    given = source("whisper", 1)
    (plain,) = answers(models["whisper"], [given])
    model = encoder_model("whisper")
    model.generation_config.suppress_tokens = plain[2:4]
    model.generation_config.begin_suppress_tokens = plain[:1]
    (expected,) = answers(model, [given])
    assert expected != plain

    with engine_of(model) as engine:
        assert served(engine, [given]) == [expected]
    with engine_of(model, model_defaults=False) as engine:
        assert served(engine, [given]) == [plain]


# --- what is cached ---------------------------------------------------------------------------------------------------


def test_given_equal_inputs_then_the_encoder_runs_once_and_only_they_share_prefixes(models: dict[str, Any]) -> None:
    same, other = begun("t5", 4, *PREFIX), begun("t5", 5, *PREFIX)

    with engine_of(models["t5"]) as engine:
        first, again, different = (engine.generate([given], GREEDY)[0] for given in (same, same, other))
        assert [result.num_cached_tokens for result in (first, again, different)] == [0, 8, 0]
        assert first.token_ids == again.token_ids != different.token_ids
        found = engine.stats().encoder
        assert found is not None
        assert (found.num_encoded, found.num_hits) == (2, 1)
        assert engine.cached_tokens(same) == {0: 8}


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_given_requests_with_equal_inputs_then_one_set_of_blocks_serves_all(
    family: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins differently, so that their decoders share nothing."""
    prompts = [begun(family, 4, 7 + number) for number in range(4)]
    expected = answers(models[family], prompts)
    held: list[int] = []
    written: list[Any] = []
    project = InputEncoder.keys_and_values

    def look(chunk: Any) -> None:
        held.append(len({block for handle in engine.manager.handles for block in handle.block_ids(1)}))

    with engine_of(models[family]) as engine:
        all_there = threading.Event()
        monkeypatch.setattr(InputEncoder, "keys_and_values", lambda *given: written.append(given) or project(*given))
        engine.after_step(lambda: all_there.wait() and None)
        requests = [engine.submit(given, GREEDY, on_chunk=look) for given in prompts]
        all_there.set()
        assert [request.result().token_ids for request in requests] == expected
        assert max(held) == engine.config.blocks_for(1, cross_tokens=requests[0].source.num_tokens)[1]
        assert len(written) == 1
        engine.manager.check()


def test_given_an_input_that_cannot_be_encoded_then_its_requests_end_and_the_next_ones_are_answered(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = source("t5", 4)
    (expected,) = answers(models["t5"], [given])

    with engine_of(models["t5"]) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(InputEncoder, "keys_and_values", lambda *_: 1 / 0)
            with pytest.raises(StepError, match="division by zero"):
                engine.generate([given, given], GREEDY)
        assert served(engine, [given]) == [expected]
        engine.manager.check()


def test_given_changed_weights_then_inputs_are_encoded_again() -> None:
    model = encoder_model("t5")
    given = begun("t5", 4, *PREFIX)
    with engine_of(model) as engine:
        engine.generate([given], GREEDY)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        assert [engine.generate([given], GREEDY)[0].token_ids] == answers(model, [given])


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_given_token_ids_then_they_are_the_encoders_and_the_decoder_begins_as_the_model_says(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = source("bart", 2)
    monkeypatch.setattr(models["bart"].generation_config, "forced_bos_token_id", 5)
    (expected,) = answers(models["bart"], [given], COUNT + 1)

    with engine_of(models["bart"]) as engine:
        (result,) = engine.generate([given["input_ids"][0].tolist()], GREEDY)
        assert result.prompt_token_ids.tolist() == [1, 5]
        assert [5, *result.token_ids] == expected
        without_start = {**given, "decoder_input_ids": [[6, 7]]}
        assert engine.generate([without_start], GREEDY)[0].prompt_token_ids.tolist() == [1, 6, 7]


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_given_a_directory_then_the_model_is_loaded_with_its_encoder(
    family: str, models: dict[str, Any], tmp_path: Path
) -> None:
    models[family].save_pretrained(tmp_path)
    given = source(family, 2)

    with engine_of(tmp_path) as engine:
        assert served(engine, [given]) == answers(models[family], [given])


def test_given_a_clip_then_the_processor_reads_it_and_the_prompt_is_the_decoders(models: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, hop_length=266, chunk_length=1)
    clip = torch.randn(12000, generator=torch.Generator().manual_seed(5)).numpy()
    features = extractor(clip, sampling_rate=16000, return_tensors="pt")["input_features"]
    (expected,) = answers(models["whisper"], [{"input_features": features}])

    with engine_of(models["whisper"], processor=extractor) as engine:
        (result,) = engine.generate([""], GREEDY, audio=[[clip]])
        assert result.token_ids == expected
        begun_by = engine.submit([1, 7, 8], GREEDY, audio=[clip]).result()
        assert begun_by.prompt_token_ids.tolist() == [1, 7, 8]
        for audio, message in (
            ([clip, clip], "one clip"),
            ([[[0.0]]], "array of samples"),
            ([[0.0] * 16001], "16001 samples is too long"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                engine.submit("", audio=audio)
    with engine_of(models["whisper"]) as engine, pytest.raises(InvalidArgumentError, match="without a processor"):
        engine.submit("", audio=[clip])


def test_given_what_the_encoder_does_not_take_then_one_line_says_so(models: dict[str, Any]) -> None:
    with engine_of(models["t5"]) as engine:
        for prompt, options, message in (
            ({"input_ids": [[3]], "pixel_values": [[1.0]]}, {}, "pixel_values"),
            ({"decoder_input_ids": [[3]]}, {}, "input_ids"),
            ([3, 500], {}, "token 500"),
            ([3], {"audio": [[[0.0]]]}, "takes no audio"),
            ([3], {"images": [["cat.png"]]}, "reads text only"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                engine.generate([prompt], **options)
        for call in (
            lambda: engine.embed([[3]]),
            lambda: engine.load_adapter("a", "b"),
            lambda: engine.invalidate([3, 4]),
        ):
            with pytest.raises(InvalidArgumentError, match="encoder-decoder"):
                call()
        with pytest.raises(NeverFitsError):
            engine.generate([[3] * 700])
    with engine_of(models["bart"]) as engine, pytest.raises(InvalidArgumentError, match="reads up to 96"):
        engine.generate([[3] * 97])
    with engine_of(models["whisper"]) as engine:
        for prompt, message in (("", "takes audio"), ({"input_features": sound(1)[..., :50]}, "shape")):
            with pytest.raises(InvalidArgumentError, match=message):
                engine.generate([prompt])


@pytest.mark.parametrize("options", [{"compile": True}, {"adapters": {"a": "b"}}, {"disk": "cache"}], ids=str)
def test_given_what_is_not_served_with_an_encoder_then_the_engine_says_so(
    options: dict[str, Any], models: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="encoder-decoder"):
        engine_of(models["t5"], **options)


def test_given_an_encoder_decoder_model_then_it_cannot_draft_or_be_a_plain_model(models: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="has an encoder"):
        engine_of(tiny_model("llama"), draft=models["t5"])
    with pytest.raises(ConfigError, match="without draft"):
        engine_of(models["t5"], draft=tiny_model("llama"))
