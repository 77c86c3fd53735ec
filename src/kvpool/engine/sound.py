"""Sound for models that hear: WAV files as arrays of 16,000 samples a second, and long clips cut into windows."""

from __future__ import annotations

import io
import os
import wave
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidArgumentError

Samples = npt.NDArray[np.float32]  # from -1 to 1

SAMPLING_RATE = 16_000  # samples a second, as Whisper takes them
RATES = (8_000, 192_000)  # that are read
_ZEROS = 8  # crossings of the filter on each side; more make it steeper
_AT_ONCE = 1 << 13  # samples that are computed together


def read_wav(file: bytes | str | os.PathLike[str]) -> Samples:
    """The samples of a WAV file, or of its bytes: 16,000 a second, all channels as one."""
    data = file if isinstance(file, bytes) else Path(file).read_bytes()
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise InvalidArgumentError(
            "the sound is no WAV file, and no other format is read: convert it, as with "
            "'ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le clip.wav'"
        )
    try:
        with wave.open(io.BytesIO(data)) as opened:
            width, channels, rate = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
            frames = opened.readframes(opened.getnframes())
    except (wave.Error, EOFError, ValueError) as error:
        raise InvalidArgumentError(f"the WAV file cannot be read: {str(error) or 'it ends too early'}") from None
    if not RATES[0] <= rate <= RATES[1] or not 1 <= width <= 4:
        raise InvalidArgumentError(
            f"the WAV file has {rate} samples a second of {8 * width} bits; read are {RATES[0]} to {RATES[1]} of 8 to 32"
        )
    whole = len(frames) // (width * channels) * width * channels
    samples = _numbers(frames[:whole], width).reshape(-1, channels).mean(axis=1, dtype=np.float32)
    if not len(samples):
        raise InvalidArgumentError("the WAV file has no samples")
    return resampled(samples, rate)


def _numbers(frames: bytes, width: int) -> Samples:
    """The numbers in frames of so many bytes each, from -1 to 1."""
    if width == 1:  # these have no sign
        return np.frombuffer(frames, np.uint8).astype(np.float32) / np.float32(128) - np.float32(1)
    if width != 3:
        return np.frombuffer(frames, f"<i{width}").astype(np.float32) / np.float32(1 << (8 * width - 1))
    padded = np.zeros((len(frames) // 3, 4), np.uint8)
    padded[:, 1:] = np.frombuffer(frames, np.uint8).reshape(-1, 3)
    return padded.view("<i4")[:, 0].astype(np.float32) / np.float32(1 << 31)


def resampled(samples: Samples, rate: int) -> Samples:
    """The same sound with 16,000 samples a second, by a sinc filter under a Hann window."""
    if rate == SAMPLING_RATE:
        return samples
    band = min(1.0, SAMPLING_RATE / rate)
    half = ceil(_ZEROS / band)
    padded = np.pad(samples, half)
    taps = np.arange(1 - half, half + 1)
    found = np.empty(ceil(len(samples) * SAMPLING_RATE / rate), np.float32)
    for start in range(0, len(found), _AT_ONCE):
        at = np.arange(start, min(start + _AT_ONCE, len(found))) * (rate / SAMPLING_RATE)
        columns = at.astype(np.int64)[:, None] + taps
        distance = columns - at[:, None]
        weights = band * np.sinc(band * distance) * np.cos(distance * (np.pi / 2 / half)) ** 2
        found[start : start + len(at)] = (padded[columns + half] * weights).sum(axis=1)
    return found


def windows(clip: Samples, most: int) -> Iterator[tuple[int, int]]:
    """Where to cut a clip into parts of at most `most` samples: each begins where the one before it ends.

    A part ends in the quietest of its last 20 pieces, each a 300th of `most`: of 30 seconds, in the last two.
    """
    start, step = 0, max(most // 300, 1)
    look = min(20, most) * step
    while len(clip) - start > most:
        end = start + most
        pieces = clip[end - look : end].reshape(-1, step)
        stop = end - look + int(np.square(pieces).sum(axis=1).argmin()) * step + (step + 1) // 2
        yield start, stop
        start = stop
    yield start, len(clip)
