"""Encoder-decoder models in the engine: prompts that their encoder reads, and its keys and values in blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvpool.checks import show
from kvpool.config.layers import GroupKind
from kvpool.engine.generation import Generation
from kvpool.engine.params import SamplingParams
from kvpool.engine.pictures import EncoderCache, PicturedPrompt
from kvpool.engine.prompts import Prompts, prompt_tokens
from kvpool.engine.runner import ModelRunner
from kvpool.engine.settings import EngineSettings
from kvpool.engine.sound import SAMPLING_RATE
from kvpool.errors import ConfigError, InvalidArgumentError, UnsupportedModelError
from kvpool.model.encoders import InputEncoder
from kvpool.model.vision import ImageEncoder
from kvpool.pools.arrays import Int32Array
from kvpool.scheduling import ScheduledSequence


class EncodedInputs:
    """What encoders made of inputs, by content, and the blocks of requests. Used by the engine's thread."""

    def __init__(
        self, encoder: InputEncoder, max_bytes: int, runner: ModelRunner, generations: Mapping[Hashable, Generation]
    ) -> None:
        self.cache = EncoderCache(encoder.encode, max_bytes)
        self._generations = generations  # by request id
        self._encoder = encoder
        self._plane = runner.plane
        self._layer_of = runner.layer_of_number
        self._groups = [group.index for group in runner.plane.config.groups if group.kind is GroupKind.CROSS]

    def write(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Writes the keys and values of the encoder's tokens for sequences that came, once for all with equal inputs."""
        for sequence in sequences:
            generation = self._generations.get(sequence.request.id)
            if generation is None or generation.source is None:
                continue
            handle = sequence.live_handle()
            if handle.stats.swaps or handle.num_cached_encoder_tokens:  # from the host, or filled for another one
                continue
            slots = np.full((len(self._plane.config.groups), handle.encoder_tokens), -1, np.int32)
            for group in self._groups:
                slots[group] = self._plane.cross_slots(handle, group)
            prepared = self._plane.prepare(slots)
            hidden = self.cache.features(generation.source)
            for number, (k, v) in self._encoder.keys_and_values(hidden).items():
                self._plane.write(prepared, k, v, self._layer_of[number])


class EncoderPrompts(Prompts):
    """Reads prompts of an encoder-decoder model: what its encoder takes, and the tokens that its decoder begins with."""

    def __init__(self, model: Any, encoder: InputEncoder, tokenizer: Any, processor: Any, images: ImageEncoder) -> None:
        num_embeddings = model.get_input_embeddings().weight.shape[0]
        super().__init__(encoder.family, tokenizer, processor, num_embeddings, images)
        self._model = model
        self._encoder = encoder
        self._decoder_vocab_size = model.get_output_embeddings().weight.shape[0]
        self._begin = decoder_begin(model)

    def read(self, prompt: Any, images: Sequence[Any] = (), audio: Sequence[Any] = ()) -> PicturedPrompt:
        """The decoder's tokens of a prompt, with the input of the encoder."""
        if isinstance(prompt, PicturedPrompt) or len(images):  # which it refuses
            return super().read(prompt, images, audio)
        given = dict(prompt) if isinstance(prompt, Mapping) else {}
        begin = given.pop("decoder_input_ids", None)
        if self._encoder.hears:
            if not isinstance(prompt, Mapping):
                begin = self._text(prompt) if isinstance(prompt, str) else prompt
            if len(audio):
                given["input_features"] = self._features(audio)
        elif len(audio):
            raise InvalidArgumentError(f"{self._encoder.family} takes no audio")
        else:
            tokens = self.token_ids(given if isinstance(prompt, Mapping) else prompt)
            given = {**given, "input_ids": tokens}
        return PicturedPrompt(self._decoder_tokens(begin), source=self._encoder.input(given))

    def _text(self, text: str) -> Any:
        if not text:
            return getattr(self._tokenizer, "prefix_tokens", None)
        if not callable(self._tokenizer):
            raise InvalidArgumentError("this model came without a tokenizer: give token ids, or Engine(tokenizer=...)")
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _features(self, audio: Sequence[Any]) -> Any:
        if len(audio) != 1:
            raise InvalidArgumentError(f"{self._encoder.family} takes one clip a prompt, got {len(audio)}")
        extractor = self._extractor()
        clip = np.asarray(audio[0], np.float32)
        if clip.ndim != 1 or not len(clip):
            raise InvalidArgumentError(
                f"a clip is an array of samples, {SAMPLING_RATE} a second, got one of shape {clip.shape}"
            )
        if len(clip) > extractor.n_samples:
            raise InvalidArgumentError(
                f"a clip of {len(clip)} samples is too long: {self._encoder.family} hears {extractor.n_samples} at once; "
                "cut it, see kvpool.engine.sound.windows"
            )
        return extractor(clip, sampling_rate=SAMPLING_RATE, return_tensors="pt")["input_features"]

    def _extractor(self) -> Any:
        extractor = getattr(self._processor, "feature_extractor", self._processor)
        if extractor is None:
            raise InvalidArgumentError(
                "this model came without a processor: use Engine(processor=...), or give input_features"
            )
        return extractor

    def speech(self) -> Speech:
        """How to ask for what is said in a clip."""
        if not self._encoder.hears:
            raise UnsupportedModelError(f"{self._encoder.family} takes no audio")
        return Speech(self._model, self._extractor().n_samples)

    def _decoder_tokens(self, begin: Any) -> Int32Array:
        """The tokens of the decoder, from its start on; as in transformers, a beginning without the start gets it."""
        if begin is None or not len(begin):
            return np.array(self._begin, np.int32)
        tokens = prompt_tokens(np.asarray(begin).reshape(-1), None, self._decoder_vocab_size)
        return tokens if tokens[0] == self._begin[0] else np.concatenate([self._begin[:1], tokens]).astype(np.int32)


class Speech:
    """How a model of Whisper is asked: the tokens that its decoder begins with, as its generation configuration says."""

    def __init__(self, model: Any, num_samples: int) -> None:
        config = model.generation_config
        self.num_samples = num_samples  # that it hears at once
        self.languages: dict[str, int] = {
            name.strip("<|>"): token for name, token in (getattr(config, "lang_to_id", None) or {}).items()
        }
        self._tasks: dict[str, int] = getattr(config, "task_to_id", None) or {}
        self._without_times: int | None = getattr(config, "no_timestamps_token_id", None)
        self._start = decoder_begin(model)[:1]

    def language(self, name: str) -> str:
        """The code of a language that the model knows, from its code or its English name."""
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        code: str = TO_LANGUAGE_CODE.get(name.lower(), name.lower())
        if code not in self.languages:
            known = ", ".join(sorted(self.languages)) or "none, because it was made for one language only"
            raise InvalidArgumentError(f"the model knows no language {show(name)}; it knows {known}")
        return code

    def begin(self, language: str | None, task: str) -> list[int]:
        """What the decoder begins with to write what is said, without times. `language` is a code."""
        begin = list(self._start)
        if language is not None:
            begin += [self.languages[language], *([self._tasks[task]] if task in self._tasks else [])]
        elif task != "transcribe":
            raise InvalidArgumentError("the model was made for one language only and does not translate")
        return begin if self._without_times is None else [*begin, self._without_times]

    def detection(self) -> tuple[list[int], SamplingParams]:
        """A beginning of the decoder, and how to sample one token behind it: that of the language."""
        allowed = list(self.languages.values())

        def only_languages(token_ids: Any, scores: Any) -> Any:
            masked = scores.new_full(scores.shape, float("-inf"))
            masked[:, allowed] = scores[:, allowed]
            return masked

        return list(self._start), SamplingParams(max_new_tokens=1, temperature=0.0, logits_processors=[only_languages])

    def code_of(self, token: int) -> str:
        """The code of the language that a token stands for."""
        return next(code for code, each in self.languages.items() if each == token)


def decoder_begin(model: Any) -> list[int]:
    """The tokens that a decoder begins with: its start, and a first one that the model wants in every answer."""
    places = getattr(model, "generation_config", None), model.config
    named = [getattr(place, name, None) for name in ("decoder_start_token_id", "bos_token_id") for place in places]
    start = next((token for token in named if token is not None), None)
    if not isinstance(start, int):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not say what its decoder begins with ({show(start)}); set "
            "model.generation_config.decoder_start_token_id"
        )
    first = getattr(places[0], "forced_bos_token_id", None)
    return [start] if first is None else [start, int(first)]


def check_settings(settings: EngineSettings) -> None:
    """Refuses settings that an engine of an encoder-decoder model cannot have."""
    not_served = {
        "draft": settings.draft is not None,
        "adapters": bool(settings.adapters),
        "compile": settings.compile,
        "tiers, disk and remote": any((settings.tiers, settings.disk, settings.remote)),
    }
    for name, is_set in not_served.items():
        if is_set:
            raise ConfigError(f"an encoder-decoder model is served without {name}; leave it out")
