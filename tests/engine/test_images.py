"""Images are counted from the heads of their files before any is decoded, and whatever is none is refused in words."""

from __future__ import annotations

import subprocess
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

image_library = pytest.importorskip("PIL.Image")
pytest.importorskip("torch")

from kvpool.engine.images import IMAGE_PIXELS, PROMPT_PIXELS, SMALL_PIXELS, num_pixels, open_images  # noqa: E402
from kvpool.errors import InvalidArgumentError  # noqa: E402


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def png_head(width: int, height: int) -> bytes:
    """A PNG that says its size and has no pixels: decoding it fails, so nothing has decoded it where it is counted."""
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def saved(kind: str, width: int = 20, height: int = 30, **options: Any) -> bytes:
    file = BytesIO()
    image_library.new("RGB", (width, height), "red").save(file, kind, **options)
    return file.getvalue()


def test_given_large_images_then_their_sum_is_refused_before_any_is_decoded() -> None:
    one = png_head(8192, 4096)
    assert num_pixels([one] * 4) == PROMPT_PIXELS
    with pytest.raises(InvalidArgumentError, match=r"5 images count .* send fewer or smaller"):
        open_images([one] * 5)


def test_given_small_images_then_each_counts_what_a_processor_may_make_of_it() -> None:
    most = PROMPT_PIXELS // SMALL_PIXELS
    assert num_pixels([saved("PNG")] * most) == PROMPT_PIXELS
    with pytest.raises(InvalidArgumentError, match=f"{most + 1} images count"):
        num_pixels([saved("PNG")] * (most + 1))


def test_given_one_image_over_its_limit_then_it_is_refused_by_its_head() -> None:
    with pytest.raises(InvalidArgumentError, match=f"8193 x 8192 pixels is over {IMAGE_PIXELS}"):
        num_pixels([png_head(8193, 8192)])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_given_a_format_that_is_read_then_the_image_is_as_pillow_decodes_it(kind: str, tmp_path: Path) -> None:
    data = saved(kind)
    (tmp_path / "image").write_bytes(data)
    expected = image_library.open(BytesIO(data)).convert("RGB").tobytes()
    for image in (data, tmp_path / "image", str(tmp_path / "image")):
        (opened,) = open_images([image])
        assert (opened.size, opened.tobytes()) == ((20, 30), expected)


def test_given_a_jpeg_of_more_pixels_than_any_processor_takes_then_it_is_decoded_at_a_smaller_size() -> None:
    large = saved("JPEG", 8192, 8192)
    assert num_pixels([large]) == 4096 * 4096
    (opened,) = open_images([large])
    assert opened.size == (4096, 4096)


@pytest.mark.parametrize(
    "data",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
        saved("TIFF"),
        saved("BMP"),
        b"no image",
        b"",
    ],
    ids=["postscript", "tiff", "bmp", "text", "empty"],
)
def test_given_another_format_then_it_is_refused_and_no_program_is_started(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(InvalidArgumentError, match=r"cannot be read: it is no PNG, JPEG, WebP or GIF$"):
        open_images([data])


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), subprocess.CalledProcessError(1, "gs"), MemoryError(), ZeroDivisionError()]
)
def test_given_any_error_of_a_decoder_then_the_image_is_refused(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(image_library.Image, "convert", fail)
    with pytest.raises(InvalidArgumentError, match=r"cannot be read: ."):
        open_images([saved("PNG")])


def test_given_damaged_images_then_they_are_decoded_or_refused() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = saved(kind)
        for place in range(0, len(data), 3):
            for broken in (data[:place], data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]):
                with suppress(InvalidArgumentError):
                    open_images([broken])


def test_given_a_jpeg_with_more_scans_than_cameras_write_then_it_is_refused() -> None:
    data = saved("JPEG", progressive=True)
    end = data.rindex(b"\xff\xda")
    open_images([data])
    with pytest.raises(InvalidArgumentError, match="over 100 scans"):
        open_images([data[:end] + data[end:-2] * 101 + data[-2:]])
