"""Comparisons on data that are read in order: the checks before training, and the examples to evaluate on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exogym.core.combinations import check
from exogym.data import IterableData, Stream
from exogym.data.reading import COMPARED, Reader, described, sum_of
from exogym.errors import ArgumentError


def opening_of(train: Any) -> int:
    """Return the checksum of the iterable's first examples, after reading them twice.

    Raises:
        DataError: the iterable cannot be read, or begins with other examples when it is read again.

    >>> opening_of(range(3)) == opening_of([0, 1, 2]) != opening_of([0, 2, 1])
    True
    """
    first = Reader(described(train), 0, shuffle=False)
    first.read(COMPARED, in_epoch=True)
    again = Reader(described(train), 0, shuffle=False)
    again.opening = first.opening
    again.read(1)
    for reader in (first, again):
        reader.close()
    return sum_of(again.block[:COMPARED])


def check_entry(features: Mapping[str, str], stream: Stream) -> None:
    """Raise ArgumentError if a strategy, or an option of its run, needs data with positions."""
    try:
        check({**features, **stream.features()})
    except ArgumentError as error:
        raise ArgumentError(
            f"{error}. Comparisons and sweeps take no factory: leave out the strategy or option, or read the examples "
            "into a list, list(itertools.islice(dataset, count))"
        ) from error


def first_examples(val: Any, most: int) -> list[Any]:
    """Return the first `most` examples of the iterable `val`.

    Raises:
        DataError: the iterable cannot be read.
    """
    data = described(val)
    reader = Reader(IterableData(data.source, length=data.length), 0, shuffle=False, whose="the validation data")
    try:
        return reader.read(most, in_epoch=True)
    finally:
        reader.close()
