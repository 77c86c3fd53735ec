"""Images for models that see: splits the output of a processor into pictures, encodes them, and says where they stand.

A picture is one input of the model's image encoder: an image, or a tile of one where the processor cuts images into tiles.
Its features take the places of its placeholder tokens in the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.checks import show
from kvpool.errors import InvalidArgumentError, StepError, UnsupportedModelError
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scope import MultimodalItem

_GRIDS = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})  # many patches, a grid for each image
_SIZES = frozenset({"mistral3"})  # padded images, and the size of each
_TILES = frozenset({"llava", "internvl", "idefics3", "smolvlm", "gemma3", "paligemma"})  # images of one size
_BOTH_WAYS = frozenset({"gemma3", "paligemma"})  # the `token_type_ids` say which tokens see one another
_PLACEHOLDERS = {"image": "image_token_id", "video": "video_token_id", "audio": "audio_token_id"}
# What a processor gives beside the pictures: masks and types follow from the tokens.
_IGNORED = frozenset({"attention_mask", "token_type_ids", "mm_token_type_ids"})


class Picture(NamedTuple):
    """One input of the encoder."""

    key: str  # a hash of its content
    places: Int64Array  # of its placeholders in the prompt
    inputs: Mapping[str, Tensor]  # what the encoder takes

    @property
    def item(self) -> MultimodalItem:
        """The picture as the prefix cache knows it."""
        first = int(self.places[0])
        return MultimodalItem(first, int(self.places[-1]) + 1 - first, self.key)


class Pictures(NamedTuple):
    """The pictures of one prompt, and the positions of its tokens where they are not 0, 1, 2, ..."""

    pictures: tuple[Picture, ...]
    positions: Int64Array | None = None  # [axis, token]
    shift: int = 0  # what positions behind the prompt add to the number of the token
    spans: tuple[MultimodalItem, ...] = ()  # tokens that see one another in both directions, by their content

    @property
    def items(self) -> tuple[MultimodalItem, ...]:
        """What the prefix cache must know beside the tokens. The keys of a span depend on all of it."""
        inside = {picture.key for picture in self.pictures for span in self.spans if _holds(span, picture.item)}
        return *self.spans, *(picture.item for picture in self.pictures if picture.key not in inside)

    @property
    def num_bytes(self) -> int:
        """What the encoder's inputs take."""
        return sum(tensor.nbytes for picture in self.pictures for tensor in picture.inputs.values())

    @property
    def together(self) -> tuple[tuple[int, int], ...]:
        """The first token of each span, and the one behind its last."""
        return tuple((span.position, span.position + span.length) for span in self.spans)

    def positions_at(self, tokens: Int64Array) -> Int64Array:
        """The positions [axis, token] of the tokens with these numbers."""
        if self.positions is None:
            return tokens[None]
        known = self.positions[:, np.minimum(tokens, self.positions.shape[1] - 1)]
        return np.where(tokens < self.positions.shape[1], known, tokens + self.shift)


class Shown(NamedTuple):
    """What pictures put into a step."""

    rows: Tensor  # tokens of the step that are placeholders, in ascending order
    features: Tensor  # [layer, row, hidden size]: in place of embeddings; then what is added behind the first layers


