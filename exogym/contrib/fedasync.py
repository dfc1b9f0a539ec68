"""FedAsync: asynchronous federated optimization, whose server mixes each node's parameters into its own.

Xie, Koyejo, Gupta, Asynchronous Federated Optimization, arXiv:1903.03934. The server and the functions s follow the
public code of Plato, an asynchronous federated library, because the paper itself could not be read. Node w

    pulls theta, takes H inner steps to theta_w, pushes theta_w, pulls again.

On arrival, the server sets

    theta <- (1 - alpha s) theta + alpha s theta_w

where alpha is the mixing weight, and s depends on tau, the number of updates of theta since w pulled theta:

    constant     s = 1
    polynomial   s = (tau + 1)^-a
    hinge        s = 1 if tau <= b, otherwise 1 / (a (tau - b) + 1)

The paper's workers may also be held near the pulled theta by a quadratic term, which is left out here.

>>> import torch
>>> server = MixingServer([torch.zeros(1)], FedAsyncStrategy(alpha=0.5, discount="polynomial", a=1.0))
>>> server.apply([torch.tensor([-4.0])], staleness=1, steps=1, batch_size=1)  # theta - theta_w = -4
>>> server.theta
[tensor([1.])]
"""

from __future__ import annotations

import math
from typing import Any, Unpack

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_choice, check_count, check_number
from exogym.strategy.clocked import ClockedStrategy, ParameterServer, check_numbers, check_rounds
from exogym.strategy.strategy import InnerOptions

DISCOUNTS = {"constant": (), "polynomial": ("a",), "hinge": ("a", "b")}  # and the arguments that each one has
DEFAULTS = {"polynomial": (0.5, 0), "hinge": (10.0, 4)}  # a and b


class MixingServer(ParameterServer):
    """FedAsync's server, which holds theta and mixes each node's parameters into it on arrival.

    Args:
        theta: the initial parameters, (P,) per block; the server copies them.
        rule: the strategy, whose `weight` the server reads.
    """

    def __init__(self, theta: list[Tensor], rule: FedAsyncStrategy):
        super().__init__(theta)
        self.rule = rule

    def apply(self, delta: list[Tensor], staleness: int = 0, steps: int = 1, batch_size: int = 1) -> None:
        """Mix one node's parameters into theta. `delta` is theta - theta_w, (P,) per block."""
        for theta, d in zip(self.theta, delta, strict=True):
            theta.sub_(d, alpha=self.rule.weight(staleness))
        self.version += 1


class FedAsyncStrategy(ClockedStrategy):
    """FedAsync: each node trains at its own pace, and a server mixes its parameters into theta on arrival.

    Use it when nodes differ in speed and none may wait for another.

        theta <- (1 - alpha s(tau)) theta + alpha s(tau) theta_w

    theta are the outer parameters, which evaluation uses, theta_w node w's parameters after its round, and tau the
    number of updates of theta since w pulled theta.

    Bytes: P b up and P b down per round of a node, for P parameters of b bytes; payload P b / H per step of the node.
    Memory: one more row per node, for the parameters that it pulled.

    Args:
        inner_optim: inner optimizer. Each node keeps its optimizer state between rounds.
        H: inner steps of a node's round; with `dylu`, of the fastest node's round.
        alpha: the mixing weight, over 0 and at most 1.
        discount: s: "constant", "polynomial" or "hinge"; see `exogym.contrib.fedasync`.
        a, b: parameters of s. None means a = 0.5 for "polynomial", and a = 10, b = 4 for "hinge".
        max_staleness, dylu: see `AsyncDiLoCoStrategy`.
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The learning-rate schedule follows the
            fleet's step.

    >>> strategy = FedAsyncStrategy("sgd", H=10, alpha=0.6, lr=0.05)
    """

    name, title, paper, payload = "fedasync", "FedAsync", "arXiv:1903.03934", "P b / H"
    tried = ()
    ranges = ("alpha=0.1..1.0",)
    equation = "on arrival: theta <- (1 - alpha s) theta + alpha s theta_w; s falls with staleness"
    needs = "a server; no node waits"
    identities = (
        "N=1, alpha=1 = inner optimizer",
        "N=1 = async_diloco:rule=nesterov with eta=alpha, beta=0",
        "hinge or polynomial with a=0 = constant",
    )
    grace_s = 0.0
    takes_parameters = True

    def __init__(
        self,
        inner_optim: Any = "sgd",
        H: int = 10,
        *,
        alpha: float = 0.6,
        discount: str = "polynomial",
        a: float | None = None,
        b: int | None = None,
        dylu: bool = False,
        max_staleness: int | None = None,
        **options: Unpack[InnerOptions],
    ):
        check_rounds(H, type(self).__name__)
        check_number("alpha", alpha, over=0, most=1)
        check_choice("discount", discount, DISCOUNTS)
        for option, given in (("a", a), ("b", b)):
            if given is not None and option not in DISCOUNTS[discount]:
                raise ArgumentError(f"{option}={given!r} has no effect with discount={discount!r}: leave {option} out")
        if max_staleness is not None:
            check_count("max_staleness", max_staleness, least=0)
        of_a, of_b = DEFAULTS.get(discount, (0.0, 0))
        self.a, self.b = of_a if a is None else a, of_b if b is None else b
        check_numbers(("a", self.a, math.inf))
        check_count("b", self.b, least=0)
        super().__init__(inner_optim, **options)
        self.H, self.dylu, self.max_staleness = H, dylu, max_staleness
        self.alpha, self.discount = alpha, discount

    def weight(self, tau: int) -> float:
        """Return alpha s(tau).

        >>> [FedAsyncStrategy(alpha=1.0, discount="hinge", a=2.0, b=1).weight(tau) for tau in (0, 1, 2, 3)]
        [1.0, 1.0, 0.3333333333333333, 0.2]
        """
        if self.discount == "polynomial":
            return float(self.alpha * (tau + 1) ** -self.a)
        late = max(0, tau - self.b) if self.discount == "hinge" else 0
        return float(self.alpha / (self.a * late + 1))

    def server(self, fleet: Fleet) -> MixingServer:
        """Return a new server whose theta is the fleet's initial parameters."""
        return MixingServer([block.params[0] for block in fleet.blocks], self)
