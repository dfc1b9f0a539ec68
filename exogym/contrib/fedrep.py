"""FedRep: clients share a body, and each fits its own head to the body before it trains the body.

Collins, Hassani, Mokhtari, Shakkottai, Exploiting Shared Representations for Personalized Federated Learning,
arXiv:2102.07078. phi is the body, which clients average, u_i is client i's head, and F_i its loss. Round r has H steps
and the clients S_r. The body is fixed in the first line, and the head in the second:

    u_i   <- u_i - eta grad_u F_i(phi, u_i),            H - s local steps
    phi_i <- phi_i - eta grad_phi F_i(phi_i, u_i),      s local steps from phi
    phi   <- sum_{i in S_r} (n_i / n_S) phi_i,          n_S = sum_{i in S_r} n_i

n_i is client i's number of examples, and eta the clients' learning rate. The weights are from the authors' code. The
inner optimizer applies neither momentum nor weight decay to the fixed part. No client sends u_i; all u_i start equal,
and a client keeps its u_i until its next round. Buffers change in both lines.

Payload: P_s b bytes per client every H steps, for P_s body parameters of b bytes. Every client keeps its row, even if
clients are sampled. `exogym.strategy.personal` describes personal parameters, their evaluation, and the options that
they exclude.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_count
from exogym.strategy.capabilities import Corrects
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.federated_rounds import RoundModule
from exogym.strategy.options import split
from exogym.strategy.personal import NO_PRIVACY, Chosen
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run


class HeadThenBody(RoundModule, Corrects):
    """Train only the personal parameters, and only the others in the last `body_steps` steps of a round.

    State: whether nodes train the body now.
    """

    counters = ("trains_body",)

    def __init__(self, average: AveragingCommunicator, body_steps: int):
        super().__init__(average)
        self.body_steps = body_steps

    def features(self) -> dict[str, str]:
        said = f"body_steps={self.body_steps}"
        return {"rounds of one length": said, "two kinds of steps": said}

    def next_event(self, step: int) -> int:
        end = self.average.next_event(step)
        switch = end - self.body_steps
        return switch if step < switch else end

    def seats(self, num_nodes: int) -> int | None:
        return None

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.trains_body = self.is_of_body(1)

    def is_of_body(self, step: int) -> bool:
        """Return whether step number `step` (from 1) trains the body."""
        return step > self.average.next_event(step - 1) - self.body_steps

    def correct(self, row: int, parameters: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        assert self.average.personal is not None
        for k, is_head in enumerate(self.average.personal.is_personal):
            if is_head == self.trains_body:
                grads[k] = None

    def communicate(self, fleet: Fleet, step: int) -> None:
        self.trains_body = self.is_of_body(step + 1)  # nodes count steps and need no message


class FedRepStrategy(CommunicateOptimizeStrategy):
    """FedRep: clients fit their own heads to the shared body, then train the body and average it.

    Use it like FedPer, when bodies would drift apart: most steps train only the small head.

        u_i <- H - s local steps on the head;   phi_i <- s local steps on the body;   phi <- sum_i n_i phi_i / sum_i n_i

    phi is the shared body, phi_i client i's values of it, u_i its head, and n_i its number of examples. Payload: P_s b
    bytes per client every H steps, for P_s body parameters of b bytes.

    Args:
        personal: the number of last layers that form the head, a pattern of names such as "head.*", or a list of
            patterns.
        H: steps of a round, in both parts together.
        body_steps: s, the steps of a round that train the body. None means H / 5, rounded down, and at least 1. With H,
            the heads never change.
        client_fraction, weighting, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`.
            `local_steps` and `local_epochs` are refused here.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer; see `Strategy`.

    >>> strategy = FedRepStrategy(inner_optim='sgd', personal='head.*', H=10, body_steps=2, lr=0.01)
    """

    name, title, paper, payload = "fedrep", "FedRep", "arXiv:2102.07078", "P_s b / H"
    tried = ()
    equation = "u_i <- H - s local steps on the head; phi_i <- s local steps on the body; phi as theta in fedavg"
    needs = "clients, every H steps"
    not_taken = NO_PRIVACY
    ranges = ()
    identities = ("s=H = fedavg of a model with a frozen head", "equal data = one node")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        personal: Chosen = 1,
        H: RoundLength = 10,
        *,
        body_steps: int | None = None,
        weighting: str = "examples",
        **options: Unpack[FederatedOptions],
    ):
        if personal is None:
            raise ArgumentError("personal=None leaves no head to train: name the head, or use fedavg")
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(H, weighting=weighting, personal=personal, **clients)
        steps = max(average.interval_steps // 5, 1) if body_steps is None else body_steps
        check_count("body_steps", steps)
        if not callable(H) and steps > average.interval_steps:  # H as a function is refused
            raise ArgumentError(f"body_steps={steps} exceeds the H={H} steps of a round: lower body_steps or raise H")
        super().__init__(inner_optim, [average, HeadThenBody(average, steps)], **others)
