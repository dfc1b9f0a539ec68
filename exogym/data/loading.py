"""Batches of data sets that return one example at a time, from one torch DataLoader for a process's nodes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from exogym.core.base import rng
from exogym.core.base.devices import CPU
from exogym.core.base.torch_private import end_workers
from exogym.errors import ArgumentError, DataError, check_count, check_switch, nearest

Request = tuple[int, int, np.ndarray, str]  # one batch: (data set, epoch, example indices, owner in words)

_OURS = {
    "dataset": "pass the data set itself",
    "batch_size": "use the argument batch_size of fit",
    "shuffle": "use the argument shuffle of fit",
    "sampler": "the order follows from seed; use partitioner to assign examples to nodes",
    "batch_sampler": "the order follows from seed; use partitioner to assign examples to nodes",
    "generator": "random numbers follow from seed",
    "in_order": "the order follows from seed",
}


def check_dataloader_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """Return checked DataLoader arguments. Raise ArgumentError for arguments that ExoGym sets itself."""
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ArgumentError(f"dataloader_kwargs={given!r} must be a dict of DataLoader's arguments, by name")
    known = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    for name in given:
        if name in _OURS:
            raise ArgumentError(f"dataloader_kwargs must not contain {name!r}: {_OURS[name]}")
        if name not in known:
            raise ArgumentError(
                f"dataloader_kwargs: DataLoader has no argument {name!r}: {nearest(name, known - set(_OURS))}"
            )
    kwargs = dict(given)
    check_switch("dataloader_kwargs: drop_last", kwargs.get("drop_last", False))
    workers = kwargs.get("num_workers", 0)
    check_count("dataloader_kwargs: num_workers", workers, least=0)
    for name in ("collate_fn", "worker_init_fn"):
        if kwargs.get(name) is not None and not callable(kwargs[name]):
            raise ArgumentError(f"dataloader_kwargs: {name}={kwargs[name]!r} is not callable: pass a function")
    if kwargs.get("prefetch_factor") is not None:
        check_count("dataloader_kwargs: prefetch_factor", kwargs["prefetch_factor"])
    if not workers and kwargs.get("timeout"):
        raise ArgumentError(f"dataloader_kwargs: timeout={kwargs['timeout']!r} needs workers: pass num_workers, too")
    try:
        DataLoader([0], **kwargs)  # type: ignore[arg-type]  # only checks
    except (ValueError, TypeError, AssertionError) as error:
        raise ArgumentError(f"dataloader_kwargs={kwargs!r}: torch's DataLoader rejects them: {error}") from error
    return kwargs


class Loading:
    """A DataLoader that keeps its workers between calls of `batches`. Each call sends a list of requests."""

    def __init__(self, datasets: Sequence[Any], private: bool, seed: int, kwargs: dict[str, Any]) -> None:
        begin = functools.partial(
            _begin_worker, _parent(kwargs.get("multiprocessing_context")), kwargs.get("worker_init_fn")
        )
        self._kwargs = {**kwargs, "collate_fn": _as_read, "worker_init_fn": begin}
        self._read = _Batches(datasets, private, seed, kwargs.get("collate_fn"))
        self._seed = seed
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = None
        self._source: Any = None  # the loader's iterator, if it has workers
        self._turn = 0

    def batches(self, requests: list[Request]) -> Iterator[Any]:
        """Yield the batch of each request.

        Pending requests are sent again if another iterator has used the workers meanwhile.
        """
        turn, source, done = -1, iter(()), 0
        shared = self._kwargs.get("num_workers", 0) > 0
        while done < len(requests):
            if turn < 0 or (shared and turn != self._turn):
                self._turn += 1
                turn = self._turn
                self._requests.requests = requests[done:]
                source = iter(self._made())
                self._source = source if shared else None
            batch: Any = next(source)
            if type(batch) is _Unreadable:
                raise batch.error()
            yield batch
            done += 1

    def _made(self) -> DataLoader[Any]:
        if self._loader is None:
            kwargs = dict(self._kwargs)
            if kwargs.get("num_workers", 0) > 0:
                kwargs.setdefault("persistent_workers", True)
            # The DataLoader draws a seed at each iteration; it must not use the caller's generator.
            draws = rng.generator(self._seed, "dataloader")
            self._loader = DataLoader(self._read, batch_size=None, sampler=self._requests, generator=draws, **kwargs)
        return self._loader

    def close(self) -> None:
        """Stop the workers. The next call of `batches` starts new ones."""
        source, self._loader, self._source = self._source, None, None
        if source is not None:
            end_workers(source)


class _Requests:
    """A sampler that yields the latest requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.requests)


