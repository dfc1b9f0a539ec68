"""Speech data sets: clips and their texts, as batches of sound and labels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.data import BulkDataset
from exogym.errors import DataError, checked, needs
from exogym.home.speech.audio import SAMPLE_RATE, one_channel, read_audio
from exogym.home.speech.manifest import AUDIO, SPEAKER, TEXT, ClipEntry, column, find_manifest, read_manifest
from exogym.home.speech.synthetic import lines_of_shakespeare, spoken
from exogym.progress import notice, printable
from exogym.streams import generator

Encode = Callable[[str, float], Sequence[int]]
SHORTEST_S, FULL_WINDOW_S, NO_LABEL = 0.1, 30.0, -100
MOST_LABELS = 448  # length of Whisper's decoder
HELD_OUT = 0.2  # share of the validation clips if the data does not name them
QUIET = 1e-4  # share of full scale; a clip that is never louder is silence
INT16 = 32767
MARGIN_S = 1.0  # silence after the longest clip; Whisper expects some


class SpeechClips(BulkDataset):
    """Hold clips (audio, labels), padded to equal lengths.

    `audio` is (window,) float32, padded with silence, and `labels` is (length,) int64, padded with -100. Memory holds
    the clips as 16-bit samples: 115 MB for an hour of speech.

    Attributes:
        texts, speakers, names: text, speaker and name of each clip.
        seconds: (n,) the clips' lengths in seconds.
        window_s: the window's length in seconds, the same for all clips.
        targets: (n,) the number of each clip's speaker. Partitions by label use it as the clip's label.
    """

    def __init__(
        self, clips: Sequence[np.ndarray], labels: Sequence[Sequence[int]], window_s: float, texts: Sequence[str],
        speakers: Sequence[str], names: Sequence[str],
    ):  # fmt: skip
        lengths = [len(clip) for clip in clips]
        self.starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.long)
        self.samples = torch.from_numpy(np.concatenate(clips) if clips else np.zeros(0, np.int16))
        longest = max(map(len, labels), default=0)
        self.labels = torch.full((len(labels), longest), NO_LABEL, dtype=torch.long)
        for row, ids in zip(self.labels, labels, strict=True):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.long)
        self.window_s, self.texts, self.speakers, self.names = window_s, list(texts), list(speakers), list(names)
        self.seconds = np.array(lengths) / SAMPLE_RATE
        self.targets = np.unique(self.speakers, return_inverse=True)[1]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        audio = torch.zeros(len(indices), round(self.window_s * SAMPLE_RATE))
        for row, i in zip(audio, indices.tolist(), strict=True):
            clip = self.clip(i)
            row[: len(clip)] = clip
        return audio, self.labels[indices]

    def thinned(self, most: int) -> SpeechClips:
        """Return at most `most` of these clips, spread evenly over all of them."""
        if len(self) <= most:
            return self
        kept = [i * len(self) // most for i in range(most)]
        clips = [self.samples[self.starts[i] : self.starts[i + 1]].numpy() for i in kept]
        labels = [[id for id in self.labels[i].tolist() if id != NO_LABEL] for i in kept]
        texts, speakers, names = ([own[i] for i in kept] for own in (self.texts, self.speakers, self.names))
        return SpeechClips(clips, labels, self.window_s, texts, speakers, names)

    def clip(self, index: int) -> Tensor:
        """Return one clip's samples (n,) float32, without the silence after them."""
        return self.samples[self.starts[index] : self.starts[index + 1]].float() / INT16


@dataclass(frozen=True)
class Speech:
    """Hold a loaded speech data set: clips for training and validation.

    Attributes:
        train, val: the training and validation clips.
        origin: where the clips came from.
        left_out: the number of clips that were left out, for each reason.
        window_s: length of the window in seconds; every clip fits into it.
    """

    train: SpeechClips
    val: SpeechClips
    origin: str
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def window_s(self) -> float:
        return self.train.window_s