class ImageEncoder:
    """The part of a model that reads images. Any thread may ask for `pictures`; only the engine's calls `encode`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.family: str = model.config.model_type
        ids = {kind: getattr(model.config, name, None) for kind, name in _PLACEHOLDERS.items()}
        self._placeholders = {kind: token for kind, token in ids.items() if isinstance(token, int)}
        self.refusal = self._why_not()
        three = self.refusal is None and hasattr(model.base_model, "get_rope_index")
        self.num_axes = 3 if three else 1  # of positions: time, height and width
        self._tile: tuple[int, ...] = ()
        self._tile_tokens = 0
        if self.refusal is None and self.family in _TILES:
            self._measure_tile()

    def _why_not(self) -> str | None:
        """Why the model takes no images; None if it does."""
        if "image" not in self._placeholders or not hasattr(self._model, "get_image_features"):
            return f"{self.family} reads text only"
        if self.family not in _GRIDS | _SIZES | _TILES:
            served = ", ".join(sorted(_GRIDS | _SIZES | _TILES))
            return f"images for {self.family} cannot be served; the families that can are {served}"
        return None

    def _measure_tile(self) -> None:
        """Encodes an empty image: all of its size have as many features."""
        vision = self._model.config.vision_config
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        self._tile = (vision.num_channels, height, width)
        blank = {"pixel_values": torch.ones(1, *self._tile)}
        wanted = getattr(self._model.config, "mm_tokens_per_image", None)  # of Gemma 3
        try:
            self._tile_tokens = self._features(self._as_taken(blank)).shape[1]
        except RuntimeError as error:
            told = f"{self.family} cannot encode an image of {height} x {width} pixels: {error}"
            if wanted is not None:
                told += f"; its configuration has mm_tokens_per_image={wanted}"
            raise UnsupportedModelError(told) from error
        if wanted not in (None, self._tile_tokens):
            raise UnsupportedModelError(
                f"the configuration of {self.family} has mm_tokens_per_image={wanted}, but its encoder gives "
                f"{self._tile_tokens} features for an image of {height} x {width} pixels; correct the number"
            )

    def check_text(self, tokens: Int32Array, shown: Int64Array | None = None) -> None:
        """Raises InvalidArgumentError if a prompt has a placeholder without a picture; `shown` are places of pictures."""
        without = tokens if shown is None else np.delete(tokens, shown)
        for kind, token in self._placeholders.items():
            if (without == token).any():
                remedy = "give images=..., or the processor's pixel_values with input_ids" if kind == "image" else ""
                remedy = f"{kind} input cannot be served" if kind != "image" else self.refusal or remedy
                raise InvalidArgumentError(f"the prompt has token {token}, a placeholder for {kind} input: {remedy}")

    def pictures(self, tokens: Int32Array, given: Mapping[str, Any]) -> Pictures | None:
        """The pictures of a prompt, from what a processor gave beside `input_ids`; None if there are none."""
        inputs = {name: torch.as_tensor(value) for name, value in given.items() if name not in _IGNORED}
        if not inputs:
            self.check_text(tokens)
            spans = self._spans(tokens, given, ())
            return Pictures((), spans=spans) if spans else None
        if self.refusal is not None:
            raise InvalidArgumentError(self.refusal)
        known = {"pixel_values", self._beside}
        if unknown := sorted(inputs.keys() - known):
            raise InvalidArgumentError(f"images for {self.family} come as {_listed(known)}; got {unknown[0]}, too")
        if missing := sorted(known - inputs.keys() - {"pixel_attention_mask", ""}):
            raise InvalidArgumentError(f"images for {self.family} come as {_listed(known)}; {missing[0]} is missing")
        parts = self._split(inputs)
        places = np.flatnonzero(tokens == self._placeholders["image"])
        counts = [count for count, _ in parts]
        if sum(counts) != len(places):
            raise InvalidArgumentError(
                f"the prompt has {len(places)} placeholders for images (token {self._placeholders['image']}), but its "
                f"{len(parts)} images need {sum(counts)}; use what the processor gave for this text and these images"
            )
        self.check_text(tokens, places)
        ends = np.cumsum(counts)
        pictures = tuple(
            Picture(content_hash(part), places[end - count : end], part)
            for (count, part), end in zip(parts, ends.tolist(), strict=True)
        )
        return Pictures(pictures, *self._positions(tokens, inputs), self._spans(tokens, given, pictures))

    def _spans(
        self, tokens: Int32Array, given: Mapping[str, Any], pictures: Sequence[Picture]
    ) -> tuple[MultimodalItem, ...]:
        """The tokens that see one another: those of an image in Gemma 3, the whole prompt in PaliGemma."""
        kinds = given.get("token_type_ids")
        if self.family not in _BOTH_WAYS or kinds is None:
            return ()
        kinds = np.asarray(kinds).reshape(-1)
        if kinds.shape != tokens.shape:
            raise InvalidArgumentError(f"{len(kinds)} token_type_ids do not fit {len(tokens)} input_ids")
        inside = kinds == (1 if self.family == "gemma3" else 0)
        edges = np.flatnonzero(np.diff(inside.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        if self.family == "paligemma" and len(edges) > 1:
            raise InvalidArgumentError(
                "the token_type_ids of paligemma have zeros in several places; they are one prefix"
            )
        spans = []
        for first, stop in edges.tolist():
            span = MultimodalItem(first, stop - first, "")
            shown = [picture for picture in pictures if _holds(span, picture.item)]
            content = hashlib.blake2b(np.ascontiguousarray(tokens[first:stop]).tobytes(), digest_size=16)
            for picture in shown:
                content.update(f"{picture.places[0] - first} {picture.key} ".encode())
            spans.append(span._replace(key=content.hexdigest()))
        for item in (picture.item for picture in pictures):
            if any(_overlap(span, item) and not _holds(span, item) for span in spans):
                raise InvalidArgumentError("the token_type_ids divide an image; use what the processor gave")
        return tuple(spans)

    @property
    def _beside(self) -> str:
        """What the encoder takes beside pixels."""
        if self.family in _GRIDS:
            return "image_grid_thw"
        if self.family in _SIZES:
            return "image_sizes"
        return "pixel_attention_mask" if self.family in ("idefics3", "smolvlm") else ""

    def _split(self, inputs: Mapping[str, Tensor]) -> list[tuple[int, dict[str, Tensor]]]:
        """How many placeholders each picture takes, and its own part of the inputs."""
        pixels = inputs["pixel_values"]
        if self.family in _GRIDS:
            return self._split_patches(pixels, inputs["image_grid_thw"].to(torch.int64))
        if self.family in _SIZES:
            return self._split_sizes(pixels, inputs["image_sizes"].to(torch.int64))
        return self._split_tiles(pixels, inputs.get("pixel_attention_mask"))

    def _split_patches(self, pixels: Tensor, grids: Tensor) -> list[tuple[int, dict[str, Tensor]]]:
        merged = self._model.config.vision_config.spatial_merge_size**2
        self._check_shape("image_grid_thw", grids, (None, 3))
        if (grids < 1).any() or (grids.prod(-1) % merged).any():
            raise InvalidArgumentError(
                f"image_grid_thw={show(grids.tolist())} has a grid that {self.family} cannot merge"
            )
        counts = grids.prod(-1).tolist()
        self._check_shape("pixel_values", pixels, (sum(counts), None))
        return [
            (count // merged, {"pixel_values": part, "image_grid_thw": grid[None]})
            for count, part, grid in zip(counts, torch.split(pixels, counts), grids, strict=True)
        ]

    def _split_sizes(self, pixels: Tensor, sizes: Tensor) -> list[tuple[int, dict[str, Tensor]]]:
        config = self._model.config
        side = config.vision_config.patch_size * config.spatial_merge_size
        self._check_shape("image_sizes", sizes, (None, 2))
        self._check_shape("pixel_values", pixels, (len(sizes), None, None, None))
        if (sizes < side).any() or (sizes > torch.tensor(pixels.shape[2:])).any():
            raise InvalidArgumentError(
                f"image_sizes={show(sizes.tolist())} do not fit pixel_values {tuple(pixels.shape)}"
            )
        return [
            (
                int((size // side).prod()),
                {"pixel_values": image[None, :, : int(size[0]), : int(size[1])], "image_sizes": size[None]},
            )
            for image, size in zip(pixels, sizes, strict=True)
        ]

    def _split_tiles(self, pixels: Tensor, mask: Tensor | None) -> list[tuple[int, dict[str, Tensor]]]:
        nested = self.family in ("idefics3", "smolvlm")  # one more axis: the images of a prompt
        self._check_shape("pixel_values", pixels, (*((1,) * nested), None, *self._tile))
        tiles = pixels[0] if nested else pixels
        parts: list[dict[str, Tensor]] = [{"pixel_values": tile[None]} for tile in tiles]
        if mask is not None:
            self._check_shape("pixel_attention_mask", mask, (1, len(tiles), *self._tile[1:]))
            for part, shown in zip(parts, mask[0], strict=True):
                part["pixel_attention_mask"] = shown[None]
        if nested:  # the processor fills up with empty images, which the model drops
            parts = [part for part in parts if part["pixel_values"].any()]
        return [(self._tile_tokens, part) for part in parts]

    def _check_shape(self, name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
        fits = tensor.ndim == len(shape) and all(
            want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if side is None else str(side) for side in shape)
            raise InvalidArgumentError(
                f"{name} of {self.family} must have the shape ({wanted}), got {tuple(tensor.shape)}"
            )

    def _positions(self, tokens: Int32Array, inputs: Mapping[str, Tensor]) -> tuple[Int64Array | None, int]:
        """The positions of the tokens, by the model's own rule, and what those behind them add to their number."""
        if self.num_axes == 1:
            return None, 0
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        found, shift = self._model.base_model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self._placeholders["image"]).int(),
            image_grid_thw=inputs["image_grid_thw"],
        )
        return found[:, 0].numpy(), int(shift)

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Tensor:
        """The features [layer, placeholder, hidden size] of a picture, on the model's device."""
        features = self._features(self._as_taken(picture.inputs))
        if features.shape[1] != len(picture.places):
            raise StepError(
                f"the image encoder of {self.family} gave {features.shape[1]} features for {len(picture.places)} placeholders"
            )
        return features

    def _as_taken(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of one picture as the encoder takes them."""
        taken = as_taken(self._model, inputs)
        if self.family in ("idefics3", "smolvlm"):
            taken = {name: value[None] for name, value in taken.items()}
        return taken

    @torch.inference_mode()
    def _features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        found = self._model.get_image_features(**inputs, return_dict=True)
        layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return torch.stack([_in_a_row(layer) for layer in layers]).to(self._model.dtype)


def _in_a_row(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """The features [placeholder, hidden size] of a layer, which may come picture by picture."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _holds(span: MultimodalItem, item: MultimodalItem) -> bool:
    return span.position <= item.position and item.position + item.length <= span.position + span.length


def _overlap(span: MultimodalItem, item: MultimodalItem) -> bool:
    return span.position < item.position + item.length and item.position < span.position + span.length


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(name for name in names if name))


