"""Sound for tests of speech: tones, files of them, and folders with a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile

NUMBERS = ("one", "two", "three", "four", "five", "six")


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray:
    """Return a sine of half the full scale, (n,) float32."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def folder_of_tones(folder: Path, count: int = 6, texts: Sequence[str] | None = None, rate: int = 16_000) -> Path:
    """Write `count` clips of 0.5 to 1 s and their manifest.csv into `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["audio,text,speaker"]
    for i in range(count):
        soundfile.write(folder / f"{i}.wav", tone(0.5 + 0.1 * (i % 6), rate, 200.0 * (i + 1)), rate)
        lines.append(f"{i}.wav,{NUMBERS[i % 6] if texts is None else texts[i]},s{i % 2}")
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    return folder
