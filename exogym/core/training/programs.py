"""Train with a user's strategy: one instance per node, each with an ordinary model and the node's rank.

With `stacked = True`, one instance trains all rows, with parameters of the shape (rows, *shape). Before the first
training step, ExoGym tests on random gradients that one row at a time gives the same parameters as all rows together.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.core.base.rng import generator, seed_python, seed_torch, stream_seed
from exogym.core.combinations import check
from exogym.core.compute.spans import Losses
from exogym.core.fleet import Stateful
from exogym.core.fleet.returning import take_rows, take_state
from exogym.core.fleet.state import Tensors
from exogym.core.training.driver import Algorithm, Setting
from exogym.core.training.meeting import Meeting
from exogym.errors import ArgumentError, StrategyError
from exogym.strategy.optim import OptimSpec
from exogym.strategy.packing import KEEP, SKELETON, as_text, from_text, pack, unpack
from exogym.strategy.schedule import Schedule
from exogym.strategy.strategy import Inner, Strategy

TRIAL_STEPS = 3
CONSTANT = (OptimSpec, Schedule, Inner)  # attributes that do not change, and are not saved


class RowModel(nn.Module):
    """A model of all rows for `stacked = True`, without a forward pass. Parameters have the shape (rows, *shape)."""

    def __init__(self, named: dict[str, nn.Parameter]):
        super().__init__()
        self._named = named

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._named.items())

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._named.values())


class Programs(Algorithm):
    """The adapter through which the driver trains with a user's `Strategy`, step by step.

    `strategies` has one instance per node, or a single instance for all rows if `stacked`.
    """

    needs_gradients = True

    def __init__(self, strategy: Strategy, setting: Setting):
        name = type(strategy).__name__
        fleet, self.worker, self.run, self.watch = setting.fleet, setting.worker, setting.run, setting.watch
        if setting.attendance is not None and fleet.comm.wire.is_shared:
            check({"one node's strategy in processes": f"{name} in several processes", "faults": "faults="})
        if type(strategy).step is Strategy.step:
            raise StrategyError(
                f"{name} does not override step(), so it would train nothing: see Strategy for an example"
            )
        if not hasattr(strategy, "inner"):
            raise StrategyError(f"{name}.__init__ must call super().__init__(...)")
        _refuse_ignored(strategy)
        super().__init__(strategy, setting)
        self.compute = setting.compute(None)
        self.blocks: list[list[int]] | None = [list(range(len(fleet)))] if strategy.stacked else None
        if strategy.stacked:
            self._compare_one_row_with_many(strategy)
        self._set_up(strategy)
        fleet.state.register("program", _ProgramState(self))

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
            _refuse_another_optimizer(strategy)
            strategy._set_lr()  # of an optimizer of its own, too

        return start

    # What the driver asks

    def next_event(self, step: int) -> int:
        return step + 1

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        """Give the strategies the gradients. With `skip`, all gradients are 0 and no node takes a step, as in DDP."""
        per_row: list[list[Tensor | None]] = [[None] * len(self.worker.parameters) for _ in range(len(self.fleet))]
        for row in rows:
            per_row[row] = self.fleet.gradients_of(row)
            if skip:  # what a strategy does with one node's is not known
                per_row[row] = [None if g is None else torch.zeros_like(g) for g in per_row[row]]
        for block in self.fleet.blocks:
            block.give_grads_away()
        if skip and self.watch.skips:
            self._repair_buffers()
        for strategy in self._moving(rows):
            strategy.overflowed = skip
        self._take_gradients(per_row)
        self._rows = rows
        return []

    def _repair_buffers(self) -> None:
        """Copy a healthy node's buffers into nodes whose buffers contain NaN, which a forward pass may have written."""
        fleet = self.fleet
        spoilt = self.watch.spoilt(fleet.comm.present)
        healthy = [node for node in fleet.comm.present if node not in spoilt]
        with fleet.comm.counted_as("buffers"):
            for rows in fleet.shared_buffers.values() if spoilt and healthy else ():
                take_rows(fleet, rows, healthy[0], spoilt)
        fleet.forget_own(spoilt)

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        moving, self._step = self._moving(self._rows), step
        before = [strategy.local_step for strategy in moving]
        self.meeting.before_first = before_mixing
        with torch.enable_grad():
            self._meet([strategy.step if strategy in moving else None for strategy in self.strategies])
        self.meeting.before_first = None
        self.compute.taken[list(self._rows)] += 1
        self._refuse_standing_still(moving, before)
        if self.watch.skips:  # there is nothing left to be skipped where the step itself was not finite
            self.watch.shared([block.params for block in self.fleet.blocks], "the nodes", step)
        for row in self._rows:
            self.watch.row(self.fleet.ranks[row], row, int(self.compute.taken[row]))
        return True

    def _moving(self, rows: Sequence[int]) -> list[Strategy]:
        """Return the strategies that take the step. If nodes are absent, set each strategy's `present`."""
        if self.blocks is not None or len(rows) == len(self.strategies):
            moving = self.strategies
        else:
            moving = [self.strategies[row] for row in rows]
        for strategy in moving:
            if strategy.present != self.fleet.comm.present:
                strategy.present = list(self.fleet.comm.present)
        return moving

    def rejoin(self, nodes: Sequence[int], source: int, step: int, forget: bool, as_fleet: bool) -> None:
        """Copy the parameters, buffers and strategy state of node `source` to `nodes`. Each node keeps its own rank."""
        fleet = self.fleet
        self.worker.point(source)
        state = object_state(self.strategies[source], self.worker.model)
        taken = take_state(fleet, state, source, nodes, self.worker.device)
        for block in fleet.blocks:
            take_rows(fleet, block.params, source, nodes)
        with fleet.comm.counted_as("buffers"):
            for rows in fleet.shared_buffers.values():
                take_rows(fleet, rows, source, nodes)
        if forget:
            fleet.forget_own(nodes)
        for rank in nodes:
            self.worker.point(rank)
            load_object_state(self.strategies[rank], self.worker.model, {k: x.clone() for k, x in taken.items()})
            self.strategies[rank].rank = rank
            self.compute.taken[rank] = step
        there = fleet.comm.present
        self._moving(there)
        self._step = step + 1
        calls = [functools.partial(strategy.rejoin, list(nodes), source) for strategy in self.strategies]
        with torch.enable_grad():
            self._meet([call if rank in there else None for rank, call in enumerate(calls)])

    def _refuse_standing_still(self, moved: Sequence[Strategy], before: Sequence[int]) -> None:
        """Raise StrategyError if a strategy's local step is still as in `before`: its `step` did not call super()."""
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
        """Raise StrategyError if steps on random gradients differ between one row per block and all rows in one."""
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
                    f"{type(strategy).__name__} sets stacked = True, but {n} rows together give other parameters "
                    f"than one row at a time (largest difference {off:.3g}): some operation crosses the row axis, "
                    "for example a norm or a topk over all of p instead of p.flatten(1). Keep the first axis apart, "
                    "or drop stacked = True"
                )

    def close(self) -> None:
        self.meeting.close()
        super().close()