class _Batches(Dataset[Any]):
    """Reads and collates a request, with random numbers that depend on the examples and not on the worker.

    Before `dataset[i]`, generators are seeded with (seed, epoch, i), and also the node if a factory made the data set.
    The user's `collate_fn`, which may mask tokens at random, continues with the last example's random numbers.
    """

    def __init__(self, datasets: Sequence[Any], private: bool, seed: int, collate: Any) -> None:
        self.datasets, self.private, self.seed, self.collate = datasets, private, seed, collate

    def __getitem__(self, request: Request) -> Any:
        home, epoch, indices, whose = request
        dataset = self.datasets[home]
        if self.collate is None and isinstance(dataset, (list, tuple, range, Tensor, np.ndarray)):
            return self._batch([dataset[i] for i in indices.tolist()], whose, indices.tolist())
        if get_worker_info() is None:
            with rng.preserved_state(CPU):
                return self._read(dataset, home, epoch, indices.tolist(), whose)
        try:
            return self._read(dataset, home, epoch, indices.tolist(), whose)
        except DataError as error:  # torch would put a traceback into the message
            return _Unreadable(str(error), traceback.format_exc())

    def _read(self, dataset: Any, home: int, epoch: int, indices: list[int], whose: str) -> Any:
        own = (home,) if self.private else ()
        examples = []
        for i in indices:
            seed = rng.stream_seed(self.seed, "example", epoch, i, *own)
            rng.seed_python(seed)
            rng.seed_torch(seed, CPU)
            try:
                examples.append(dataset[i])
            except Exception as error:
                raise DataError(
                    f"the data set failed at index {i}, an example of {whose}: {type(error).__name__}: {error}; try "
                    f"dataset[{i}] alone"
                ) from error
        return self._batch(examples, whose, indices)

    def _batch(self, examples: list[Any], whose: str, indices: list[int]) -> Any:
        return joined(examples, self.collate, f"{indices[:8]}{' and more' if len(indices) > 8 else ''} of {whose}")


def joined(examples: list[Any], collate: Any, which: str) -> Any:
    """Collate examples by the user's `collate`, or by torch's `default_collate`.

    Raises:
        DataError: the examples do not form a batch. `which` describes them in the message.
    """
    try:
        return default_collate(examples) if collate is None else collate(examples)
    except Exception as error:
        remedy = "join them by a collate_fn in dataloader_kwargs" if collate is None else "correct collate_fn"
        raise DataError(
            f"the examples {which} do not form a batch: {type(error).__name__}: {error}; give all examples the same "
            f"form and size, or {remedy}"
        ) from error


@dataclass(frozen=True)
class _Unreadable:
    """Sent by a worker instead of a batch that it could not read."""

    message: str
    traceback: str

    def error(self) -> DataError:
        error = DataError(self.message)
        error.add_note(f"in a worker of the DataLoader:\n{self.traceback}")
        return error


def _as_read(batch: Any) -> Any:
    return batch


def _parent(context: Any) -> int | None:
    """Return this process's id if it will be the workers' parent, which it is not with a fork server."""
    method = context if isinstance(context, str) else (context or multiprocessing).get_start_method()
    return None if method == "forkserver" else os.getpid()


def _begin_worker(parent: int | None, then: Callable[[int], None] | None, number: int) -> None:
    """Ignore Ctrl-C and SIGTERM in a worker; the run's process handles them, and may still need a batch.

    torch's worker ends when its parent changes, but would run forever if the parent died before its first check.
    """
    if parent is not None and os.getppid() != parent:
        os._exit(1)
    for name in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # only a main thread may set handlers
            signal.signal(name, lambda *_: None)  # programs that the data set starts would inherit SIG_IGN
    if then is not None:
        then(number)
