"""GPA: DDP that steps one sequence of parameters, takes gradients at a second, and evaluates a third, their average.

Defazio et al., Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs, arXiv:2512.17131, and the authors'
`GPAAdamW` (Generalized Primal Averaging). The three sequences z, y and x start equal; the nodes' parameters are y. Opt
is the inner optimizer. At every step, with the averaging factors mu_x and mu_y:

    g = (1/N) sum_i grad f_i(y)                # all-reduce of P elements
    z <- Opt(z, clip(g))
    x <- mu_x x + (1 - mu_x) z
    y <- mu_y x + (1 - mu_y) z

Weight decay acts on z, as is the authors' default. Payload: P b bytes per node and step, for P parameters of b bytes,
as in DDP; ring all-reduce, tx = rx = 2 (N-1)/N P b. With mu_x = 0, GPA is DDP. With SGD and mu_x = mu_y = mu, the
sequence y is DDP with Nesterov SGD at (1 - mu) times the rate. Evaluation uses x.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule, PeriodicModule
from exogym.strategy.simple_reduce import GradientAverage
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic


class PrimalAverage(PeriodicModule):
    """Average z into x after every step, and give the nodes y, at which they compute the next gradient.

    Args:
        mu_x: the share of x that each step keeps, from 0 to below 1.
        mu_y: the share of x in y, from 0 to 1.

    State: x and z, one copy each for all nodes.
    """

    def __init__(self, mu_x: float, mu_y: float):
        super().__init__()
        check_number("mu_x", mu_x, least=0, under=1)
        check_number("mu_y", mu_y, least=0, most=1)
        self.mu_x, self.mu_y = mu_x, mu_y

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return []

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.x, self.z = ([block.params[:1].clone() for block in fleet.blocks] for _ in range(2))
        self.shared_state = {f"{name}.{b}": t for name in "xz" for b, t in enumerate(getattr(self, name))}

    def give_z(self, fleet: Fleet) -> None:
        """Give the nodes z, on which the inner optimizer then steps."""
        for block, z in zip(fleet.blocks, self.z, strict=True):
            block.params.copy_(z.expand_as(block.params))

    def communicate(self, fleet: Fleet, step: int) -> None:
        for block, x, z in zip(fleet.blocks, self.x, self.z, strict=True):
            z.copy_(block.params[:1])
            x.mul_(self.mu_x).add_(z, alpha=1 - self.mu_x)
            block.params.copy_((self.mu_y * x).add_(z, alpha=1 - self.mu_y).expand_as(block.params))

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        return [x[0] for x in self.x]


class GradientAtY(GradientModule):
    """Average the nodes' gradients at y, and give the nodes z for the inner step."""

    def __init__(self, primal: PrimalAverage):
        super().__init__()
        self.primal, self.average = primal, GradientAverage()
        self.bucket_bytes = self.average.bucket_bytes

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return self.average.traffic(P, N, b)

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        self.average.transform(fleet, step, lr)
        self.primal.give_z(fleet)


class GPAStrategy(CommunicateOptimizeStrategy):
    """GPA: DDP on z, with gradients at y, a mix of z and of its running average x.

    Use it when the network carries DDP and the inner optimizer alone learns too slowly: like SNOO, but with fewer
    options and without rounds.

        g = mean_i grad f_i(y);   z <- Opt(z, clip(g));   x <- mu_x x + (1 - mu_x) z;   y <- mu_y x + (1 - mu_y) z

    Opt is the inner optimizer and f_i node i's loss. Evaluation uses x. Payload: P b bytes per node and step, for P
    parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The paper uses AdamW.
        mu_x, mu_y: see `PrimalAverage`. The authors' mu_x = 0.9967 corresponds to DiLoCo's H = 32 on one node, 0.974 to
            H = 4, 0.9869 to 8, 0.9934 to 16 and 0.9984 to 64.

    >>> strategy = GPAStrategy("adamw", lr=1e-3, mu_x=0.9934)
    """

    name, title, paper, payload = "gpa", "GPA", "arXiv:2512.17131", "P b"
    tried = ()
    ranges = ("mu_x=0.98..0.999", "mu_y=0.5..0.95")
    equation = "g at y as ddp; z <- Opt(z, g); x <- mu_x x + (1 - mu_x) z; y <- mu_y x + (1 - mu_y) z"
    needs = "all nodes, every step; a fast network"
    identities = ("mu_x=0 = ddp", "SGD(lr), mu_x=mu_y=mu: y = ddp with Nesterov SGD((1-mu) lr, mu)")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        *,
        mu_x: float = 0.9967,
        mu_y: float = 0.7,
        **options: Unpack[InnerOptions],
    ):
        primal = PrimalAverage(mu_x, mu_y)
        super().__init__(inner_optim, [primal], gradient_modules=[GradientAtY(primal)], **options)
