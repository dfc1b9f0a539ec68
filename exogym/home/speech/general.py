"""Clips of ordinary running speech, to test whether a fine-tuned model still understands such speech."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, from_numpy

from exogym.errors import DataError
from exogym.home.speech.audio import SAMPLE_RATE, read_audio
from exogym.home.speech.clips import FULL_WINDOW_S, Encode, speech
from exogym.home.speech.manifest import ENDINGS
from exogym.home.speech.synthetic import PROGRAM, spoken

SPOKEN = "spoken"
MOST_CLIPS = 8
LINES = (
    "Ask not what your country can do for you, ask what you can do for your country.",
    "Four score and seven years ago our fathers brought forth on this continent a new nation.",
    "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "The train to the city leaves every morning at half past seven, and it is often late.",
)


@dataclass(frozen=True)
class GeneralSpeech:
    """Hold clips of running speech.

    Attributes:
        clips: the clips' samples, each (n,) float32 at 16 kHz, up to 30 s.
        texts: the clips' texts, or None if they are unknown.
        origin: a text that says where the clips came from.
    """

    clips: list[Tensor]
    texts: list[str] | None
    origin: str


def general_speech(general: str | os.PathLike[str], encode: Encode) -> GeneralSpeech:
    """Return a sample of running speech. A folder with a manifest gives at most eight of its validation clips.

    Args:
        general: a folder or a manifest as for `speech`; a sound file, whose first 30 s are used; or "spoken", with
            which espeak-ng reads four sentences aloud.
        encode: a function of (text, seconds) that returns the labels, as for `speech`.

    Raises:
        DataError: the file or folder does not exist or cannot be read, or "spoken" finds no espeak-ng.
    """
    if general == SPOKEN:
        if shutil.which(PROGRAM) is None:
            raise DataError(f"{PROGRAM} is not installed: install it, or give general= (recordings of running speech)")
        rows = spoken(LINES)
        clips = [from_numpy(row["audio"]["array"]) for row in rows]
        return GeneralSpeech(clips, list(LINES), f"{len(clips)} sentences read aloud by {PROGRAM}")
    path = Path(general).expanduser()
    if path.is_file() and path.suffix.lower() not in ENDINGS:
        samples, seconds = read_audio(path)
        if not len(samples):
            raise DataError(f"general={os.fspath(general)!r} lasts {seconds:.0f} s: wanted up to an hour")
        return GeneralSpeech([from_numpy(samples[: round(FULL_WINDOW_S * SAMPLE_RATE)])], None, path.name)
    kept = speech(general, encode).val.thinned(MOST_CLIPS)
    return GeneralSpeech([kept.clip(i) for i in range(len(kept))], kept.texts, f"{len(kept)} clips of {path.name}")
