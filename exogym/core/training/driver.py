"""The driver trains the fleet with any strategy, stretch by stretch. `Algorithm` is its interface to a strategy.

Between two events the nodes are independent, so one node takes all local steps of a stretch, then the next node does.
Features that change which nodes act, or when (absent nodes, seats and timing), are wrappers around an `Algorithm` (see
the modules `around`, `absence`, `seating` and `clocking`). A run gets only the wrappers that its options need.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.communicator import tell
from exogym.core.compute.finite import Watch, is_finite
from exogym.core.compute.inner import InnerOptimizer
from exogym.core.compute.spans import Compute, Losses, RowSpan, way_of
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of
from exogym.core.fleet.returning import take_state
from exogym.core.record.metrics import Evaluator
from exogym.data.stream import Stream
from exogym.strategy.capabilities import Corrects
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.strategy import Inner, Run, Strategy

if TYPE_CHECKING:
    from exogym.core.fleet.seats import Seats
    from exogym.core.training.timing import Timing
    from exogym.faults import Attendance

ALGORITHMS = {  # by what a strategy says in `driven_by`: the module and class of its adapter, loaded when it is needed
    "rounds": (__name__, "Compositions"),
    "programs": ("exogym.core.training.programs", "Programs"),
    "clock": ("exogym.core.training.by_clock", "ByClock"),
}
COMPUTING = ("optimizer", "scale")  # beside parameters, what makes the computing of two nodes equal
Model = tuple[list[Tensor], dict[str, Tensor]]  # (P,) vectors, one per block, and buffers by name


@dataclass
class Setting:
    """Everything that an `Algorithm` works with: this process's rows, the data, the clock, and the present nodes.

    Attributes:
        how: the way of computing, one of the values of `fit(compute=)`.
        attendance: the nodes present at each step, or None if all nodes are present at every step.
        timing: the virtual clock, if the run has a network.
        watch: finds numbers that are not finite, and reacts as `on_nonfinite` says.
        around: a function that wraps the way of computing, if a feature needs a wrapper.
        optimizer: the user's own optimizer (`exogym.attached.optimizer`), in the place of the inner optimizers.
    """

    fleet: Fleet
    worker: Worker
    stream: Stream
    run: Run
    how: str
    attendance: Attendance | None
    timing: Timing | None
    watch: Watch
    around: Callable[[Compute], Compute] = lambda compute: compute
    optimizer: Any = None

    def compute(
        self, inner: Inner | None, bucket_bytes: int | None = None, corrections: Sequence[Corrects] = ()
    ) -> Compute:
        """Return the object that computes local steps, or raise ModelError if the model does not work with it.

        Args:
            inner: each row's inner optimizer, or None if the caller applies the gradients itself.
            bucket_bytes: size of gradient buckets. A bucket is sent while the other gradients are computed.
            corrections: modules that rewrite a row's own gradients before each inner step.
        """
        optimizer = self.optimizer
        if optimizer is None and inner is not None:
            optimizer = InnerOptimizer(inner, self.worker, self.run.total_steps)
        if optimizer is not None:
            optimizer.corrections += corrections
        overlapping = bucket_bytes if self.attendance is None else None
        return self.around(way_of(self.how)(self.worker, self.stream, optimizer, self.watch, overlapping))


def meet(fleet: Fleet, nodes: Sequence[int]) -> None:
    """Let only `nodes` take part in communication from now on. No other function may set `fleet.comm.present`."""
    fleet.comm.present = list(nodes)


class Algorithm:
    """Base class of the adapters between the driver and a strategy. Each kind of strategy has its own subclass.

    Attributes:
        compute: the object that takes the local steps.
        needs_gradients: whether all nodes take every step together. If so, the driver computes all gradients, calls
            `on_gradients`, and then takes the inner steps.
        leaves_out: whether a synchronization can leave out a node whose numbers are not finite. If False, all nodes
            skip that step.
        keeps_time: whether the algorithm advances the clock itself.
    """

    needs_gradients = False
    leaves_out = False
    keeps_time = False
    compute: Compute

    def __init__(self, strategy: Strategy, setting: Setting):
        self.fleet = setting.fleet
        self.schedule = strategy.inner.schedule(setting.run.total_steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step + 1`."""
        return self.schedule.lr(step)

    @property
    def nodes(self) -> Sequence[int]:
        """The ids of the nodes that train now. These are all nodes, unless there are fewer rows than nodes."""
        return range(self.fleet.num_nodes)

    def next_event(self, step: int) -> int:
        """Return the first step after `step` at which the algorithm must act."""
        raise NotImplementedError

    def begin(self, step: int) -> None:
        """Prepare the stretch that begins after `step`."""

    def work(self, first: int, last: int) -> np.ndarray | None:
        """Return (N,) each node's number of local steps from the fleet's step `first` to `last`.

        The result is None if each node takes `last - first` steps. Additive: work(a, b) + work(b, c) == work(a, c).
        """
        return None

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        """Return the clients in the server's round that ends with `step`, and the seconds for which the server waits.

        Return None if no round ends with `step`, or if the round left out no node. A round ends for all nodes together.
        """
        return None

    def seated(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return two lists: clients that need a row from `step` on, and clients that have a row until `step`."""
        raise NotImplementedError

    def spans(self, losses: Losses, counts: Sequence[int]) -> list[RowSpan]:
        """Return the local steps to compute before `act`, where row k has `counts[k]` local steps in the stretch."""
        left = ((row, losses.done(row), count) for row, count in enumerate(counts))
        return [RowSpan(row, range(done, count)) for row, done, count in left if done < count]

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        """Read or rewrite the gradients of `rows` in the fleet's blocks, and return the rows that take the step.

        With `skip`, ignore the gradients: one overflowed in fp16, or is not finite and all nodes skip the step.
        """
        raise NotImplementedError

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        """Let the nodes `fleet.comm.present` communicate, as due after `step`. Return whether nodes have synchronized.

        Args:
            losses: the losses of the stretch that ends with `step`. Local steps during `act` add their losses.
            before_mixing: a function that `act` calls once, before communication changes the nodes' parameters.
        """
        raise NotImplementedError

    def rejoin(self, nodes: Sequence[int], source: int, step: int, forget: bool, as_fleet: bool) -> None:
        """Let `nodes`, which were absent until `step` and are present again, copy state from node `source`.

        With `forget`, the nodes copy the whole state. With `as_fleet`, the copied step counts become the fleet's.
        """
        raise NotImplementedError

    def end_stretch(self, losses: Losses) -> tuple[Sequence[int], Tensor]:
        """End the stretch of `losses`. Return node ids, and each node's mean loss in each step: (nodes, steps)."""
        return self.nodes, self.fleet.comm.wire.rows(losses.end(), self.nodes)

    def finish(self, step: int) -> None:
        """Do the final synchronization, at the end of training."""

    def consensus(self) -> list[Tensor] | None:
        """Return the P outer parameters, (P,) per block, or None if the strategy has no outer parameters."""
        return None

    def consensus_buffers(self) -> dict[str, Tensor] | None:
        """Return the outer model's buffers by name, or None if the model takes the mean of all rows' buffers."""
        return None

    def close(self) -> None:
        """Free the memory, threads and files that the training used."""
        self.compute.close()


class Compositions(Algorithm):
    """The adapter for a strategy made of modules. Nodes take local steps, then the modules mix all rows."""

    leaves_out = True

    def __init__(self, strategy: CommunicateOptimizeStrategy, setting: Setting):
        super().__init__(strategy, setting)
        self.strategy, self.worker, self.watch = strategy, setting.worker, setting.watch
        self.needs_gradients = strategy.needs_gradients
        corrections = [module for module in strategy.communication_modules if isinstance(module, Corrects)]
        self.compute = setting.compute(strategy.inner, strategy.bucket_bytes, corrections)
        self.composition = strategy.on(self.fleet, setting.run)

    def next_event(self, step: int) -> int:
        return self.composition.next_event(step)

    def work(self, first: int, last: int) -> np.ndarray | None:
        return self.composition.clients.local_steps(first, last)

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        return self.composition.clients.server_round(step)

    def seated(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.composition.clients.seated(step)

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        if not skip:
            self.composition.transform_gradients(step, self.lr(step - 1))
        return rows

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        if self.composition.seeing:
            self.composition.see_losses(losses.first, losses.means())
        if self.composition.is_event(step):
            before_mixing()
        if self.composition.communicate(step):
            for row in range(len(self.fleet)):
                self.compute.reset(row)
        meets = self.next_event(step - 1) == step
        if meets:
            self.watch.shared(self.consensus(), "the outer parameters", step)
        return meets

    def rejoin(self, nodes: Sequence[int], source: int, step: int, forget: bool, as_fleet: bool) -> None:
        fleet, there = self.fleet, self.fleet.comm.present
        meet(fleet, [i for i in there if i not in nodes] or [source])  # nobody receives their own old parameters
        outer = self.consensus()
        meet(fleet, there)
        if not self.composition.bring_back(nodes, source, step + 1, forget, outer):
            return
        state = fleet.state.row(fleet.ranks.index(source), COMPUTING) if source in fleet.ranks else None
        taken = take_state(fleet, state, source, nodes, self.worker.device)
        for row in rows_of(fleet, nodes):
            fleet.state.load_row(row, {name: x.clone() for name, x in taken.items()}, COMPUTING)
            if as_fleet:
                self.compute.taken[row] = step

    def finish(self, step: int) -> None:
        self.composition.finish(step)

    def consensus_buffers(self) -> dict[str, Tensor] | None:
        return self.composition.consensus_buffers()

    def consensus(self) -> list[Tensor] | None:
        return self.composition.consensus()


def algorithm_of(strategy: Strategy, setting: Setting) -> Algorithm:
    """Return the adapter of a strategy of any kind."""
    home, name = ALGORITHMS[strategy.driven_by]
    found: Algorithm = getattr(importlib.import_module(home), name)(strategy, setting)
    return found


class Driver:
    """Train the fleet with an `Algorithm`.

    Args:
        algorithm: the strategy's adapter, inside its features' wrappers.
        seats: the assignment of rows to nodes, or None if every node has a row.

    Attributes:
        losses: the current stretch's losses.
        evaluator: computes the losses and metrics of a model; None without a validation set.
        shares_model: whether between rounds every client has the server's model, without personal parameters.
        attendance: the nodes present at each step, or None if all nodes are present at every step.
        before_sync: a function that `advance` calls at its last step, before communication changes parameters. The
            training loop may set another function for every stretch.
    """

    def __init__(self, algorithm: Algorithm, setting: Setting, seats: Seats | None = None):
        self.algorithm, self.compute, self.fleet = algorithm, algorithm.compute, setting.fleet
        self.worker, self.watch, self.attendance = setting.worker, setting.watch, setting.attendance
        self.seats, self.shares_model = seats, False
        self.evaluator: Evaluator | None = None
        self.losses = Losses(len(self.fleet), self.worker.device)
        self.before_sync: Callable[[], None] | None = None
        self.fleet.state.register("losses", self.losses)

    def advance(self, first: int, last: int) -> tuple[Sequence[int], Tensor] | None:
        """Train from step `first` to `last`, and communicate if `last` is an event. No event may lie between them.

        If a stretch was stopped in the middle, it continues after the last local step whose loss is in `losses`. Return
        the nodes' ids and their losses (nodes, last - first): means over a node's local steps in one step of the fleet,
        or NaN for no local step. Return None if the run must stop before the stretch ends.
        """
        algorithm, losses = self.algorithm, self.losses
        if not losses.under_way:
            losses.begin(first, last)
            with torch.no_grad():
                algorithm.begin(first)
        work = algorithm.work(first, last)
        counts = [last - first if work is None else int(work[rank]) for rank in self.fleet.ranks]
        if not algorithm.needs_gradients:
            self.compute.steps(algorithm.spans(losses, counts), losses)
        if self.fleet.comm.wire.agree(self.worker.should_stop()):
            return None
        if algorithm.needs_gradients:
            self._step_together(last, [row for row, count in enumerate(counts) if count])
        with torch.no_grad():
            algorithm.act(last, losses, lambda: self.before_sync() if self.before_sync is not None else None)
            found = algorithm.end_stretch(losses)
        self.fleet.comm.wire.launch()  # only now, because the losses would wait behind a transfer
        return found

    def _step_together(self, step: int, rows: Sequence[int]) -> None:
        """Take one step of all nodes together, with communication of their gradients."""
        compute = self.compute
        found = compute.gradients(rows)
        for row, loss in zip(rows, found, strict=True):
            self.losses.add(row, range(1), loss.reshape(1))
        overflowed = compute.overflowed
        if self.worker.scaled:
            overflowed = self.fleet.comm.wire.agree(overflowed)
        compute.rescale(rows, overflowed)
        with torch.no_grad():
            stepping = self.algorithm.on_gradients(step, rows, overflowed)
        compute.apply(stepping, overflowed)

    def finish(self, step: int) -> None:
        """Do the final synchronization. Raise TrainingError if the final model has numbers that are not finite."""
        with torch.no_grad():
            self.algorithm.finish(step)
        here = rows_of(self.fleet, self.fleet.comm.present)[:1]
        held = [block.params[row] for row in here for block in self.fleet.blocks] or None
        final = self.algorithm.consensus()
        self.watch.shared(held if final is None else final, "the final model", step)

    def model(self, node: int | None = None) -> Model:
        """Return the averaged (or outer) model, or the model of `node`, in every process.

        All processes must make the same calls in the same order. The bytes that they send do not count as traffic.
        """
        if node is not None:
            rows = self.fleet.comm.wire.rows
            vectors = [rows(block.params, [node])[0] for block in self.fleet.blocks]
            return vectors, {name: rows(x, [node])[0] for name, x in self.fleet.buffers.items()}
        outer, others = self.algorithm.consensus(), self.algorithm.consensus_buffers()
        vectors = self.fleet.average() if outer is None else [x.clone() for x in outer]
        return vectors, self.fleet.average_buffers() if others is None else {n: x.clone() for n, x in others.items()}

    def model_left(self) -> Model:
        """Return the model after a failure: the mean of this process's rows, without non-finite rows if possible."""
        fleet = self.fleet
        finite = [row for row in range(len(fleet)) if all(is_finite(block.params[row]) for block in fleet.blocks)]
        if not fleet.comm.wire.is_shared:
            present = fleet.comm.present
            meet(fleet, [i for i in present if i in {fleet.ranks[row] for row in finite}] or present)
            return self.model()
        rows = finite or list(range(len(fleet)))
        buffers = {name: x[rows[0]].clone() for name, x in fleet.buffers.items()}
        return [block.params[rows].mean(0) for block in fleet.blocks], buffers

    def evaluate(self, node: int | None = None, on: int | None = None) -> dict[str, float]:
        """Return losses and metrics of the averaged (or outer) model, or of `node`; {} without a validation set.

        With `on`, evaluate on this node's own validation set. Clients that keep nothing have the server's model there.
        """
        if self.evaluator is None:
            return {}
        wire = self.fleet.comm.wire
        vectors, buffers = self.model(None if on is not None and self.shares_model else node)
        values = self.evaluator(vectors, buffers, on) if wire.process == 0 else {}  # the first node's processes
        return values if wire.shares_memory else tell(wire, values)

    def close(self) -> None:
        """Free the memory, threads and files that the training used."""
        self.before_sync = None
        self.algorithm.close()
