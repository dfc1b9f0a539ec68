"""Ditto: FedAvg, and for each client a personal model that stays near the shared model.

Li, Hu, Beirami, Smith, Ditto, arXiv:2012.04221. theta are the server's parameters, theta_i client i's copy of them, and
v_i its personal model, all equal at first. A round has H steps, and its first s steps train v_i. F_i is client i's
loss, and eta the clients' learning rate:

    v_i     <- v_i - eta (grad F_i(v_i) + lambda (v_i - theta)),  s local steps
    theta_i <- H - s local steps on F_i from theta
    theta   <- sum_{i in S} (n_i / n_S) theta_i,  over the round's clients S

n_i is client i's number of examples, and n_S the sum over S. Both lines of local steps use the theta of the round's
start, so their order does not matter. v_i never leaves its client and never changes theta. The proximal term is part of
the gradient, so it enters Adam's moments. The inner optimizer starts afresh before each of the two lines. Between
rounds, a client's row holds v_i, its own model. Buffers belong to both models and are averaged as in FedAvg.

Payload: P b bytes per client every H steps, for P parameters of b bytes, as in FedAvg. Each client also keeps theta and
the model that it does not currently train. Every client keeps its row, even if clients are sampled.
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_count, check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.federated_rounds import RoundModule
from exogym.strategy.fedprox import ProximalTerm
from exogym.strategy.options import split
from exogym.strategy.personal import NO_PRIVACY
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run


class SharedModels(RoundModule):
    """Put theta_i into each client's row after the first `steps` steps of a round, and store v_i.

    This module precedes the averaging in the list of modules. State: the model that is not in the row, theta_i or v_i,
    (rows, P); whether the rows hold v_i.
    """

    fresh_inner_state = True
    counters = ("is_personal",)

    def __init__(self, average: AveragingCommunicator, steps: int):
        super().__init__(average)
        self.steps = steps

    def features(self) -> dict[str, str]:
        said = f"personal_steps={self.steps}"
        return {"rounds of one length": said, "two kinds of steps": said}

    def next_event(self, step: int) -> int:
        end = self.average.next_event(step)
        switch = end - self.average.interval_steps + self.steps  # the last step that trains v_i
        return switch if step < switch else end

    def seats(self, num_nodes: int) -> int | None:
        return None

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.row_state = {f"other.{b}": block.params.clone() for b, block in enumerate(fleet.blocks)}
        self.is_personal = True

    def holds_personal(self) -> bool:
        return self.is_personal

    def swap(self, fleet: Fleet, to_personal: bool) -> None:
        """Put v_i (`to_personal`) or theta_i into the rows unless they already hold it."""
        if self.is_personal == to_personal:
            return
        for block, other in zip(fleet.blocks, self.row_state.values(), strict=True):
            kept = block.params.clone()
            block.params.copy_(other)
            other.copy_(kept)
        self.is_personal = to_personal

    def communicate(self, fleet: Fleet, step: int) -> None:
        self.swap(fleet, False)

    def consensus(self, fleet: Fleet) -> list[Tensor] | None:
        """Return the mean of all theta_i, even if the rows hold v_i."""
        wire, everyone = fleet.comm.wire, fleet.there
        share = fleet.comm.share(everyone)
        shared = self.row_state.values() if self.is_personal else [block.params for block in fleet.blocks]
        return [wire.reduce(x, everyone, "mean", share) for x in shared]


class PersonalModels(RoundModule):
    """Put v_i into each client's row after the averaging. This module is last in the list of modules."""

    def __init__(self, average: AveragingCommunicator, models: SharedModels):
        super().__init__(average)
        self.models = models

    def communicate(self, fleet: Fleet, step: int) -> None:
        self.models.swap(fleet, True)


class DittoStrategy(CommunicateOptimizeStrategy):
    """Ditto: FedAvg, and a personal model v_i for each client, which stays near the shared model theta.

    Use it when clients' data differ so much that each client needs its own whole model.

        g_i <- grad F_i(v_i) + lambda (v_i - theta) in the first s steps of a round; the other steps as fedavg

    F_i is client i's loss. Evaluation uses theta; a client's own model is v_i (`exogym.callbacks.EvaluateClients`).
    Payload: P b bytes per client every H steps, for P parameters of b bytes.

    Args:
        lam: lambda, weight of the term that holds v_i near theta (0.05 to 2 in the paper). With 0, each v_i trains
            alone.
        H: steps of a round, in both parts together.
        personal_steps: s, the steps of a round that train v_i. None means H / 2, rounded down.
        client_fraction, weighting, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`.
            `local_steps` and `local_epochs` are refused here.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer; see `Strategy`.

    >>> strategy = DittoStrategy(inner_optim='sgd', lam=0.5, H=10, lr=0.01)
    """

    name, title, paper, payload = "ditto", "Ditto", "arXiv:2012.04221", "P b / H"
    tried = ()
    ranges = ("lam=0.01..2.0",)
    equation = "v_i <- v_i - eta (grad F_i(v_i) + lambda (v_i - theta)); theta as in fedavg"
    needs = "clients, every H steps"
    not_taken: ClassVar = NO_PRIVACY | {
        "personal": "each client has a whole personal model: use fedavg, fedprox or fedopt for personal parameters",
    }
    identities = ("lam=0: v_i = client i alone", "theta does not depend on lam")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        lam: float = 0.5,
        H: RoundLength = 10,
        *,
        personal_steps: int | None = None,
        weighting: str = "examples",
        **options: Unpack[FederatedOptions],
    ):
        check_number("lam", lam, least=0)
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(H, weighting=weighting, **clients)
        steps = max(average.interval_steps // 2, 1) if personal_steps is None else personal_steps
        check_count("personal_steps", steps)
        if not callable(H) and steps >= average.interval_steps:  # H as a function is refused
            raise ArgumentError(f"personal_steps={steps} leaves none of the H={H} steps for theta: raise H")
        models = SharedModels(average, steps)
        near = ProximalTerm(average, lam, models.holds_personal)  # copied with `models`
        super().__init__(inner_optim, [models, average, near, PersonalModels(average, models)], **others)