def _refuse_ignored(strategy: Strategy) -> None:
    """Raise StrategyError if `__init__` sets the optimizer itself, or another schedule than the strategy's."""
    name, own = type(strategy).__name__, vars(strategy)
    if own.get("optim") is not None:
        raise StrategyError(
            f"{name}.__init__ sets self.optim, but the strategy makes this optimizer itself: pass the optimizer to "
            "super().__init__(optimizer), or set self.optim in _init_node(), after super()._init_node(...)"
        )
    if type(strategy)._init_node is not Strategy._init_node:  # which may make a scheduler of its own from these
        return
    for attribute in ("lr_scheduler", "lr_scheduler_kwargs"):
        value = own.get(attribute)
        if value and value != strategy.inner.lr_scheduler:
            raise StrategyError(
                f"{name} sets self.{attribute}={value!r}, but nodes use the schedule given to super().__init__(), "
                f"{strategy.inner.lr_scheduler!r}: pass it there, as in super().__init__(lr_scheduler='cosine', "
                "warmup_steps=10), and remove the attribute"
            )


def _refuse_another_optimizer(strategy: Strategy) -> None:
    """Raise StrategyError if an attribute `optim_spec`, as in the first ExoGym, differs from the node's optimizer."""
    try:
        spec = OptimSpec.of(vars(strategy)["optim_spec"])
    except (KeyError, ArgumentError):  # none, or something else
        return
    made = strategy.optim
    if not isinstance(made, spec.cls) or any(made.defaults.get(key) != value for key, value in spec.kwargs.items()):
        name = type(strategy).__name__
        raise StrategyError(
            f"{name} sets self.optim_spec={spec!r}, but the node trains with {type(made).__name__}, "
            f"lr={made.defaults.get('lr')}: pass the optimizer to super().__init__(optimizer), or build self.optim in "
            "_init_node(), after super()._init_node(...)"
        )


