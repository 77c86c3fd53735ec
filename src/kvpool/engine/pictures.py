"""Images in requests: prompts with pictures, the cache of what the encoder made of them, and their part in a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.checks import show
from kvpool.engine.generation import Generation
from kvpool.engine.spans import Span
from kvpool.errors import InvalidArgumentError
from kvpool.model.encoders import EncoderInput
from kvpool.model.vision import ImageEncoder, Pictures, Shown
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scheduling import BatchPlan
from kvpool.storage.moving import upload

MAX_PIXELS = 2**26  # of one image; decoded, they take three bytes each


class EncoderStats(NamedTuple):
    """What the cache of encoded pictures, texts or clips holds, and how often it was of use."""

    num_pictures: int
    num_bytes: int
    max_bytes: int
    num_encoded: int  # how often the encoder ran
    num_hits: int  # how often a step found one encoded


class EncoderCache:
    """What an encoder made of its inputs, by content, at most `max_bytes`; what was not used for longest goes first."""

    def __init__(self, encode: Callable[[Any], Tensor], max_bytes: int) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._features: OrderedDict[str, Tensor] = OrderedDict()
        self._num_bytes = self._num_encoded = self._num_hits = 0

    def features(self, given: Any) -> Tensor:
        """What the encoder makes of an input, which has a `key`."""
        found = self._features.get(given.key)
        if found is not None:
            self._features.move_to_end(given.key)
            self._num_hits += 1
            return found
        found = self._encode(given)
        self._num_encoded += 1
        if found.nbytes <= self._max_bytes:
            self._features[given.key] = found
            self._num_bytes += found.nbytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._features.popitem(last=False)[1].nbytes
        return found

    def clear(self) -> None:
        """Forgets all features: the encoder has other weights now."""
        self._features.clear()
        self._num_bytes = 0

    def stats(self) -> EncoderStats:
        """Counts since the engine began, and what is held now."""
        return EncoderStats(len(self._features), self._num_bytes, self._max_bytes, self._num_encoded, self._num_hits)


class StepInputs(NamedTuple):
    """What pictures change in a step."""

    positions: Int64Array  # of its tokens; [axis, token] where the model has several
    shown: Shown | None  # the pictures that it computes
    spans: Sequence[Span]  # tokens that see one another in both directions


class StepPictures:
    """What pictures change in steps: positions of tokens, and embeddings of placeholders. Used by the engine's thread."""

    def __init__(
        self,
        encoder: ImageEncoder,
        max_bytes: int,
        device: torch.device,
        generations: Mapping[Hashable, Generation],
    ) -> None:
        self.cache = EncoderCache(encoder.encode, max_bytes)
        self._generations = generations  # by request id
        self._num_axes = encoder.num_axes
        self._device = device

    def of(self, plan: BatchPlan) -> StepInputs:
        """What pictures change in this step."""
        positions = plan.positions
        if self._num_axes > 1:
            positions = np.broadcast_to(positions, (self._num_axes, len(positions))).copy()
        rows: list[Int64Array] = []
        features: list[Tensor] = []
        spans: list[Span] = []
        for row, sequence in enumerate(plan.sequences):
            generation = self._generations.get(sequence.request.id)
            pictures = None if generation is None else generation.pictures
            if pictures is None:
                continue
            begin, end = plan.query_start[row : row + 2].tolist()
            numbers = plan.positions[begin:end]
            if self._num_axes > 1:
                positions[:, begin:end] = pictures.positions_at(numbers)
            for picture in pictures.pictures:
                first, last = np.searchsorted(picture.places, (numbers[0], numbers[-1] + 1)).tolist()
                if first < last:
                    rows.append(picture.places[first:last] + (begin - int(numbers[0])))
                    features.append(self.cache.features(picture)[:, first:last])
            for first, last in pictures.together:
                start, stop = max(first, int(numbers[0])), min(last, int(numbers[-1]) + 1)
                if stop - start > 1:
                    spans.append(Span(row, start, stop))
        shown = None
        if rows:
            shown = Shown(upload(np.concatenate(rows), self._device), torch.cat(features, dim=1))
        return StepInputs(positions, shown, spans)


@dataclass(frozen=True, eq=False)
class PicturedPrompt:
    """The token ids of a prompt, and the pictures behind its placeholders.

    In an encoder-decoder model they are those of the decoder, and `source` is what the encoder reads.
    """

    token_ids: Int32Array
    pictures: Pictures | None = None
    source: EncoderInput | None = None

    @property
    def beside(self) -> dict[str, Any]:
        """What a request has beside its tokens."""
        return {"pictures": self.pictures, "source": self.source}

    def __len__(self) -> int:
        return len(self.token_ids)


