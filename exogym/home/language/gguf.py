"""Check the header of a GGUF file before the package gguf reads it: gguf trusts every count and length in it.

All numbers are little-endian, or all big-endian (then also the version). The file begins with "GGUF", the version
(u32), the number of tensors (u64) and the number of fields (u64). A field is a name, a type (u32) and a value. A name
or text is a length (u64) and this number of bytes. A value of type 9 is an array: the items' type (u32), their number
(u64) and the items. Then comes for each tensor its name, rank (u32), a size for each axis (u64 each), a type (u32) and
the place of its numbers (u64).
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any

from exogym.errors import DataError
from exogym.files import opened_regular

VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
WHOLE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}  # types of whole numbers, as for struct
MOST_AXES, MOST_NESTED = 4, 2
MOST_ITEMS = 1 << 22  # in all arrays: gguf makes a Python object for each
LARGEST = 1 << 24  # of the sizes in a model's fields: transformers may make tables of such a length


def check_gguf(path: Path) -> None:
    """Raise DataError unless the header of a GGUF file is whole, and its counts and sizes are possible."""
    try:
        with opened_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()
    except (OSError, ValueError, struct.error) as error:
        raise DataError(
            f"{path} is not a complete GGUF file ({error}): copy it again, or choose another file"
        ) from error


class _Header:
    def __init__(self, data: mmap.mmap):
        self.data, self.at, self.items, self.order = data, 0, 0, "<"

    def check(self) -> None:
        if self._taken(4) != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self.order = "<" if self.data[self.at : self.at + 2] != b"\0\0" else ">"
        if (version := self._number("I")) not in VERSIONS:
            raise ValueError(f"it has version {version}, but only versions {VERSIONS} can be read")
        tensors, fields = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(fields):
            name, kind = self._text(), self._number("I")
            values[name] = self._value(kind, 0)
        layers = set()
        for _ in range(tensors):
            name, axes = self._text(), self._number("I")
            if axes > MOST_AXES:
                raise ValueError(f"the tensor {name!r} has {axes} axes")
            self._taken(8 * axes + 12)
            layers |= set(re.findall(r"^(?:blk|dec\.blk|enc\.blk)\.(\d+)\.", name))
        kind_of_model = f"{values.get('general.architecture')}."
        for name, value in values.items():
            if name.startswith(kind_of_model) and isinstance(value, int) and abs(value) > LARGEST:
                raise ValueError(f"{name} = {value}, but at most {LARGEST} is allowed")
        name = f"{kind_of_model}block_count"
        if not isinstance(values.get(name), int) or not 0 <= values[name] <= len(layers):
            raise ValueError(f"{name} is {values.get(name)}, and it has the tensors of {len(layers)} layers")

    def _taken(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"at byte {self.at} it should have {size} more bytes, but it has {len(self.data)} in all")
        self.at += size
        return self.data[self.at - size : self.at]

    def _number(self, kind: str) -> int:
        found: int = struct.unpack(self.order + kind, self._taken(struct.calcsize("=" + kind)))[0]
        return found

    def _text(self) -> str:
        return self._taken(self._number("Q")).decode("utf-8")

    def _value(self, kind: int, depth: int) -> Any:
        """Skip a value. Return it if it is a whole number or a text, otherwise None."""
        if kind in WHOLE:
            return self._number(WHOLE[kind])
        if kind in SIZES:
            self._taken(SIZES[kind])
        elif kind == STRING:
            return self._text()
        elif kind == ARRAY and depth < MOST_NESTED:
            of, count = self._number("I"), self._number("Q")
            self.items += count
            if self.items > MOST_ITEMS:
                raise ValueError(f"its arrays have over {MOST_ITEMS} items")
            if of in SIZES:
                self._taken(count * SIZES[of])
            else:
                for _ in range(count):
                    self._value(of, depth + 1)
        else:
            raise ValueError(f"at byte {self.at} there is a value of the unknown type {kind}")
        return None
