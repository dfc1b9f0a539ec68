"""MuLoCo: DiLoCo with Muon as the inner optimizer.

Therien et al., MuLoCo: Muon is a practical inner optimizer for DiLoCo, arXiv:2505.23725. Muon (torch's own) trains the
hidden matrices and AdamW the rest (`exogym.strategy.muon`). After every H inner steps, nodes take DiLoCo's outer step
with a larger outer learning rate eta and a smaller outer momentum mu:

    Delta = (1/N) sum_i (theta - theta_i),  v <- mu v + Delta,  theta <- theta - eta (Delta + mu v),  theta_i <- theta

theta are the outer parameters, theta_i node i's parameters, and v is the momentum's buffer. Payload, traffic and absent
nodes are as in DiLoCo. A single node is allowed (the paper's K = 1, with eta 0.7 and mu 0.6). The paper's compressed
variants are not implemented.
"""

from __future__ import annotations

from typing import Any, Unpack

from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.diloco import DiLoCoCommunicator
from exogym.strategy.options import split
from exogym.strategy.outer import OuterAndInnerOptions, OuterRule
from exogym.strategy.rounds import RoundLength


class MuLoCoStrategy(CommunicateOptimizeStrategy):
    """MuLoCo: DiLoCo with Muon as the inner optimizer.

    Use it when Muon trains your model well and the network is slow.

        Delta = mean_i (theta - theta_i);   v <- mu v + Delta;   theta <- theta - eta (Delta + mu v);   theta_i <- theta

    theta are the outer parameters, theta_i node i's parameters, and v is the buffer of the outer momentum mu. Payload:
    P b bytes per node every H steps, for P parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Pass a learning rate for AdamW,
            because Muon's updates are scaled to the size of AdamW's. For Muon's own learning rates, pass
            `OptimSpec("muon", adjust_lr_fn="original", lr=0.02)`.
        H, outer_optim, weighting, outer_lr_scheduler, outer_warmup_rounds: see `DiLoCoStrategy`.
        outer_lr, outer_momentum: eta and mu of the outer step, by default 0.9 and 0.8 if outer_optim='sgd'.

    >>> strategy = MuLoCoStrategy(H=30, lr=1e-3)
    """

    name, title, paper, payload = "muloco", "MuLoCo", "arXiv:2505.23725", "P b / H"
    only_inner = ("muon",)
    ranges = ("outer_lr=0.1..1.5", "outer_momentum=0.0..0.95")
    equation = "as diloco, with Muon for hidden matrices"
    needs = "all nodes, every H steps"
    identities = ("= diloco with inner_optim='muon'", "N=1, outer SGD(lr=1) = Muon", "equal data = one node")

    def __init__(
        self,
        inner_optim: Any = "muon",
        outer_optim: Any = "sgd",
        H: RoundLength = 30,
        *,
        weighting: str = "uniform",
        **options: Unpack[OuterAndInnerOptions],
    ):
        rule, others = split(options, OuterRule)
        if isinstance(outer_optim, str) and outer_optim.lower() == "sgd":
            for name, value in (("outer_lr", 0.9), ("outer_momentum", 0.8)):
                rule[name] = value if rule.get(name) is None else rule[name]
        outer = DiLoCoCommunicator(H, outer_optim, weighting=weighting, **rule)
        super().__init__(inner_optim, [outer], **others)