def as_taken(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of an encoder on the device of its model, floats in its type."""
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def content_hash(inputs: Mapping[str, Tensor]) -> str:
    """A hash of what the encoder takes: equal inputs have the same one, in every process."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        tensor = inputs[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def embedded(model: Any, input_ids: Tensor, shown: Shown) -> Tensor:
    """The embeddings [token, hidden size] of a step, with the features of pictures in the places of their placeholders."""
    known = input_ids.index_fill(0, shown.rows, 0)  # a placeholder may be outside of the vocabulary
    embeddings: Tensor = model.get_input_embeddings()(known)
    return embeddings.index_copy(0, shown.rows, shown.features[0].to(embeddings.dtype))


@contextmanager
def deep_features(model: Any, num_tokens: int, shown: Shown | None) -> Iterator[None]:
    """Lets the first decoder layers of one forward add the deeper features of pictures (Qwen3-VL calls that DeepStack).

    The model's own forward hands them to its decoder only together with pixels.
    """
    if shown is None or len(shown.features) == 1:
        yield
        return
    mask = torch.zeros(1, num_tokens, dtype=torch.bool, device=shown.rows.device)
    mask[0, shown.rows] = True

    def add(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "visual_pos_masks": mask, "deepstack_visual_embeds": list(shown.features[1:])}

    handle = model.get_decoder().register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
