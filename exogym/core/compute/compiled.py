"""`compute="compiled"`: compile a row's local steps, from forward pass to inner step, with `torch.compile`.

After a stretch in fp32 each parameter differs from its value under `compute="loop"` by at most 1e-5 of its norm
(`tests/core/compute/test_compiled.py`). There is one graph for several steps (at most 5) and one for a single step. A
run compiles a graph when it first needs the graph. Compiling takes seconds to a minute; a later run loads the graph
from inductor's cache on disk in a few seconds. Only the number of remaining steps decides which graphs take these
steps. So stopping a run, or placing rows on other processes, changes no bits of the result.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.base.batches import map_tensors, tensors_in
from exogym.core.base.torch_private import copy_
from exogym.core.communicator import say
from exogym.core.compute.finite import Watch
from exogym.core.compute.graph import Stepping, Tracer, first_line, number_dtype, refusal, signature
from exogym.core.compute.inner import InnerOptimizer
from exogym.core.compute.loop import Loop, TrainNode
from exogym.core.compute.updates import SCALARS, UPDATES, State, Update, settings, steps_before
from exogym.core.compute.worker import Worker
from exogym.data.stream import Stream
from exogym.strategy.kernels import bare_step
from exogym.strategy.schedule import set_rates

STEPS, OPERATIONS = 5, 400  # a graph's limits: longer graphs are no faster, and take minutes to compile
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.05  # the first comparison's limits, as shares of a gradient's norm


def compiled(graph: Callable[..., Any], backend: str, draws: bool) -> Callable[..., Any]:
    """Return a compiled version of `graph`. The version's first call compiles, without torch's worker processes.

    Args:
        backend: the backend of `torch.compile`.
        draws: whether the graph draws random numbers. The compiled graph then draws the same numbers as torch.
    """
    # One thread compiles in this process: torch's worker processes would outlive a fork.
    options: Any = {"compile_threads": 1, "fallback_random": draws} if backend == "inductor" else None
    return torch.compile(graph, backend=backend, fullgraph=True, dynamic=False, options=options)


@dataclass(frozen=True)
class Maker:
    """A method that makes graphs faster: compiling, or capturing CUDA graphs.

    Attributes:
        how: the method's name in `compute=`.
        doing, done: the method as a verb in messages, such as "compiling" and "compiled".
        often: a text about how often a graph is made, for messages.
        build: a function of (graph, example inputs, whether the graph draws random numbers). It returns a faster
            function with the same result.
    """

    how: str
    doing: str
    done: str
    often: str
    build: Callable[[Callable[..., Any], tuple[Any, ...], bool], Callable[..., Any]]


COMPILER = Maker(
    "compiled", "compiling", "compiled", "; once, then from the cache on disk",
    lambda graph, inputs, draws: compiled(graph, "inductor", draws),
)  # fmt: skip


class GraphNode:
    """Train a row like `TrainNode`, but with graphs.

    Batches with other shapes than the first batch are computed without a graph.
    """

    def __init__(self, stretches: Stretches, row: int, worker: Worker, *given: Any):
        self.plain, self.stretches, self.row, self.worker = TrainNode(row, worker, *given), stretches, row, worker
        self.next_batch = self.plain.next_batch

    @property
    def rank(self) -> int:
        return self.plain.rank

    def train(
        self, count: int, at: np.ndarray | None = None, may_stop: bool = True, source: tuple[int, int] | None = None
    ) -> Tensor:
        """Take `count` local steps and return their losses. A stop request takes effect after the current graph."""
        plain, worker, stretches, row = self.plain, self.worker, self.stretches, self.row
        assert plain.inner is not None
        first, losses = int(plain.taken[row]), list[Tensor]()
        worker.point(row)
        plain.inner.enter(row)
        batches, done = plain.stream.batches(*((self.rank, first) if source is None else source), count), 0
        while done < count:
            group = [stretches.plain(batch) for batch in islice(batches, stretches.most)]
            steps = np.arange(first + done, first + done + len(group)) if at is None else at[done:]
            whole = len(group) == stretches.most and all(map(stretches.fits, group))
            if whole and (taken := stretches.stretch(self, group, steps)) is not None:
                losses.append(taken)
            else:
                losses += [self._step(batch, int(steps[k]), first + done + k) for k, batch in enumerate(group)]
            done += len(group)
            plain.taken[row] = first + done
            pulse.step_taken()
            if worker.should_stop() and may_stop:
                break
        return self.looked_at(torch.cat(losses), first)

    def looked_at(self, losses: Tensor, first: int) -> Tensor:
        """Check the row's parameters and the `losses` (K,) of its steps after step `first`; return the losses."""
        self.worker.check(self.row)
        found = self.plain.watch.losses(self.rank, self.row, losses.to(torch.get_default_dtype()), first)
        self.plain.watch.row(self.rank, self.row, first + len(losses))
        return found

    def _step(self, batch: Any, at: int, step: int) -> Tensor:
        """Take one step and return its loss, (1,)."""
        stretches, worker, inner = self.stretches, self.worker, self.plain.inner
        assert inner is not None
        whole = stretches.fits(batch)
        if whole and stretches.most > 1 and (taken := stretches.stretch(self, [batch], np.array([at]))) is not None:
            return taken
        worker.reseed(self.rank, step)
        loss = stretches.gradient(self.row, batch) if whole else worker.gradient(batch, self.row)
        if not whole:
            stretches.say_unlike(batch)
        inner.step(self.row, at)
        return loss.reshape(1)

    def compute_gradient(self) -> Tensor:
        batch, first = self.stretches.plain(self.next_batch()), int(self.plain.taken[self.row])
        if not self.stretches.fits(batch):
            return self.plain.compute_gradient()
        self.worker.point(self.row)
        self.worker.reseed(self.rank, first)
        loss = self.stretches.gradient(self.row, batch).reshape(1)
        pulse.step_taken()
        return self.plain.watch.losses(self.rank, self.row, loss, first)[0]


