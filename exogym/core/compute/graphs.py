"""`compute="graphs"`: capture stretches of many rows as CUDA graphs and replay them.

A stretch becomes a function of nested tensors that never reads a tensor's value. So the GPU runs the whole stretch
without commands from the CPU. Rows with the same number of steps run together, with `torch.func.vmap`. If vmap does not
support the model's operations, the rows run one after the other. Tests without a GPU cover everything except
`captured`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.base.batches import map_tensors, stack_nested, tensors_in
from exogym.core.base.torch_private import copy_
from exogym.core.combinations import check
from exogym.core.compute.compiled import GraphNode, Maker, Stretches
from exogym.core.compute.finite import Watch
from exogym.core.compute.graph import Stepping, first_line, refusal
from exogym.core.compute.inner import InnerOptimizer
from exogym.core.compute.loop import Loop
from exogym.core.compute.spans import Losses, Span
from exogym.core.compute.updates import State
from exogym.core.compute.worker import Worker
from exogym.data.stream import Stream
from exogym.errors import ModelError

ROWS = 64  # at once, at most: in a stretch each has its own parameters, gradients and optimizer state
DEVICE = "cuda"
WARM_UP = 3  # runs before a capture, which choose kernels and allocate memory

Body = Callable[[], Any]
Captured = tuple[Callable[[], Any], Any]


def captured(body: Body) -> Captured:
    """Capture `body` as a CUDA graph; return a function that replays it, and its result tensors."""
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
    """Capture a function of nested tensors once, and replay it at each call.

    A call copies its arguments into the captured inputs, replays the function, and returns copies of the results.

    Args:
        function: the function to capture.
        inputs: example inputs. Copies of them become the captured inputs.
        capture: a function like `captured`, which captures a function without arguments.

    >>> def again(body):
    ...     results = body()
    ...     return (lambda: results.copy_(body())), results
    >>> double = Replay(lambda x: 2 * x, (torch.ones(2),), again)
    >>> double(torch.tensor([3.0, 4.0]))
    tensor([6., 8.])
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], capture: Callable[[Body], Captured]):
        self.inputs = map_tensors(inputs, torch.clone)
        self.places = tensors_in(self.inputs)
        self.replay, self.results = capture(lambda: function(*self.inputs))

    def __call__(self, *inputs: Any) -> Any:
        copy_(self.places, tensors_in(inputs))
        self.replay()
        return map_tensors(self.results, torch.clone)


CAPTURER = Maker("graphs", "capturing", "captured", "", lambda graph, inputs, draws: Replay(graph, inputs, captured))


