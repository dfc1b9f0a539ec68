"""FedPer: FedAvg whose last layers stay with each client.

Arivazhagan, Aggarwal, Singh, Choudhary, Federated Learning with Personalization Layers, arXiv:1912.00818. The model has
base layers theta, which clients average, and personal layers u_i. Round r, with its clients S_r:

    (theta_i, u_i) <- H_i local steps from (theta, u_i)     for i in S_r
    theta <- sum_{i in S_r} (n_i / n_S) theta_i,   n_S = sum_{i in S_r} n_i

n_i is client i's number of examples. Clients train all layers together. u_i changes only in client i's own steps, and
no client sends it; all u_i start equal. The paper has no sampling; with `client_fraction`, a client keeps its u_i until
its next round.

Payload: P_s b bytes per client every H steps, for P_s base parameters of b bytes. `exogym.strategy.personal` describes
personal parameters, their evaluation, and the options that they exclude.
"""

from __future__ import annotations

from typing import Any, Unpack

from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.options import split
from exogym.strategy.personal import NO_PRIVACY, Chosen
from exogym.strategy.rounds import RoundLength


class FedPerStrategy(CommunicateOptimizeStrategy):
    """FedPer: FedAvg whose last layers stay with each client.

    Use it when clients need different outputs for similar inputs, such as few labels each.

        theta <- sum_i n_i theta_i / sum_i n_i;   u_i stays with client i

    theta are the shared parameters, theta_i client i's values of them, u_i its personal parameters, and n_i its number
    of examples. Payload: P_s b bytes per client every H steps, for P_s shared parameters of b bytes.

    Args:
        personal: the number of last layers that are personal (the paper's K_P), a pattern of names such as "head.*", or
            a list of patterns. With None the strategy is FedAvg.
        H, client_fraction, weighting, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer; see `Strategy`.

    >>> strategy = FedPerStrategy(inner_optim='sgd', personal='head.*', H=5, lr=0.01)
    """

    name, title, paper, payload = "fedper", "FedPer", "arXiv:1912.00818", "P_s b / H"
    tried = ()
    ranges = ()
    equation = "theta <- sum_i n_i theta_i / sum_i n_i; last layers stay with client i"
    needs = "clients, every H steps"
    not_taken = NO_PRIVACY
    identities = ("personal=None = fedavg", "equal data = fedavg")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        personal: Chosen | None = 1,
        H: RoundLength = 10,
        *,
        weighting: str = "examples",
        **options: Unpack[FederatedOptions],
    ):
        clients, others = split(options, AveragingCommunicator)
        super().__init__(
            inner_optim, [AveragingCommunicator(H, weighting=weighting, personal=personal, **clients)], **others
        )
