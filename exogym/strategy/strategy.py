"""The base class of every strategy, and the way to write a strategy for a single node.

Your strategy is a subclass, written for one node of many, as with torch.distributed: it has a model, a rank
and a number of nodes, and calls collectives. ExoGym runs one instance per node; the instances meet at each
collective. The strategies of this package act on rows instead (`CommunicateOptimizeStrategy`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict, Unpack

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from exogym.core.base.torch_private import scale_
from exogym.core.communicator import ALONE, Inside
from exogym.core.fleet.layout import hidden_matrices
from exogym.errors import ArgumentError, StrategyError
from exogym.faults import Availability, Faults
from exogym.strategy import communicate
from exogym.strategy.kernels import bare_step
from exogym.strategy.optim import OptimSpec
from exogym.strategy.options import defined, split, taking
from exogym.strategy.schedule import Schedule, Scheduler, check_schedule, set_rates
from exogym.strategy.traffic import Plan

STRATEGIES: dict[str, type[Strategy]] = {}  # by `name`; a class enters when Python defines it


@dataclass(frozen=True)
class Run:
    """The facts about a run that a strategy may use.

    Attributes:
        num_nodes: N.
        seed: the run's seed; choices that nodes share come from it.
        total_steps: T, the steps each node takes.
        examples: (N,) training examples of each node.
        batch_size: examples per step of a node; (N,) if nodes differ.
        step_s: (N,) seconds of a step, if they were given.
        availability: which clients a server can ask for a round. None: always everybody.
        empty: nodes known to have no examples; they take part in nothing.
        final_sync: whether the last unsynchronized steps are synchronized at the end.
    """

    num_nodes: int
    seed: int
    total_steps: int
    examples: np.ndarray
    batch_size: int | np.ndarray
    step_s: np.ndarray | None = None
    availability: Availability | None = None
    empty: Set[int] = frozenset()
    final_sync: bool = True


class Inner:
    """The inner optimizer as a value: spec, clipping and schedule."""

    def __init__(
        self,
        optim: Any,
        *,
        lr: float | None = None,
        max_norm: float | None = None,
        lr_scheduler: Scheduler = None,
        warmup_steps: int = 0,
    ):
        if lr is not None and not (isinstance(lr, int | float) and lr >= 0):
            raise ArgumentError(f"lr={lr!r} must be a number of at least 0")
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
            raise ArgumentError(f"max_norm={max_norm!r} must be a positive number, or None for no clipping")
        check_schedule(lr_scheduler, warmup_steps)
        self.spec = OptimSpec.of(optim, lr=lr)
        self.max_norm, self.lr_scheduler, self.warmup_steps = max_norm, lr_scheduler, warmup_steps
        self.base_lr = self.spec.base_lr()

    def schedule(self, total_steps: int) -> Schedule:
        return Schedule(self.lr_scheduler, self.warmup_steps, total_steps, self.base_lr)


class InnerOptions(TypedDict, total=False):
    """Options of every strategy beside `inner_optim`: the arguments of `Inner`."""

    lr: float | None
    inner_lr: float | None
    max_norm: float | None
    lr_scheduler: Scheduler
    warmup_steps: int


defined(InnerOptions, Inner)


class Strategy:
    """A strategy written for one node. Subclass it and override `step`.

    Args:
        inner_optim: a name, an optimizer class or an `OptimSpec`; "muon" is `exogym.strategy.muon.MuonAdamW`.
        lr, inner_lr: two names for the inner optimizer's learning rate. None: the optimizer's default.
        max_norm: clip the gradient's 2-norm to this before each step. None: no clipping.
        lr_scheduler: "constant", "cosine", "linear", a torch scheduler class or a callable from the step to a factor.
        warmup_steps: steps of linear warm-up.

    Within a step a node has `self.model`, `self.rank`, `self.num_nodes`, `self.optim`, `self.local_step` (steps done),
    and the collectives of `exogym.strategy.communicate`. The model is an ordinary model with this node's parameters;
    their gradients are in `.grad`. If any node's gradients overflow in fp16, all nodes get `self.overflowed` and zero
    gradients, and `update_parameters()` changes nothing. The schedule scales the base rate of each group of
    `self.optim`, which may be your own optimizer. A rate that you or a torch scheduler set stays.

    With `stacked = True` the subclass gets all rows at once: parameters and gradients are (rows, *shape), and
    `self.rank` is a (rows,) tensor. The first `fit` compares the results with one row at a time.

    With absent nodes (`exogym.faults`): an absent node takes no step. Collectives run among `self.present`, so
    `op="mean"` divides by their number. Ranks and `num_nodes` stay the same. A collective from or to an absent node is
    an error. A returning node copies parameters, buffers and all of the strategy's state, except the rank, from a node
    that stayed (their bytes, broadcast); see `rejoin`. A lost synchronization is a missed step.

    With batches of different sizes (`exogym.balance`) nodes are weighted by their batches in every collective with
    `op="mean"`, including `communicate_gradients`. Set `weighted_means = True` if all your averages are such means;
    otherwise `balance="batch"` is refused.

    A class describes itself by these attributes, so that other code never checks for a class:

    Attributes:
        name: its name on the command line, in lower case. A class with a name enters `STRATEGIES`: `exogym compare` and
            `advise` know it, and a comparison saves its runs. Subclasses do not inherit the name.
        title, paper, equation: for tables (`exogym.strategy.registry.table`).
        payload: for tables: a formula of the bytes that a node hands over per step, of P, N and b as in `plan` and the
            constructor's arguments: "P b / H".
        needs: for tables: what it asks of the network.
        identities: for tables: what it equals for certain arguments. Tests check each.
        driven_by: "programs": one instance for each node; all step together. "rounds": a
            `CommunicateOptimizeStrategy`, whose nodes are independent between events, so hosts may be lost for good
            (`min_hosts`). "clock": nodes at their own pace, in the order of a virtual clock, and nobody waits.
        needs_gradients: whether nodes take every step together, because they average gradients.
        own_rule: whether it has its own update rule, independent of the inner optimizer that other strategies get.
        only_inner: names of the inner optimizers for which its equation holds; empty: any. `exogym compare` uses the
            strategy's default if the task's optimizer is not among them.
        not_taken: arguments of other strategies that it does not take -> why.

    >>> class MyStrategy(Strategy):
    ...     def step(self):
    ...         self.communicate_gradients()
    ...         self.update_parameters()
    ...         super().step()
    """

    name: str | None = None
    title = paper = equation = payload = needs = ""
    identities: tuple[str, ...] = ()
    not_taken: ClassVar[dict[str, str]] = {
        "privacy": "it bounds how much the sum of clients' updates reveals, but this strategy takes no such sum: take "
        "fedavg, fedopt (with server_optim='momentum' it is DiLoCo with a heavy ball) or fedprox"
    }
    driven_by = "programs"
    needs_gradients = True
    own_rule = False
    only_inner: tuple[str, ...] = ()
    stacked = False
    overflowed = False
    weighted_means = False
    registered: ClassVar[bool] = False
    inner: Inner
    model: nn.Module
    rank: Any
    num_nodes: int
    present: list[int]
    optim: Optimizer
    schedule: Schedule
    local_step: int
    total_steps: int

    def __init_subclass__(cls) -> None:
        name = cls.__dict__.get("name")
        cls.registered = isinstance(name, str)
        if not isinstance(name, str):
            return
        other = STRATEGIES.get(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise StrategyError(
                f"{cls.__module__}.{cls.__qualname__} and {other.__module__}.{other.__qualname__} both have "
                f"name={name!r}: rename one of them"
            )
        STRATEGIES[name] = cls

    @taking
    def __init__(self, inner_optim: Any = "adamw", **options: Unpack[InnerOptions]):
        self.inner = Inner(inner_optim, **split(options, Inner)[0])

    def plan(self, P: float, N: int, b: float) -> Plan:
        """Return what it sends, for `exogym.advise`, with P parameters of b bytes on N nodes.

        Raises:
            ArgumentError: no formula is known.
        """
        raise ArgumentError(
            f"no formula is known for {type(self).__name__}, which is written for one node: give a Plan of its traffic"
        )

    def seats(self, num_nodes: int) -> int | None:
        """Return the largest number of nodes that act in a round, if the other nodes need no row. None: all act."""
        return None

    @property
    def asks_clients(self) -> bool:
        """Whether a server asks some nodes to take part in a round, and they may be unavailable."""
        return False

    @property
    def asks_all_lengths(self) -> bool:
        """Whether it must know each node's number of examples before any node acts."""
        return False

    def round_lengths(self, total_steps: int) -> dict[str, list[int]]:
        """Return the steps of each round, by module, for modules whose H is a function of the round."""
        return {}

    def beside(self, faults: Faults) -> Strategy:
        """Return this strategy with the wrong updates of the bad nodes in `faults`, if `faults` has any."""
        return self

    def features(self) -> dict[str, str]:
        """Return the features of this strategy: a name from `exogym.core.combinations.FEATURES` -> the given value."""
        name = type(self).__name__
        found = {"its own clock": name} if self.driven_by == "clock" else {}
        found |= {"no modules": f"{name}, which has no modules"} if self.driven_by != "rounds" else {}
        if self.driven_by == "programs" and self.stacked:
            found["stacked"] = f"{name}, which is stacked"
        if not self.asks_clients:
            found["a server that asks nobody"] = f"{name}, which as it is asks nobody"
        if self.needs_gradients:
            found["gradients at every step"] = f"{name}, whose nodes meet at every step"
        own = {} if self.weighted_means else {"its own mean": f"{name}, which averages in its own way"}
        return found | own

    def features_in_parts(self) -> dict[str, str]:
        """Return further features, for a run whose processes each hold a part of a node's row.

        Only such runs call it, because it takes trial steps of the outer optimizer.
        """
        return {}

    def _init_node(self, model: nn.Module, rank: Any, num_nodes: int) -> None:
        """Set the node up, once before training. Overrides call `super()._init_node(model, rank, num_nodes)`."""
        self.model, self.rank, self.num_nodes = model, rank, num_nodes
        self.present = list(range(num_nodes))
        self.local_step = 0
        self.schedule = self.inner.schedule(self.total_steps)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        hidden = hidden_matrices(model)
        self.inner.spec.try_out(named, hidden)
        self.optim = self.inner.spec.build(named, may_fuse=not self.stacked, hidden=hidden)  # several rows cannot fuse
        self._set_lr()

    def communicate_gradients(self) -> None:
        """Average the gradients over the present nodes: all-reduce of P elements, payload P b bytes.

        As in torch's DDP, a node without a gradient gives zeros if another node has one. A parameter without a gradient
        on any node stays unchanged.
        """
        parameters = self._parameters()
        mine = torch.tensor([p.grad is not None for p in parameters])
        used = communicate.agree(mine.expand(len(self.rank), -1) if self.stacked else mine)
        for p, needed in zip(parameters, used.tolist(), strict=True):
            if needed:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                communicate.all_reduce(p.grad, op="mean")

    def update_parameters(self) -> None:
        """Clip the gradient to `max_norm` and step the inner optimizer, unless gradients overflowed in fp16."""
        if self.overflowed:
            return
        if self.inner.max_norm is not None:
            clip_rows([p.grad for p in self._parameters() if p.grad is not None], self.inner.max_norm, self.stacked)
        bare_step(self.optim)()

    def step(self) -> None:
        """End the step: advance the learning-rate schedule. Overrides call `super().step()` last."""
        self.local_step += 1
        self._set_lr()

    def rejoin(self, nodes: list[int], source: int) -> None:
        """Adjust state after `nodes` have returned. Every present node calls it before their first step.

        They now hold the values of node `source`. Override it to reset a node's own state; it may call collectives:

            if self.rank in nodes:
                self.residual.zero_()
        """

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _set_lr(self) -> None:
        set_rates(self.optim, self.schedule, self.local_step)


def clip_rows(grads: list[torch.Tensor], max_norm: float, stacked: bool, inside: Inside = ALONE) -> None:
    """Scale gradients in place so that each node's 2-norm over all tensors is at most `max_norm` (torch's rule).

    With `stacked` each tensor is (rows, *shape) and every row has its own norm. A norm that is NaN scales nothing, so
    that the NaN stays in its tensor, where messages can name it. All processes of `inside` are one node.
    """
    if not grads:
        return
    if not stacked:
        total = inside.norms(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads])))
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
        scale_(grads, factor)
        return
    # Row by row: a kernel over several rows may add in another order than over one row.
    rows = zip(*(g.unbind(0) for g in grads), strict=True)
    norms = torch.stack(
        [torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in row])) for row in rows]
    )
    factor = (max_norm / (inside.norms(norms) + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
    for g in grads:
        g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))
