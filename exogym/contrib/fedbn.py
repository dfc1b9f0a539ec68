"""FedBN: FedAvg whose batch normalization stays with each client.

Li, Jiang, Zhang, Kamp, Dou, FedBN, arXiv:2102.07623. u_i are the scales, shifts, running means and running variances of
client i's batch normalization layers, and theta are all other parameters. Round r, with its clients S_r:

    (theta_i, u_i) <- H_i local steps from (theta, u_i)     for i in S_r
    theta <- mean_{i in S_r} theta_i

No client sends its u_i. In the paper all clients have equal weights (`weighting="uniform"`). A layer counts as batch
normalization if training changes its `running_mean`; without such layers the strategy is FedAvg, and ExoGym says so.

Payload: P_s b bytes per client every H steps, for P_s other parameters of b bytes. `exogym.strategy.personal` describes
personal parameters, their evaluation, and the options that they exclude.
"""

from __future__ import annotations

from typing import Any, Unpack

from exogym.core.communicator import say
from exogym.core.fleet import Fleet
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.options import split
from exogym.strategy.personal import NO_PRIVACY
from exogym.strategy.rounds import RoundLength


def batch_norms(fleet: Fleet) -> list[str]:
    """Return the names of all parameters and buffers of batch normalization layers."""
    layers = {name.removesuffix("running_mean") for name in fleet.buffers if name.endswith("running_mean")}
    if not layers:
        say(fleet.comm.wire, "fedbn: the model has no batch normalization, so this run is FedAvg", about="fedbn")
    names = [*fleet.names, *fleet.buffers]
    return [name for name in names if name.removesuffix(name.rpartition(".")[2]) in layers]


class FedBNStrategy(CommunicateOptimizeStrategy):
    """FedBN: FedAvg whose batch normalization stays with each client.

    Use it when clients' inputs differ, such as pictures from different cameras.

        theta <- mean_i theta_i;   batch normalization's parameters and statistics stay with client i

    theta are the shared parameters and theta_i client i's values of them. Payload: P_s b bytes per client every H
    steps, for P_s shared parameters of b bytes.

    Args:
        H, client_fraction, weighting, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`. By
            default clients have equal weights, as in the paper.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer; see `Strategy`.

    >>> strategy = FedBNStrategy(inner_optim='sgd', H=5, lr=0.01)
    """

    name, title, paper, payload = "fedbn", "FedBN", "arXiv:2102.07623", "P_s b / H"
    tried = ()
    ranges = ()
    equation = "theta <- mean_i theta_i; batch normalization stays with client i"
    needs = "clients, every H steps"
    not_taken = NO_PRIVACY
    identities = ("no batch normalization = fedavg", "equal data = fedavg")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        H: RoundLength = 10,
        *,
        weighting: str = "uniform",
        **options: Unpack[FederatedOptions],
    ):
        clients, others = split(options, AveragingCommunicator)
        super().__init__(
            inner_optim, [AveragingCommunicator(H, weighting=weighting, personal=batch_norms, **clients)], **others
        )
