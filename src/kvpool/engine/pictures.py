"""Images in requests: prompts with pictures, the cache of what the encoder made of them, and their part in a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.engine.generation import Generation
from kvpool.engine.spans import Span
from kvpool.model.vision import ImageEncoder, Picture, Pictures, Shown
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scheduling import BatchPlan
from kvpool.storage.moving import upload


class EncoderStats(NamedTuple):
    """What the cache of encoded pictures holds, and how often it was of use."""

    num_pictures: int
    num_bytes: int
    max_bytes: int
    num_encoded: int  # how often the encoder ran
    num_hits: int  # how often a step found one encoded


class EncoderCache:
    """What the encoder made of pictures, by content, at most `max_bytes`; what was not used for longest goes first."""

    def __init__(self, encode: Callable[[Picture], Tensor], max_bytes: int) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._features: OrderedDict[str, Tensor] = OrderedDict()
        self._num_bytes = self._num_encoded = self._num_hits = 0

    def features(self, picture: Picture) -> Tensor:
        """What the encoder makes of a picture."""
        found = self._features.get(picture.key)
        if found is not None:
            self._features.move_to_end(picture.key)
            self._num_hits += 1
            return found
        found = self._encode(picture)
        self._num_encoded += 1
        if found.nbytes <= self._max_bytes:
            self._features[picture.key] = found
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
    """The token ids of a prompt, and the pictures behind its placeholders."""

    token_ids: Int32Array
    pictures: Pictures | None = None

    @property
    def beside(self) -> dict[str, Any]:
        """What a request has beside its tokens."""
        return {"pictures": self.pictures}

    def __len__(self) -> int:
        return len(self.token_ids)
