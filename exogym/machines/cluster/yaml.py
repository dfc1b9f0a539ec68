"""YAML, written: blocks of mappings and lists, every text in double quotes as JSON has it: none is read as more."""

from __future__ import annotations

import json
from typing import Any


def document(value: Any) -> str:
    """Return a value as a YAML document.

    >>> print(document({"kind": "Job", "spec": {"args": ["a: b", "no"], "env": []}}), end="")
    "kind": "Job"
    "spec":
      "args":
      - "a: b"
      - "no"
      "env": []
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        found = []
        for key, item in value.items():
            inner = _lines(item)
            if not _is_block(item):
                found.append(f"{json.dumps(key)}: {inner[0]}")
            else:
                indent = "" if isinstance(item, list) else "  "
                found += [f"{json.dumps(key)}:", *(indent + line for line in inner)]
        return found
    if isinstance(value, list) and value:
        found = []
        for item in value:
            first, *rest = _lines(item)
            found += [f"- {first}", *(f"  {line}" for line in rest)]
        return found
    return [json.dumps(value)]


def _is_block(value: Any) -> bool:
    return isinstance(value, dict | list) and bool(value)
