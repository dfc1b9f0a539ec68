"""Drives a user's strategy: one instance per node, each with an ordinary model and its real rank.

With `stacked = True` one instance holds all rows, its parameters (rows, *shape); before the first training
step it is compared with one row at a time on random gradients.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.base.rng import generator, seed_python, seed_torch, stream_seed
from exogym.compute.finite import Watch
from exogym.compute.train_node import Steps, TrainNode
from exogym.compute.vmap import VmapGradients
from exogym.compute.worker import Worker
from exogym.data.stream import Stream
from exogym.errors import ArgumentError, StrategyError
from exogym.faults import Attendance
from exogym.fleet import Fleet, Stateful
from exogym.fleet.presence import take_rows, take_state
from exogym.fleet.state import Tensors
from exogym.strategy.packing import SKELETON
from exogym.strategy.strategy import Run, Strategy
from exogym.training.meeting import Meeting
from exogym.training.object_state import load_object_state, object_state
from exogym.training.timing import Timing

TRIAL_STEPS = 3


class RowModel(nn.Module):
    """Stands for the model in a stacked strategy: its parameters are (rows, *shape) and have no forward pass."""

    def __init__(self, named: dict[str, nn.Parameter]):
        super().__init__()
        self._named = named

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._named.items())

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._named.values())


class NodeDriver:
    """Takes a user's `Strategy` through training, step by step.

    Attributes:
        strategies: one per node, or a single one for all rows where `stacked`.
    """

    def __init__(
        self, strategy: Strategy, fleet: Fleet, worker: Worker, stream: Stream, run: Run, compute: str,
        attendance: Attendance | None, timing: Timing | None, watch: Watch,
    ):  # fmt: skip
        self.attendance, self.timing, self.watch = attendance, timing, watch
        self.before_sync: Callable[[], None] | None = None
        if attendance is not None and (strategy.stacked or fleet.comm.wire.is_shared):
            raise ArgumentError(
                f"faults with {type(strategy).__name__}: a strategy written for one node can miss nodes in one process "
                "and without stacked = True only; leave those out, or write it as a CommunicationModule"
            )
        self.fleet, self.worker, self.run = fleet, worker, run
        self.steps = np.zeros(len(fleet), dtype=np.int64)
        self.nodes = [TrainNode(rank, row, worker, stream, self, watch) for row, rank in enumerate(fleet.ranks)]  # type: ignore[arg-type]
        self.vmap = VmapGradients(worker) if compute == "vmap" else None
        if type(strategy).step is Strategy.step:
            raise StrategyError(
                f"{type(strategy).__name__} does not override step(), so it would train nothing: see Strategy for an "
                "example"
            )
        self.schedule = strategy.inner.schedule(run.total_steps) if hasattr(strategy, "inner") else None
        if self.schedule is None:
            raise StrategyError(f"{type(strategy).__name__}.__init__ must call super().__init__(...)")
        self.blocks: list[list[int]] | None = [list(range(len(fleet)))] if strategy.stacked else None
        if strategy.stacked:
            self._compare_one_row_with_many(strategy)
        self._set_up(strategy)
        fleet.state.register("steps", Steps(self.steps))
        fleet.state.register("program", _Kept(self))

    def _set_up(self, strategy: Strategy) -> None:
        count = len(self.fleet) if self.blocks is None else len(self.blocks)
        self.strategies = [copy.deepcopy(strategy) for _ in range(count)]
        self.grads: list[list[Tensor | None]] = [[None] * len(self.worker.parameters) for _ in range(count)]
        self.models = [
            self.worker.model if self.blocks is None else self._row_model(rows) for rows in self.blocks or [[]] * count
        ]
        self._step = 0
        self.meeting = Meeting(self.fleet.comm, self._enter, self._leave, self.blocks, self.worker.device)
        try:
            self._meet([self._starter(k) for k in range(count)])
        except BaseException:
            self.meeting.close()
            raise

    def _row_model(self, rows: list[int]) -> RowModel:
        named = {}
        contiguous = slice(rows[0], rows[-1] + 1)
        for block in self.fleet.blocks:
            for slot, view in block.views(block.params[contiguous]):
                named[slot.name] = nn.Parameter(view)
        return RowModel(named)

    def _starter(self, k: int) -> Callable[[], None]:
        strategy, model = self.strategies[k], self.models[k]
        rank: Any = (
            self.fleet.ranks[k] if self.blocks is None else torch.tensor([self.fleet.ranks[r] for r in self.blocks[k]])
        )

        def start() -> None:
            strategy.total_steps = self.run.total_steps
            strategy._init_node(model, rank, self.fleet.num_nodes)
            if getattr(strategy, "model", None) is not model:
                raise StrategyError(
                    f"{type(strategy).__name__}._init_node must call super()._init_node(model, rank, num_nodes)"
                )
            strategy._set_lr()  # of an optimizer of its own, too

        return start

    # The loop's questions

    def next_event(self, step: int) -> int:
        return step + 1

    def lr(self, step: int) -> float:
        assert self.schedule is not None
        return self.schedule.lr(step)

    def advance(self, first: int, last: int, begun: Tensor | None) -> tuple[Tensor, bool]:
        """Take one step of all nodes; returns their losses, (rows, 1), and False where the run is to stop before it."""
        self._step = last
        losses = torch.full((len(self.fleet), 1), torch.nan, device=self.worker.device)
        if self.fleet.comm.wire.agree(self.worker.should_stop()):
            return losses, False
        there = self._there(first)
        nodes = [self.nodes[rank] for rank in there]
        if self.vmap is not None and nodes:
            if self.timing is not None:
                self.timing.begin()
            batches = [next(iter(n.stream.batches(n.rank, int(self.steps[n.row]), 1))) for n in nodes]
            rows = [n.row for n in nodes]
            losses[rows, 0] = self.vmap(rows, batches)
            if self.timing is not None:
                self.timing.end(*rows)
            for node in nodes:
                losses[node.row] = self.watch.losses(node.rank, node.row, losses[node.row], first)
        per_row: list[list[Tensor | None]] = [[None] * len(self.worker.parameters) for _ in self.nodes]
        overflowed = spoilt = False
        for node in nodes:
            if self.vmap is None:
                if self.timing is not None:
                    self.timing.begin()
                losses[node.row, 0] = node.compute_gradient()
                if self.timing is not None:
                    self.timing.end(node.row)
                overflowed = overflowed or self.worker.overflowed
                per_row[node.row] = [p.grad for p in self.worker.parameters]
            else:
                grads = [s.of(b.own_grads()[node.row]).clone() for b in self.fleet.blocks for s in b.layout]
                per_row[node.row] = list(grads)
            if not (self.worker.scaled and self.worker.overflowed):
                finite = self.watch.gradients(node.rank, per_row[node.row], int(self.steps[node.row]) + 1)
                spoilt = spoilt or not finite
        if self.worker.scaled:
            overflowed = self.fleet.comm.wire.agree(overflowed)
        self.worker.overflowed = overflowed
        for node in nodes:
            self.worker.update_scale(node.row)
        if self.watch.skips:
            overflowed = self.fleet.comm.wire.agree(overflowed or spoilt)
        if overflowed:  # all nodes skip together, as in DDP: what a strategy does with one node's is not known
            per_row = [[None if g is None else torch.zeros_like(g) for g in grads] for grads in per_row]
        moving = self.strategies if self.attendance is None else [self.strategies[rank] for rank in there]
        for strategy in moving:
            strategy.overflowed = overflowed
        if self.timing is not None:
            counts = np.zeros(self.fleet.num_nodes, dtype=np.int64)
            counts[there if self.attendance is not None else slice(None)] = 1
            self.timing.computed(counts)
        self._take_gradients(per_row)
        before = [strategy.local_step for strategy in moving]
        self.meeting.before_first = self.before_sync
        self._meet([strategy.step if strategy in moving else None for strategy in self.strategies])
        self.meeting.before_first = None
        self.steps[[node.row for node in nodes]] += 1
        self._refuse_standing_still(moving, before)
        if self.watch.skips:  # there is nothing left to be skipped where the step itself was not finite
            self.watch.shared([block.params for block in self.fleet.blocks], "the nodes", last)
            losses = losses.where(losses != torch.inf, torch.nan)
        for node in nodes:
            self.watch.row(node.rank, node.row, int(self.steps[node.row]))
        return losses, True

    def _there(self, first: int) -> list[int]:
        """Return the rows that take the step after `first`; nodes that come back take over a node that stayed."""
        if self.attendance is None:
            return list(range(len(self.fleet)))
        back, source = self.attendance.returning(first + 1)
        there = self.fleet.comm.present = self.attendance.up(first + 1)
        for rank in there:
            self.strategies[rank].present = list(there)
        if source is not None:
            self._bring_back(back, source, first)
        return there

    def _bring_back(self, nodes: list[int], source: int, step: int) -> None:
        """Give `nodes` the parameters, the buffers and all that the strategy of `source` keeps but its rank."""
        fleet = self.fleet
        self.worker.point(source)
        state = object_state(self.strategies[source], self.worker.model)
        taken = take_state(fleet, state, source, nodes, self.worker.device)
        for block in fleet.blocks:
            take_rows(fleet, block.params, source, nodes)
        with fleet.comm.counted_as("buffers"):
            for rows in fleet.buffers.values():
                take_rows(fleet, rows, source, nodes)
        for rank in nodes:
            self.worker.point(rank)
            load_object_state(self.strategies[rank], self.worker.model, {k: x.clone() for k, x in taken.items()})
            self.strategies[rank].rank = rank
            self.steps[rank] = step
        there = fleet.comm.present
        self._meet(
            [
                functools.partial(strategy.rejoin, nodes, source) if rank in there else None
                for rank, strategy in enumerate(self.strategies)
            ]
        )

    def _refuse_standing_still(self, moved: Sequence[Strategy], before: Sequence[int]) -> None:
        """Raise StrategyError where `step` did not call `super().step()`; their local steps were `before`."""
        for strategy, step in zip(moved, before, strict=True):
            if strategy.local_step == step:
                raise StrategyError(
                    f"{type(strategy).__name__}.step must call super().step(): it counts local_step and advances the "
                    "learning-rate schedule"
                )

    def _take_gradients(self, per_row: list[list[Tensor | None]]) -> None:
        if self.blocks is None:
            self.grads = per_row
            return
        for model, rows in zip(self.models, self.blocks, strict=True):
            for index, p in enumerate(model.parameters()):
                mine = [per_row[row][index] for row in rows]
                if all(g is None for g in mine):
                    p.grad = None
                    continue
                p.grad = torch.stack([torch.zeros_like(p[0]) if g is None else g for g in mine])

    def _meet(self, functions: Sequence[Callable[[], None] | None]) -> None:
        self._resumed = [0] * len(functions)
        self.meeting.run(functions)

    def _enter(self, k: int) -> None:
        first = k if self.blocks is None else self.blocks[k][0]
        seed = stream_seed(self.run.seed, "strategy", self.fleet.ranks[first], self._step, self._resumed[k])
        seed_torch(seed, self.worker.device)
        seed_python(seed)
        self._resumed[k] += 1
        if self.blocks is not None:
            return
        self.worker.point(k)
        for p, grad in zip(self.worker.parameters, self.grads[k], strict=True):
            p.grad = grad
            if self._step == 0:  # in _init_node, copy.deepcopy(model) would copy the memory of all rows with a view
                p.data = p.data.clone()

    def _leave(self, k: int) -> None:
        if self.blocks is not None:
            return
        self.grads[k] = [p.grad for p in self.worker.parameters]
        with torch.no_grad():
            for p, view in zip(self.worker.parameters, self.worker.views(k), strict=True):
                if p.data_ptr() != view.data_ptr():
                    view.copy_(p.data)
                    p.data = view

    def _compare_one_row_with_many(self, strategy: Strategy) -> None:
        """Run a few steps on random gradients with one row per block and with all rows in one.

        Raises:
            StrategyError: the results differ.
        """
        start = [block.params.clone() for block in self.fleet.blocks]
        n = len(self.fleet)
        if self.fleet.num_nodes < 2:
            return
        results = []
        counted = self.fleet.comm.ledger.state()
        for blocks in ([[row] for row in range(n)], [list(range(n))]):
            self.blocks = blocks
            self._set_up(strategy)
            for step in range(1, TRIAL_STEPS + 1):
                self._step = step
                streams = [generator(self.run.seed, "trial", step, rank) for rank in self.fleet.ranks]
                parameters = self.worker.parameters
                self._take_gradients([[torch.randn(p.shape, generator=g).to(p) for p in parameters] for g in streams])
                try:
                    self._meet([s.step for s in self.strategies])
                except BaseException:
                    self.meeting.close()
                    raise
            results.append([block.params.clone() for block in self.fleet.blocks])
            self.meeting.close()
            for block, before in zip(self.fleet.blocks, start, strict=True):
                block.params.copy_(before)
        self.fleet.comm.ledger.load_state(counted)
        for alone, together in zip(*results, strict=True):
            off = float((alone - together).abs().max())
            if not off <= 1e-5 * float(alone.abs().max()):
                raise StrategyError(
                    f"{type(strategy).__name__} says stacked = True, but {n} rows together give other parameters "
                    f"than one row at a time (largest difference {off:.3g}): some operation crosses the row axis, "
                    "for example a norm or a topk over all of p instead of p.flatten(1). Keep the first axis apart, "
                    "or drop stacked = True"
                )

    def finish(self, step: int) -> None:
        """A user's strategy decides for itself what it synchronises."""

    def consensus(self) -> list[Tensor]:
        return self.fleet.average()

    def close(self) -> None:
        self.meeting.close()


