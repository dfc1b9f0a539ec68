"""DES-LOC: average parameters and the inner optimizers' moments, each at its own period.

Iacob et al., DES-LOC: desynced low communication adaptive optimizers, arXiv:2505.22549. Nodes take local steps of Adam,
with first moments u_i and second moments v_i, and

    theta_i <- (1/N) sum_j theta_j      after steps that H divides
    u_i     <- (1/N) sum_j u_j          after steps that H_u divides
    v_i     <- (1/N) sum_j v_j          after steps that H_v divides

Local Adam averages all three every H steps. Moments change more slowly than parameters and need fewer averages: by
default H_u = H_v = 3 H. The paper averages second moments, which change slowest, half as often as first moments. Its
H_v = 6 H suits only dense gradients: a node that has seen almost no gradient of a parameter divides the other nodes'
u_i by its own sqrt(v_i), which is near 0. If second moments are averaged whenever first moments are (H_v divides H_u),
|u| stays within Adam's multiple of sqrt(v).

If H_u and H_v exceed the number of steps, DES-LOC is local SGD (FedAvg) with Adam. With H = H_u = 1 and SGD with
momentum, DES-LOC is DDP. With Adam, averaging gradients at every step is a different method, because the mean of
squares is not the square of the mean.

Payload: P b (1/H + 1/H_u + 1/H_v) bytes per node and step, for P parameters of b bytes; ring all-reduces, tx = rx = 2
(N-1)/N times the payload. Moments are sent in the precision of their parameters. At the end of training, unsynchronized
parameters are averaged once more, but not moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.core.base.torch_private import bare_step
from exogym.core.fleet import Block, Fleet
from exogym.errors import ArgumentError, check_count
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.optim import OptimSpec
from exogym.strategy.rounds import check_one_length
from exogym.strategy.strategy import Inner, InnerOptions
from exogym.strategy.traffic import Traffic

FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq", "square_avg")
Kind = tuple[str, ...]


class Moments:
    """The moments of the optimizers that `spec` builds: state tensors with the shapes of their parameters.

    Attributes:
        kinds: the kinds of moments, in the order first, second, others. A kind is a tuple of the names that torch's
            optimizers use for it; a parameter's state has one of these names.

    Raises:
        ArgumentError: the optimizer keeps no such state.

    >>> Moments(OptimSpec("adamw")).kinds, Moments(OptimSpec("sgd", momentum=0.9)).kinds == [FIRST]
    ([('exp_avg', 'momentum_buffer'), ('exp_avg_sq', 'square_avg')], True)
    """

    def __init__(self, spec: OptimSpec):
        named = {"weight": nn.Parameter(torch.ones(2, 2)), "bias": nn.Parameter(torch.ones(2))}
        optimizer = OptimSpec(spec.make, **spec.kwargs).build(named, hidden={"weight"})
        for p in named.values():
            p.grad = torch.ones_like(p)
        bare_step(optimizer)()  # without importing torch's compiler, which takes a second
        kept = [(p, name, x) for p in named.values() for name, x in optimizer.state[p].items()]
        names = [name for p, name, x in kept if isinstance(x, Tensor) and x.shape == p.shape]
        if not names:
            raise ArgumentError(f"{spec!r} keeps no state per parameter that could be averaged: use 'adamw'")
        own: list[Kind] = [(name,) for name in dict.fromkeys(names) if name not in FIRST + SECOND]
        self.kinds: list[Kind] = [*(kind for kind in (FIRST, SECOND) if {*kind} & {*names}), *own]

    def average(self, fleet: Fleet, kind: Kind) -> None:
        """Average the moments of `kind` over the nodes. The payload is P b bytes.

        A parameter that has never had a gradient has no moment yet, which counts as zeros in the mean and is not
        created.
        """
        optimizers = getattr(fleet.state.parts.get("optimizer"), "optimizers", {})
        for block in fleet.blocks:
            x = block.zeros()
            places = [(row, place) for row, o in optimizers.items() for place in _places(o, block, kind)]
            for row, (start, moment) in places:
                x[row, start : start + moment.numel()] = moment.flatten()
            mean = fleet.comm.all_reduce(x, "mean")
            for row, (start, moment) in places:
                moment.copy_(mean[row, start : start + moment.numel()].view_as(moment))


def _places(optimizer: Optimizer, block: Block, kind: Kind) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, tensor) for the moment of each parameter of the block, in the optimizer's order."""
    start = 0
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.dtype != block.layout.dtype:
            continue
        state = optimizer.state.get(p, {})
        yield from ((start, state[name]) for name in kind if state.get(name) is not None)
        start += p.numel()


class MomentAverage(PeriodicModule):
    """Average the inner optimizers' moments of one `kind` after every step that `every` divides."""

    def __init__(self, moments: Moments, kind: Kind, every: int):
        super().__init__()
        self.take_rounds(every)
        self.moments, self.kind = moments, kind
        self.name = f"average of {kind[0]}"

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b, self.interval_steps)]

    def communicate(self, fleet: Fleet, step: int) -> None:
        self.moments.average(fleet, self.kind)

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        """Do nothing: nodes' moments may differ at the end of training."""


class DESLOCStrategy(CommunicateOptimizeStrategy):
    """DES-LOC: local Adam that averages parameters, first moments u and second moments v, each at its own period.

    Use it when nodes train with Adam, and averaging its moments as often as the parameters costs too many bytes.

        theta_i <- mean_j theta_j every H steps;   u_i <- mean_j u_j every H_u;   v_i <- mean_j v_j every H_v

    theta_i, u_i and v_i are the values of node i. Payload: P b (1/H + 1/H_u + 1/H_v) bytes per node and step, for P
    parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The optimizer must keep
            moments: "adamw", "adam", or SGD with momentum.
        H: steps between averages of the parameters.
        H_u: steps between averages of the first moments ("exp_avg", SGD's "momentum_buffer"). None means 3 H.
        H_v: steps between averages of the second moments ("exp_avg_sq"), if the optimizer has them. None means H_u; the
            paper uses 6 H.

    >>> strategy = DESLOCStrategy(H=32, lr=3e-4)
    """

    name, title, paper = "desloc", "DES-LOC", "arXiv:2505.22549"
    tried = ()
    ranges = ()
    payload = "P b / H + 2 P b / (3 H)"
    equation = "theta_i, u_i, v_i <- their means every H, H_u and H_v steps; u, v: Adam's moments"
    needs = "all nodes, every H steps; moments less often"
    identities = ("H_u, H_v over all steps = fedavg", "H=H_u=1, SGD with momentum = ddp", "equal data = one node")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        H: int = 32,
        *,
        H_u: int | None = None,
        H_v: int | None = None,
        **options: Unpack[InnerOptions],
    ):
        check_one_length(H, type(self).__name__)
        moments = Moments(Inner.of(inner_optim, options).spec)
        if H_v is not None and SECOND not in moments.kinds:
            raise ArgumentError(
                f"H_v={H_v!r} with inner_optim={inner_optim!r}, which keeps no second moments: use "
                "inner_optim='adamw', or leave H_v out"
            )
        averages = []
        H_u = 3 * H if H_u is None else H_u
        for kind, option, every in ((FIRST, "H_u", H_u), (SECOND, "H_v", H_u if H_v is None else H_v)):
            check_count(option, every)
            averages += [MomentAverage(moments, kind, every)] if kind in moments.kinds else []
        super().__init__(inner_optim, [AveragingCommunicator(H, weighting="uniform"), *averages], **options)
