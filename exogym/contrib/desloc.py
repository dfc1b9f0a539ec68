"""DES-LOC: average parameters and the inner optimizers' moments, each at its own period.

Iacob et al., DES-LOC: desynced low communication adaptive optimizers, arXiv:2505.22549. Nodes take local steps of Adam,
with first moments u_i and second moments v_i, and

    theta_i <- (1/N) sum_j theta_j      after steps that H divides
    u_i     <- (1/N) sum_j u_j          after steps that H_u divides
    v_i     <- (1/N) sum_j v_j          after steps that H_v divides

Local Adam averages all three kinds of values every H steps. Moments change more slowly than parameters, so they need
fewer averages: by default H_u = H_v = 3 H. Second moments change slowest, and the paper averages them half as often as
first moments, H_v = 6 H. H_v = 6 H suits dense gradients only: a node that has seen almost no gradient of a parameter
takes the other nodes' u_i and divides it by its own sqrt(v_i), which is near 0. If second moments are averaged whenever
first moments are averaged (H_v divides H_u), |u| stays within Adam's multiple of sqrt(v).

If H_u and H_v exceed the number of steps, DES-LOC is local SGD (FedAvg) with Adam. With H = H_u = 1 and SGD with
momentum, DES-LOC is DDP. With Adam, averaging gradients at every step would be a different method, because the mean of
squares is not the square of the mean.

Payload P b (1/H + 1/H_u + 1/H_v) bytes per node and step, for P parameters of b bytes; ring all-reduces, tx = rx = 2
(N-1)/N times the payload. Nodes send moments in the precision of their parameters. At the end of training,
unsynchronized parameters are averaged once more; moments are not.
"""

from __future__ import annotations

from typing import Any, Unpack

from exogym.contrib.moments import FIRST, SECOND, Kind, Moments
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_count
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.rounds import check_one_length
from exogym.strategy.strategy import Inner, InnerOptions
from exogym.strategy.traffic import Traffic


class MomentAverage(PeriodicModule):
    """Average one kind of moment of the inner optimizers (`kind`) after every step that `every` divides."""

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

        theta_i <- mean_j theta_j every H steps;   u_i <- mean_j u_j every H_u;   v_i <- mean_j v_j every H_v

    theta_i, u_i and v_i are the values of node i. Payload: P b (1/H + 1/H_u + 1/H_v) bytes per node and step, for P
    parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The optimizer must keep
            moments: "adamw", "adam", or SGD with momentum.
        H: steps between averages of the parameters.
        H_u: steps between averages of the first moments ("exp_avg", SGD's "momentum_buffer"). None means 3 H.
        H_v: steps between averages of the second moments ("exp_avg_sq"), if the optimizer has such moments. None means
            H_u. The paper has 6 H.

    >>> strategy = DESLOCStrategy(H=32, lr=3e-4)
    """

    name, title, paper = "desloc", "DES-LOC", "arXiv:2505.22549"
    tried = ()
    ranges = ()
    payload = "P b / H + 2 P b / (3 H)"
    equation = "theta_i, u_i, v_i <- their means, every H, H_u and H_v steps; u, v the moments of Adam"
    needs = "all nodes every H steps, and less often for the moments"
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
                f"H_v={H_v!r} with inner_optim={inner_optim!r}, which keeps no second moments: take "
                "inner_optim='adamw', or leave H_v out"
            )
        averages = []
        H_u = 3 * H if H_u is None else H_u
        for kind, option, every in ((FIRST, "H_u", H_u), (SECOND, "H_v", H_u if H_v is None else H_v)):
            check_count(option, every)
            averages += [MomentAverage(moments, kind, every)] if kind in moments.kinds else []
        super().__init__(inner_optim, [AveragingCommunicator(H, weighting="uniform"), *averages], **options)
