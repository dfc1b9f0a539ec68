"""Post-local SGD: averaged gradients first, local steps later.

Lin et al., Don't use large mini-batches, use local SGD, arXiv:1808.07217. N nodes have the parameters theta_i and the
gradients g_i, and Opt is the inner optimizer. After step t0, nodes switch from the first line to the second:

    t <= t0:  g = (1/N) sum_i g_i,  theta_i <- Opt(theta_i, clip(g))     # DDP
    t >  t0:  theta_i <- Opt(theta_i, clip(g_i)), and after steps t0 + H, t0 + 2 H, ...: theta_i <- (1/N) sum_j theta_j

The inner optimizers keep their states, which nodes never average.

Payload: P b bytes per node and step up to t0, then P b every H steps, for P parameters of b bytes; ring all-reduce, tx
= rx = 2 (N-1)/N P b. The method equals DDP if t0 is at least the run's number of steps, or if t0 = 0, H = 1 and the
optimizer is plain SGD. Absent nodes are handled as in DDP up to t0, and as in local SGD later.

torch's `post_localSGD_hook` (`start_localSGD_iter=t0`) with `PeriodicModelAverager(period=H, warmup_steps=t0 + H - 1)`
takes the same averages. With `warmup_steps=t0`, torch averages after steps t0 + 1, t0 + 1 + H, ...; with plain SGD that
is this method with t0 + 1, because an average after one step from equal parameters is a step of DDP. torch's version
can also keep averaging gradients inside a machine.
"""

from __future__ import annotations

from typing import Any, Unpack

from exogym.core.fleet import Fleet
from exogym.errors import check_count
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.rounds import RoundLength
from exogym.strategy.simple_reduce import GradientAverage
from exogym.strategy.strategy import InnerOptions
from exogym.strategy.traffic import Traffic


class EarlyGradientAverage(GradientAverage):
    """Average the nodes' gradients up to and including step `stop`; later each node uses its own."""

    def __init__(self, stop: int):
        super().__init__()
        check_count("start_step", stop, least=0)
        self.stop, self.bucket_bytes = stop, None  # later gradients are not summed

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return []  # the repeated collectives come after this phase

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        if step <= self.stop:
            super().transform(fleet, step, lr)


class LateAverage(PeriodicModule):
    """Average the nodes' parameters after each round of `H` steps; the first round begins after step `after`."""

    weighted_means = True

    def __init__(self, H: RoundLength, after: int):
        super().__init__()
        self.take_rounds(H)
        self.after = after

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b, self.interval_steps)]

    def next_event(self, step: int) -> int:
        """Return the next step at which nodes meet; at step `after` they are equal and send nothing."""
        return self.after if step < self.after else self.after + super().next_event(step - self.after)

    def sends_parameters(self, step: int) -> bool:
        return step > self.after

    def communicate(self, fleet: Fleet, step: int) -> None:
        if step == self.after:
            return
        for block in fleet.blocks:
            fleet.comm.all_reduce(block.params, "mean", out=block.params)
        fleet.synchronise_buffers()

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        if since and step > self.after:
            self.communicate(fleet, step)


class PostLocalSGDStrategy(CommunicateOptimizeStrategy):
    """Post-local SGD: DDP up to step t0, local SGD after it.

    Use it when DDP's large global batch generalizes poorly, and the network can carry DDP until step t0.

        t <= t0:  theta_i <- Opt(theta_i, clip(mean_j g_j))
        t >  t0:  theta_i <- Opt(theta_i, clip(g_i)), and theta_i <- mean_j theta_j after steps t0 + H, t0 + 2 H, ...

    Node i has the parameters theta_i and the gradient g_i; t is the step and Opt the inner optimizer. Payload: P b
    bytes per node and step up to t0, then P b every H steps, for P parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on the averaged
            gradient up to `start_step`, and on each node's own gradient later.
        H: steps between averages of the parameters. The first average is taken H steps after `start_step`, which equals
            torch's `PeriodicModelAverager` with `warmup_steps=start_step + H - 1`.
        start_step: t0, the number of initial steps with averaged gradients. The paper switches when the learning rate
            first decays.

    >>> strategy = PostLocalSGDStrategy("sgd", H=16, start_step=500, lr=0.1)
    """

    name, title, paper, payload = "post_local_sgd", "Post-local SGD", "arXiv:1808.07217", "P b / H"
    ranges = ()
    equation = "t <= t0: as ddp; later as fedavg: theta_i <- mean_j theta_j every H steps"
    needs = "all nodes, every step up to start_step, then every H steps"
    identities = (
        "t0 over all steps = ddp",
        "t0=0 = fedavg",
        "t0=0, H=1, SGD = ddp",
        "= torch's PostLocalSGDOptimizer with warmup_steps = t0 + H - 1",
    )

    def __init__(
        self,
        inner_optim: Any = "sgd",
        H: RoundLength = 16,
        start_step: int = 100,
        **options: Unpack[InnerOptions],
    ):
        late, early = LateAverage(H, start_step), EarlyGradientAverage(start_step)
        super().__init__(inner_optim, [late], gradient_modules=[early], **options)
