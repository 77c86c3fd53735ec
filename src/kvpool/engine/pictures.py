"""Images in requests: prompts with pictures, the cache of what the encoder made of them, and their part in a step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.engine.generation import Generation
from kvpool.engine.spans import Span
from kvpool.engine.step_part import StepInputs, StepPart
from kvpool.model.vision import ImageEncoder, Picture, Pictures, Shown
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scheduling import BatchPlan, Request
from kvpool.scheduling.request import Finished
from kvpool.scope import ReuseScope
from kvpool.storage.moving import upload


class EncoderStats(NamedTuple):
    """What the cache of encoded pictures holds, and how often it was of use."""

    num_pictures: int
    num_bytes: int
    max_bytes: int
    num_encoded: int  # how often the encoder ran
    num_hits: int  # how often a step found one encoded


class _Key(NamedTuple):
    """A picture, and who may find what the encoder made of it. It is the same for all adapters."""

    tenant: str
    salt: str
    picture: str


class _Encoded(NamedTuple):
    features: Tensor
    session: str | None  # of the request for which the encoder ran


class EncoderCache:
    """What the encoder made of pictures, by content, at most `max_bytes`; what was not used for longest goes first.

    A tenant finds only pictures that its own requests brought, with the same salt: the time that the encoder takes would
    tell which pictures others have sent. The engine's thread asks for features; any thread has some forgotten.
    """

    def __init__(self, encode: Callable[[Picture], Tensor], max_bytes: int) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._encoded: OrderedDict[_Key, _Encoded] = OrderedDict()
        self._num_bytes = self._num_encoded = self._num_hits = 0

    def features(self, picture: Picture, request: Request) -> Tensor:
        """What the encoder makes of a picture in a request."""
        key = _Key(request.scope.tenant, request.scope.salt, picture.key)
        with self._lock:
            if (found := self._encoded.get(key)) is not None:
                self._encoded.move_to_end(key)
                self._num_hits += 1
                return found.features
        features = self._encode(picture)
        self._num_encoded += 1
        if features.nbytes <= self._max_bytes:
            with self._lock:
                self._encoded[key] = _Encoded(features, request.session)
                self._num_bytes += features.nbytes
                while self._num_bytes > self._max_bytes:
                    self._num_bytes -= self._encoded.popitem(last=False)[1].features.nbytes
        return features

    def forget(self, scope: ReuseScope | None = None, *, session: str | None = None, tenant: str | None = None) -> None:
        """Forgets the pictures in a scope, or those that a session or a tenant brought; without arguments all."""
        with self._lock:
            for key, found in list(self._encoded.items()):
                if (
                    (scope is None or (key.tenant, key.salt) == (scope.tenant, scope.salt))
                    and (session is None or found.session == session)
                    and (tenant is None or key.tenant == tenant)
                ):
                    del self._encoded[key]
                    self._num_bytes -= found.features.nbytes

    def stats(self) -> EncoderStats:
        """Counts since the engine began, and what is held now."""
        with self._lock:
            return EncoderStats(len(self._encoded), self._num_bytes, self._max_bytes, self._num_encoded, self._num_hits)


class StepPictures(StepPart):
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

    def inputs(self, plan: BatchPlan, inputs: StepInputs) -> None:
        """Positions of tokens, embeddings of placeholders, and spans that see one another."""
        positions = inputs.positions
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
                    features.append(self.cache.features(picture, sequence.request)[:, first:last])
            for first, last in pictures.together:
                start, stop = max(first, int(numbers[0])), min(last, int(numbers[-1]) + 1)
                if stop - start > 1:
                    spans.append(Span(row, start, stop))
        inputs.positions, inputs.spans = positions, spans
        if rows:
            inputs.shown = Shown(upload(np.concatenate(rows), self._device), torch.cat(features, dim=1))

    def ended(self, done: Finished) -> None:
        """Nobody else may find the pictures of a private request."""
        generation = self._generations.get(done.request.id)
        if generation is not None and generation.is_private:
            self.cache.forget(done.request.scope)


@dataclass(frozen=True, eq=False)
class PicturedPrompt:
    """The token ids of a prompt, and the pictures behind its placeholders."""

    token_ids: Int32Array
    pictures: Pictures | None = None

    def __len__(self) -> int:
        return len(self.token_ids)
