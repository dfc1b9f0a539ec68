"""EDiT: local steps, and an outer step per layer that rejects, weights and clips the nodes' outer gradients.

Cheng et al., EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models, arXiv:2412.07210,
with details from the authors' code in ATorch. theta are the outer parameters of one layer, theta_i node i's, and
OuterOpt is the outer optimizer. After every H inner steps, for each layer:

    Delta_i = theta - theta_i,   G_i = |Delta_i|                 # all-gather of one number per layer
    node i is rejected if z(G_i) > z_max max(1, std of its last W values of z)
    Delta   = sum_i w_i Delta_i,   w_i ~ exp(-G_i / T)           # over the other nodes, sum_i w_i = 1; all-reduce
    Delta   <- Delta min(1, phi / (|Delta| + 1e-6))
    theta   <- OuterOpt(theta, Delta),   theta_i <- theta

Without weights (no T), the mean is over the nodes that are not rejected (in the authors' code, rejected nodes then
count with Delta_i = 0). If all nodes are rejected, theta does not change and the layer is not sent. z(G) = (G - m) /
sqrt(s), with each node's running mean m and variance s of this layer's G. No node is rejected in its first W rounds.
Each round updates m and s, even with a rejected node's G:

    d = G - m,   m <- m + a d,   s <- (1 - a) (s + a d (G - m))

Layers are the numbered modules of the largest stack and one group for all other parameters, or all modules if no module
is numbered (`exogym.strategy.fragments`). All layers are sent together; the paper sends them during the next forward
pass, with the same results. The asynchronous variant (A-EDiT) and the published code's generalized task arithmetic are
not implemented.

Payload: P b + 8 L bytes per node every H steps, for P parameters of b bytes in L layers: ring all-reduce, tx = rx = 2
(N-1)/N P b, and an all-gather of the 8 L bytes, tx = rx = 8 (N-1) L, which is only needed for rejection and weights.
Without rejection, weights and clipping, EDiT is DiLoCo.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.base.devices import widest
from exogym.core.fleet import Fleet
from exogym.core.fleet.state import Tensors
from exogym.errors import check_count, check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.fragments import fragments, layers_of
from exogym.strategy.options import split
from exogym.strategy.outer import OuterAndInnerOptions, OuterRule
from exogym.strategy.outer_parameters import OuterFragments, OuterParameters
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class Outliers:
    """Detect unusually large norms, by a separate history for each node and layer.

    A norm G is unusual if z(G) > reject max(1, std of the last `memory` values of z), where z(G) = (G - m) / sqrt(s).
    Each norm then updates the mean m and the variance s: d = G - m, m <- m + a d, s <- (1 - a) (s + a d (G - m)).

    Args:
        rows, layers: the number of rows and of layers.
        reject: standard deviations above the mean from which a norm is unusual.
        memory: norms before a norm can be unusual.
        decay: a, the weight of a new norm.

    >>> watch = Outliers(1, 1, reject=3.0, memory=2, decay=0.5)
    >>> [bool(watch.see(0, torch.tensor([G]))) for G in (1.0, 1.1, 1.0, 9.0)]
    [False, False, False, True]
    """

    def __init__(self, rows: int, layers: int, reject: float, memory: int, decay: float):
        self.reject, self.memory, self.decay = reject, memory, decay
        self.count, self.m, self.s = (torch.zeros(rows, layers, dtype=torch.float64) for _ in range(3))
        self.z = torch.zeros(rows, layers, memory, dtype=torch.float64)

    def state(self) -> Tensors:
        """Return the histories, (rows, ...) each, by their names in checkpoints."""
        return {"count": self.count, "m": self.m, "s": self.s, "z": self.z}

    def see(self, row: int, G: Tensor) -> Tensor:
        """Return whether each layer's norm in `G` is unusual for the node in `row`, (L,); add `G` to its history."""
        count, m, s, window = self.count[row], self.m[row], self.s[row], self.z[row]
        unusual = (count >= self.memory) & (_z(G, m, s) > self.reject * window.std(-1).clamp(min=1.0))
        count += 1
        d = G - m
        m.add_(d, alpha=self.decay)
        s.add_(d * (G - m), alpha=self.decay).mul_(1 - self.decay)
        at = ((count - 1) % self.memory).long()[:, None]
        window.scatter_(1, at, torch.where(count >= self.memory, _z(G, m, s), 0.0)[:, None])
        return unusual


def _z(G: Tensor, m: Tensor, s: Tensor) -> Tensor:
    return torch.where(s > 0, (G - m) / s.sqrt(), 0.0)


