"""Synthetic speech for tests and examples: espeak-ng reads lines aloud."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exogym.data import shakespeare
from exogym.errors import DataError, ExoGymError
from exogym.home.speech.audio import read_audio
from exogym.streams import generator

PROGRAM = "espeak-ng"
FEWEST_WORDS, MOST_WORDS, MOST_LETTERS = 4, 7, 36
LONGEST_S = 30.0


@dataclass(frozen=True)
class Voice:
    """A voice of espeak-ng: its name with a variant, words per minute, and pitch from 0 to 99."""

    name: str = "en-us"
    speed: int = 160
    pitch: int = 50

    def __str__(self) -> str:
        return f"{self.name}/{self.speed}/{self.pitch}"


# the voices of the training clips, in turn
VOICES = (Voice(), Voice("en-us+f3", 150, 60), Voice("en-us+m3", 170, 35), Voice("en-gb+f2", 160, 55))


def spoken(lines: Sequence[str], voices: Sequence[Voice] = VOICES) -> list[dict[str, Any]]:
    """Let espeak-ng read the lines aloud. Return a row with "audio", "text" and "speaker" for each line.

    The voices take turns.

    Raises:
        ExoGymError: espeak-ng is not installed, or fails.
    """
    if shutil.which(PROGRAM) is None:
        raise ExoGymError(
            f"synthetic speech needs {PROGRAM}, which is not installed: apt-get install {PROGRAM} (Debian, Ubuntu), "
            f"brew install {PROGRAM} (macOS), or pass data="
        )
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        voice = voices[number % len(voices)]
        words = [PROGRAM, "--stdout", "-v", voice.name, "-s", str(voice.speed), "-p", str(voice.pitch), "--stdin"]
        done = subprocess.run(words, input=line.encode(), capture_output=True, check=False)
        if done.returncode or not done.stdout:
            raise ExoGymError(f"{' '.join(words)} failed: {done.stderr.decode(errors='replace').strip()}")
        samples, _ = read_audio(_whole(done.stdout), LONGEST_S)
        rows.append({"audio": {"array": samples, "sampling_rate": 16_000}, "text": line, "speaker": str(voice)})
    return rows


def _whole(wav: bytes) -> bytes:
    """Write the sizes into a WAV header. espeak-ng writes to a pipe and cannot know them in advance."""
    at = wav.index(b"data")
    sizes = ((4, len(wav) - 8), (at + 4, len(wav) - at - 8))
    found = bytearray(wav)
    for place, size in sizes:
        found[place : place + 4] = size.to_bytes(4, "little")
    return bytes(found)


def lines_of_shakespeare(count: int, held_out: int) -> tuple[list[str], list[str]]:
    """Draw lines of four to seven words from Shakespeare's plays.

    Return a list of `count` lines and a list of `held_out` lines. All lines are different.

    Raises:
        DataError: the plays were not found, or have too few such lines.
    """
    whole = shakespeare().text
    lines = {line.strip(" ,;:-") for line in whole.split("\n") if not line.endswith(":") and not line.isupper()}
    fit = sorted(
        line for line in lines if re.fullmatch(r"[A-Za-z' ,;.!?-]+", line)
        and FEWEST_WORDS <= len(line.split()) <= MOST_WORDS and len(line) <= MOST_LETTERS
    )  # fmt: skip
    if len(fit) < count + held_out:
        raise DataError(
            f"the text has {len(fit)} lines of {FEWEST_WORDS} to {MOST_WORDS} words, but {count + held_out} are needed"
        )
    order = generator(0, "lines")
    chosen = [fit[i] for i in torch.randperm(len(fit), generator=order)[: count + held_out].tolist()]
    return chosen[:count], chosen[count:]
