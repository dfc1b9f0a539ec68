"""FedAvg and local SGD: clients train locally, then their parameters are averaged.

McMahan et al., arXiv:1602.05629; local SGD, Stich, arXiv:1805.09767. Round r, with sampled clients S_r:

    theta_i <- H_i local steps from theta            for i in S_r
    theta   <- sum_{i in S_r} (n_i / n_S) theta_i,   n_S = sum_{i in S_r} n_i

theta are the shared parameters, theta_i client i's parameters, and n_i is client i's number of examples. If islands are
used, each round shuffles its nodes into groups of s, and each group averages separately.

Payload: P b bytes per sampled client every H steps, for P parameters of b bytes. If all nodes are clients, they use a
ring all-reduce, tx = rx = 2 (n-1)/n P b, for n nodes in an island (N without islands). Sampled clients send through the
server: tx = rx = P b for each client, and 0 for other nodes.

If nodes are absent, clients and islands are still drawn among all nodes, and the drawn nodes that are present at the
round's end average, with n counting only them in the bytes above. A node alone in an island sends nothing, and a single
sampled client sends P b bytes. If no client is present, theta does not change.

A node that missed the synchronization continues from theta_i, even if it is a client that should have received theta. A
node that was down receives parameters from a node that stayed, by a broadcast of P b bytes. If clients are sampled,
only returning clients of the current round receive parameters, namely theta (P b bytes); other nodes keep theirs until
they next take part. Islands of sampled clients share no theta, so all returning nodes keep their parameters.

With `privacy`, each node takes part in a round with probability C (`client_fraction`), independently of the others, and
the server divides the sum of clipped updates by C N and adds noise (`exogym.strategy.privacy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from exogym.core.combinations import check, features_of, refuse
from exogym.core.fleet import Fleet
from exogym.core.fleet.cuts import Cut
from exogym.core.fleet.fleet import rows_of
from exogym.errors import ArgumentError, check_choice, check_count, checked
from exogym.strategy.averaging import FLAT, Averaging, averaging_of
from exogym.strategy.capabilities import ChoosesClients
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule, example_weights
from exogym.strategy.fragments import Piece
from exogym.strategy.options import defined, split
from exogym.strategy.participation import ClientDraws, Participation
from exogym.strategy.personal import Chosen, Personal, check_personal
from exogym.strategy.privacy import DifferentialPrivacy, check_privacy
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import AskedRounds, Traffic


class AveragingCommunicator(PeriodicModule, ChoosesClients):
    """Average the parameters after every step divisible by H.

    Args:
        H: steps of a round, as a number or a pure function of the round (from 0). A client takes at most H local steps
            in a round.
        island_size: s, the number of nodes in an island; the last island is smaller if s does not divide N. Each round
            draws its islands from (seed, round), which takes no bytes. None means one average over all nodes.
        client_fraction: C, the share of the N nodes that are clients in a round. Each round samples max(ceil(C N), 1)
            clients without replacement; other nodes do nothing and receive theta when they next take part.
        weighting: "examples" to weight clients by their numbers of examples n_i, as in the paper, or "uniform".
        local_steps: H_i of each node, from 1 to H, for clients with different amounts of work.
        local_epochs: E, the epochs of a client's round, which then has H_i = E ceil(n_i / B) steps for the batch size B
            (with `drop_last`, an epoch has max(1, floor(n_i / B)) steps). H becomes the largest H_i.
        keep_inner_state: if False, each client starts every round with a fresh inner optimizer.
        privacy: a `DifferentialPrivacy`. The history then records the `epsilon` spent. It excludes islands, unequal
            weights by examples, and buffers that training changes (their averages are not private).
        personal: the parameters and buffers that each client keeps to itself, while the others are averaged: a pattern
            such as "head.*", a list of patterns, or the number of the model's last layers (`exogym.strategy.personal`).

    With `fit(faults=Faults(trace=...))` the server asks only available clients (`exogym.strategy.participation`), and
    the history has `server_time_s`, `failed_rounds`, and the last round's `asked` and `reports`.

    An average with equal weights does not change the mean over nodes. Evaluation uses the mean of the present nodes'
    rows or, if clients are sampled, theta with the buffers that clients last sent.
    """

    weighted_means = True

    @checked
    def __init__(
        self,
        H: RoundLength = 1,
        *,
        island_size: int | None = None,
        client_fraction: float = 1.0,
        weighting: str = "examples",
        local_steps: Sequence[int] | None = None,
        local_epochs: int | None = None,
        keep_inner_state: bool = True,
        privacy: DifferentialPrivacy | None = None,
        personal: Chosen | None = None,
    ):
        super().__init__()
        check_personal(personal)
        self.personal_given = personal
        self.personal: Personal | None = None
        self.take_rounds(H)
        check_choice("weighting", weighting, ("examples", "uniform"))
        if local_epochs is not None:
            check_count("local_epochs", local_epochs)
        if not isinstance(local_steps, Sequence | np.ndarray | None):
            raise ArgumentError(f"local_steps={local_steps!r} must be a list with the number of steps of each node")
        for steps in () if local_steps is None else local_steps:
            check_count("each of local_steps", steps)
            if steps > self.interval_steps:
                raise ArgumentError(f"local_steps contains {steps}, more than the H={H} steps of a round: raise H")
        check_privacy(privacy)
        self.draws = ClientDraws(client_fraction, island_size, privacy is not None)
        self.participation: Participation | None = None
        self.weighting = weighting
        self.local_steps_given, self.local_epochs = local_steps, local_epochs
        self.work: np.ndarray | None = None
        self.fresh_inner_state = not keep_inner_state
        self.acts_on = "elements" if privacy is None else "row"  # privacy clips the norm of a whole row
        self.privacy, self.released, self.rounds_ended = privacy, 0, 0
        if privacy is not None:
            self.counters = ("released",)  # rounds whose mean the clients received
        self.samples = self.draws.samples
        self.asks_clients = client_fraction < 1 and island_size is None and privacy is None
        self.asks_all_lengths = local_epochs is not None
        check(self.features())

    def features(self) -> dict[str, str]:
        fraction = self.draws.client_fraction
        rest = features_of(
            client_fraction=fraction if fraction < 1 else None, privacy=self.privacy,
            local_steps=self.local_steps_given, local_epochs=self.local_epochs,
        )  # fmt: skip
        found = super().features() | rest
        found |= features_of(island_size=self.draws.island_size, personal=self.personal_given)
        return found | ({"nodes that rest": " and ".join(rest.values())} if rest else {})

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        if self.local_epochs is not None and self.work is None:  # a run's start sets `work`
            raise ArgumentError(
                f"local_epochs={self.local_epochs} has no formula because the number of steps depends on the data: "
                "give H instead"
            )
        island = self.draws.sizes(N)[1]
        way = "server" if N > 1 and self.samples else None
        members = island if way or island < N else None
        share = 1 if self.personal is None else self.personal.share  # known from a run's start on
        return [Traffic("all_reduce", P * share * b, self.interval_steps, members, way)]

    def rounds_among(self, N: int) -> AskedRounds | None:
        return self.draws.rounds_among(N, self.interval_steps)

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        is_end = self.next_event(step - 1) == step
        if not self.has_server or not (is_end or step == self.run.total_steps):
            return None
        round_ = self.round_of(step)
        clients = self.clients(round_)
        if self.participation is None or not is_end:
            return clients, 0.0
        return clients, self.participation.slack_s(round_, clients)

    def couples_every(self, N: int) -> float:
        return self.draws.couples_every(self.interval_steps, N)

    def seats(self, num_nodes: int) -> int | None:
        return self.draws.seats(num_nodes)

    def seated(self, step: int) -> tuple[list[int], list[int]]:
        if step == 0:
            return self.clients(0), []
        round_ = self.round_of(step)
        return self.clients(round_ + 1), self.clients(round_)

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self._drawn: dict[int, list[int]] = {}
        self.weights = example_weights(run, self.weighting)
        if self.weighting == "examples" and not run.examples.all():
            self.weights = torch.from_numpy(run.examples)  # filled in when nodes take seats
        self.work = None
        if self.local_epochs is not None:
            self.work = self.local_epochs * run.epoch_steps
            self.interval_steps = int(self.work.max())
        elif self.local_steps_given is not None:
            if len(self.local_steps_given) != run.num_nodes:
                raise ArgumentError(
                    f"local_steps has {len(self.local_steps_given)} entries for {run.num_nodes} nodes: give one each"
                )
            self.work = np.array(self.local_steps_given)
        self.participation = self._participation(run)
        self.row_state = {}
        if self.personal_given is not None:
            self.personal = Personal(fleet, self.personal_given)
            self.row_state = self.personal.row_state()
        self.has_server = self.samples and len(self.islands(0)) == 1
        if self.privacy is not None:
            self._check_private(fleet)
        if self.samples:
            self.server = Server(fleet, self.privacy, self.draws.client_fraction, run.seed, self.personal)
            kept = self.server.state()  # islands have no server and no shared buffers
            self.shared_state = {n: x for n, x in kept.items() if self.has_server or n.startswith("theta.")}

    def _participation(self, run: Run) -> Participation | None:
        if run.availability is None:
            return None
        if run.step_s is None:  # `fit` did not check this run
            refuse({"no step_seconds": "no step_seconds"} | features_of(trace=run.availability))
        self.counters = ("rounds_ended",)

        def work(round_: int) -> np.ndarray | int:
            steps = self.end_of(round_) - (self.end_of(round_ - 1) if round_ else 0)
            return steps if self.work is None else np.minimum(self.work, steps)

        wanted = self.draws.sizes(run.num_nodes)[0]
        return Participation(run.seed, run.num_nodes, wanted, work, run.step_s, run.availability)

    def _check_private(self, fleet: Fleet) -> None:
        """Raise ArgumentError if clients would send values without clipping and noise."""
        found = self.features()
        if self.weights is not None:
            found["weights by examples"] = "weights by examples"
        if fleet.shared_buffers:
            found["buffers that change"] = f"training that changes the buffers {', '.join(fleet.shared_buffers)}"
        check(found)

    def clients(self, round_: int) -> list[int]:
        """Return the sorted ids of the clients in round `round_` (from 0); with `privacy`, possibly none."""
        n = self.run.num_nodes
        if not self.samples:
            return list(range(n))
        if round_ not in self._drawn:
            self._drawn = {r: clients for r, clients in self._drawn.items() if abs(r - round_) == 1}
            asked = self.participation
            self._drawn[round_] = (
                self.draws.clients(n, self.run.seed, round_) if asked is None else asked.of(round_).reported
            )
        return [i for i in self._drawn[round_] if i not in self.run.empty] if self.run.empty else self._drawn[round_]

    def islands(self, round_: int) -> list[list[int]]:
        """Divide the clients of round `round_` into the groups that average separately at the round's end."""
        return self.draws.islands(self.clients(round_), self.run.seed, round_)

    def local_steps(self, first: int, last: int) -> np.ndarray | None:
        if self.work is None and not self.samples:
            return None
        steps = np.full(self.run.num_nodes, last - first)
        if self.work is not None:
            steps = np.clip(self.work - first % self.interval_steps, 0, last - first)
        absent = np.ones(self.run.num_nodes, dtype=bool)
        absent[self.clients(self.round_of(first + 1))] = False
        steps[absent] = 0
        return steps

    def weights_among(self, nodes: Sequence[int]) -> Tensor | None:
        """Return the weights by examples for a mean over `nodes`, (N,), or None if they are equal."""
        if self.weights is None or (self.samples and len(set(self.weights[list(nodes)].tolist())) == 1):
            return None
        return self.weights

    def communicate(self, fleet: Fleet, step: int) -> None:
        round_ = self.round_of(step)
        islands = {tuple(i for i in island if i in fleet.comm.present): island for island in self.islands(round_)}
        groups = [list(island) for island in islands if island]
        expected = [islands[tuple(island)] for island in groups]
        way = "server" if self.samples else "ring"
        if self.privacy is not None and groups:
            self.privacy.clip_rows(fleet, rows_of(fleet, groups[0]), self.server.theta)
        w, own = self.weights_among([i for group in groups for i in group]), self.personal
        if own is not None:
            own.keep(fleet, [i for group in groups for i in group])
        for x, piece in self._sent(fleet) if groups else ():
            fleet.comm.all_reduce(x, "mean", groups=groups, weights=w, out=x, algorithm=way, expected=expected)
            if piece is not None:
                piece.put(piece.block.params, x)
        if groups:
            fleet.synchronise_buffers(groups, () if own is None else own.buffers)
        if self.has_server:
            came = groups[0] if groups else []
            self.server.serve(fleet, round_, came, self.clients(round_), self.clients(round_ + 1))
            self.released += self.privacy is not None
            self.give_own(fleet, [i for i in self.clients(round_ + 1) if i in fleet.comm.present])
        if self.participation is not None:
            self.participation.of(round_).record(fleet)
            self.rounds_ended = round_ + 1

    def _sent(self, fleet: Fleet) -> list[tuple[Tensor, Piece | None]]:
        """Return the parameters that clients average, (rows, p) each, with their piece if they may be copies."""
        if self.personal is None:
            return [(block.params, None) for block in fleet.blocks]
        return [(piece.take(piece.block.params), piece) for piece in self.personal.shared]

    def give_own(self, fleet: Fleet, nodes: Sequence[int]) -> None:
        """Restore the personal parameters of `nodes` after other code has overwritten their rows."""
        if self.personal is not None:
            self.personal.give(fleet, nodes)

    def shared_only(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return `grads`, one per parameter, with None for personal parameters."""
        if self.personal is None:
            return list(grads)
        return [None if own else g for g, own in zip(grads, self.personal.is_personal, strict=True)]

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        self.give_own(fleet, nodes)

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        if name.startswith("own.") and self.personal is not None:
            return self.personal.cut(name)
        return super().cut(name, shape)

    def figures(self) -> dict[str, float]:
        """Return numbers for the history: epsilon so far, and a server's rounds, failed rounds and reports.

        Only numbers that apply to this run are included.
        """
        found = (
            {} if self.privacy is None else {"epsilon": self.privacy.epsilon(self.draws.client_fraction, self.released)}
        )
        if self.participation is not None and self.rounds_ended:
            found |= self.participation.figures(self.rounds_ended)
        if self.run.empty:
            found["empty_clients"] = len(self.run.empty)  # counts only clients that were drawn or asked for their size
        return found

    def joining(self, nodes: list[int], step: int) -> list[int]:
        if not self.samples:
            return nodes
        clients = self.clients(self.round_of(step)) if self.has_server else []
        return [node for node in nodes if node in clients]

    def consensus(self, fleet: Fleet) -> list[Tensor] | None:
        if not self.has_server:
            return None
        return [theta[0] for theta in self.server.theta]

    def consensus_buffers(self, fleet: Fleet) -> dict[str, Tensor] | None:
        return {name: rows[0] for name, rows in self.server.buffers.items()} if self.has_server else None


class Server:
    """The server of sampled clients, which holds theta and the buffers that clients last sent between rounds.

    theta are the shared parameters, (1, P) per block. Buffers are (1, ...) each.

    Args:
        fraction: the expected share of clients among the nodes; only `privacy` uses it.
        personal: the parameters and buffers that stay with the clients, or None.
    """

    def __init__(
        self, fleet: Fleet, privacy: DifferentialPrivacy | None, fraction: float, seed: int,
        personal: Personal | None = None,
    ):  # fmt: skip
        self.personal = personal
        self.theta = [block.params[:1].clone() for block in fleet.blocks]
        self.buffers = {name: rows[:1].clone() for name, rows in fleet.buffers.items()}
        self.privacy, self.wanted, self.seed = privacy, fraction * fleet.num_nodes, seed

    def state(self) -> dict[str, Tensor]:
        """Return theta and the buffers as tensors by their names in checkpoints."""
        named = {f"theta.{b}": theta for b, theta in enumerate(self.theta)}
        return named | {f"buffer.{name}": rows for name, rows in self.buffers.items()}

    def serve(self, fleet: Fleet, round_: int, came: list[int], clients: list[int], following: list[int]) -> None:
        """End round `round_`: update theta from the reporting clients' mean, and send it to the next clients.

        With `privacy`, the server adds noise to the new theta.

        Args:
            came: the clients that reported; may be empty.
            clients: all clients of the round that ends.
            following: the clients of the next round.
        """
        present, holder = fleet.comm.present, came[:1]
        for b, (block, theta) in enumerate(zip(fleet.blocks, self.theta, strict=True)):
            mean = fleet.comm.wire.rows(block.params, holder) if holder else theta
            if self.privacy is None:
                theta.copy_(mean)
            else:
                theta.add_(mean - theta, alpha=len(came) / self.wanted)
                theta.add_(self.privacy.noise(theta, self.wanted, self.seed, b, round_))
                _give(block.params, rows_of(fleet, came), theta)  # the server's message to its clients
            _give(block.params, rows_of(fleet, [i for i in following if i in present]), theta)
        # resting nodes do not use their own buffers before they receive these
        lost = rows_of(fleet, [i for i in {*following, *clients} if i not in present])
        if self.personal is not None:
            self.personal.forget(fleet, self.theta)
        own = () if self.personal is None else self.personal.buffers
        for name, rows in fleet.shared_buffers.items() if holder else ():
            if name in own:
                continue
            theirs = rows[lost]
            self.buffers[name].copy_(fleet.comm.wire.rows(rows, holder))
            rows.copy_(self.buffers[name].expand_as(rows))
            rows[lost] = theirs


def _give(params: Tensor, rows: Sequence[int], theta: Tensor) -> None:
    for row in rows:
        params[row] = theta[0]


class ClientOptions(TypedDict, total=False):
    """Options of all federated strategies: arguments of `AveragingCommunicator`."""

    client_fraction: float
    local_steps: Sequence[int] | None
    local_epochs: int | None
    keep_inner_state: bool


defined(ClientOptions, AveragingCommunicator)


class FederatedOptions(ClientOptions, InnerOptions, total=False):
    """All options of federated strategies: clients, averaging and the inner optimizer."""


class FedAvgStrategy(CommunicateOptimizeStrategy):
    """FedAvg: clients train H steps, then a server (or an all-reduce) averages their parameters.

    Use it for federated training, or as local SGD if all nodes take part in every round.

        theta <- sum_i n_i theta_i / sum_i n_i          over the clients i of the round, with n_i examples

    theta are the shared parameters and theta_i client i's parameters. Payload: P b bytes per client every H steps, for
    P parameters of b bytes.

    Args:
        island_size, H, client_fraction, weighting, local_steps, local_epochs, keep_inner_state: see
            `AveragingCommunicator`.
        averaging: an `Averaging` with `transport`, `privacy` or `personal`.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer; see `Strategy`.

    >>> strategy = FedAvgStrategy(inner_optim='sgd', island_size=4, H=5, lr=0.01)
    """

    name, title, paper, payload = "fedavg", "FedAvg", "arXiv:1602.05629", "P b / H"
    ranges = ()
    averages, not_taken = ("transport", "privacy", "personal"), FLAT
    equation = "theta <- sum_i n_i theta_i / sum_i n_i over the round's clients i"
    needs = "clients, every H steps"
    identities = ("H=1, SGD = ddp", "islands of 1 = nodes alone", "islands of N = no islands", "equal data = one node")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        island_size: int | None = None,
        H: RoundLength = 10,
        *,
        weighting: str = "examples",
        averaging: Averaging | None = None,
        **options: Unpack[FederatedOptions],
    ):
        means = averaging_of(averaging)
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(
            H, island_size=island_size, weighting=weighting, privacy=means.privacy, personal=means.personal, **clients
        )
        super().__init__(inner_optim, [average], **others)
        self.average_by(means)
