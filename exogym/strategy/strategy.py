"""The base class of every strategy, and the way to write a strategy for a single node.

You write your subclass for one node of many, as with torch.distributed: the node has a model, a rank and the number of
nodes, and calls collectives. ExoGym runs one instance per node, and the instances wait for each other at each
collective. This package's own strategies act on the rows of many nodes instead (`CommunicateOptimizeStrategy`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypedDict, Unpack

import numpy as np

from exogym.core.base.lazy import absent
from exogym.core.refusals import UNTRIED
from exogym.errors import ArgumentError, StrategyError, as_call, bind, without_aliases
from exogym.faults import Availability, Faults
from exogym.strategy.capabilities import ChoosesClients, Clients
from exogym.strategy.names import ByName, Home, homes
from exogym.strategy.one_node import OneNode
from exogym.strategy.optim import OptimSpec
from exogym.strategy.options import arguments_of, defined, split, taking
from exogym.strategy.schedule import Schedule, Scheduler, check_schedule
from exogym.strategy.traffic import Plan

__getattr__ = functools.partial(absent, __name__)  # a class that used to be here

STRATEGIES = ByName()  # a class enters when Python defines it


@dataclass(frozen=True)
class Run:
    """The facts about a run that a strategy may use.

    Attributes:
        num_nodes: N, the number of nodes.
        seed: the run's seed, which determines the random choices that nodes share.
        total_steps: T, the steps that each node takes.
        examples: (N,) the number of training examples of each node.
        batch_size: examples per step of a node, or (N,) if nodes differ.
        step_s: (N,) seconds that a step of each node takes, or None if unknown.
        availability: which clients a server can ask for a round. None means all clients in every round.
        empty: nodes known to have no examples. These nodes never take part.
        final_sync: whether nodes synchronize steps that are left unsynchronized at the end of the run.
        drops_last: whether nodes leave out the short last batches of their epochs.
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
    drops_last: bool = False

    @property
    def epoch_steps(self) -> np.ndarray:
        """(N,) the steps that each node needs for one pass over its examples."""
        if self.drops_last:
            return np.maximum(np.minimum(1, self.examples), self.examples // self.batch_size)
        return -(-self.examples // self.batch_size)


SGD_LR = 0.1  # of an inner optimizer that is named 'sgd'


class Inner:
    """A description of the inner optimizer: its class, arguments, gradient clipping and learning-rate schedule."""

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
        if isinstance(optim, str) and optim.lower() == "sgd" and lr is None:
            lr = SGD_LR  # with torch's 1e-3 SGD hardly learns
        self.spec = OptimSpec.of(optim, lr=lr)
        self.max_norm, self.lr_scheduler, self.warmup_steps = max_norm, lr_scheduler, warmup_steps
        self.base_lr = self.spec.base_lr()

    @classmethod
    def of(cls, optim: Any, options: Mapping[str, Any]) -> Inner:
        """Return the description of `optim`, with the `options` of a strategy that are arguments of this class."""
        return cls(optim, **split(without_aliases(dict(options), ("lr",)), cls)[0])

    def schedule(self, total_steps: int) -> Schedule:
        return Schedule(self.lr_scheduler, self.warmup_steps, total_steps, self.base_lr)


class InnerOptions(TypedDict, total=False):
    """Options of every strategy in addition to `inner_optim`: the arguments of `Inner`."""

    lr: float | None
    inner_lr: float | None
    max_norm: float | None
    lr_scheduler: Scheduler
    warmup_steps: int


defined(InnerOptions, Inner)


class Strategy(OneNode):
    """Base class of strategies written for one node. Subclasses override `step`.

    Args:
        inner_optim: the inner optimizer: a name ("muon" is `exogym.strategy.muon.MuonAdamW`), an optimizer class, a
            function of the parameters, or an `OptimSpec`, which describes these forms.
        lr, inner_lr: two names for the inner optimizer's learning rate. None means 0.1 for 'sgd', otherwise the
            optimizer's default.
        max_norm: the largest 2-norm of a gradient. Longer gradients are scaled down before each step. None means no
            clipping.
        lr_scheduler: "constant", "cosine", "linear", a torch scheduler class, or a function that maps the step to a
            learning-rate factor.
        warmup_steps: steps of linear warm-up.

    `step` can use `self.model`, `self.rank`, `self.num_nodes`, `self.optim`, `self.local_step` (steps done), and the
    collectives of `exogym.strategy.communicate`. The model is an ordinary model with this node's parameters and their
    gradients in `.grad`. If any node's gradients overflow in fp16, then on all nodes `self.overflowed` is True,
    gradients are zero, and `update_parameters()` changes nothing. The schedule scales the base rate of each group of
    `self.optim`, which may be your own optimizer, but leaves a rate that you or a torch scheduler set.

    If `stacked = True`, the subclass receives all rows of its process at once: parameters and gradients are (rows,
    *shape), and `self.rank` is a (rows,) tensor. The first `fit` checks that one row at a time gives the same results.

    Absent nodes (`exogym.faults`) take no step. Collectives then run among `self.present`, so `op="mean"` divides by
    the number of present nodes; ranks and `num_nodes` stay the same. A collective from or to an absent node is an
    error. A returning node copies parameters, buffers and the strategy's state except the rank from a node that stayed,
    which counts as a broadcast; see `rejoin`. A node that loses a synchronization misses this step.

    If batches differ in size (`exogym.balance`), collectives with `op="mean"` and `communicate_gradients` weight nodes
    by their batches. Set `weighted_means = True` if your strategy averages only by these calls; otherwise ExoGym
    refuses `balance="batch"`.

    These attributes describe a strategy class to other code:

    Attributes:
        name: the strategy's name on the command line, in lower case. A class with a name enters `STRATEGIES`, so
            `exogym compare` and `advise` know it and comparisons save its runs. Subclasses do not inherit the name.
        title, paper, equation: texts for tables.
        payload: the bytes that a node hands over per step, as a formula for tables, such as "P b / H". It uses P, N and
            b as in `plan`, and the constructor's arguments.
        needs: text for tables about what the strategy needs from the network.
        identities: the methods that the strategy equals for certain arguments, as texts for tables, such as "p=0 =
            diloco". Tests check each.
        driven_by: how ExoGym runs the nodes. With "programs", each node has its own instance, and all nodes step
            together. With "rounds", the strategy is a `CommunicateOptimizeStrategy`, whose nodes are independent
            between synchronizations, so hosts may be lost for good (`min_hosts`). With "clock", each node trains at its
            own pace on a virtual clock, and no node waits.
        temporary_rows: the temporary memory of a step, in rows of parameters per node, as measured by
            `tests/device/test_memory.py`.
        needs_gradients: whether nodes take every step together because they average gradients.
        own_rule: whether the strategy has its own update rule instead of an inner optimizer.
        only_inner: names of the inner optimizers for which the strategy's equation holds. An empty tuple means any
            optimizer. If the task's optimizer has another name, `exogym compare` uses the strategy's default.
        ranges: the options to tune besides the inner learning rate, with their ranges, such as "outer_lr=0.1..1.5".
            Options that change the bytes do not belong here. None means that the strategy has no ranges and cannot be
            tuned.
        not_taken: arguments of other strategies that this one does not accept, with the reasons.
        tried: the features in `exogym.core.refusals.UNTRIED` that a contrib method's tests cover; runs with its other
            features are refused. None means that the strategy accepts all.

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
        "privacy": "it bounds how much the sum of clients' updates reveals, but this strategy takes no such sum: use "
        "fedavg, fedopt (with server_optim='momentum' it is DiLoCo with a heavy ball) or fedprox"
    }
    driven_by = "programs"
    needs_gradients = True
    temporary_rows: ClassVar[float] = 0.3
    tried: tuple[str, ...] | None = None
    own_rule = False
    only_inner: tuple[str, ...] = ()
    ranges: tuple[str, ...] | None = None
    weighted_means = False
    registered: ClassVar[bool] = False
    inner: Inner

    def __init_subclass__(cls) -> None:
        cls.__signature__ = arguments_of(cls.__init__)
        name = cls.__dict__.get("name")
        cls.registered = isinstance(name, str)
        if not isinstance(name, str):
            return
        own, there = Home(cls.__module__, cls.__qualname__), STRATEGIES.loaded.get(name)
        if there is not None:
            other = Home(there.__module__, there.__qualname__)
        else:
            other = own if own.module.startswith("exogym.") else homes().get(name, own)
        if other != own:
            raise StrategyError(f"{'.'.join(own)} and {'.'.join(other)} both have name={name!r}: rename one of them")
        STRATEGIES[name] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse arguments that `__init__` does not accept, and record the others in `given_arguments`."""
        made = super().__new__(cls)
        given = bind(cls.__name__, cls.__signature__, args, kwargs, cls.not_taken)[0] if args or kwargs else {}
        vars(made)["given_arguments"] = given  # a copy or a loaded strategy gets its own afterwards
        return made

    @taking
    def __init__(self, inner_optim: Any = "adamw", **options: Unpack[InnerOptions]):
        self.inner = Inner.of(inner_optim, options)

    __signature__: ClassVar[inspect.Signature] = arguments_of(__init__)

    def __repr__(self) -> str:
        return as_call(self)

    def plan(self, P: float, N: int, b: float) -> Plan:
        """Return the strategy's communication, for `exogym.advise`: P parameters of b bytes on N nodes.

        Raises:
            ArgumentError: no formula is known.
        """
        raise ArgumentError(
            f"no formula is known for {type(self).__name__}, because it is written for one node: pass a Plan with "
            "its traffic"
        )

    @property
    def clients(self) -> ChoosesClients:
        """The choice of the nodes that act in a round."""
        return Clients()

    def round_lengths(self, total_steps: int) -> dict[str, list[int]]:
        """Return the lengths of all rounds by module name, for the modules whose H is a function of the round."""
        return {}

    def beside(self, faults: Faults) -> Strategy:
        """Return this strategy with the bad nodes of `faults`, which send wrong updates.

        Without bad nodes, return the strategy unchanged.
        """
        return self

    def features(self) -> dict[str, str]:
        """Return a dict that maps this strategy's features (names in `exogym.core.refusals`) to texts."""
        name = type(self).__name__
        found = {"its own clock": name} if self.driven_by == "clock" else {}
        found |= {"no modules": f"{name}, which has no modules"} if self.driven_by != "rounds" else {}
        if self.driven_by == "programs" and self.stacked:
            found["stacked"] = f"{name}, which is stacked"
        if not self.clients.asks_clients:
            found["a server that samples no clients"] = f"{name}, which does not sample clients"
        if self.needs_gradients:
            found["gradients at every step"] = f"{name}, whose nodes synchronize at every step"
        if not self.weighted_means:
            found["its own mean"] = f"{name}, which averages in its own way"
        if self.tried is not None:
            found |= {f"not tried with {feature}": name for feature in UNTRIED if feature not in self.tried}
        return found

    def features_in_parts(self) -> dict[str, str]:
        """Return further features for a run in which several processes hold one node's row.

        Only such runs call it, because it takes trial steps of the outer optimizer.
        """
        return (
            {"an optimizer from a function": f"inner_optim={self.inner.spec!r}"} if self.inner.spec.is_function else {}
        )
