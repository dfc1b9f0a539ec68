"""`compute="graphs"`: the stretches of `compiled`, of many rows at once, each captured as a CUDA graph and replayed.

A stretch is a function of nested tensors that asks none of them for its numbers, so the host says nothing to the device
between its begin and its end. Rows with as many steps to take go through it together, by `torch.func.vmap`, where the
model's operations allow it; else one after the other. All but `captured` is tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.base.torch_private import copy_
from exogym.core.combinations import check
from exogym.core.compute.compiled import Compiled, tensors_of
from exogym.core.compute.graph import Stepping, first_line, refusal
from exogym.core.compute.outputs import map_tensors
from exogym.core.compute.spans import Losses, Span
from exogym.core.compute.updates import State, settings
from exogym.core.compute.worker import Worker
from exogym.errors import ModelError

ROWS = 64  # at once, at most: each has parameters, gradients and optimizer state of its own in a stretch
WARM_UP = 3  # runs before a capture, in which kernels are chosen and memory is taken

Body = Callable[[], Any]
Captured = tuple[Callable[[], Any], Any]


def captured(body: Body) -> Captured:
    """Capture `body` as a CUDA graph; return what replays it, and the tensors in which its results then are."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = body()
    return graph.replay, results


class Replay:
    """A function of nested tensors with fixed places for what goes in: filled, replayed, and the results copied out.

    Args:
        inputs: of the kind that it is called with; copied.
        capture: as `captured`.

    >>> def again(body):
    ...     results = body()
    ...     return (lambda: results.copy_(body())), results
    >>> double = Replay(lambda x: 2 * x, (torch.ones(2),), again)
    >>> double(torch.tensor([3.0, 4.0]))
    tensor([6., 8.])
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], capture: Callable[[Body], Captured]):
        self.inputs = map_tensors(inputs, torch.clone)
        self.places = tensors_of(self.inputs)
        self.replay, self.results = capture(lambda: function(*self.inputs))

    def __call__(self, *inputs: Any) -> Any:
        copy_(self.places, tensors_of(inputs))
        self.replay()
        return map_tensors(self.results, torch.clone)


class Graphs(Compiled):
    """Computes stretches of many rows as one CUDA graph; what such a graph cannot do goes as in `Compiled`'s loop.

    Raises:
        ModelError: as `Compiled`; the model draws random numbers; or the device is none of CUDA.
    """

    how, device_type, together = "graphs", "cuda", True
    doing, done, often = "capturing", "captured", ""
    capture = staticmethod(captured)

    def __init__(self, worker: Worker, *args: Any, **options: Any):
        if worker.device.type != self.device_type:
            check({'compute="graphs"': "compute='graphs'", "no CUDA": f"device={worker.device.type!r}"})
        if worker.draws_torch:
            raise refusal(self.how, "it draws random numbers, which a replayed graph does not seed anew for each step")
        super().__init__(worker, *args, **options)
        self.together_rows, self.alone = ROWS, False

    def build(self, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return Replay(plain, inputs, self.capture)

    def steps(self, spans: Sequence[Span], losses: Losses, may_stop: bool = True) -> None:
        left = list(spans)
        while left and not (may_stop and self.worker.should_stop()):
            count = len(left[0].columns)
            alike = [span for span in left if len(span.columns) == count][: self.together_rows]
            left = [span for span in left if not any(span is one for one in alike)]
            if len(alike) == 1:
                super().steps(alike, losses, may_stop)
            else:
                self._train_together(alike, losses, may_stop)

    def _train_together(self, spans: list[Span], losses: Losses, may_stop: bool) -> None:
        """Take the steps of spans of one length, stretch by stretch together; what cannot be, row by row."""
        count, firsts = len(spans[0].columns), [int(self.taken[span.row]) for span in spans]
        source = [span.source or (self.nodes[span.row].rank, at) for span, at in zip(spans, firsts, strict=True)]
        batches = [self.stream.batches(node, at, count) for node, at in source]
        found, done, may_go_on = list[Tensor](), 0, True
        while done < count and may_go_on:
            size = self.most if count - done >= self.most else 1
            groups = [[self._plain(batch) for batch in islice(each, size)] for each in batches]
            taken = self._stretch_of_all(spans, groups, done)
            if taken is None:
                break
            found.append(taken)
            done += size
            for span, first in zip(spans, firsts, strict=True):
                self.taken[span.row] = first + done
            pulse.step_taken()
            may_go_on = not (may_stop and self.worker.should_stop())
        for k, (span, first) in enumerate(zip(spans, firsts, strict=True) if found else ()):
            self.worker.point(span.row)
            own = self._looked_at(span.row, torch.cat([taken[k] for taken in found]), first)
            losses.add(span.row, span.columns[:done], own)
        if done < count and may_go_on:
            super().steps([_rest(span, done) for span in spans], losses, may_stop)

    def _stretch_of_all(self, spans: list[Span], groups: list[list[Any]], done: int) -> Tensor | None:
        """Take the steps of `groups`, each row's batches, in one graph; return the losses (rows, K), None: it cannot.

        Args:
            done: steps of the spans that were taken before.
        """
        worker, fleet, inner, size = self.worker, self.fleet, self.inner, len(groups[0])
        assert inner is not None
        if self.alone or not all(self._fits(batch) for group in groups for batch in group):
            return None
        keys, kept, numbers = set[Any](), [], []
        stepping: Stepping | None = None
        for span in spans:
            worker.point(span.row)
            inner.enter(span.row)
            key = (size, *map(settings, inner.optimizer.param_groups))
            if key not in self._steppings:
                self._steppings[key] = self._stepping()
            stepping = self._steppings[key]
            keys.add(key)
            if stepping is None or len(keys) > 1:
                return None
            at = np.arange(self.taken[span.row], self.taken[span.row] + size)
            own = self._numbers(stepping, at if span.at is None else span.at[done : done + size])
            if own is None:
                return None
            kept.append(self._kept(stepping))
            numbers.append(own)
        assert stepping is not None
        rows = torch.tensor([span.row for span in spans], device=worker.device)
        blocks = [(block, block.params.index_select(0, rows)) for block in fleet.blocks]
        params = [slot.of(x) for block, x in blocks for slot in block.layout]
        buffers = [x.index_select(0, rows) for x in fleet.buffers.values()]
        inputs = (params, _stacked(kept), buffers, torch.stack(numbers), _stacked(groups))
        try:
            after = self._run(
                ("together", len(spans), *keys),
                self._traced_together(groups[0], stepping, kept[0], inputs),
                size,
                inputs,
            )
        except _OneByOne as error:
            self.alone = True
            self._say_once(f"rows go one after the other ({error})")
            return None
        params_after, kept_after, buffers_after, losses = after
        places = [slot.of(block.params) for block in fleet.blocks for slot in block.layout]
        for place, x in zip([*places, *fleet.buffers.values()], [*params_after, *buffers_after], strict=True):
            place.index_copy_(0, rows, x)
        for k, span in enumerate(spans):
            inner.enter(span.row)
            self._keep(stepping, [[x[k].clone() for x in state] for state in kept_after], size)
        return losses

    def _traced_together(
        self, batches: list[Any], stepping: Stepping, kept: list[State], inputs: tuple[Any, ...]
    ) -> Callable[[], Callable[..., Any]]:
        def trace() -> Callable[..., Any]:
            plain = self.tracer.stretch(batches, stepping, kept)
            try:
                return self.tracer.together(plain, *inputs)
            except ModelError as error:
                raise _OneByOne(first_line(error)) from error

        return trace


class _OneByOne(Exception):
    """An operation of the model that `torch.func.vmap` does not know, or not in place."""


def _rest(span: Span, done: int) -> Span:
    """Return what is left of a span after so many steps."""
    at = None if span.at is None else span.at[done:]
    source = None if span.source is None else (span.source[0], span.source[1] + done)
    return Span(span.row, span.columns[done:], at, source)


def _stacked(each: Sequence[Any]) -> Any:
    """Return nested tensors like the first of `each`, those of all in front of one another.

    >>> _stacked([[torch.tensor(1), (torch.tensor(2),)], [torch.tensor(3), (torch.tensor(4),)]])
    [tensor([1, 3]), (tensor([2, 4]),)]
    """
    stacks = iter([torch.stack(alike) for alike in zip(*map(tensors_of, each), strict=True)])
    return map_tensors(each[0], lambda x: next(stacks))