class _ProgramState(Stateful):
    """The saved state of users' strategies: one per node, or a stacked strategy's tensors and other values."""

    def __init__(self, programs: Programs):
        self.programs = programs
        self._taken: dict[int, Tensors] = {}  # rows of a stacked strategy, until they are put together

    def row(self, row: int) -> Tensors:
        programs = self.programs
        if programs.blocks is None:
            return object_state(programs.strategies[row], programs.worker.model)
        return {name: x[row] for name, x in self._stacked()[0].items()}

    def load_row(self, row: int, tensors: Tensors) -> None:
        programs = self.programs
        if programs.blocks is None:
            load_object_state(programs.strategies[row], programs.worker.model, tensors)
        else:
            self._taken[row] = tensors

    def shared(self) -> Tensors:
        return {} if self.programs.blocks is None else self._stacked()[1]

    def load_shared(self, tensors: Tensors) -> None:
        programs = self.programs
        if programs.blocks is None:
            return
        taken = [self._taken.pop(row) for row in range(len(programs.fleet))]
        rows = {name: torch.stack([own[name] for own in taken]) for name in taken[0].keys() - tensors.keys()}
        load_object_state(programs.strategies[0], programs.models[0], tensors | rows)

    def _stacked(self) -> tuple[Tensors, Tensors]:
        """Return a stacked strategy's state: tensors (rows, ...), and other values, which all rows share."""
        programs, rows, shared = self.programs, Tensors(), Tensors()
        for name, x in object_state(programs.strategies[0], programs.models[0]).items():
            by_row = not name.endswith(SKELETON) and x.dim() > 0 and len(x) == len(programs.fleet)
            (rows if by_row else shared)[name] = x
        return rows, shared


def object_state(strategy: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return the state of `strategy` as named tensors, without the model's tensors, which are saved as rows.

    The state is all attributes that `exogym.strategy.packing` can pack. For other attributes the strategy must define
    `state_dict()` and `load_state_dict(state)`; otherwise raise StrategyError.
    """
    tensors: dict[str, Tensor] = {}
    own = {id(p): index for index, p in enumerate(model.parameters())}
    source = strategy.state_dict() if hasattr(strategy, "state_dict") else vars(strategy)
    tensors[SKELETON] = as_text(
        {key: pack(value, key, tensors, own, CONSTANT) for key, value in source.items() if key != "given_arguments"}
    )
    return tensors


def load_object_state(strategy: Any, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set the attributes of `strategy` from a result of `object_state`."""
    own = list(model.parameters())
    skeleton = from_text(tensors[SKELETON])
    if hasattr(strategy, "load_state_dict"):
        strategy.load_state_dict({k: unpack(v, None, tensors, own) for k, v in skeleton.items()})
        return
    for key, packed in skeleton.items():
        value = unpack(packed, vars(strategy).get(key), tensors, own)
        if value is not KEEP:
            setattr(strategy, key, value)