class _Kept(Stateful):
    """What users' strategies keep: each node's own, or of a stacked one (rows, ...) tensors and the rest."""

    def __init__(self, driver: NodeDriver):
        self.driver = driver
        self._taken: dict[int, Tensors] = {}  # rows of a stacked strategy, until they are put together

    def row(self, row: int) -> Tensors:
        driver = self.driver
        if driver.blocks is None:
            return object_state(driver.strategies[row], driver.worker.model)
        return {name: x[row] for name, x in self._stacked()[0].items()}

    def load_row(self, row: int, tensors: Tensors) -> None:
        driver = self.driver
        if driver.blocks is None:
            load_object_state(driver.strategies[row], driver.worker.model, tensors)
        else:
            self._taken[row] = tensors

    def shared(self) -> Tensors:
        return {} if self.driver.blocks is None else self._stacked()[1]

    def load_shared(self, tensors: Tensors) -> None:
        driver = self.driver
        if driver.blocks is None:
            return
        taken = [self._taken.pop(row) for row in range(len(driver.fleet))]
        rows = {name: torch.stack([own[name] for own in taken]) for name in taken[0].keys() - tensors.keys()}
        load_object_state(driver.strategies[0], driver.models[0], tensors | rows)

    def _stacked(self) -> tuple[Tensors, Tensors]:
        """Return what a stacked strategy keeps: tensors (rows, ...), and the rest, which all rows share."""
        driver, rows, shared = self.driver, Tensors(), Tensors()
        for name, x in object_state(driver.strategies[0], driver.models[0]).items():
            by_row = not name.endswith(SKELETON) and x.dim() > 0 and len(x) == len(driver.fleet)
            (rows if by_row else shared)[name] = x
        return rows, shared