class Stretches:
    """Take a row's steps with graphs: pass the row's tensors to the graphs, and store the results in the row.

    Only SGD, Adam and AdamW step inside a graph. With another optimizer, or a strategy that corrects gradients, the
    graph ends with the gradients. The row's own optimizer then takes the step.

    Attributes:
        operations: number of operations in a gradient's graph.
        most: largest number of steps in one graph.

    Raises:
        ModelError: the model draws from Python's or numpy's generators; the precision is fp16; the batches hold more
            than tensors; the model's step is not a function of tensors; the graph's gradients differ from the model's;
            or this machine cannot compile (no C++ compiler).
    """

    def __init__(self, worker: Worker, stream: Stream, inner: InnerOptimizer | None, maker: Maker = COMPILER):
        self.worker, self.stream, self.inner, self.maker, self.fleet = worker, stream, inner, maker, worker.fleet
        self.how = maker.how
        if worker.draws_python:
            raise refusal(self.how, "its training step draws from Python's or numpy's random numbers")
        if worker.scaled:
            raise refusal(self.how, "with fp16 each node has its own loss scale")
        self.tracer = Tracer(worker, self.how)
        self._graphs: dict[Any, Callable[..., Any]] = {}
        self._steppings: dict[Any, Stepping | None] = {}
        self._told = set[str]()
        batch = self.plain(next(iter(stream.batches(stream.first, 0, 1))))
        kind = signature(batch)
        if kind is None:
            raise refusal(
                self.how, "its batches hold more than tensors, and a graph would reuse the first batch's values"
            )
        self.kind = kind
        self._first_gradient = self.tracer.gradient(batch)
        self._compare(batch)
        self.operations = operations = len(self._first_gradient.graph.nodes)  # type: ignore[attr-defined]
        self.most = 1 if worker.draws_torch else max(1, min(STEPS, OPERATIONS // operations))

    def stretch(self, node: GraphNode, batches: list[Any], at: np.ndarray) -> Tensor | None:
        """Take one step with each of the K `batches`, all in one graph, and return the losses, (K,).

        Return None if no graph can take these steps.

        Args:
            node: the object that trains the row.
            at: (K,) step numbers for the learning rate's schedule.
        """
        worker, row = self.worker, node.row
        key, stepping = self.stepping(len(batches))
        numbers = None if stepping is None else self.numbers(stepping, at[: len(batches)])
        if stepping is None or numbers is None:
            return None
        kept = self.kept(stepping)
        params, buffers = worker.views(row), [rows[row] for rows in worker.fleet.buffers.values()]
        worker.reseed(node.rank, int(node.plain.taken[row]))
        inputs = (params, kept, buffers, numbers, batches)
        made = (lambda: self.tracer.stretch(batches, stepping, kept), len(batches))
        params_after, kept_after, buffers_after, losses = self.run(key, *made, inputs)
        copy_([*params, *buffers], [*params_after, *buffers_after])
        self.keep(stepping, kept_after, len(batches))
        return losses

    def gradient(self, row: int, batch: Any) -> Tensor:
        """Compute the gradients of `row` with a graph and store them in `.grad`; return the loss."""
        worker = self.worker
        params, buffers = worker.views(row), [rows[row] for rows in worker.fleet.buffers.values()]
        grads, after, loss = self.run("gradient", lambda: self._first_gradient, 1, (params, buffers, batch))
        for p, g in zip(worker.parameters, grads, strict=True):
            p.grad = g
        if buffers:
            copy_(buffers, after)
        return loss

    # Graphs

    def run(self, key: Any, trace: Callable[[], Callable[..., Any]], steps: int, inputs: tuple[Any, ...]) -> Any:
        """Run the graph stored under `key`, and return its results.

        The first call makes the graph. It also runs the graph's operations one by one, and compares the results.

        Args:
            trace: returns the graph's operations, which are then compiled or captured.
            steps: the graph's number of steps, for messages.
        """
        with torch.no_grad():
            if key in self._graphs:
                return self._graphs[key](*inputs)
            with pulse.at(pulse.STARTING):
                return self._make(key, trace(), steps, inputs)

    def _make(self, key: Any, plain: Callable[..., Any], steps: int, inputs: tuple[Any, ...]) -> Any:
        wire, what = self.fleet.comm.wire, "a step" if steps == 1 else f"{steps} steps"
        operations = len(plain.graph.nodes)  # type: ignore[attr-defined]
        say(wire, f"compute={self.how!r}: {self.maker.doing} {what} ({operations} operations){self.maker.often}")
        begin = time.perf_counter()
        state = torch.default_generator.get_state()
        wanted = tensors_in(plain(*inputs))
        try:
            torch.default_generator.set_state(state)
            graph = self.maker.build(plain, inputs, self.worker.draws_torch)
            found = graph(*inputs)
        except Exception as error:  # the compiler's: a missing g++, an operation that it does not know
            raise refusal(
                self.how, f"it could not be {self.maker.done} on this machine ({first_line(error)})"
            ) from error
        for a, b in zip(wanted, tensors_in(found), strict=True):
            if not self._is_close(a, b):
                raise refusal(
                    self.how, f"its {self.maker.done} graph and the graph's single operations give different numbers"
                )
        say(wire, f"compute={self.how!r}: {self.maker.done} in {time.perf_counter() - begin:.1f} s")
        self._graphs[key] = graph
        return found

    def _compare(self, batch: Any) -> None:
        """Compute a gradient with and without the graph. A graph would silently leave out a hook or a closure.

        Raises:
            ModelError: the two gradients, or buffers, differ.
        """
        worker, before = self.worker, {name: rows[0].clone() for name, rows in self.fleet.buffers.items()}
        worker.point(0)
        worker.reseed(0, 0)
        worker.gradient(batch, 0)
        worker.check(0)
        alone: list[Tensor | None] = [p.grad for p in worker.parameters]
        after = [rows[0].clone() for rows in self.fleet.buffers.values()]
        for name, rows in self.fleet.buffers.items():
            rows[0].copy_(before[name])
        worker.reseed(0, 0)
        with torch.no_grad():
            grads, buffers, _ = self._first_gradient(worker.views(0), list(before.values()), batch)
        worker.clear_grads()
        names = [*worker.names, *self.fleet.buffers]
        for name, a, b in zip(names, [*alone, *after], [*grads, *buffers], strict=True):
            if (a is None) != (b is None) or (a is not None and not self._is_close(a, b)):
                raise refusal(
                    self.how,
                    f"its graph gives {name!r} another gradient or value. A graph leaves out hooks, and functions that "
                    "hold a parameter",
                )
        self.used = [g is not None for g in alone]

    def _is_close(self, a: Tensor, b: Tensor) -> bool:
        if not a.is_floating_point():
            return torch.equal(a, b)
        half = self.worker.dtype is not None or a.dtype in (torch.bfloat16, torch.float16)
        limit = (HALF_TOLERANCE if half else TOLERANCE) * a.norm().item() + 1e-7
        return (a - b).norm().item() <= limit or not bool(torch.isfinite(a).all())

    # The inner optimizer

    def stepping(self, steps: int) -> tuple[Any, Stepping | None]:
        """Return the key of the graph that takes `steps` steps of the current row, and the graph's `Stepping`.

        Return None instead of the `Stepping` if the row's optimizer takes its steps outside the graph.
        """
        assert self.inner is not None
        key = (steps, *map(settings, self.inner.optimizer.param_groups))
        if key not in self._steppings:
            self._steppings[key] = self._stepping()
        return key, self._steppings[key]

    def _stepping(self) -> Stepping | None:
        """Return how the row's optimizer steps inside a graph. If it cannot, say why and return None."""
        inner, worker = self.inner, self.worker
        assert inner is not None
        optimizer = inner.optimizer
        known = UPDATES.get(type(optimizer))
        if known is None or bare_step(optimizer) == optimizer.step:
            self.say_once(f"{type(optimizer).__name__} steps outside the graph; only SGD, Adam and AdamW step inside")
            return None
        if inner.corrections:
            self.say_once("the strategy corrects gradients before each step, so the optimizer steps outside the graph")
            return None
        place = {p: i for i, p in enumerate(worker.parameters)}
        updates: list[Update | None] = [None] * len(place)
        clock = [0] * len(place)
        for column, group in enumerate(optimizer.param_groups):
            update = known(group)
            for p in group["params"]:
                clock[place[p]] = column
                updates[place[p]] = update if self.used[place[p]] else None
        return Stepping(updates, clock, inner.max_norm)

    def numbers(self, stepping: Stepping, at: np.ndarray) -> Tensor | None:
        """Return the numbers that a graph needs for K steps, such as learning rates: a tensor (K, groups, SCALARS).

        The second axis is for the optimizer's parameter groups. Return None if the parameters of one group have taken
        different numbers of steps.

        Args:
            at: (K,) step numbers for the learning rate's schedule.
        """
        inner, worker = self.inner, self.worker
        assert inner is not None
        groups = inner.optimizer.param_groups
        place = {p: i for i, p in enumerate(worker.parameters)}
        before = []
        for group in groups:
            updates = [(p, stepping.updates[place[p]]) for p in group["params"]]
            stepping_params = [p for p, update in updates if update is not None]
            update = next((update for _, update in updates if update is not None), None)
            taken = 0 if update is None else steps_before(inner.optimizer, stepping_params, update)
            if taken is None:
                return None
            before.append((update, taken))
        numbers = np.zeros((len(at), len(groups), SCALARS))
        for k, step in enumerate(at):
            if not inner.schedule.is_constant:
                set_rates(inner.optimizer, inner.schedule, int(step))
            for column, (group, (update, taken)) in enumerate(zip(groups, before, strict=True)):
                if update is not None:
                    numbers[k, column] = update.scalars(float(group["lr"]), taken + k)
        return torch.from_numpy(numbers).to(self.worker.device, number_dtype(self.worker.parameters))

    def kept(self, stepping: Stepping) -> list[State]:
        """Return the current row's optimizer state for each parameter. Before the row's first step it is all zeros."""
        assert self.inner is not None
        states = self.inner.optimizer.state
        kept: list[State] = []
        for p, update in zip(self.worker.parameters, stepping.updates, strict=True):
            own = states.get(p) or {}
            keys = () if update is None else update.keys
            kept.append([own[key] if own.get(key) is not None else torch.zeros_like(p) for key in keys])
        return kept

    def keep(self, stepping: Stepping, kept: Sequence[State], steps: int) -> None:
        """Store the optimizer state `kept`, which a graph of `steps` steps returned, in the current row's optimizer."""
        assert self.inner is not None
        states = self.inner.optimizer.state
        for p, update, tensors in zip(self.worker.parameters, stepping.updates, kept, strict=True):
            if update is None or not update.keys:
                continue
            own = states[p]
            if update.counts:
                step = own.setdefault("step", torch.zeros((), device=p.device if update.group["fused"] else "cpu"))
                step += steps
            own.update(zip(update.keys, tensors, strict=True))

    # Batches and messages

    def plain(self, batch: Any) -> Any:
        return map_tensors(self.worker.to_device(batch), lambda x: x)

    def fits(self, batch: Any) -> bool:
        """Return whether a graph can take this batch. It must have the graph's shapes and examples of equal weight."""
        return signature(batch) == self.kind and self.worker.counts_examples(batch)

    def say_unlike(self, batch: Any) -> None:
        """Print once why this batch is computed without a graph."""
        if signature(batch) == self.kind:
            self.say_once("batches whose micro-batches are not weighted by their examples are computed without a graph")
        else:
            self.say_once(
                f"batches whose shape differs from the first batch's, {_shapes(self.kind)}, are computed without a "
                "graph"
            )

    def say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            say(self.fleet.comm.wire, f"compute={self.how!r}: {text}")


def _shapes(kind: Any) -> str:
    """Return a signature's shapes as text.

    >>> _shapes(("tuple", ((20, 3), (3, 1), torch.float32), ((20,), (1,), torch.int64)))
    '(20, 3), (20,)'
    """
    if isinstance(kind, tuple) and kind and isinstance(kind[-1], torch.dtype):
        return str(kind[0])
    inside = [_shapes(x) for x in kind if isinstance(x, tuple)]
    return ", ".join(text for text in inside if text)


def way(
    worker: Worker, stream: Stream, inner: InnerOptimizer | None, watch: Watch, bucket_bytes: int | None = None
) -> Loop:
    stretches = Stretches(worker, stream, inner)
    return Loop(worker, stream, inner, watch, node=functools.partial(GraphNode, stretches))
