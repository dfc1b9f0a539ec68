"""One color per strategy, the same in every picture and on the page. The strategy's name alone decides the color.

The palette is Okabe and Ito's (2008), because color-blind readers can distinguish its colors. Yellow is left out,
because it is too pale for a line. The strategies of `exogym.strategy` take the colors in a fixed order. For any other
name, a hash of the name chooses the color. The run `single` is gray. Strategies of the same color in one picture
(`diloco:H=5` and `diloco:H=20`) have different dashes. This module does not import torch.

>>> [look.color for look in looks_of(["ddp", "diloco:H=5", "diloco:H=20", "single"]).values()]
['#0072B2', '#D55E00', '#D55E00', '#7F7F7F']
>>> [look.dash for look in looks_of(["ddp", "diloco:H=5", "diloco:H=20", "single"]).values()]
[(), (), (5, 2), ()]
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from exogym.study.compare.summary import SINGLE, name_of

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
ON_DARK = ("#56A8E8", "#EE8A45", "#2FC79A", "#DD9AC0", "#8FD0FF", "#F0C24B", "#F2F2F2")  # the same hues
GRAY = "#7F7F7F"
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.2), (5, 1.5, 1, 1.5), (9, 3))
MOST_COLORED = 8  # curves of a picture; the rest is gray
BEST = 5  # colored cells of a sweep with many cells
# Strategies that are often compared follow each other, so that their colors differ.
ORDER = (
    *("ddp", "diloco", "sparta", "fedavg", "demo", "streaming_diloco", "sparta_diloco"),
    *("async_diloco", "noloco", "fedopt", "sparseloco", "muloco", "topk", "gossip"),
    *("fedprox", "scaffold", "signsgd", "post_local_sgd", "qsgd", "powersgd"),
)


@dataclass(frozen=True)
class Look:
    """The color and dashes of a strategy's curve.

    Attributes:
        color, dark: the color on a light background, and the color on a dark background.
        dash: lengths of strokes and gaps in line widths; () is a solid line.
    """

    color: str
    dark: str
    dash: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"dash": list(self.dash)}


GRAYED = Look(GRAY, GRAY)


def look_of(label: str) -> Look:
    """Return a strategy's color, with a solid line. `label` is the strategy's text with options, or its short name.

    >>> look_of("DiLoCo:H=20") == look_of("diloco"), look_of("mine") == look_of("mine:x=1")
    (True, True)
    """
    name = name_of(label)
    if name == SINGLE:
        return GRAYED
    number = ORDER.index(name) if name in ORDER else zlib.crc32(name.encode("utf-8", "replace"))
    return Look(COLORS[number % len(COLORS)], ON_DARK[number % len(COLORS)])


def looks_of(labels: Iterable[str], losses: Mapping[str, float | None] | None = None) -> dict[str, Look]:
    """Return a dict from label to `Look` for one picture. Curves with the same color get different dashes.

    Args:
        losses: given if the labels are a sweep's cells. If there are more than seven cells, only the five with
            the lowest losses have colors; the others are gray.

    >>> looks = looks_of("987654321", {label: float(label) for label in "987654321"})
    >>> [label for label, look in looks.items() if look is GRAYED], looks["1"].color
    (['9', '8', '7', '6'], '#0072B2')
    """
    labels = list(labels)
    if losses is None:
        return dict(zip(labels, each_look(labels), strict=True))
    known = {label: x for label, x in losses.items() if x is not None}
    colored = labels
    if len(labels) > len(COLORS):
        colored = sorted(labels, key=lambda label: known.get(label, math.inf))[:BEST]
    return dict.fromkeys(labels, GRAYED) | dict(zip(colored, map(Look, COLORS, ON_DARK), strict=False))


def each_look(labels: Iterable[str]) -> list[Look]:
    """Return a `Look` for each curve in a picture. The same label may occur several times."""
    looks, taken = list[Look](), dict[str, int]()
    for label in labels:
        look = look_of(label)
        before = taken.get(look.color, 0)
        taken[look.color] = before + (look is not GRAYED)
        looks.append(Look(look.color, look.dark, DASHES[before % len(DASHES)]))
    return looks
