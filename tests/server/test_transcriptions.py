"""Sound behind the server, through OpenAI's client: a tiny random Whisper whose words are w0, w1, ..."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
import wave
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from encoder_models import encoder_model, own_answer
from live import Live, openai_client, until, word_tokenizer
from transformers import WhisperFeatureExtractor

from kvpool.engine import Engine
from kvpool.engine.sound import windows
from kvpool.server import Limits, ServedModel, create_app

LANGUAGES = {"<|en|>": 100, "<|de|>": 101, "<|fr|>": 102}
TASKS = {"transcribe": 103, "translate": 104}
RATE = 16_000  # and the samples that the tiny model hears at once
EXTRACTOR = WhisperFeatureExtractor(feature_size=8, hop_length=266, chunk_length=1)


def sound(num_samples: int, seed: int = 1) -> Any:
    """Noise as a file of 16 bits has it."""
    given = np.random.default_rng(seed).uniform(-0.5, 0.5, num_samples)
    return np.round(given * 32768).astype("<i2")


def wav(samples: Any, rate: int = RATE) -> tuple[str, bytes]:
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(rate)
        opened.writeframes(samples.tobytes())
    return "clip.wav", file.getvalue()


def features(samples: Any) -> Any:
    return EXTRACTOR(samples.astype(np.float32) / 32768, sampling_rate=RATE, return_tensors="pt")["input_features"]


@pytest.fixture(scope="module")
def whisper() -> Any:
    model = encoder_model("whisper")
    told = {"lang_to_id": LANGUAGES, "task_to_id": TASKS, "no_timestamps_token_id": 105, "is_multilingual": True}
    for name, value in told.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.fixture(scope="module")
def hearing(whisper: Any) -> Iterator[Engine]:
    options = {"tokenizer": word_tokenizer(), "processor": EXTRACTOR, "device": "cpu"}
    with Engine(whisper, **options, kv_blocks=256, block_size=4) as made:
        yield made


@pytest.fixture
def live(hearing: Engine) -> Iterator[Live]:
    made = Live(create_app([ServedModel("whisper", hearing)], limits=Limits(requests=3)))
    yield made
    made.stop()
    until(lambda: hearing.stats().num_running == 0)
    hearing.manager.check()


def expected(model: Any, samples: Any, language: str, task: str = "transcribe") -> list[int]:
    """The tokens of transformers behind the beginning that the form asks for, up to the last position."""
    begin = [1, LANGUAGES[f"<|{language}|>"], TASKS[task], 105]
    given = {"input_features": features(samples), "decoder_input_ids": torch.tensor([begin])}
    return own_answer(model, given, 61)  # the last one needs no position


def words(text: str) -> list[int]:
    return [int(word) for word in text.replace("w", " ").split()]


def test_given_a_clip_then_its_text_is_that_of_transformers_in_every_form(live: Live, whisper: Any) -> None:
    clip = sound(12_000)
    tokens = expected(whisper, clip, "de")
    assert tokens != expected(whisper, clip, "en")
    with openai_client(live) as client:
        ask = client.audio.transcriptions.create
        asked = {"model": "whisper", "file": wav(clip), "language": "de"}
        whole = ask(**asked)
        assert words(whole.text) == [token for token in tokens if token != 1]
        assert ask(**asked, response_format="text") == whole.text + "\n"
        assert ask(**{**asked, "language": "German"}, temperature=0.0).text == whole.text
        *parts, end = ask(**asked, stream=True)
        assert "".join(part.delta for part in parts).strip() == end.text == whole.text
        assert len(parts) > 1
        translated = ask(**asked, extra_body={"task": "translate"})
        assert words(translated.text) == [t for t in expected(whisper, clip, "de", "translate") if t != 1]


def test_given_a_long_clip_then_its_parts_are_written_one_behind_the_other(live: Live, whisper: Any) -> None:
    clip = sound(40_000, seed=3)
    cuts = list(windows(clip.astype(np.float32), RATE))
    assert len(cuts) == 3
    first = clip[: cuts[0][1]]
    (spoken,) = (name for name, token in LANGUAGES.items() if token == whisper.detect_language(features(first)).item())
    with openai_client(live) as client:
        asked = {"model": "whisper", "file": wav(clip)}
        found = client.audio.transcriptions.create(**asked, response_format="verbose_json")
        *_, end = client.audio.transcriptions.create(**asked, stream=True)
    assert (found.task, found.duration) == ("transcribe", 2.5)
    assert found.language == {"<|en|>": "english", "<|de|>": "german", "<|fr|>": "french"}[spoken]
    assert [(each.start, each.end) for each in found.segments] == [(a / RATE, b / RATE) for a, b in cuts]
    tokens = [expected(whisper, clip[start:stop], spoken.strip("<|>")) for start, stop in cuts]
    assert [each.tokens for each in found.segments] == tokens
    assert found.text == "".join(each.text for each in found.segments).strip()
    assert end.text == found.text
    assert all(each.avg_logprob < 0 < each.compression_ratio for each in found.segments)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(openai.BadRequestError) as error:
        call()
    return str(error.value.body["message"])


def test_given_what_cannot_be_done_then_one_line_says_so(live: Live) -> None:
    clip = wav(sound(8_000))
    with openai_client(live) as client:
        for options, message in (
            ({"file": ("a.mp3", b"ID3\x04 and so on")}, "no WAV file"),
            ({"language": "tlh"}, "no language 'tlh'; it knows de, en, fr"),
            ({"response_format": "srt"}, "response_format"),
            ({"temperature": 3}, "temperature"),
            ({"prompt": "Earlier text."}, "prompt"),
            ({"timestamp_granularities": ["word"]}, "no such field"),
            ({"file": wav(sound(4 * RATE))}, "limit of 3 seconds"),
        ):
            asked = {"model": "whisper", "file": clip, **options}
            assert message in refused(lambda asked=asked: client.audio.transcriptions.create(**asked))


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", b"", "multipart/form-data"),
        ("multipart/form-data; boundary=x", b"--x\r\n", "does not end"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nhi\r\n--x--", "a name of its own"),
        ("multipart/form-data; boundary=x", b"--x--", "no part 'file'"),
    ],
)
def test_given_a_broken_form_then_it_is_refused(live: Live, kind: str, body: bytes, message: str) -> None:
    request = urllib.request.Request(f"{live.url}/v1/audio/transcriptions", body, {"content-type": kind})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    assert error.value.code == 400
    assert message in json.loads(error.value.read())["error"]["message"]


def test_given_a_model_of_text_then_it_takes_no_sound(serve: Callable[..., Live]) -> None:
    with openai_client(serve()) as client:
        ask = client.audio.transcriptions.create
        assert "takes no audio" in refused(lambda: ask(model="tiny", file=wav(sound(8_000))))
