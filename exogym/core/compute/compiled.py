"""`compute="compiled"`: local steps of a row as one graph, from forward to inner step, by `torch.compile`.

Held to `loop` within 1e-5 of a parameter's norm over a stretch in fp32 (`tests/core/compute/test_compiled.py`). A graph
is made once for `STEPS` steps and once for a single one, when first needed: seconds to a minute, then a few seconds
from inductor's own cache on disk. How a span is cut into graphs depends on nothing but the steps left of it, so
stopping and placement change no bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.base.torch_private import copy_
from exogym.core.communicator import say
from exogym.core.compute.finite import Watch
from exogym.core.compute.graph import Stepping, Tracer, first_line, number_dtype, refusal, signature
from exogym.core.compute.inner import InnerOptimizer
from exogym.core.compute.loop import Loop
from exogym.core.compute.outputs import map_tensors
from exogym.core.compute.spans import Losses, Span
from exogym.core.compute.updates import SCALARS, UPDATES, State, Update, settings, steps_before
from exogym.core.compute.worker import Worker
from exogym.data.stream import Stream
from exogym.strategy.kernels import bare_step
from exogym.strategy.schedule import set_rates

STEPS, OPERATIONS = 5, 400  # of a graph, at most: longer ones are no faster, and take minutes to compile
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.05  # of a gradient's norm, where a graph is first compared


def compiled(graph: Callable[..., Any], backend: str, draws: bool) -> Callable[..., Any]:
    """Return a graph as `backend` compiles it, when first called; `draws`: it draws random numbers, as torch would.

    In this process and no other: those that torch starts to compile would outlive a fork.
    """
    options: Any = {"compile_threads": 1, "fallback_random": draws} if backend == "inductor" else None
    return torch.compile(graph, backend=backend, fullgraph=True, dynamic=False, options=options)


class Compiled(Loop):
    """Computes row by row as `Loop`, with graphs for whole batches of the first batch's kind; others one by one.

    Only SGD, Adam and AdamW step inside of a graph. With another optimizer, or a strategy that corrects gradients, the
    graph ends with the gradients, and the row's own optimizer takes the step.

    Raises:
        ModelError: the model draws from Python's or numpy's generators, needs fp16's scales, has batches that hold
            more than tensors, or a step that is no function of tensors, or that gives other gradients as a graph; or
            nothing can be compiled here (no C++ compiler).
    """

    how, backend = "compiled", "inductor"
    doing, done, often = "compiling", "compiled", "; once, then from the cache on disk"  # in what it says

    def __init__(
        self,
        worker: Worker,
        stream: Stream,
        inner: InnerOptimizer | None,
        watch: Watch,
        bucket_bytes: int | None = None,
    ):
        super().__init__(worker, stream, inner, watch)  # no buckets: all gradients are there at the same moment
        self.stream = stream
        reasons = [
            (worker.draws_python, "its training step draws from Python's or numpy's random numbers"),
            (worker.scaled, "fp16 scales each node's loss by itself"),
        ]
        for refused, why in reasons:
            if refused:
                raise refusal(self.how, why)
        self.tracer = Tracer(worker, self.how)
        self._graphs: dict[Any, Callable[..., Any]] = {}
        self._steppings: dict[Any, Stepping | None] = {}
        self._told = set[str]()
        batch = self._plain(next(iter(stream.batches(0, 0, 1))))
        kind = signature(batch)
        if kind is None:
            raise refusal(self.how, "a batch holds more than tensors, which a graph would keep as they are")
        self.kind = kind
        self._first_gradient = self.tracer.gradient(batch)
        self._compare(batch)
        self.operations = operations = len(self._first_gradient.graph.nodes)  # type: ignore[attr-defined]
        self.most = 1 if worker.draws_torch else max(1, min(STEPS, OPERATIONS // operations))

    # Spans

    def steps(self, spans: Sequence[Span], losses: Losses, may_stop: bool = True) -> None:
        for span in spans:
            if may_stop and self.worker.should_stop():
                return
            losses.add(span.row, span.columns, self._train(span, may_stop))

    def _train(self, span: Span, may_stop: bool) -> Tensor:
        """Take the steps of a span, as `TrainNode.train`; stopped, it ends after the graph at hand."""
        worker, inner, row, node = self.worker, self.inner, span.row, self.nodes[span.row]
        assert inner is not None
        first, count, losses = int(self.taken[row]), len(span.columns), list[Tensor]()
        worker.point(row)
        inner.enter(row)
        batches, done = self.stream.batches(*((node.rank, first) if span.source is None else span.source), count), 0
        while done < count:
            group = [self._plain(batch) for batch in islice(batches, self.most)]
            at = np.arange(first + done, first + done + len(group)) if span.at is None else span.at[done:]
            alike = all(map(self._fits, group))
            if len(group) == self.most and alike and (taken := self._stretch(row, group, at)) is not None:
                losses.append(taken)
            else:
                losses += [self._step(row, batch, int(at[k]), first + done + k) for k, batch in enumerate(group)]
            done += len(group)
            self.taken[row] = first + done
            pulse.step_taken()
            if worker.should_stop() and may_stop:
                break
        return self._looked_at(row, torch.cat(losses), first)

    def _looked_at(self, row: int, losses: Tensor, first: int) -> Tensor:
        """Return the losses (K,) of steps of the row from `first` on, looked at, as are its parameters."""
        node = self.nodes[row]
        self.worker.check(row)
        found = self.watch.losses(node.rank, row, losses.to(torch.get_default_dtype()), first)
        self.watch.row(node.rank, row, first + len(losses))
        return found

    def _step(self, row: int, batch: Any, at: int, step: int) -> Tensor:
        """Take one step of the row; return its loss, (1,)."""
        worker, inner = self.worker, self.inner
        assert inner is not None
        whole = self._fits(batch)
        if whole and self.most > 1 and (taken := self._stretch(row, [batch], np.array([at]))) is not None:
            return taken
        worker.reseed(self.nodes[row].rank, step)
        loss = self._gradient(row, batch) if whole else worker.gradient(batch, row)
        if not whole and signature(batch) == self.kind:
            self._say_once("batches whose micro-batches do not count as their examples do go through the loop")
        elif not whole:
            self._say_once(f"batches of another shape than the first one's, {_shapes(self.kind)}, go through the loop")
        inner.step(row, at)
        return loss.reshape(1)

    def _stretch(self, row: int, batches: list[Any], at: np.ndarray) -> Tensor | None:
        """Take the steps of `batches` in one graph; return their losses, (K,). None where it cannot."""
        worker, inner = self.worker, self.inner
        assert inner is not None
        optimizer = inner.optimizer
        key = (len(batches), *map(settings, optimizer.param_groups))
        if key not in self._steppings:
            self._steppings[key] = self._stepping()
        stepping = self._steppings[key]
        if stepping is None:
            return None
        numbers = self._numbers(stepping, at[: len(batches)])
        if numbers is None:
            return None
        kept = self._kept(stepping)
        params, buffers = worker.views(row), [rows[row] for rows in worker.fleet.buffers.values()]
        worker.reseed(self.nodes[row].rank, int(self.taken[row]))
        inputs = (params, kept, buffers, numbers, batches)
        made = (lambda: self.tracer.stretch(batches, stepping, kept), len(batches))
        params_after, kept_after, buffers_after, losses = self._run(key, *made, inputs)
        copy_([*params, *buffers], [*params_after, *buffers_after])
        self._keep(stepping, kept_after, len(batches))
        return losses

    def _gradient(self, row: int, batch: Any) -> Tensor:
        """Compute loss and gradients (into `.grad`) of the row the module points at, by a graph; return the loss."""
        worker = self.worker
        params, buffers = worker.views(row), [rows[row] for rows in worker.fleet.buffers.values()]
        grads, after, loss = self._run("gradient", lambda: self._first_gradient, 1, (params, buffers, batch))
        for p, g in zip(worker.parameters, grads, strict=True):
            p.grad = g
        if buffers:
            copy_(buffers, after)
        return loss

    def gradients(self, rows: Sequence[int]) -> Tensor:
        for block in self.fleet.blocks:
            block.own_grads()
        self.overflowed, self.spoilt, losses = False, [], []
        for row in rows:
            node = self.nodes[row]
            batch = self._plain(node.next_batch())
            if not self._fits(batch):
                losses.append(node.compute_gradient())
            else:
                first = int(self.taken[row])
                self.worker.point(row)
                self.worker.reseed(node.rank, first)
                losses.append(self.watch.losses(node.rank, row, self._gradient(row, batch).reshape(1), first)[0])
            self._copy_gradients(row)
            self._look_at_gradient(row)
            pulse.step_taken()
        return torch.stack(losses) if losses else torch.empty(0, device=self.worker.device)

    # Graphs

    def build(self, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Return what computes `plain`, a graph for nested tensors like `inputs`, faster."""
        return compiled(plain, self.backend, self.worker.draws_torch)

    def _run(self, key: Any, trace: Callable[[], Callable[..., Any]], steps: int, inputs: tuple[Any, ...]) -> Any:
        """Run the graph of `key`, made when it is first needed and then compared with its operations one by one."""
        with torch.no_grad():
            if key in self._graphs:
                return self._graphs[key](*inputs)
            with pulse.at(pulse.STARTING):
                return self._make(key, trace(), steps, inputs)

    def _make(self, key: Any, plain: Callable[..., Any], steps: int, inputs: tuple[Any, ...]) -> Any:
        wire, what = self.fleet.comm.wire, "a step" if steps == 1 else f"{steps} steps"
        operations = len(plain.graph.nodes)  # type: ignore[attr-defined]
        say(wire, f"compute={self.how!r}: {self.doing} {what} ({operations} operations){self.often}")
        begin = time.perf_counter()
        state = torch.default_generator.get_state()
        wanted = tensors_of(plain(*inputs))
        try:
            torch.default_generator.set_state(state)
            graph = self.build(plain, inputs)
            found = graph(*inputs)
        except Exception as error:  # of the compiler: a missing g++, an operation that it cannot do
            raise refusal(self.how, f"it cannot be {self.done} here ({first_line(error)})") from error
        for a, b in zip(wanted, tensors_of(found), strict=True):
            if not self._is_close(a, b):
                raise refusal(self.how, f"{self.done}, it gives other numbers than operation by operation")
        say(wire, f"compute={self.how!r}: {self.done} in {time.perf_counter() - begin:.1f} s")
        self._graphs[key] = graph
        return found

    def _compare(self, batch: Any) -> None:
        """Compute one gradient both ways: what a graph cannot follow (a hook, a closure) would fail in silence.

        Raises:
            ModelError: they differ.
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
                    f"as a graph it gives {name!r} another gradient or value, as where a hook, or a function that "
                    "holds the parameter itself, takes part",
                )
        self.used = [g is not None for g in alone]

    def _is_close(self, a: Tensor, b: Tensor) -> bool:
        if not a.is_floating_point():
            return torch.equal(a, b)
        half = self.worker.dtype is not None or a.dtype in (torch.bfloat16, torch.float16)
        limit = (HALF_TOLERANCE if half else TOLERANCE) * a.norm().item() + 1e-7
        return (a - b).norm().item() <= limit or not bool(torch.isfinite(a).all())

    # The inner optimizer

    def _stepping(self) -> Stepping | None:
        """Return how the row's optimizer steps inside of a graph; None, and a word, where it cannot."""
        inner, worker = self.inner, self.worker
        assert inner is not None
        optimizer = inner.optimizer
        known = UPDATES.get(type(optimizer))
        if known is None or bare_step(optimizer) == optimizer.step:
            self._say_once(f"{type(optimizer).__name__} steps outside of the graph: it knows SGD, Adam and AdamW")
            return None
        if inner.corrections:
            self._say_once("the strategy corrects gradients before each step, so steps are taken outside of the graph")
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

    def _numbers(self, stepping: Stepping, at: np.ndarray) -> Tensor | None:
        """Return the numbers of the next steps, (K, groups, SCALARS); None where tensors of a group are not alike."""
        inner, worker = self.inner, self.worker
        assert inner is not None
        groups = inner.optimizer.param_groups
        place = {p: i for i, p in enumerate(worker.parameters)}
        before = []
        for group in groups:
            updates = [(p, stepping.updates[place[p]]) for p in group["params"]]
            there = [p for p, update in updates if update is not None]
            update = next((update for _, update in updates if update is not None), None)
            taken = 0 if update is None else steps_before(inner.optimizer, there, update)
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

    def _kept(self, stepping: Stepping) -> list[State]:
        """Return what the row's optimizer keeps of each parameter; zeros where it has not begun."""
        assert self.inner is not None
        states = self.inner.optimizer.state
        kept: list[State] = []
        for p, update in zip(self.worker.parameters, stepping.updates, strict=True):
            own = states.get(p) or {}
            keys = () if update is None else update.keys
            kept.append([own[key] if own.get(key) is not None else torch.zeros_like(p) for key in keys])
        return kept

    def _keep(self, stepping: Stepping, kept: Sequence[State], steps: int) -> None:
        """Put what the graph gave into the row's optimizer."""
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

    # Words

    def _plain(self, batch: Any) -> Any:
        return map_tensors(self.worker.to_device(batch), lambda x: x)

    def _fits(self, batch: Any) -> bool:
        """Whether a batch can go through the graph: of the shape it was made for, its micro-batches weighed alike."""
        return signature(batch) == self.kind and self.worker.counts_examples(batch)

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            say(self.fleet.comm.wire, f"compute={self.how!r}: {text}")


def tensors_of(nested: Any) -> list[Tensor]:
    """Return the tensors in `nested`, in order."""
    found: list[Tensor] = []
    map_tensors(nested, found.append)
    return found


def _shapes(kind: Any) -> str:
    """Return the shapes in a signature as text.

    >>> _shapes(("tuple", ((20, 3), (3, 1), torch.float32), ((20,), (1,), torch.int64)))
    '(20, 3), (20,)'
    """
    if isinstance(kind, tuple) and kind and isinstance(kind[-1], torch.dtype):
        return str(kind[0])
    inside = [_shapes(x) for x in kind if isinstance(x, tuple)]
    return ", ".join(text for text in inside if text)