class Graphs:
    """Compute stretches of many rows as one CUDA graph. Stretches that cannot be captured are computed row by row.

    Raises:
        ModelError: `Stretches` refuses the model; the model draws random numbers; or the device is not a CUDA device.
    """

    def __init__(self, worker: Worker, stream: Stream, inner: InnerOptimizer | None):
        if worker.device.type != DEVICE:
            check({'compute="graphs"': "compute='graphs'", "no CUDA": f"device={worker.device.type!r}"})
        if worker.draws_torch:
            why = "it draws random numbers, and a replayed graph cannot seed them for each step"
            raise refusal(CAPTURER.how, why)
        self.stretches = Stretches(worker, stream, inner, CAPTURER)
        self.worker, self.stream, self.inner, self.fleet, self.alone = worker, stream, inner, worker.fleet, False

    def gradients(self, plain: Loop, rows: Sequence[int]) -> None:
        """Return None, so that the loop computes the gradients row by row."""

    def steps(self, plain: Loop, spans: Sequence[Span], losses: Losses, may_stop: bool) -> Sequence[Span]:
        left, alone = list(spans), list[Span]()
        while left and not (may_stop and self.worker.should_stop()):
            count = len(left[0].columns)
            alike = [span for span in left if len(span.columns) == count][:ROWS]
            left = [span for span in left if not any(span is one for one in alike)]
            alone += alike if len(alike) == 1 else self._train_together(plain, alike, losses, may_stop)
        return alone

    def _train_together(self, plain: Loop, spans: list[Span], losses: Losses, may_stop: bool) -> list[Span]:
        """Take the steps of equally long spans together, stretch by stretch; return the rest of the spans."""
        count, firsts = len(spans[0].columns), [int(plain.taken[span.row]) for span in spans]
        source = [span.source or (plain.nodes[span.row].rank, at) for span, at in zip(spans, firsts, strict=True)]
        batches = [self.stream.batches(node, at, count) for node, at in source]
        found, done, may_go_on = list[Tensor](), 0, True
        while done < count and may_go_on:
            size = self.stretches.most if count - done >= self.stretches.most else 1
            groups = [[self.stretches.plain(batch) for batch in islice(each, size)] for each in batches]
            taken = self._stretch_of_all(plain, spans, groups, done)
            if taken is None:
                break
            found.append(taken)
            done += size
            for span, first in zip(spans, firsts, strict=True):
                plain.taken[span.row] = first + done
            pulse.step_taken()
            may_go_on = not (may_stop and self.worker.should_stop())
        for k, (span, first) in enumerate(zip(spans, firsts, strict=True) if found else ()):
            self.worker.point(span.row)
            node = plain.nodes[span.row]
            assert isinstance(node, GraphNode)
            losses.add(span.row, span.columns[:done], node.looked_at(torch.cat([taken[k] for taken in found]), first))
        return [_rest(span, done) for span in spans] if done < count and may_go_on else []

    def _stretch_of_all(self, plain: Loop, spans: list[Span], groups: list[list[Any]], done: int) -> Tensor | None:
        """Take the steps of `groups`, each row's batches, in one graph; return the losses (rows, K).

        Returns None if no graph can take them.

        Args:
            done: the spans' steps already taken.
        """
        worker, fleet, inner, size = self.worker, self.fleet, self.inner, len(groups[0])
        stretches = self.stretches
        assert inner is not None
        if self.alone or not all(stretches.fits(batch) for group in groups for batch in group):
            return None
        keys, kept, numbers = set[Any](), [], []
        stepping: Stepping | None = None
        for span in spans:
            worker.point(span.row)
            inner.enter(span.row)
            key, stepping = stretches.stepping(size)
            keys.add(key)
            if stepping is None or len(keys) > 1:
                return None
            at = np.arange(plain.taken[span.row], plain.taken[span.row] + size)
            own = stretches.numbers(stepping, at if span.at is None else span.at[done : done + size])
            if own is None:
                return None
            kept.append(stretches.kept(stepping))
            numbers.append(own)
        assert stepping is not None
        rows = torch.tensor([span.row for span in spans], device=worker.device)
        blocks = [(block, block.params.index_select(0, rows)) for block in fleet.blocks]
        params = [slot.of(x) for block, x in blocks for slot in block.layout]
        buffers = [x.index_select(0, rows) for x in fleet.buffers.values()]
        inputs = (params, stack_nested(kept), buffers, torch.stack(numbers), stack_nested(groups))
        try:
            after = stretches.run(
                ("together", len(spans), *keys),
                self._traced_together(groups[0], stepping, kept[0], inputs),
                size,
                inputs,
            )
        except _OneByOne as error:
            self.alone = True
            stretches.say_once(f"rows are computed one after the other ({error})")
            return None
        params_after, kept_after, buffers_after, losses = after
        places = [slot.of(block.params) for block in fleet.blocks for slot in block.layout]
        for place, x in zip([*places, *fleet.buffers.values()], [*params_after, *buffers_after], strict=True):
            place.index_copy_(0, rows, x)
        for k, span in enumerate(spans):
            inner.enter(span.row)
            stretches.keep(stepping, [[x[k].clone() for x in state] for state in kept_after], size)
        return losses

    def _traced_together(
        self, batches: list[Any], stepping: Stepping, kept: list[State], inputs: tuple[Any, ...]
    ) -> Callable[[], Callable[..., Any]]:
        def trace() -> Callable[..., Any]:
            plain = self.stretches.tracer.stretch(batches, stepping, kept)
            try:
                return self.stretches.tracer.together(plain, *inputs)
            except ModelError as error:
                raise _OneByOne(first_line(error)) from error

        return trace


class _OneByOne(Exception):
    """The model has an operation that `torch.func.vmap` does not support."""


def _rest(span: Span, done: int) -> Span:
    """Return the rest of a span after `done` steps."""
    at = None if span.at is None else span.at[done:]
    source = None if span.source is None else (span.source[0], span.source[1] + done)
    return Span(span.row, span.columns[done:], at, source)


def way(
    worker: Worker, stream: Stream, inner: InnerOptimizer | None, watch: Watch, bucket_bytes: int | None = None
) -> Loop:
    graphs = Graphs(worker, stream, inner)
    return Loop(worker, stream, inner, watch, node=functools.partial(GraphNode, graphs.stretches), at_once=graphs)
