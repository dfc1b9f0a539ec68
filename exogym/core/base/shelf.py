"""A key-value store with torch's interface, over authenticated connections.

torch's own `TCPStore` answers anybody who can reach its port. Here, requests and answers are lines of JSON on a
connection that a door (`exogym.machines.launch.door`) has accepted:

    {"say": "store", "id", "do": "set" | "add" | "get" | "check" | "delete" | "swap" | "count", "keys": [...], ...}
    {"hear": "store", "id", "is": the answer}

Values are encoded as base64. A "get" is answered once all its keys exist.
"""

from __future__ import annotations

import base64
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist

Who = TypeVar("Who")
# The errors that a malformed line can raise.
SENSELESS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Shelf(Generic[Who]):
    """Hold a store's keys and values, and answer requests. This class uses no sockets.

    >>> shelf = Shelf()
    >>> shelf.take("a", {"id": 7, "do": "get", "keys": ["x"]})
    []
    >>> shelf.take("b", {"id": 1, "do": "set", "keys": ["x"], "values": ["eA=="]})
    [('b', {'hear': 'store', 'id': 1, 'is': None}), ('a', {'hear': 'store', 'id': 7, 'is': ['eA==']})]
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._waiting: list[tuple[Who, int, list[str]]] = []

    def take(self, who: Who, said: dict[str, Any]) -> list[tuple[Who, dict[str, Any]]]:
        """Process the request `said` from the sender `who`. Return the (receiver, answer) pairs to send now.

        Raises:
            an exception listed in SENSELESS: the request is malformed.
        """
        number, keys = int(said["id"]), [str(key) for key in said["keys"]]
        if said["do"] == "get":
            answered = []
            self._waiting.append((who, number, keys))
        else:
            answered = [(who, _answer(number, self._do(said["do"], keys, said)))]
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            if all(key in self.values for key in entry[2]):
                answered.append((entry[0], _answer(entry[1], [self.values[key] for key in entry[2]])))
            else:
                self._waiting.append(entry)
        return answered

    def leave(self, who: Who) -> None:
        """Drop the unanswered requests of the sender `who`."""
        self._waiting = [entry for entry in self._waiting if entry[0] != who]

    def _do(self, do: str, keys: list[str], said: dict[str, Any]) -> Any:
        if do == "set":
            self.values.update(zip(keys, map(str, said["values"]), strict=True))
            return None
        if do == "check":
            return all(key in self.values for key in keys)
        if do == "count":
            return len(self.values)
        (key,) = keys
        if do == "add":
            total = int(unpacked(self.values.get(key, "MA=="))) + int(said["by"])
            self.values[key] = packed(str(total))
            return total
        if do == "delete":
            return self.values.pop(key, None) is not None
        if do == "swap":
            if self.values.get(key, "") == said["old"]:
                self.values[key] = str(said["new"])
            return self.values.get(key, said["old"])
        raise ValueError(f"do={do!r} is unknown to this store")


def _answer(number: int, value: Any) -> dict[str, Any]:
    return {"hear": "store", "id": number, "is": value}


def packed(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def unpacked(text: str) -> bytes:
    return base64.b64decode(text)


class LineStore(dist.Store):
    """A torch `Store` that keeps its keys and values in a `Shelf` in another process.

    Args:
        say: function that sends a request to the other process. Another thread passes each answer to `hear`.

    All calls raise torch's DistNetworkError once the connection has failed. A call that waits for too long raises
    torch's DistStoreError.
    """

    def __init__(self, say: Callable[[dict[str, Any]], None]):
        super().__init__()
        self._send, self._numbers, self._lock = say, itertools.count(), threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._failed: str | None = None

    # The line

    def hear(self, said: dict[str, Any]) -> None:
        """Pass an answer to the call that waits for it."""
        with self._lock:
            asked = self._open.pop(said["id"], None)
        if asked is not None:
            asked.set_result(said["is"])

    def fail(self, why: str) -> None:
        """Mark the connection as lost, so that waiting and later calls raise an error with the reason `why`."""
        with self._lock:
            self._failed = self._failed or why
            lost, self._open = list(self._open.values()), {}
        for asked in lost:
            asked.set_exception(dist.DistNetworkError(why))

    def later(self, do: str, keys: Sequence[str], **more: Any) -> Future[Any]:
        """Send the request `do` for `keys`. Return a future for its answer."""
        asked: Future[Any] = Future()
        with self._lock:
            number, failed = next(self._numbers), self._failed
            if failed is None:
                self._open[number] = asked
        if failed is None:
            self._send({"say": "store", "id": number, "do": do, "keys": list(keys), **more})
        else:
            asked.set_exception(dist.DistNetworkError(failed))
        return asked

    def _ask(self, do: str, keys: Sequence[str], timeout: timedelta | None = None, **more: Any) -> Any:
        limit_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
        try:
            return self.later(do, keys, **more).result(limit_s)
        except TimeoutError:
            raise dist.DistStoreError(
                f"the store has not answered about {', '.join(keys)} within {limit_s:g} s"
            ) from None

    # What torch calls

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], values=[packed(value)])

    def get(self, key: str) -> bytes:
        return unpacked(self._ask("get", [key])[0])

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", [key], by=value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("get", keys, timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:
        return int(self._ask("count", []))

    deleteKey, getNumKeys = delete_key, num_keys  # torch's C++ uses these names

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return unpacked(self._ask("swap", [key], old=packed(expected), new=packed(desired)))
