"""Read sound files as 16 kHz samples of one channel."""

from __future__ import annotations

import io
import math
import os
from typing import Any

import numpy as np

from exogym.errors import DataError, needs

SAMPLE_RATE = 16_000
EDGE_S = 0.05  # of silence, so that a clip's end does not ring into its start
LONGEST_S = 3600.0  # longer files are not decoded
RATES = (1_000, 1_000_000)


def read_audio(source: str | os.PathLike[str] | bytes, longest_s: float = LONGEST_S) -> tuple[np.ndarray, float]:
    """Return the samples (n,) float32 at 16 kHz, averaged over channels, and the length in seconds.

    The source can be WAV, FLAC, OGG, MP3 or another format of libsndfile, at any rate. If a file is longer than
    `longest_s`, the length is returned without samples.

    Raises:
        DataError: the source cannot be read, or is not a sound file.
    """
    soundfile = needs("soundfile", "whisper")
    if not isinstance(source, bytes) and not os.path.isfile(source):  # opening a pipe would wait for its other end
        raise DataError("the file does not exist")
    try:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source)) as file:
            rate, length_s = file.samplerate, file.frames / file.samplerate
            if not RATES[0] <= rate <= RATES[1]:
                raise DataError(f"a rate of {rate} Hz")
            if length_s > longest_s:
                return np.zeros(0, dtype=np.float32), length_s
            samples = file.read(dtype="float32", always_2d=True, frames=math.ceil(longest_s * rate))
    except (RuntimeError, OSError, ValueError, MemoryError) as error:  # soundfile raises them
        raise DataError(str(error) or type(error).__name__) from error
    if not np.isfinite(samples).all():
        raise DataError("some of its samples are not finite")
    return one_channel(samples, rate), len(samples) / rate


def one_channel(samples: Any, rate: int) -> np.ndarray:
    """Return (n,) float32 at 16 kHz from samples (n,), (n, channels) or (channels, n).

    Integers are scaled to -1 to 1.
    """
    found = np.asarray(samples)
    if found.dtype.kind in "iu":
        found = found / float(np.iinfo(found.dtype).max)
    if found.ndim == 2:
        found = found.mean(axis=int(found.shape[0] > found.shape[1]))
    if found.ndim != 1:
        raise DataError(f"samples have shape {found.shape}, but must have shape (n,) or (n, channels)")
    return resample(found.astype(np.float32), rate)


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Convert samples (n,) from the rate `rate` to 16 kHz.

    The function cuts the Fourier spectrum or fills it up with zeros. Then it transforms the spectrum back at the new
    length ceil(16,000 n / rate). Only frequencies below half of both rates remain.

    >>> tone = lambda rate: np.sin(2 * np.pi * 440 * np.arange(rate // 5) / rate).astype(np.float32)
    >>> bool(np.abs(resample(tone(44_100), 44_100)[500:-500] - tone(16_000)[500:-500]).max() < 0.01)
    True
    """
    if rate == SAMPLE_RATE or not len(samples):
        return samples
    common = math.gcd(rate, SAMPLE_RATE)
    old, new = rate // common, SAMPLE_RATE // common
    blocks = math.ceil((len(samples) + EDGE_S * rate) / old)
    spectrum = np.fft.rfft(samples, n=blocks * old)
    found = np.fft.irfft(spectrum[: blocks * new // 2 + 1], n=blocks * new) * (new / old)
    return found[: math.ceil(len(samples) * SAMPLE_RATE / rate)].astype(np.float32)
