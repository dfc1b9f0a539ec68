"""PULSELoCo: DiLoCo that sends only the entries that change the parameters' BF16 values, and keeps the rest.

Miahi and Belilovsky, arXiv:2602.03839, second version, with details from the first author's published trainer
(one-covenant/grail). theta are the outer parameters, theta_i node i's parameters, e_i is its error, and OuterOpt the
outer optimizer. bf16 rounds to BF16, in which a mixed-precision forward pass reads the parameters. Every H inner steps:

    s_i   = e_i + theta - theta_i                      # in FP32
    M_i   = [bf16(theta) != bf16(theta - s_i)]         # the entries that the next forward pass would notice
    Delta = mean_i M_i s_i                             # sent unrounded, with their indices
    e_i   <- (1 - M_i) s_i
    theta <- OuterOpt(theta, Delta);   theta_i <- theta

BF16 resolves a change of about 1/256 of an entry's size. A small learning rate moves most entries less in a round, so
e_i collects their changes until BF16 shows them. The learning rate therefore decides the bytes: if nodes send more than
1/N of their fp32 entries, DiLoCo sends fewer bytes. Errors left after the last round are lost.

Payload per round: nodes gather their numbers of entries, 8 bytes each, whose maximum (at least 1) is K. Then each node
sends K (b + 4) bytes, for values of b bytes (4 or more) with 4-byte indices; all-gather, tx = rx = (N-1) payload.
Parameters of several dtypes have a K for each dtype. `advise` cannot know K and assumes K / P = `VISIBLE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import check_choice
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.options import split
from exogym.strategy.outer import OuterRule, OuterRuleOptions
from exogym.strategy.outer_parameters import OuterModule, OuterParameters
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
VISIBLE = 0.03  # K / P of the formula: with 8 bytes per entry it makes a round 17 times smaller, the abstract's figure


class VisibleEntries:
    """Encodes one block's outer gradients: the visible entries of s_i, with their indices; the rest stays in e_i.

    Args:
        fleet: the fleet, whose communicator gathers the nodes' numbers of entries.
        error: e_i, (rows, P), which `encode` changes.
        theta: the outer parameters, (1, P), which the outer optimizer changes in place.
        dtype: the precision in which a change must be visible.
    """

    def __init__(self, fleet: Fleet, error: Tensor, theta: Tensor, dtype: torch.dtype):
        self.fleet, self.error, self.theta, self.dtype = fleet, error, theta, dtype

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        s = self.error.add_(x)
        M = self.theta.to(self.dtype) != (self.theta - s).to(self.dtype)
        K = max(1, int(self.fleet.comm.all_gather(M.sum(1, keepdim=True)).max()))
        indices = torch.full((len(s), K), s.shape[1], dtype=torch.int32, device=s.device)  # P means no entry
        values = s.new_zeros(len(s), K)
        for row, is_sent in enumerate(M):
            at = is_sent.nonzero()[:, 0]
            indices[row, : len(at)], values[row, : len(at)] = at.int(), s[row, at]
        s.masked_fill_(M, 0)
        return indices, values

    def decode(self, *parts: Tensor) -> Tensor:
        indices, values = parts
        return values.new_zeros(len(values), self.error.shape[1] + 1).scatter_(1, indices.long(), values)[:, :-1]


class VisibleOuterStep(OuterModule):
    """Take PULSELoCo's outer step at the end of each round of H steps.

    Args:
        H: inner steps of a round, as a number or a pure function of the round (from 0).
        rule: the outer optimizer and its schedules.
        cast: see `PULSELoCoStrategy`.

    State: theta and the outer optimizer's state, one copy for all nodes; each node's e_i, (rows, P), in fp32 or wider.
    """

    def __init__(self, H: RoundLength, rule: OuterRule, cast: str | None):
        super().__init__()
        self.take_rounds(H)
        if cast is not None:
            check_choice("cast", cast, CASTS)
        self.rule, self.cast = rule, cast

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_gather", size, self.interval_steps) for size in (8, VISIBLE * P * (max(b, 4) + 4))]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        for b, block in enumerate(fleet.blocks):
            wide = torch.promote_types(block.params.dtype, torch.float32)
            self.row_state[f"error.{b}"] = torch.zeros_like(block.params, dtype=wide)
        self.outer = OuterParameters(fleet, self.rule, self.round_of(run.total_steps) + 1)
        self.outer.codecs = [
            VisibleEntries(fleet, self.row_state[f"error.{b}"], theta, CASTS[self.cast] if self.cast else theta.dtype)
            for b, theta in enumerate(self.outer.theta)
        ]


class PULSELoCoOptions(OuterRuleOptions, InnerOptions, total=False):
    """Options that `PULSELoCoStrategy` shares with other strategies."""


class PULSELoCoStrategy(CommunicateOptimizeStrategy):
    """PULSELoCo: DiLoCo whose nodes send only the entries that change the parameters' BF16 values, with error feedback.

    Use it to fine-tune in BF16 with a very small learning rate, such as reinforcement learning at 1e-6.

        s_i = e_i + theta - theta_i;   M_i = [bf16(theta) != bf16(theta - s_i)];   e_i <- (1 - M_i) s_i
        Delta = mean_i M_i s_i;   theta <- OuterOpt(theta, Delta);   theta_i <- theta

    theta are the outer parameters, which evaluation uses, theta_i node i's parameters, and e_i is its error. bf16
    rounds to BF16, and OuterOpt is the outer optimizer.

    Payload: v P (b + 4) + 8 bytes per node every H steps, for P parameters of b bytes. v is the largest share of
    entries that a node sends: near 0 if the learning rate is small relative to the parameters, and 1 if it is large.

    Args:
        inner_optim: inner optimizer. The authors use AdamW.
        outer_optim: outer optimizer. 'sgd' is Nesterov SGD with lr 0.7 and momentum 0.9, as the authors use.
        H: inner steps between outer steps, as a number or a pure function of the round (from 0).
        cast: the precision in which a change must be visible: "bf16" (as in the paper) or "fp16". Keep the parameters
            in fp32, as `fit(precision="bf16")` does. None means the parameters' own precision: every changed entry is
            sent, and the strategy is DiLoCo.
        outer_lr, outer_lr_scheduler, outer_warmup_rounds, outer_momentum, outer_momentum_scheduler: see `OuterRule`.
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: arguments of the inner optimizer; see `Strategy`.

    >>> strategy = PULSELoCoStrategy(inner_optim='adamw', H=10, lr=1e-6)
    """

    name, title, paper = "pulseloco", "PULSELoCo", "arXiv:2602.03839"
    tried = ()
    ranges = ("outer_lr=0.1..1.5", "outer_momentum=0.0..0.95")
    payload = f"({VISIBLE} P (b + 4) + 8) / H"
    equation = (
        "s_i = e_i + theta - theta_i; M_i = [bf16(theta) != bf16(theta - s_i)]; e_i <- (1 - M_i) s_i; "
        "theta <- OuterOpt(theta, mean_i M_i s_i)"
    )
    needs = f"all nodes, every H steps; {VISIBLE} is an assumed share of changed entries, which depends on lr"
    identities = ("cast=None = diloco", "sent + kept = the sum of differences", "equal data = one node")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        outer_optim: Any = "sgd",
        H: RoundLength = 10,
        *,
        cast: str | None = "bf16",
        **options: Unpack[PULSELoCoOptions],
    ):
        rule, others = split(options, OuterRule)
        super().__init__(inner_optim, [VisibleOuterStep(H, OuterRule(outer_optim, **rule), cast)], **others)