@checked
def speech(data: Any, encode: Encode, *, window_s: float | None = None) -> Speech:
    """Read speech and convert it to 16 kHz and one channel.

    Args:
        data: a folder with a manifest (see `exogym.home.speech.manifest.read_manifest`), a manifest, a Hugging Face
            data set or the folder from its `save_to_disk`, or a sequence of mappings with "audio" (a file, or
            {"array", "sampling_rate"}) and "text".
        encode: function of (text, seconds) that returns the labels, such as `encode` of Whisper's `Tokens`.
        window_s: the window's length in seconds. Longer clips are left out. Default: a second more than the longest
            clip, in whole seconds, up to 30.

    The manifest or the data set names the validation clips. Otherwise a random fifth of the clips is for validation,
    always the same fifth. ExoGym leaves out, and reports, clips that are longer than the window, empty (under 0.1 s, or
    silence), without words, with over 448 labels, or unreadable.

    Raises:
        DataError: the data do not exist, the manifest cannot be read or names a file outside its folder, or no clip is
            left.
    """
    entries, origin = _entries(data)
    clips: list[np.ndarray] = []
    labels: list[Sequence[int]] = []
    kept: list[ClipEntry] = []
    left_out: Counter[str] = Counter()
    examples: dict[str, str] = {}
    limit_s = FULL_WINDOW_S if window_s is None else window_s
    for entry in entries:
        try:
            samples, seconds = _sound(entry.audio, limit_s)
            why = _unfit(samples, seconds, entry.text, limit_s)
        except DataError as error:
            why = f"unreadable ({error})"
        if why is None:
            ids = encode(entry.text, seconds)
            why = None if len(ids) <= MOST_LABELS else f"with over {MOST_LABELS} labels"
        if why is not None:
            kind = why.partition(" (")[0]
            left_out[kind] += 1
            examples.setdefault(kind, f"{entry.name}{why.removeprefix(kind)}")
            continue
        clips.append((samples.clip(-1, 1) * INT16).round().astype(np.int16))
        labels.append(ids)
        kept.append(entry)
    if left_out:
        said = ", ".join(f"{count} {kind} (as {_short(examples[kind])})" for kind, count in left_out.items())
        notice(f"{origin}: left out of {len(kept) + left_out.total():,} clips: {said}")
    if len(kept) < 2:
        raise DataError(
            f"{origin}: only {len(kept)} clips are left for training and validation ({dict(left_out)} left out); "
            "at least two are needed that have words and are no longer than the window"
        )
    if window_s is None:
        window_s = min(FULL_WINDOW_S, float(-(-max(map(len, clips)) // SAMPLE_RATE)) + MARGIN_S)
    held = [bool(entry.held_out) for entry in kept]
    if all(entry.held_out is None for entry in kept) or len(set(held)) == 1:
        order = torch.randperm(len(kept), generator=generator(0, "held out"))  # lists often have a period
        held = (order < max(1, round(HELD_OUT * len(kept)))).tolist()

    def part(which: bool) -> SpeechClips:
        chosen = [i for i, is_held in enumerate(held) if is_held == which]
        own = [kept[i] for i in chosen]
        return SpeechClips(
            [clips[i] for i in chosen], [labels[i] for i in chosen], window_s, [entry.text for entry in own],
            [entry.speaker for entry in own], [entry.name for entry in own],
        )  # fmt: skip

    return Speech(part(False), part(True), origin, dict(left_out))


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _unfit(samples: np.ndarray, seconds: float, text: str, limit_s: float) -> str | None:
    """Return why a clip cannot be used for training, with details in brackets."""
    if seconds > limit_s or len(samples) > round(limit_s * SAMPLE_RATE):
        return f"longer than {limit_s:g} s ({seconds:.1f} s)"
    if seconds < SHORTEST_S or np.abs(samples).max(initial=0) < QUIET:
        return "empty"
    return None if any(c.isalnum() for c in text) else "without words"


def _sound(audio: Any, limit_s: float) -> tuple[np.ndarray, float]:
    """Return samples at 16 kHz, and seconds, from a file, bytes, or a Hugging Face `audio` field."""
    if isinstance(audio, Mapping):
        if audio.get("array") is not None:
            samples = np.asarray(audio["array"])
            if samples.size and not np.isfinite(samples).all():
                raise DataError("some of its samples are not finite")
            rate = int(audio["sampling_rate"])
            return one_channel(samples, rate), max(samples.shape, default=0) / rate
        audio = audio.get("bytes") or audio.get("path")
    if not isinstance(audio, str | os.PathLike | bytes):
        raise DataError(
            f"the audio is a {type(audio).__name__}, but must be a file or a mapping with array and sampling_rate"
        )
    return read_audio(audio, limit_s)


def _entries(data: Any) -> tuple[list[ClipEntry], str]:
    if not isinstance(data, str | os.PathLike):
        return _rows_of(data), f"a {type(data).__name__}"
    path = find_manifest(data)
    if path is not None:
        return read_manifest(path), str(path)
    folder = Path(data).expanduser()
    if any((folder / name).exists() for name in ("dataset_dict.json", "dataset_info.json", "state.json")):
        datasets = needs("datasets")
        return _rows_of(datasets.load_from_disk(str(folder))), str(folder)
    raise DataError(
        f"data={os.fspath(data)!r} has no manifest: write a manifest.csv with the header 'audio,text' and one line per "
        "clip, or pass a data set that Hugging Face's save_to_disk wrote"
    )


def _rows_of(data: Any) -> list[ClipEntry]:
    """Return the clips of a Hugging Face data set, of several by split, or of a sequence of mappings."""
    if isinstance(data, Mapping):
        splits = {str(name): _rows_of(part) for name, part in data.items()}
        return [
            ClipEntry(e.audio, e.text, e.speaker, not name.startswith("train"), f"{name} {e.name}")
            for name, part in splits.items()
            for e in part
        ]
    features, words = getattr(data, "features", None), None
    if isinstance(features, Mapping):  # undecoded, so that no other decoder is needed
        audio = next((name for name in AUDIO if name in features), None)
        if audio is not None and hasattr(features[audio], "decode"):
            data = data.cast_column(audio, type(features[audio])(decode=False))
        text = next((name for name in TEXT if name in features), None)
        words = None if text is None else getattr(features[text], "names", None)  # names of a ClassLabel
    if not isinstance(data, Iterable):
        raise DataError(
            f"data is a {type(data).__name__}, but must be a folder, a manifest, or a data set with audio and text"
        )
    found = []
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise DataError(f"clip {number} is a {type(row).__name__}, but must be a mapping with audio and text")
        where = f"clip {number}"
        speaker = str(next((row[name] for name in SPEAKER if row.get(name)), ""))
        said = column(row, TEXT, where)
        said = words[said] if words and isinstance(said, int) else said
        found.append(
            ClipEntry(column(row, AUDIO, where), "" if said is None else str(said), speaker, None, str(number))
        )
    return found


def find_speech(
    data: Any, encode: Encode, *, window_s: float | None = None, lines: int = 96, held_out: int = 24
) -> Speech:
    """Load speech: return `speech(data, ...)`.

    Without data, search for a folder `speech` in EXOGYM_DATA or the user's cache (exogym/speech). If there is none,
    espeak-ng reads lines of Shakespeare aloud: `lines` for training and `held_out` for validation.

    Raises:
        DataError, ExoGymError: as in `speech` and `spoken`.
    """
    if data is not None:
        return speech(data, encode, window_s=window_s)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exogym"
    given = os.environ.get("EXOGYM_DATA")
    for place in ([Path(given).expanduser()] if given else []) + [cache]:
        if (folder := place / "speech").is_dir():
            return speech(folder, encode, window_s=window_s)
    train, val = lines_of_shakespeare(lines, held_out)
    read = speech({"train": spoken(train), "validation": spoken(val)}, encode, window_s=window_s)
    return replace(read, origin="Shakespeare read by espeak-ng (synthetic)")
