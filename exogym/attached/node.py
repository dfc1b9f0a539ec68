"""An attached node: one row, the strategy's adapter, and the steps that the user's loop takes."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.attached.checking import modules_of
from exogym.attached.optimizer import UsersOptimizer
from exogym.core.base.modes import evaluation_mode
from exogym.core.base.rng import preserved_state
from exogym.core.base.torch_private import version
from exogym.core.communicator import Wire, gather
from exogym.core.compute.finite import Watch
from exogym.core.compute.first_step import check_dense, same
from exogym.core.compute.loop import Loop
from exogym.core.compute.outputs import Loss
from exogym.core.compute.worker import Worker
from exogym.core.engine.engines import several_devices, world_size
from exogym.core.engine.equal_start import start_equal
from exogym.core.engine.world import join_world
from exogym.core.fleet import Fleet
from exogym.core.fleet.state import Tensors, below
from exogym.core.progress import notice
from exogym.core.record.history import History
from exogym.core.record.observers import Observers
from exogym.core.saving.checkpoint_files import Snapshot
from exogym.core.saving.snapshots import put_back, snapshot_of
from exogym.core.training.driver import Driver, Setting, algorithm_of
from exogym.core.training.options import describe
from exogym.core.training.resuming import sum_of_shared
from exogym.core.training.standing import Agenda, Reports, RunStanding, Totals
from exogym.data.stream import Stream
from exogym.errors import ArgumentError, CheckpointError, ExoGymError, ModelError, TrainingError
from exogym.strategy.outer import few_rounds
from exogym.strategy.strategy import Run, Strategy

LONGEST = 1024  # the longest stretch in steps
_open: weakref.WeakSet[Node] = weakref.WeakSet()  # this process's nodes whose runs are not finished
ENDLESS = 2**53  # the length of a run without `total_steps`
BUFFERS = ("fleet.buffer.", "own.")  # the name of a buffer in a row's state begins with one of these


class Node:
    """This process's row of an attached run.

    The row holds the parameters from the beginning. Everything else that a strategy needs is built before the first
    step (`_begin`), because only then it is known which buffers training changes and how many examples each node has.

    Attributes:
        rank, part: the node's number, and the number of this process in it.
        users: the user's optimizer, or None if the strategy's inner optimizer takes the steps.
        has_begun: whether the node's first step has begun. Until then, `driver`, `compute` and `standing` don't exist.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, device: torch.device,
        total_steps: int | None, seed: int, node: Any = None,
    ):  # fmt: skip
        self.model, self.strategy, self.device, self.seed = model, strategy, device, seed
        self.total_steps = total_steps
        self.shards: Any = None
        if node is None:
            self.wire = wire_of_world(device)
        else:
            kind = several_devices("attach")
            self.wire = kind.wire_between(node, device)
            self.shards = kind(model, self.wire)
        start_equal(model, self.wire)
        self.worker = Worker(model, Loss(model, None), device, "fp32", seed, None)
        self.worker.devices = self.shards
        parts = None if self.shards is None else self.shards.parts
        self.worker.bind(Fleet(model, self.wire.ranks, len(self.wire.placement), device, self.wire, parts))
        self.worker.point(0)
        self.fleet, self.rank, self.part = self.worker.fleet, self.wire.ranks[0], self.wire.devices.part
        self.watch = Watch("raise", self.worker)
        self.frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self.stream: Stream | None = None
        self.users: UsersOptimizer | None = None
        if optimizer is not None:
            scheduled = {"lr_scheduler", "warmup_steps"} & vars(strategy).get("given_arguments", {}).keys()
            length = total_steps or ENDLESS
            self.users = UsersOptimizer(optimizer, strategy.inner, self.worker, length, bool(scheduled))
            self.users.node = self  # kept alive by its hooks, so that `abandon_others` finds it
        _open.add(self)
        self.driver: Driver
        self.compute: Loop
        self.standing: RunStanding
        self.has_begun = self.is_abandoned = False
        self._buffers = {name: (b, version(b), b.detach().clone()) for name, b in model.named_buffers()}
        self._rates: dict[int, float] = {}  # of the current stretch's steps
        self._examples: list[int] = []
        self._values: Tensor  # all nodes' losses in the current stretch
        self._place: tuple[Tensors, Tensors] = {}, {}  # the loader's position in a loaded state, until a loader exists

    @property
    def step(self) -> int:
        return int(self.compute.taken[0]) if self.has_begun else 0

    @property
    def history(self) -> History:
        return self.standing.history if self.has_begun else History()

    # The first step

    def take_stream(self, stream: Stream) -> None:
        """Use the numbers of examples in `stream` for the run.

        Raises:
            ArgumentError: the run began with other numbers of examples, and a module weights nodes by them.
        """
        examples = stream.examples.tolist()
        if stream.iterated is not None:
            place, is_first = stream.iterated.begin(self.fleet), "data" not in self.fleet.state.parts
            self.fleet.state.parts["data"] = place  # a new loader replaces an old one
            row, shared = self._place
            if is_first and (row or shared):  # a state was loaded before: move to its position
                place.load_row(0, row)
                place.load_shared(shared)
        if not self.has_begun:
            self.stream = stream
        elif (
            len({*examples}) > 1
            and examples != self._examples
            and any(getattr(module, "weighting", None) == "examples" for module in modules_of(self.strategy))
        ):
            raise ArgumentError(
                f"{type(self.strategy).__name__} weights nodes by their numbers of examples, and training began with "
                f"other numbers than {examples[:8]}: call nodes.loader before the first step, or pass "
                "weighting='uniform'"
            )

    def _begin(self, changing: Mapping[str, Tensor], examples: list[int]) -> None:
        """Create the strategy's adapter and the records.

        Args:
            changing: the buffers that training changes, by name, with their values before training.
            examples: each node's number of examples.
        """
        fleet, worker, num_nodes = self.fleet, self.worker, self.fleet.num_nodes
        grads = [p.grad for p in worker.parameters]
        worker.changing = list(changing)
        worker.pointer.add_buffers(self.model, worker.changing)
        now = {name: rows.clone() for name, rows in fleet.buffers.items()}
        for name, value in changing.items():  # a strategy starts with the buffers from before the first step
            fleet.buffers[name][0] = value
            if name in fleet.own:
                fleet.own[name] = value
        worker.point(0)
        steps, size = self.total_steps or ENDLESS, 1 if self.stream is None else self.stream.batch_size
        self._examples = examples
        fleet.comm.overlap = True
        run = Run(num_nodes, self.seed, steps, np.array(examples), size)
        strategy = copy.deepcopy(self.strategy)
        stream: Any = self.stream  # the user's loop takes the batches
        setting = Setting(fleet, worker, stream, run, "loop", None, None, self.watch, optimizer=self.users)
        algorithm = algorithm_of(strategy, setting)
        assert isinstance(algorithm.compute, Loop)
        self.compute = algorithm.compute
        if self.users is not None:
            algorithm.schedule = self.users  # type: ignore[assignment]
        self.driver = Driver(algorithm, setting)
        for name, rows in now.items():
            fleet.buffers[name].copy_(rows)
        epoch = (0 if self.stream is None else self.stream.steps_per_epoch) or steps
        agenda = Agenda(steps, epoch, max_stretch=LONGEST, description=self._description())
        reports = Reports(Observers(), fleet.comm, agenda)
        self.standing = RunStanding(agenda, self.driver, fleet, History(), reports)
        text = None if self.total_steps is None else few_rounds(strategy, self.total_steps)
        if text is not None and self.wire.is_main:
            notice(text, about="few outer rounds", once=True)
        fleet.state.shared()  # if the state can't be saved, fail now instead of at the first `state_dict`
        self.standing.start_clock()
        self.has_begun = True
        for p, grad in zip(worker.parameters, grads, strict=True):
            p.grad = grad

    def _description(self) -> dict[str, Any]:
        """Return the settings that must match if a state is loaded into this run, as JSON values."""
        layouts = [block.layout.whole or block.layout for block in self.fleet.blocks]
        return {
            "strategy": describe(self.strategy), "num_nodes": self.fleet.num_nodes, "seed": self.seed,
            "total_steps": self.total_steps,
            "processes": self.wire.devices.parts,
            "optimizer": None if self.users is None else type(self.users.optimizer).__name__,
            "model": [[slot.name, list(slot.shape), str(layout.dtype)] for layout in layouts for slot in layout],
            "shared": sum_of_shared(self.model, self.fleet.buffers),
        }  # fmt: skip

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the first forward pass changed on any node, with their values before it."""
        changed, before = [], dict[str, Tensor]()
        for name, buffer in self.model.named_buffers():
            was, at, value = self._buffers.get(name, (None, 0, None))
            if value is None or value.shape != buffer.shape:
                raise ModelError(
                    f"the model created or resized the buffer {name!r} in its first step, so no node would start with "
                    "the right values: run the model on one batch before attach"
                )
            before[name] = value
            if not same(value, buffer) or (buffer is was and version(buffer) != at):
                changed.append(name)
        self._buffers = {}
        names = {name for told in self._told(changed) for name in told}
        return {name: value for name, value in before.items() if name in names}

    def _told(self, changed: list[str] | None) -> list[list[str]]:
        """Exchange the lists `changed` of all processes at the first step, or at an end without a step (None)."""
        told = gather(self.wire, changed)
        self._check_together([int(names is not None) for names in told])
        return told

    # A step

    def before_step(self, loss: Tensor | float | None = None) -> None:
        """Do the part of a step before the optimizer's step; the gradients are in `.grad`."""
        self.worker.check(0)
        if self.shards is not None:
            self.shards.take_gradients()
        self._check_gradients()
        if not self.has_begun:
            examples = [1] * self.fleet.num_nodes if self.stream is None else self.stream.examples.tolist()
            changing = self._changed_buffers()
            with preserved_state(self.device):
                self._begin(changing, examples)
        if self.total_steps is not None and self.step >= self.total_steps:
            raise ArgumentError(
                f"step {self.step + 1} is beyond total_steps={self.total_steps}: call nodes.finish() earlier, or pass "
                "a larger total_steps to attach"
            )
        self._check_dense()
        algorithm, losses, step = self.driver.algorithm, self.driver.losses, self.step
        if not losses.under_way:
            self._totals = self._now()
            losses.begin(step, self.standing.agenda.stretch_end(step, self.driver.algorithm.next_event(step)))
            with torch.no_grad():
                algorithm.begin(step)
        if self.users is not None:
            self.users.set_rates(step)
        self._rates[step] = algorithm.lr(step)
        self._add_loss(step, loss)
        if not algorithm.needs_gradients:
            return
        if self.shards is not None:
            self.shards.share_buffers()
        for block in self.fleet.blocks:
            block.own_grads()
        self.compute.keep_gradients(0)
        self.compute.look_at_gradient(0)
        self._values = self._meet(step + 1)
        with torch.no_grad():
            moving = algorithm.on_gradients(step + 1, [0], False)
        if moving:
            self.compute.point_gradients(0)

    def _add_loss(self, step: int, loss: Tensor | float | None) -> None:
        losses, column = self.driver.losses, step - self.driver.losses.first
        value = torch.as_tensor(math.nan if loss is None else loss).detach().reshape(1)
        if loss is not None:
            value = value if self.shards is None else self.shards.mean(value)
            self.watch.losses(self.rank, 0, value, step)
        losses.add(0, range(column, column + 1), value)

    def optimizer_step(self) -> None:
        inner = self.compute.inner
        if inner is not None:  # otherwise the strategy's own step() steps an optimizer
            inner.enter(0)
            inner.step(0, self.step, clip=not self.driver.algorithm.needs_gradients)

    def after_step(self) -> None:
        """Do the part of a step after the optimizer's step."""
        step = self.step + 1
        if self.compute.inner is not None:
            self.compute.taken[0] = step
        if step == self.driver.losses.last:
            self._end_stretch()

    def _meet(self, step: int) -> Tensor:
        """Return all nodes' losses in the current stretch, (N, steps), once all nodes have reached `step`.

        Each node communicates only after this exchange, so a node whose loop has ended still meets the others here.

        Raises:
            TrainingError: another node is at another step.
        """
        losses = self.driver.losses
        means = losses.means()
        count = means.new_full((1, 1), step - losses.first)
        told = self.wire.rows(torch.cat([count, means], 1), range(self.fleet.num_nodes))
        self._check_together([losses.first + int(count) for count in told[:, 0].tolist()])
        return told[:, 1 : 1 + step - losses.first]

    def _check_together(self, counts: list[int]) -> None:
        """Raise TrainingError unless the processes' numbers of steps are equal."""
        if len({*counts}) == 1:
            return
        per_node = len(counts) // self.fleet.num_nodes
        found = {counts[k]: k // per_node for k in reversed(range(len(counts)))}
        (few, first), *_, (many, other) = sorted(found.items())
        raise TrainingError(
            f"node {first} ended after {few} steps, but node {other} is at step {many}: all nodes must take the same "
            "number of steps, so end the loop by a number that all nodes share, such as the step or the averaged "
            "model's loss"
        )

    def _check_gradients(self) -> None:
        """Raise ModelError if there are no gradients, or gradients of parameters that are not in the row."""
        if all(p.grad is None for p in self.worker.parameters):
            raise ModelError(
                "no parameter has a gradient: call loss.backward() before the step. Nodes can't skip steps"
            )
        for name, p in self.frozen:
            if p.grad is not None or p.requires_grad:
                raise ModelError(
                    f"{name!r} was frozen when attach was called but is trained now, so its changes would not reach "
                    "the other nodes. Call nodes.finish() and attach again"
                )

    def _check_dense(self) -> None:
        """Raise ModelError if a gradient is sparse, unless only the user's optimizer reads the gradients."""
        if self.driver.algorithm.needs_gradients or self.users is None or self.users.changes_gradients:
            check_dense(zip(self.worker.names, self.worker.parameters, strict=True))

    def _end_stretch(self, is_over: bool = False) -> None:
        """End the stretch. If `is_over`, the loop has ended, so the stretch ends early, at the node's step."""
        driver, losses = self.driver, self.driver.losses
        first, last = losses.first, self.step if is_over else losses.last
        self.watch.row(self.rank, 0, last)
        if self.shards is not None and not driver.algorithm.needs_gradients:
            self.shards.share_buffers()
        if is_over or not driver.algorithm.needs_gradients:
            self._values = self._meet(last)
        losses.end_at(last)
        with torch.no_grad(), self._generators():
            driver.algorithm.act(last, losses, lambda: None)
        losses.forget()
        self.wire.launch()
        self.worker.clear_grads()
        self.standing.step = last
        rate = self._rates.__getitem__
        self.standing.reports.stretch(
            self.history, (first, last), driver.algorithm.nodes, self._values, rate, self._totals, self._now(),
            has_clock=False,
        )  # fmt: skip
        self._rates = {}

    def _generators(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that keeps the loop's random state while the strategy's own step draws random numbers."""
        is_program = self.compute.inner is None
        return preserved_state(self.device) if is_program else contextlib.nullcontext()

    def _now(self) -> Totals:
        return Totals.of(self.fleet.comm, 0.0, self.standing.wall_s())

    # Results

    def put_into(self, model: nn.Module, node: int | None) -> None:
        """Copy the averaged (or outer) parameters and buffers, or the node's own, into the copy `model`."""
        if not self.has_begun:
            return  # all nodes are equal
        with torch.no_grad():
            vectors, buffers = self.driver.model(node)
            parameters, others = dict(model.named_parameters()), dict(model.named_buffers())
            for block, vector in zip(self.fleet.blocks, vectors, strict=True):
                for slot in block.layout:
                    parameters[slot.name].copy_(slot.of(vector))
            for name, x in buffers.items():
                others[name].copy_(x)

    @contextlib.contextmanager
    def showing(self, node: int | None) -> Iterator[nn.Module]:
        """A context in which the model itself has the parameters and buffers of `put_into`, in evaluation mode."""
        if any(p.grad is not None for p in self.model.parameters()):
            raise ModelError("the model holds gradients of an unfinished step: evaluate after nodes.step()")
        try:
            with evaluation_mode(self.model), torch.no_grad():
                if self.has_begun:
                    self.worker.check(0)
                    vectors, buffers = self.driver.model(node)
                    if self.shards is not None:
                        buffers = self.shards.shared(buffers)
                    self.worker.pointer.point_at(vectors, buffers)
                yield self.model
        finally:
            if self.has_begun:
                self.worker.point(0)

    def finish(self) -> None:
        worker = self.worker
        worker.check(0)
        if not self.has_begun:
            self._told(None)
            worker.set_home([block.params[0] for block in self.fleet.blocks], {})
        else:
            losses, step = self.driver.losses, self.step
            if losses.under_way:
                self._end_stretch(is_over=True)
            elif step != self.total_steps:  # another node may already be in the next stretch
                losses.begin(step, self.standing.agenda.stretch_end(step, self.driver.algorithm.next_event(step)))
                self._meet(step)
                losses.forget()
            with self._generators():
                self.driver.finish(self.step)
            now = self._now()
            values: dict[str, Any] = dict(
                zip(("payload_bytes", "tx_bytes", "rx_bytes"), now.payload_tx_rx, strict=True)
            )
            self.history.add_evaluation(self.step, self.standing.epoch, values | {"wall_s": now.wall_s})
            with torch.no_grad():
                worker.set_home(*self.driver.model())
            self.driver.close()
        self._free()
        self.wire.leave()

    def abandon(self) -> None:
        """End the run immediately, without the other processes. Parameters stay, and gradients become None."""
        self.is_abandoned = True
        self.worker.clear_grads()
        if self.shards is not None:
            self.shards.clear_gradients()
        if self.has_begun:
            self.driver.close()
        self._free()

    def _free(self) -> None:
        _open.discard(self)
        self.fleet.state.parts.clear()
        if self.users is not None:
            self.users.release()

    # State

    def state_dict(self) -> dict[str, Any]:
        if not self.has_begun:
            return {"node": self.rank, "part": self.part, "row": {}, "shared": {}, "meta": {"step": 0}}
        found = snapshot_of(self.standing)
        (row,) = found.rows.values()
        own = {"examples": self._examples, "rates": [[step, rate] for step, rate in self._rates.items()]}
        return {"node": self.rank, "part": self.part, "row": row, "shared": found.shared, "meta": found.meta | own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not _is_state(state):
            raise CheckpointError("the state is not from nodes.state_dict(): pass the value that state_dict returned")
        meta = dict(state["meta"])
        saved, own = (
            (place["node"], place.get("part", 0)) for place in (state, {"node": self.rank, "part": self.part})
        )
        if saved != own:
            those = [
                f"node {node}" + (f", process {part}" if part or self.shards else "") for node, part in (saved, own)
            ]
            raise CheckpointError(
                f"the state belongs to {those[0]}, but this process is {those[1]}: each process must save and load "
                "its own file"
            )
        if not meta["step"] and not state["row"]:
            if self.has_begun:
                raise CheckpointError("the state was saved before the first step, but this run has begun: attach again")
            return
        if not self.has_begun:
            every = state["row"].items()
            changing = {name.removeprefix(p): x for name, x in every for p in BUFFERS if name.startswith(p)}
            with preserved_state(self.device):
                self._begin(changing, meta["examples"])
        for name, value in self.standing.description.items():
            if (had := meta["description"].get(name)) != value:
                what = "another model" if name in ("model", "shared") else f"{name}={had!r}, not {value!r}"
                raise CheckpointError(
                    f"the state is from a run with {what}: call attach with the arguments of that run"
                )
        self._rates = {int(step): rate for step, rate in meta.pop("rates")}
        meta.pop("examples")
        try:
            with torch.no_grad():
                put_back(self.standing, Snapshot({self.rank: dict(state["row"])}, dict(state["shared"]), meta))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError, ExoGymError) as error:
            raise CheckpointError(f"the state does not fit this run: {error!r}") from error
        self._place = below("data.", state["row"]), below("data.", state["shared"])
        self.worker.point(0)
        self._totals = self._now()


def abandon_others(model: nn.Module, optimizer: Optimizer | None) -> None:
    """End the runs that use this model or optimizer and were not finished, because their loops were interrupted."""
    own = {id(p) for p in model.parameters()}
    for other in list(_open):
        is_shared = other.users is not None and other.users.optimizer is optimizer
        if is_shared or any(id(p) in own for p in other.model.parameters()):
            other.abandon()


def wire_of_world(device: torch.device, gpus: int | None = None) -> Wire:
    """Return the wire between this run's processes: each is one node, and a script on its own is a single node.

    `gpus` is `join_world`'s.
    """
    if (count := world_size()) == 1:
        return Wire([0])
    join_world(device, gpus)
    from exogym.core.engine.wire import ProcessWire

    return ProcessWire([[rank] for rank in range(count)])


def _is_state(state: Any) -> bool:
    """Return whether `state` has the form of a node's state."""
    if not isinstance(state, Mapping) or {"node", "row", "shared", "meta"} - state.keys():
        return False
    row, shared, meta = state["row"], state["shared"], state["meta"]
    if not all(isinstance(part, Mapping) for part in (row, shared, meta)):
        return False
    begun = {"examples", "description", "rates"} if row or meta.get("step") else set()
    if not isinstance(meta.get("description", {}), Mapping):
        return False
    return not ({"step"} | begun) - meta.keys() and all(
        isinstance(x, Tensor) for x in (*row.values(), *shared.values())
    )
