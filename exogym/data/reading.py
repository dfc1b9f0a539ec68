"""Read iterables: their examples by position, in blocks, and from a saved place."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.base import rng
from exogym.core.base.devices import CPU
from exogym.core.base.rng import stream_seed
from exogym.core.fleet.state import Tensors
from exogym.core.progress import notice
from exogym.errors import DataError, check_count, checked

WINDOW = 1024  # examples that are shuffled together
AHEAD = 64  # examples that are read together without shuffling
COMPARED = 8  # examples that must be the same when a run resumes


class IterableData:
    """An iterable with its length and shuffle window, which ExoGym cannot infer from it.

    Every iterable is a data set by itself: a torch `IterableDataset`, a streaming data set of Hugging Face, or your own
    object whose `__iter__` starts anew each time. Wrap it in this class to change a default.

    Args:
        source: the iterable. In a given epoch, it must return the same examples in the same order each time; before an
            epoch begins, ExoGym calls `source.set_epoch(epoch)` if it exists. A resumed run restores the iterable's
            place if it has `state_dict` and `load_state_dict`, and otherwise reads the epoch's examples again up to its
            place.
        length: examples per epoch. Default: `len(source)`. If the iterable has no length, a run needs `max_steps`.
        window: with `fit(shuffle=True)`, every `window` consecutive examples (fewer at an epoch's end) are shuffled
            together, and a process keeps them in memory.

    >>> IterableData(range(10), length=10, window=100)
    IterableData(range, length=10, window=100)
    """

    @checked
    def __init__(self, source: Iterable[Any], *, length: int | None = None, window: int = WINDOW) -> None:
        if not hasattr(source, "__iter__") or isinstance(source, str | bytes | Mapping | set | frozenset | Iterator):
            raise DataError(
                f"IterableData of a {type(source).__name__}: expected an object whose __iter__ starts anew each time, "
                "such as an IterableDataset"
            )
        check_count("window", window)
        if length is not None:
            check_count("length", length)
        self.source, self.length, self.window = source, length, window
        self.nodes = 1

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __repr__(self) -> str:
        return f"IterableData({type(self.source).__name__}, length={self.length}, window={self.window})"


class FirstShare(IterableData):
    """The examples that node 0 of `nodes` nodes gets from an iterable, for a run with this node alone.

    The node takes example k if k mod `nodes` is 0, in the order of the run of all nodes.

    Args:
        dataset: the iterable.
        nodes: number of nodes among which examples are dealt.
    """

    def __init__(self, dataset: Any, nodes: int) -> None:
        data = described(dataset)
        super().__init__(data.source, length=data.length, window=data.window)
        self.nodes = nodes


def described(dataset: Any) -> IterableData:
    """Return an iterable with its length and window.

    >>> described(IterableData(range(3))).length
    3
    """
    data = dataset if isinstance(dataset, IterableData) else IterableData(dataset)
    if data.length is None:
        try:
            length = len(data.source)  # type: ignore[arg-type]
            data = copy.copy(data)
            data.length = length
        except (TypeError, NotImplementedError):
            pass
    return data


class Reader:
    """Read an iterable's examples by position, with its epochs one after another without a gap.

    Examples are read in blocks of `window` examples, fewer at the end of an epoch. Before a block, the generators of
    Python, numpy and torch are seeded with (seed, "block", epoch, first example), so that random examples do not depend
    on the process.

    Args:
        data: the iterable.
        ids: further numbers for the names of random streams.
        whose: the owner of the data, for messages.

    Attributes:
        position: number of the next example to return.

    >>> reader = Reader(IterableData(range(5)), seed=0, shuffle=False)
    >>> reader.read(7), reader.position
    ([0, 1, 2, 3, 4, 0, 1], 7)
    >>> reader.seek(3)
    >>> reader.read(1)
    [3]
    """

    def __init__(self, data: IterableData, seed: int, shuffle: bool, ids: Sequence[int] = (), whose: str = "the data"):
        self.source: Any = data.source
        self.length = data.length
        self.seed, self.shuffle, self.ids, self.whose = seed, shuffle, tuple(ids), whose
        self.window = data.window if shuffle else AHEAD
        self.moves = all(hasattr(self.source, name) for name in ("state_dict", "load_state_dict"))
        self.opening: int | None = None  # the sum of the first examples, when they were first read
        self._opened: Any = None
        self._iterator: Any = None
        self._begin(0, 0, 0)

    def read(self, count: int, *, in_epoch: bool = False) -> list[Any]:
        """Return the next `count` examples, or with `in_epoch` only those left in this epoch."""
        found: list[Any] = []
        while len(found) < count:
            if self.position == self.first + len(self.block):
                if not in_epoch:
                    self._next_block()
                elif not self._more():
                    break
            start = self.position - self.first
            new = self._picked[start : start + count - len(found)]
            self.position += len(new)
            found += new
        return found

    def seek(self, position: int) -> None:
        """Go to example number `position`: forwards by reading, backwards from the start of an epoch."""
        if position < self.first:
            self._begin(*((self.epoch, self.begun, self.begun) if position >= self.begun else (0, 0, 0)))
        while position > self.first + len(self.block):
            self._next_block()
        self.position = position

    def mark(self) -> Tensors:
        """Return the place of the current block: numbers, and the iterable's own state if it has one."""
        if not self.block:
            return {}
        numbers = [self.epoch, self.begun, self.first, sum_of(self.block[:COMPARED])]
        return {"place": torch.tensor(numbers)} | ({} if self._state is None else _packed(self._state))

    def load(self, mark: Tensors) -> None:
        """Go to the place that `mark` returned.

        Raises:
            DataError: the iterable returns other examples at this place than when the mark was made.
        """
        epoch, begun, first, wanted = mark["place"].tolist()
        if "state" in mark:
            self._begin(epoch, begun, first, torch.load(io.BytesIO(mark["state"].numpy().tobytes()), weights_only=True))
            if self._more() and sum_of(self.block[:COMPARED]) == wanted:
                return
            notice(
                f"{self.whose}: the iterable's load_state_dict does not restore the next examples (a shuffle buffer "
                f"would be lost), so ExoGym reads {first - begun:,} examples again"
            )
        self._begin(epoch, begun, begun)
        while self.first + len(self.block) <= first and self._more():
            pass
        self.position = first
        if self.first != first or sum_of(self.block[:COMPARED]) != wanted:
            raise DataError(
                f"{self.whose}: example {first - begun:,} of epoch {epoch} differs from the example before the "
                "interruption: provide the same files in the same order, which must not depend on the process"
            )

    def close(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()  # a generator frees its files
        self._iterator = self._opened = None

    # Blocks

    def _begin(self, epoch: int, begun: int, first: int, state: Any = None) -> None:
        """Go to example `first`, in an epoch whose examples begin at `begun`; `state` is the iterable's at this place.

        The user's iterable keeps its place: an iterable that has a place is copied.
        """
        self.close()
        self.epoch, self.begun, self.first, self.position = epoch, begun, first, first
        self.block: list[Any] = []
        self._picked: list[Any] = []  # the block's examples in the order in which they are returned
        self._ended, self._state = False, state

    def _open(self) -> Any:
        within = self.first - self.begun
        opened = self.source
        if self.moves or hasattr(opened, "set_epoch"):
            try:
                opened = copy.deepcopy(opened)
            except (TypeError, pickle.PickleError):  # such as torchdata's StatefulDataLoader
                opened = copy.copy(opened)
        if hasattr(opened, "set_epoch"):
            opened.set_epoch(self.epoch)
        if within and self.moves:
            opened.load_state_dict(self._state)
        iterator: Any = iter(opened)
        if within and not self.moves:
            iterator.load_state_dict(self._state)
        self._opened = opened
        return iterator

    def _now(self) -> Any:
        """Return the iterable's state at its current place, or None if it has none."""
        of = self._opened if self.moves else self._iterator
        if not (hasattr(of, "state_dict") and hasattr(of, "load_state_dict")):
            return None
        return copy.deepcopy(of.state_dict())

    def _more(self) -> bool:
        """Read the next block of this epoch, and return False if it has no more examples."""
        self.first += len(self.block)
        self.block, self._picked = [], []
        if self._ended:
            return False
        within = self.first - self.begun
        with rng.preserved_state(CPU):
            seed = stream_seed(self.seed, "block", self.epoch, within, *self.ids)
            rng.seed_python(seed)
            rng.seed_torch(seed, CPU)
            try:
                if self._iterator is None:
                    self._iterator = self._open()
                elif within:
                    self._state = self._now()
                self.block = list(islice(self._iterator, self.window))
            except Exception as error:
                raise DataError(
                    f"{self.whose}: the iterable failed at example {within:,} of epoch {self.epoch}, or at one of the "
                    f"next {self.window}: {type(error).__name__}: {error}"
                ) from error
        self._ended = len(self.block) < self.window
        seen = within + len(self.block)
        if self.length is not None and (seen > self.length or (self._ended and seen < self.length)):
            found = f"{'at least ' * (not self._ended)}{seen:,}"
            raise DataError(
                f"{self.whose}: expected {self.length:,} examples in an epoch, got {found}: pass the correct length"
            )
        if not self.first and self.block:
            self._check_opening()
        self._picked = self._order(within)
        return bool(self.block)

    def _check_opening(self) -> None:
        found = sum_of(self.block[:COMPARED])
        if self.opening not in (None, found):
            raise DataError(
                f"{self.whose}: read a second time, the iterable begins with other examples, so its order is not known "
                "and no run could resume: let __iter__ start anew in a fixed order (sort file names, seed "
                "generators), or follow set_epoch(epoch)"
            )
        self.opening = found

    def _order(self, within: int) -> list[Any]:
        """Return the block's examples in the order in which nodes get them."""
        if not self.shuffle:
            return self.block
        name = (self.epoch, *([within] if within else []), *self.ids)
        perm = torch.randperm(len(self.block), generator=rng.generator(self.seed, "shuffle", *name))
        return [self.block[i] for i in perm.tolist()]

    def _next_block(self) -> None:
        """Read the next block, of this epoch or the next."""
        while not self._more():
            if self.first == self.begun:
                again = f" in epoch {self.epoch}: let __iter__ start anew each time" if self.epoch else ""
                raise DataError(f"{self.whose}: the iterable has no examples{again}")
            self._begin(self.epoch + 1, self.first, self.first)


def sum_of(value: Any) -> int:
    """Return a 63-bit hash of examples: numbers, texts, bytes, tensors and arrays in lists, tuples and mappings.

    >>> sum_of([torch.ones(2), "a"]) == sum_of([torch.ones(2), "a"]) != sum_of([torch.ones(3), "a"])
    True
    """
    digest = hashlib.blake2b(digest_size=8)

    def add(part: Any) -> None:
        if isinstance(part, Mapping):
            digest.update(b"{")
            for key, item in part.items():
                add(key)
                add(item)
        elif isinstance(part, list | tuple):
            digest.update(f"[{len(part)}".encode())
            for item in part:
                add(item)
        elif isinstance(part, Tensor) and part.layout == torch.strided and not part.is_quantized:
            flat = part.detach().cpu().contiguous().view(-1)
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(part, np.ndarray | np.generic) and part.dtype != object:
            digest.update(f"{part.dtype}{part.shape}".encode() + part.tobytes())
        elif isinstance(part, bytes | bytearray):
            digest.update(part)
        elif isinstance(part, bool | int | float | complex | str) or part is None:
            digest.update(f"{type(part).__name__}{part!r}".encode())
        else:
            digest.update(type(part).__name__.encode())

    add(value)
    return int.from_bytes(digest.digest(), "little") >> 1


def bytes_of(example: Any) -> int:
    """Return approximately how many bytes an example takes.

    >>> bytes_of({"x": torch.zeros(4), "text": b"abc"})
    19
    """
    if isinstance(example, Tensor | np.ndarray):
        return example.nbytes
    if isinstance(example, Mapping):
        return sum(map(bytes_of, example.values()))
    if isinstance(example, list | tuple):
        return sum(map(bytes_of, example))
    return len(example) if isinstance(example, str | bytes) else 8


def _packed(state: Any) -> Tensors:
    """Return an iterable's state as bytes, or {} if they could not be read again without executing code."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError):
        return {}
    return {"state": torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}
