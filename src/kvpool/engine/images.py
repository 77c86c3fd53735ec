"""Opens the images of a prompt within limits: it counts their pixels before it decodes any of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

IMAGE_PIXELS = 2**26  # of one image, decoded
PROMPT_PIXELS = 2**27  # of all images of a prompt, decoded
SMALL_PIXELS = 2**21  # what an image counts at least, because processors enlarge small ones
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_SCAN = b"\xff\xda"  # begins a scan of a JPEG; each scan of a progressive one goes over all of its pixels
_MOST_SCANS = 100
# Processors of the families that are served reduce an image to fewer pixels than these, so a JPEG is decoded at a smaller
# size if that still has as many.
_ENOUGH_PIXELS = 3584**2


def open_images(images: Sequence[Any]) -> list[Any]:
    """Images of files or their bytes, decoded one after the other; anything else is left to the processor."""
    num_pixels(images)
    return [_decoded(image) if isinstance(image, (str, Path, bytes)) else image for image in images]


def num_pixels(images: Sequence[Any]) -> int:
    """How many pixels the images of a prompt count, from the heads of their files. Raises if they are too many."""
    total = 0
    for image in images:
        if isinstance(image, (str, Path, bytes)):
            with _opened(image) as opened:
                total += max(opened.width * opened.height, SMALL_PIXELS)
    if total > PROMPT_PIXELS:
        raise InvalidArgumentError(
            f"{len(images)} images count {total} pixels together, and a prompt may have {PROMPT_PIXELS}, where a small image "
            f"counts {SMALL_PIXELS}: send fewer or smaller images"
        )
    return total


def _decoded(image: str | Path | bytes) -> Image:
    with _opened(image) as opened:
        return opened.convert("RGB")


@contextmanager
def _opened(image: str | Path | bytes) -> Iterator[Image]:
    """An image whose head was read and whose size is allowed. Every error of Pillow becomes an InvalidArgumentError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise InvalidArgumentError(
            "reading images needs Pillow: pip install '.[vision]' in a checkout of kvpool"
        ) from error
    name = "" if isinstance(image, bytes) else f" {image}"
    if isinstance(image, bytes) and image.startswith(b"\xff\xd8") and image.count(_SCAN) > _MOST_SCANS:
        raise InvalidArgumentError(f"the image cannot be read: it is a JPEG of over {_MOST_SCANS} scans")
    try:
        with Image.open(BytesIO(image) if isinstance(image, bytes) else image, formats=_FORMATS) as opened:
            pixels = opened.width * opened.height
            if pixels > IMAGE_PIXELS:
                raise InvalidArgumentError(
                    f"an image of {opened.width} x {opened.height} pixels is over {IMAGE_PIXELS}: send a smaller one"
                )
            scale = max(1.0, (pixels / _ENOUGH_PIXELS) ** 0.5)
            opened.draft(
                "RGB", (int(opened.width / scale), int(opened.height / scale))
            )  # has no effect on other formats
            yield opened
    except InvalidArgumentError:
        raise
    except UnidentifiedImageError as error:
        raise InvalidArgumentError(f"the image{name} cannot be read: it is no PNG, JPEG, WebP or GIF") from error
    except Exception as error:  # decoders raise errors of many kinds for damaged files
        raise InvalidArgumentError(f"the image{name} cannot be read: {str(error) or type(error).__name__}") from error