def chat_images(messages: Sequence[Any]) -> list[Any]:
    """The images of a conversation, in order: parts of its messages such as `{"type": "image", "image": ...}`."""
    parts = [part for message in messages if isinstance(message, Mapping) for part in message.get("content") or ()]
    return [part["image"] for part in parts if isinstance(part, Mapping) and "image" in part]


def in_parts(messages: Sequence[Any]) -> list[Any]:
    """The messages as templates of models that take images read them: lists of parts, without the images themselves."""
    spoken: list[Any] = []
    for message in messages:
        content = message.get("content") or "" if isinstance(message, Mapping) else None
        if content is None:  # refused where the template is used
            spoken.append(message)
            continue
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        shown = [{"type": "image"} if isinstance(part, Mapping) and "image" in part else part for part in parts]
        spoken.append({**message, "content": shown})
    return spoken


def chat_text_tokens(text: str, tokenizer: Any) -> Sequence[int]:
    """The token ids of what the chat template of a processor wrote."""
    ids: Sequence[int] = tokenizer(text, **_marks(text, tokenizer))["input_ids"]
    return ids


def _marks(text: str, tokenizer: Any) -> dict[str, bool]:
    """Keeps a tokenizer from writing the mark of the beginning again, if a chat template wrote it."""
    mark = getattr(tokenizer, "bos_token", None)
    return {"add_special_tokens": not (mark and text.startswith(mark))}


def of_prompts(name: str, given: object, num_prompts: int) -> list[Sequence[Any]]:
    """The images or clips of each prompt."""
    if given is None:
        return [()] * num_prompts
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else None
    if each is None or len(each) != num_prompts or not all(isinstance(some, Sequence) for some in each):
        raise InvalidArgumentError(
            f"{name} must be a list of {name} for each of the {num_prompts} prompts, got {show(given)}"
        )
    return each


def check_images(processor: Any, encoder: ImageEncoder) -> None:
    """Raises InvalidArgumentError if the model takes no images, or came without what reads them."""
    if encoder.refusal is not None:
        raise InvalidArgumentError(encoder.refusal)
    if processor is None:
        raise InvalidArgumentError(
            "this model came without a processor: use Engine(processor=...), or give input_ids and pixel_values"
        )


def processed(prompt: Any, images: Sequence[Any], processor: Any) -> Mapping[str, Any]:
    """What the model's processor makes of a text and its images."""
    if not isinstance(prompt, str):
        raise InvalidArgumentError(
            f"images go with a text, got {show(prompt)}; or give what the processor makes of both"
        )
    opened = [open_image(image) for image in images]
    marks = _marks(prompt, getattr(processor, "tokenizer", None))
    try:
        found: Mapping[str, Any] = processor(text=[prompt], images=opened, return_tensors="pt", **marks)
    except Exception as error:  # each processor checks images in its own way
        raise InvalidArgumentError(
            f"the model's processor refuses this text with {len(opened)} images: {error}"
        ) from error
    return found


def open_image(image: Any) -> Any:
    """An image of a file or its bytes, decoded; anything else is left to the processor."""
    if not isinstance(image, (str, Path, bytes)):
        return image
    try:
        from PIL import Image
    except ImportError as error:
        raise InvalidArgumentError("reading images needs Pillow: pip install 'kvpool[vision]'") from error
    try:
        with Image.open(BytesIO(image) if isinstance(image, bytes) else image) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise InvalidArgumentError(f"an image of {opened.width} x {opened.height} pixels is over {MAX_PIXELS}")
            return opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        name = "" if isinstance(image, bytes) else f" {image}"
        raise InvalidArgumentError(f"the image{name} cannot be read: {error}") from error


def processor_output(given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The `input_ids` of one prompt, and what else a processor gave for it."""
    rest = dict(given)
    tokens = rest.pop("input_ids", None)
    if tokens is None:
        raise InvalidArgumentError(
            f"a prompt that is a mapping is the output of a processor, with input_ids; got {show(sorted(rest))}"
        )
    tokens = np.asarray(tokens)
    mask = rest.get("attention_mask")
    if tokens.ndim == 2 and len(tokens) != 1:
        raise InvalidArgumentError(f"input_ids of shape {tokens.shape} are several prompts; give one mapping for each")
    if mask is not None and not np.asarray(mask).all():
        raise InvalidArgumentError("the attention_mask hides tokens; process each prompt without padding")
    return tokens.reshape(-1), rest
