"""Store the state of nodes without a row: in memory up to a limit, and the rest in files."""

from __future__ import annotations

import contextlib
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file

from exogym.core.fleet.state import Tensors
from exogym.errors import TrainingError


class Store:
    """Store each node's named tensors. If the tensors take more than `limit_bytes`, the oldest tensors go to files.

    Args:
        limit_bytes: most bytes of tensors in memory. Default: no limit.
        folder: the folder for the files. It is made when needed, and `close` removes it. A limit needs a folder.

    >>> import torch
    >>> store = Store()
    >>> store.put(7, {"momentum": torch.ones(3)})
    >>> 7 in store, len(store), store.pop(7)["momentum"].tolist(), len(store)
    (True, 1, [1.0, 1.0, 1.0], 0)
    """

    def __init__(self, limit_bytes: float | None = None, folder: Path | None = None):
        self.limit_bytes, self.folder = limit_bytes, folder
        self.memory_bytes = 0
        self._here: OrderedDict[int, Tensors] = OrderedDict()
        self._in_files: set[int] = set()

    def __len__(self) -> int:
        return len(self._here) + len(self._in_files)

    def __contains__(self, node: object) -> bool:
        return node in self._here or node in self._in_files

    def __iter__(self) -> Iterator[int]:
        return iter(sorted([*self._here, *self._in_files]))

    def put(self, node: int, tensors: Tensors) -> None:
        """Store `tensors` for `node`. Do not change the tensors afterward.

        Raises:
            TrainingError: a file could not be written.
        """
        self._here[node] = tensors
        self.memory_bytes += _size(tensors)
        while self.limit_bytes is not None and self.memory_bytes > self.limit_bytes and self._here:
            self._write(*self._here.popitem(last=False))

    def get(self, node: int) -> Tensors:
        """Return the tensors of `node`, which remain in the store."""
        return self._here[node] if node in self._here else self._read(node)

    def pop(self, node: int) -> Tensors:
        """Return the tensors of `node`, and remove them from the store."""
        if node in self._here:
            tensors = self._here.pop(node)
            self.memory_bytes -= _size(tensors)
            return tensors
        tensors = self._read(node)
        self._in_files.discard(node)
        self._file(node).unlink(missing_ok=True)
        return tensors

    def clear(self) -> None:
        """Remove all tensors and files from this store."""
        self._here.clear()
        self._in_files.clear()
        self.memory_bytes = 0
        self.close()

    def close(self) -> None:
        """Remove this store's files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, node: int) -> Path:
        assert self.folder is not None
        return self.folder / f"node-{node}.safetensors"

    def _read(self, node: int) -> Tensors:
        if node not in self._in_files:
            raise KeyError(node)
        return {name: x.clone() for name, x in load_file(self._file(node)).items()}  # a view would hold the file open

    def _write(self, node: int, tensors: Tensors) -> None:
        file = self._file(node)
        self.memory_bytes -= _size(tensors)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: x.contiguous() for name, x in tensors.items()}, file)
        except Exception as error:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            raise TrainingError(
                f"the state of node {node} could not be written to {file} ({error}): free space on the disk, or raise "
                f"client_state_memory, now {self.limit_bytes:,.0f} bytes for each process"
            ) from error
        self._in_files.add(node)


def _size(tensors: Tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())