class LayerwisePenalty(OuterFragments, PeriodicModule):
    """Take EDiT's outer step, layer by layer, at the end of each round of H steps.

    Args:
        H: inner steps of a round, as a number or a pure function of the round (from 0).
        rule: the outer optimizer and its schedules.
        reject: z_max. None means that no node is rejected.
        temperature: T of the weights. None means equal weights.
        clip: phi, the largest norm of a layer's Delta. None means no clipping.
        memory: W, the rounds before a node can be rejected.
        decay: a, the weight of a new G in the running mean and variance.

    State: theta and the outer optimizer's state per layer, and each node's running statistics per layer.
    """

    def __init__(
        self, H: RoundLength, rule: OuterRule, reject: float | None, temperature: float | None, clip: float | None,
        memory: int, decay: float,
    ):  # fmt: skip
        super().__init__()
        self.take_rounds(H)
        for name, given in (("reject", reject), ("temperature", temperature), ("clip", clip)):
            if given is not None:
                check_number(name, given, over=0)
        check_count("memory", memory, least=2)
        check_number("decay", decay, over=0, most=1)
        self.rule, self.reject, self.temperature, self.clip = rule, reject, temperature, clip
        self.memory, self.decay = memory, decay
        self.outliers: Outliers | None = None

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        sent = [Traffic("all_reduce", P * b, self.interval_steps)]
        weighs = self.reject is not None or self.temperature is not None
        return (
            [*sent, Traffic("all_gather", 8, self.interval_steps)] if weighs else sent
        )  # per layer; the plan knows one

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        layers, others = layers_of(fleet.names)
        parts = fragments(fleet, len(layers) + bool(others))
        self.outer = [
            OuterParameters(fleet, self.rule, self.round_of(run.total_steps) + 1, fragment=part) for part in parts
        ]
        self.row_state, self.outliers = {}, None
        if self.reject is not None:
            self.outliers = Outliers(len(fleet), len(parts), self.reject, self.memory, self.decay)
            self.row_state = self.outliers.state()

    def communicate(self, fleet: Fleet, step: int) -> None:
        weights = self._weights(fleet)
        for k, outer in enumerate(self.outer):
            outer.weights = None if weights is None else weights[:, k]
            if outer.weights is not None and not outer.weights.any():
                outer.give(fleet, fleet.comm.present)
                continue
            flight = outer.send(fleet, step, self.round_of(step))
            if self.clip is not None:
                norm = math.sqrt(sum(float(widest(x).square().sum()) for x in flight.mean))
                for x in flight.mean:
                    x.mul_(min(1.0, self.clip / (norm + 1e-6)))
            outer.arrive(fleet, flight, fleet.comm.present)
        fleet.synchronise_buffers()

    def _weights(self, fleet: Fleet) -> Tensor | None:
        """Return w, (N, L), zero for rejected nodes, or None without rejection and weights."""
        if self.reject is None and self.temperature is None:
            return None
        G = torch.zeros(len(fleet), len(self.outer), dtype=torch.float64)
        for k, outer in enumerate(self.outer):
            pieces = zip(outer.fragment, outer.theta, strict=True)
            moved = [theta - piece.take(piece.block.params) for piece, theta in pieces]
            for row in range(len(fleet)):
                G[row, k] = math.sqrt(sum(float(widest(d[row]).square().sum()) for d in moved))
        if self.outliers is not None:
            for row, norms in enumerate(G):
                norms[self.outliers.see(row, norms)] = math.inf
        G = fleet.comm.all_gather(G)[0]
        kept = G.isfinite()
        shares = kept.double() if self.temperature is None else torch.exp((G.amin(0) - G) / self.temperature)
        return torch.where(kept, shares, 0.0)


class EDiTStrategy(CommunicateOptimizeStrategy):
    """EDiT: DiLoCo by layers that rejects nodes with an unusually large outer gradient, weights the others, and clips.

    Use it when DiLoCo's loss jumps because some data or nodes are bad.

        Delta = sum_i w_i (theta - theta_i), w_i ~ exp(-G_i / T);   theta <- OuterOpt(theta, clip(Delta));   theta_i <- theta

    For each layer, theta are the outer parameters, theta_i node i's parameters, and G_i = |theta - theta_i|. The sum is
    over the nodes that are not rejected. OuterOpt is the outer optimizer. Evaluation uses theta. Payload: P b + 8 L
    bytes per node every H steps, for P parameters of b bytes in L layers.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`.
        outer_optim, outer_lr, outer_lr_scheduler, outer_warmup_rounds, outer_momentum: see `OuterRule`. With
            outer_optim='sgd', the default rate is 0.7 and the momentum 0.8, as in the authors' code.
        H, reject, temperature, clip, memory, decay: see `LayerwisePenalty`.

    >>> strategy = EDiTStrategy(H=100, lr=3e-4, clip=10.0)
    """  # noqa: E501

    name, title, paper, payload = "edit", "EDiT", "arXiv:2412.07210", "(P b + 8) / H"
    tried = ()
    equation = (
        "by layer: Delta = sum_i w_i (theta - theta_i), w_i ~ exp(-G_i / T); theta <- OuterOpt(theta, clip(Delta))"
    )
    needs = "all nodes, every H steps"
    ranges = ("outer_lr=0.1..1.5", "outer_momentum=0.0..0.95", "temperature=0.1..10.0")
    identities = ("no rejection, weights and clipping = diloco", "equal data = one node")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        outer_optim: Any = "sgd",
        H: RoundLength = 100,
        *,
        reject: float | None = 3.0,
        temperature: float | None = 1.0,
        clip: float | None = 10.0,
        memory: int = 10,
        decay: float = 0.02,
        **options: Unpack[OuterAndInnerOptions],
    ):
        rule, others = split(options, OuterRule)
        if isinstance(outer_optim, str) and outer_optim.lower() == "sgd" and rule.get("outer_momentum") is None:
            rule["outer_momentum"] = 0.8
        edit = LayerwisePenalty(H, OuterRule(outer_optim, **rule), reject, temperature, clip, memory, decay)
        super().__init__(inner_optim, [edit], **others)
