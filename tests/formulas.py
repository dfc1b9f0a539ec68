"""What is asked of every strategy by name: a test for each identity that it states, and bytes equal to a formula."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from paths import TESTS
from problems import Regressor, shards, train
from torch import float32, nn
from torch.utils.data import TensorDataset

from exogym.strategy.registry import parse_strategy


def untested(stated: dict[str, Sequence[str]], tests: dict[str, list[str]]) -> list[str]:
    """Return what is stated without a test of it that exists and has a control."""
    files, missing = {}, []
    for path in TESTS.rglob("test_*.py"):
        files |= {path.stem: path, f"{path.parent.name}/{path.stem}": path}
    for name, identities in stated.items():
        named = tests.get(name, [])
        missing += [f"{name}: {identity}" for identity in identities[len(named) :]]
        missing += [f"{name}: {test} states nothing" for test in named[len(identities) :]]
        for test in named:
            file, _, function = test.partition("::")
            text = files[file].read_text("utf-8")
            body = re.search(rf"^def {function}\(.*?(?=^[^\s)]|\Z)", text, re.S | re.M)
            if body is None or not re.search(r"unlike\(|control|assert not |> |!=", body[0]):
                missing.append(f"{name}: {test} is no test with a control")
    return missing


# Bytes: of a node over six steps, handed over and sent, for fleets and models of all sizes

STEPS, B = 6, 4
ring: Callable[[int], float] = lambda n: 2 * (n - 1) / n  # noqa: E731
gather: Callable[[int], float] = lambda n: n - 1  # noqa: E731
once: Callable[[int], float] = lambda n: 1.0  # noqa: E731
Shapes = list[tuple[int, ...]]
Formula = tuple[str, Callable[[Shapes, int, int], float], Callable[[int], float]]


def degree(n: int) -> int:
    return min(2, n - 1)


def check_bytes(formula: Formula, n: int, each_node: bool = True) -> None:
    """Assert that `n` nodes hand over and send what the formula gives, each by itself or in the mean."""
    text, payload, factor = formula
    data = [TensorDataset(*(t.float() for t in node.tensors)) for node in shards(n)]
    for hidden in (5, 8):  # 41 and 65 parameters
        model: nn.Module = Regressor(hidden, float32)
        shapes = [tuple(p.shape) for p in model.parameters()]
        P = sum(p.numel() for p in model.parameters())
        seen = train(parse_strategy(text, lr=0.01), data, n, STEPS, model)
        wanted = payload(shapes, P, n) if n > 1 else 0.0
        assert seen.payload.mean() == pytest.approx(wanted, rel=1e-12)
        assert seen.tx.mean() == pytest.approx(wanted * factor(n), rel=1e-12)
        assert seen.rx.mean() == pytest.approx(seen.tx.mean(), rel=1e-12)
        if each_node:
            np.testing.assert_allclose(seen.payload, wanted, rtol=1e-12)
