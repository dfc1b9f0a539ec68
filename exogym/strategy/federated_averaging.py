"""FedAvg and local SGD: train locally, average the parameters.

McMahan et al., arXiv:1602.05629; local SGD, Stich, arXiv:1805.09767. Round r, with sampled clients S_r:

    theta_i <- H_i local steps from theta            for i in S_r
    theta   <- sum_{i in S_r} (n_i / n_S) theta_i,   n_S = sum_{i in S_r} n_i

Islands: the nodes of a round are shuffled into groups of s, and each group averages for itself.

Payload P b bytes per sampled client every H steps. All clients: ring all-reduce, tx = rx = 2 (n-1)/n P b over
the n members of an island (N without islands). Sampled clients: through the server, tx = rx = P b; others 0.

With absent nodes: clients and islands are drawn among all nodes, and those of them that are there at the end of the
round average and send the above, n counting them (one alone in an island sends nothing, one client alone does); with
none there, theta stays. A node whose synchronisation was lost keeps theta_i and goes on from it, even as a client that
should have received theta. A node that was down comes back with the parameters of one that stayed, which broadcasts
them: P b bytes. Where clients are sampled only a client of the running round takes parameters, theta, at that price;
any other keeps what it had, to receive theta when it next takes part (islands of sampled clients have no theta: there
all keep what they had).

With `privacy` each node is a client of a round with probability C, independently, and the server takes the mean of
clipped updates over C N, and noise: `exogym.strategy.privacy`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from exogym.core.base.draws import numpy_generator
from exogym.core.combinations import check, features_of
from exogym.core.fleet import Fleet
from exogym.core.fleet.presence import rows_of
from exogym.errors import ArgumentError, check_choice, check_count, check_number, checked
from exogym.faults import Availability
from exogym.strategy.averaging import AveragingOptions
from exogym.strategy.capabilities import ChoosesClients, HasOuterModel
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule, example_weights
from exogym.strategy.options import defined, split
from exogym.strategy.participation import Participation, Round
from exogym.strategy.privacy import DifferentialPrivacy
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import AskedRounds, Traffic


class AveragingCommunicator(PeriodicModule, ChoosesClients, HasOuterModel):
    """Average the parameters after every step divisible by H.

    Args:
        H: local steps of a round (global steps; the slowest client's, where clients differ), or a pure function of the
            round, from 0.
        island_size: s; None averages over everyone. The last island is smaller where s does not divide.
            Islands are drawn anew each round from (seed, round), so nobody has to send them.
        client_fraction: C; each round samples max(ceil(C N), 1) clients without replacement. The others do
            nothing and receive theta when they next take part.
        weighting: "examples" (n_i, the paper's), or "uniform".
        local_steps: H_i per node, each from 1 to H: clients with different amounts of work.
        local_epochs: E; H_i = E ceil(n_i / B), and H is the largest of them.
        keep_inner_state: False starts every round with a fresh inner optimizer, as stateless clients do.
        privacy: a `DifferentialPrivacy`; the history then has what was spent, as `epsilon`. Without islands, weights by
            examples that differ, and buffers that training changes (they would be averaged as they are).
        over_sampling, deadline_s, min_reports: a server that asks more clients than it needs (0.3: 30 % more), takes
            the first reports that come in deadline_s seconds by `fit(step_seconds=)`, and gives a round up where fewer
            than min_reports came (`exogym.strategy.participation`); `fit(faults=Faults(trace=...))` says who is there.
            The history then has `server_time_s`, and of the last round `asked` and `reports`, and `failed_rounds`.

    The mean over nodes of equal weight is unchanged by an average. With client sampling the evaluation model is
    theta with the buffers that clients last brought, else the mean of the rows (of the nodes that are there).
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
        over_sampling: float = 0.0,
        deadline_s: float | None = None,
        min_reports: int = 1,
    ):
        super().__init__()
        self.take_rounds(H)
        check_choice("weighting", weighting, ("examples", "uniform"))
        if island_size is not None:
            check_count("island_size", island_size)
        check_number("client_fraction", client_fraction, over=0, most=1)
        if local_epochs is not None:
            check_count("local_epochs", local_epochs)
        for steps in local_steps or ():
            check_count("each of local_steps", steps)
            if steps > self.interval_steps:
                raise ArgumentError(f"local_steps holds {steps}, more than the H={H} steps of a round: raise H")
        check_number("over_sampling", over_sampling, least=0, more=", a share of the clients of a round")
        if deadline_s is not None:
            check_number("deadline_s", deadline_s, over=0)
        check_count("min_reports", min_reports)
        self.over_sampling, self.deadline_s, self.min_reports = over_sampling, deadline_s, min_reports
        self.asks = over_sampling > 0 or deadline_s is not None or min_reports > 1
        self.participation: Participation | None = None
        self.island_size, self.client_fraction, self.weighting = island_size, client_fraction, weighting
        self.local_steps_given, self.local_epochs = local_steps, local_epochs
        self.work: np.ndarray | None = None
        self.fresh_inner_state = not keep_inner_state
        self.acts_on = "elements" if privacy is None else "row"  # whose norms are cut
        if not isinstance(privacy, DifferentialPrivacy | None):
            raise ArgumentError(f"privacy={privacy!r} must be a DifferentialPrivacy, as DifferentialPrivacy(1.0, 1.0)")
        self.privacy, self.released, self.rounds_ended = privacy, 0, 0
        if privacy is not None:
            self.counters = ("released",)  # rounds whose mean was given to clients
        self.asks_clients = client_fraction < 1 and island_size is None and privacy is None
        self.asks_all_lengths = local_epochs is not None
        check(self.features())

    def features(self) -> dict[str, str]:
        sampled = self.client_fraction if self.client_fraction < 1 else None
        rest = features_of(
            client_fraction=sampled, privacy=self.privacy, local_steps=self.local_steps_given,
            local_epochs=self.local_epochs,
        )  # fmt: skip
        found = super().features() | rest | features_of(island_size=self.island_size, deadline_s=self.deadline_s)
        found |= {"nodes that rest": " and ".join(rest.values())} if rest else {}
        found |= {"no client_fraction": "client_fraction=1"} if sampled is None else {}
        if self.asks:
            asked = f"over_sampling={self.over_sampling}, deadline_s={self.deadline_s}, min_reports={self.min_reports}"
            found["over_sampling, deadline_s or min_reports"] = asked
        return found

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        if self.local_epochs is not None and self.work is None:  # which is known once a run has begun
            raise ArgumentError("how many steps local_epochs takes depends on the data: give H instead")
        island = self._sizes(N)[1]
        way = "server" if N > 1 and (self.client_fraction < 1 or self.privacy is not None) else None
        members = island if way or island < N else None
        return [Traffic("all_reduce", P * b, self.interval_steps, members, way)]

    def rounds_among(self, N: int) -> AskedRounds | None:
        if self.client_fraction == 1 or N == 1:
            return None
        size = self._sizes(N)[1] if self.island_size else None

        def rounds(step_s: np.ndarray) -> Iterator[tuple[list[list[int]], float | None]]:
            asked = self._asked(0, N, lambda round_: self.interval_steps, step_s) if self.asks else None
            for round_ in itertools.count():
                held = None if asked is None else asked.of(round_)
                clients = self._drawn_among(N, 0, round_) if held is None else held.clients
                groups = _islands(clients, size, 0, round_)
                yield groups, None if len(groups) > 1 else 0.0 if held is None else held.end_s - held.begin_s

        return rounds

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        is_end = self.next_event(step - 1) == step
        if not self.has_server or not (is_end or step == self.run.total_steps):
            return None
        round_ = self.round_of(step)
        clients = self.clients(round_)
        if self.participation is None or self.run.step_s is None or not is_end:
            return clients, 0.0
        return clients, self.participation.slack_s(round_, clients)

    def couples_every(self, N: int) -> float:
        clients, island = self._sizes(N)
        rounds = 1 if island == clients else math.ceil(math.log(clients, max(island, 2)))
        return self.interval_steps * rounds * N / clients

    def _sizes(self, N: int) -> tuple[int, int]:
        """Return how many of N nodes take part in a round, and how many of them are an island."""
        clients = max(math.ceil(self.client_fraction * N - 1e-9), 1)
        return clients, min(self.island_size or clients, clients)

    def seats(self, num_nodes: int) -> int | None:
        clients, island = self._sizes(num_nodes)
        if island < clients:
            return None
        if self.privacy is not None:  # each node by its own chance: never more in practice
            mean = self.client_fraction * num_nodes
            return min(num_nodes, math.ceil(mean + 8 * math.sqrt(mean) + 8))
        return clients if clients < num_nodes else None

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
            self.weights = torch.from_numpy(run.examples)  # which is filled in as nodes are seated
        self.work = None
        if self.local_epochs is not None:
            self.work = self.local_epochs * -(-run.examples // run.batch_size)
            self.interval_steps = int(self.work.max())
        elif self.local_steps_given is not None:
            if len(self.local_steps_given) != run.num_nodes:
                raise ArgumentError(f"local_steps has {len(self.local_steps_given)} entries for {run.num_nodes} nodes")
            self.work = np.array(self.local_steps_given)
        self.participation = self._participation(run)
        self.samples = self.client_fraction < 1 or self.privacy is not None
        self.has_server = self.samples and len(self.islands(0)) == 1
        if self.privacy is not None:
            self._check_private(fleet)
        if self.samples:
            self.shared_state = {f"theta.{b}": block.params[:1].clone() for b, block in enumerate(fleet.blocks)}
        if self.has_server:
            self.shared_state |= {f"buffer.{name}": rows[:1].clone() for name, rows in fleet.buffers.items()}

    def _participation(self, run: Run) -> Participation | None:
        if not self.asks and run.availability is None:
            return None
        if run.step_s is None:  # of a run that `fit` did not check
            untimed = {"no step_seconds": "no step_seconds"}
            check(untimed | features_of(deadline_s=self.deadline_s, trace=run.availability))
        self.counters = ("rounds_ended",)

        def work(round_: int) -> np.ndarray | int:
            steps = self.end_of(round_) - (self.end_of(round_ - 1) if round_ else 0)
            return steps if self.work is None else np.minimum(self.work, steps)

        step_s = 1.0 if run.step_s is None else run.step_s
        return self._asked(run.seed, run.num_nodes, work, step_s, run.availability)

    def _asked(
        self, seed: int, N: int, work: Callable[[int], np.ndarray | int], step_s: np.ndarray | float,
        availability: Availability | None = None,
    ) -> Participation:  # fmt: skip
        return Participation(
            seed, N, self._sizes(N)[0], work, step_s, availability, self.over_sampling, self.deadline_s,
            self.min_reports,
        )  # fmt: skip

    def _check_private(self, fleet: Fleet) -> None:
        """Raise ArgumentError where something of the clients would be seen that is not clipped and blurred."""
        found = self.features()
        if self.weights is not None:
            found["weights by examples"] = "weights by examples"
        if fleet.buffers:
            found["buffers that change"] = f"training that changes the buffers {', '.join(fleet.buffers)}"
        check(found)

    def clients(self, round_: int) -> list[int]:
        """Return the sorted ids that take part in round `round_` (from 0); with `privacy` there may be none."""
        n = self.run.num_nodes
        if not self.samples:
            return list(range(n))
        if round_ not in self._drawn:
            self._drawn = {r: clients for r, clients in self._drawn.items() if abs(r - round_) == 1}
            self._drawn[round_] = self._draw(n, round_)
        return [i for i in self._drawn[round_] if i not in self.run.empty] if self.run.empty else self._drawn[round_]

    def _draw(self, n: int, round_: int) -> list[int]:
        if self.participation is not None:
            return self.participation.of(round_).clients
        return self._drawn_among(n, self.run.seed, round_)

    def _drawn_among(self, n: int, seed: int, round_: int) -> list[int]:
        if self.privacy is not None:
            chance = numpy_generator(seed, "private clients", round_).random(n)
            return np.flatnonzero(chance < self.client_fraction).tolist()
        drawn = numpy_generator(seed, "clients", round_).choice(n, self._sizes(n)[0], replace=False)
        return sorted(drawn.tolist())

    def islands(self, round_: int) -> list[list[int]]:
        """Return the groups that average at the end of round `round_`: disjoint, covering its clients."""
        return _islands(self.clients(round_), self.island_size, self.run.seed, round_)

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
        """Return the (N,) weights by examples of a mean over `nodes`; None where they weigh alike."""
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
            theta = [self.shared_state[f"theta.{b}"] for b in range(len(fleet.blocks))]
            self.privacy.clip_rows(fleet, rows_of(fleet, groups[0]), theta)
        w = self.weights_among([i for group in groups for i in group])
        for block in fleet.blocks if groups else ():
            x = block.params
            fleet.comm.all_reduce(x, "mean", groups=groups, weights=w, out=x, algorithm=way, expected=expected)
        if groups:
            fleet.synchronise_buffers(groups)
        if self.has_server:
            self._serve(fleet, round_, groups[0] if groups else [])
            self.released += self.privacy is not None
        if self.participation is not None:
            self._count_the_others(fleet, self.participation.of(round_))
            self.rounds_ended = round_ + 1

    def _count_the_others(self, fleet: Fleet, held: Round) -> None:
        """Record what clients got and sent that were asked and whose reports do not count."""
        counted = set(held.clients)
        in_vain = [i for i in held.asked if i not in counted]
        for block in fleet.blocks:
            if in_vain:
                fleet.comm.pull(block.params, in_vain)
            if not held.holds and held.reported:
                size = block.layout.total * block.layout.dtype.itemsize
                fleet.comm.record("push", "server", held.reported, size)

    def _serve(self, fleet: Fleet, round_: int, came: list[int]) -> None:
        """Take theta from the clients that came, if any, and give it to the next round's that are there."""
        clients, present, holder = self.clients(round_ + 1), fleet.comm.present, came[:1]
        for b, block in enumerate(fleet.blocks):
            theta = self.shared_state[f"theta.{b}"]
            mean = fleet.comm.wire.rows(block.params, holder) if holder else theta
            if self.privacy is None:
                theta.copy_(mean)
            else:
                wanted = self.client_fraction * fleet.num_nodes
                theta.add_(mean - theta, alpha=len(came) / wanted)
                theta.add_(self.privacy.noise(theta, wanted, self.run.seed, b, round_))
                for row in rows_of(fleet, came):
                    block.params[row] = theta[0]  # what the server sends down
            for row in rows_of(fleet, [i for i in clients if i in present]):
                block.params[row] = theta[0]
        # theta's buffers; nodes that sit out have no use for their own until they get these
        lost = [i for i in {*clients, *self.clients(round_)} if i not in present]
        for name, rows in fleet.buffers.items() if holder else ():
            theirs = rows[rows_of(fleet, lost)]
            of_server = self.shared_state[f"buffer.{name}"]
            of_server.copy_(fleet.comm.wire.rows(rows, holder))
            rows.copy_(of_server.expand_as(rows))
            rows[rows_of(fleet, lost)] = theirs

    def figures(self) -> dict[str, float]:
        """Return the epsilon spent so far; of rounds that clients are asked for, what came of them."""
        found = {} if self.privacy is None else {"epsilon": self.privacy.epsilon(self.client_fraction, self.released)}
        if self.participation is not None and self.rounds_ended:
            last = self.participation.of(self.rounds_ended - 1)
            found |= {"server_time_s": last.end_s, "asked": len(last.asked), "reports": len(last.reported)}
            found["failed_rounds"] = self.participation.failed(self.rounds_ended)
        if self.run.empty:
            found["empty_clients"] = len(self.run.empty)  # of those that were ever drawn, or asked for their length
        return found

    def joining(self, nodes: list[int], step: int) -> list[int]:
        if not self.samples:
            return nodes
        clients = self.clients(self.round_of(step)) if self.has_server else []
        return [node for node in nodes if node in clients]

    def consensus(self, fleet: Fleet) -> list[Tensor] | None:
        if not self.has_server:
            return None
        return [self.shared_state[f"theta.{b}"][0] for b in range(len(fleet.blocks))]

    def consensus_buffers(self, fleet: Fleet) -> dict[str, Tensor] | None:
        return {name: self.shared_state[f"buffer.{name}"][0] for name in fleet.buffers} if self.has_server else None


def _islands(clients: list[int], size: int | None, seed: int, round_: int) -> list[list[int]]:
    if size is None or size >= len(clients):
        return [clients]
    order = numpy_generator(seed, "islands", round_).permutation(clients).tolist()
    return [sorted(order[i : i + size]) for i in range(0, len(order), size)]


class ClientOptions(TypedDict, total=False):
    """What all federated strategies take: arguments of `AveragingCommunicator`."""

    client_fraction: float
    local_steps: Sequence[int] | None
    local_epochs: int | None
    keep_inner_state: bool
    over_sampling: float
    deadline_s: float | None
    min_reports: int


defined(ClientOptions, AveragingCommunicator)


class FederatedOptions(ClientOptions, AveragingOptions, total=False):
    """What all federated strategies take: of clients, of means, and of the inner optimizer."""


class FedAvgStrategy(CommunicateOptimizeStrategy):
    """Federated averaging, with islands, client sampling, weights by data and unequal work.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: of the clients, as `Strategy`.
        island_size, H, client_fraction, weighting, local_steps, local_epochs, keep_inner_state, privacy, over_sampling,
            deadline_s, min_reports: as `AveragingCommunicator`.

    >>> strategy = FedAvgStrategy(inner_optim='sgd', island_size=4, H=5, lr=0.01)
    """

    name, title, paper, payload = "fedavg", "FedAvg", "arXiv:1602.05629", "P b / H"
    equation = "theta <- sum_i n_i theta_i / sum_i n_i over the clients i of the round"
    needs = "all nodes every H steps; with client_fraction a server and those clients"
    identities = ("H=1, SGD = ddp", "islands of 1 = nodes alone", "islands of N = no islands", "equal data = one node")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        island_size: int | None = None,
        H: RoundLength = 10,
        *,
        weighting: str = "examples",
        privacy: DifferentialPrivacy | None = None,
        **options: Unpack[FederatedOptions],
    ):
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(H, island_size=island_size, weighting=weighting, privacy=privacy, **clients)
        super().__init__(inner_optim, [average], **others)
