"""WAV files as the samples that a model hears, and clips cut into windows."""

from __future__ import annotations

import io
import wave
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.engine.sound import SAMPLING_RATE, read_wav, resampled, windows
from kvpool.errors import InvalidArgumentError


def tone(hertz: float, rate: int, seconds: float = 0.5) -> Any:
    return np.sin(np.arange(int(rate * seconds)) * (2 * np.pi * hertz / rate)).astype(np.float32)


def wav(samples: Any, rate: int = SAMPLING_RATE, width: int = 2) -> bytes:
    """A file of samples [sample] or [sample, channel]."""
    whole = np.round(np.asarray(samples, np.float64) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    whole = whole + 128 if width == 1 else whole
    data = whole.astype("<i8").view(np.uint8).reshape(*whole.shape, 8)[..., :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1 if whole.ndim == 1 else whole.shape[1])
        opened.setsampwidth(width)
        opened.setframerate(rate)
        opened.writeframes(data)
    return file.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_given_samples_of_any_width_then_they_are_read_to_their_last_bit(width: int, tmp_path: Path) -> None:
    given = tone(440, SAMPLING_RATE)
    (tmp_path / "clip.wav").write_bytes(wav(given, width=width))
    assert np.abs(read_wav(tmp_path / "clip.wav") - given).max() < 2.0 ** (2 - min(8 * width, 20))


def test_given_two_channels_then_they_are_one() -> None:
    both = np.stack([tone(440, SAMPLING_RATE), -tone(440, SAMPLING_RATE)], axis=1)
    assert np.abs(read_wav(wav(both))).max() < 1e-4


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_given_another_rate_then_the_sound_is_the_same(rate: int) -> None:
    found, expected = resampled(tone(440, rate), rate), tone(440, SAMPLING_RATE)
    assert len(found) == pytest.approx(len(expected), abs=1)
    middle = slice(200, 7800)  # the filter needs both sides
    assert np.abs(found[: len(expected)][middle] - expected[middle]).max() < 2e-3


def test_given_a_tone_that_the_lower_rate_cannot_have_then_it_is_gone() -> None:
    assert np.abs(resampled(tone(11000, 44100), 44100)[200:-200]).max() < 1e-2


def test_given_a_long_clip_then_it_is_cut_where_it_is_quiet() -> None:
    clip = np.ones(7000, np.float32)
    clip[2850:2900] = clip[5700:5750] = 0.0
    cuts = list(windows(clip, 3000))
    assert cuts[0][0] == 0
    assert cuts[-1][1] == 7000
    assert all(before[1] == behind[0] for before, behind in pairwise(cuts))
    assert all(0 < stop - start <= 3000 for start, stop in cuts)
    assert [stop for _, stop in cuts] == [2855, 5710, 7000]  # in the middle of the first piece that is silent
    assert list(windows(clip[:3000], 3000)) == [(0, 3000)]


@pytest.mark.parametrize("most", [1, 2, 19, 301, 999])
def test_given_any_length_then_no_part_is_empty_or_too_long(most: int) -> None:
    cuts = list(windows(np.random.default_rng(most).normal(size=2000).astype(np.float32), most))
    assert all(0 < stop - start <= most for start, stop in cuts)
    assert sum(stop - start for start, stop in cuts) == 2000


@pytest.mark.parametrize(("rate", "is_read"), [(7999, False), (8000, True), (192_000, True), (192_001, False)])
def test_given_a_rate_at_the_edge_then_it_is_read_and_one_beyond_is_not(rate: int, is_read: bool) -> None:
    with nullcontext() if is_read else pytest.raises(InvalidArgumentError, match=f"{rate} samples a second"):
        assert len(read_wav(wav(tone(440, rate, 0.01), rate=rate))) == 160


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ID3 some mp3", "no WAV file.*ffmpeg"),
        (wav(tone(440, 16000))[:30], "cannot be read"),
        (wav(np.zeros(0)), "no samples"),
        (wav(tone(440, 16000), rate=1), "1 samples a second"),
    ],
)
def test_given_what_cannot_be_read_then_one_line_says_so(data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_wav(data)
