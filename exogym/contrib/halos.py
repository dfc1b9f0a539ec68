"""HALoS: asynchronous local SGD with a server in each island and a global server above, so few bytes travel far.

Kim et al., HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for Geo-Distributed Large Language Model
Training, arXiv:2506.04531 (ICML 2025). The rules follow the authors' published simulator, because the paper's own
algorithm could not be read. theta_r are the parameters of island r's server, and Theta the global server's. Node w of
island r

    pulls theta_r, takes H inner steps to theta_w, pushes Delta = theta_pulled - theta_w, pulls again.

The island's server applies each Delta on arrival by delayed Nesterov, where t counts the arrivals and A and m start at
0:

    theta_r <- theta_r - eta_l Delta;   A <- A + Delta
    if t mod d_l = 0:   m <- beta_l m + A/d_l;   theta_r <- theta_r - eta_l d_l beta_l m;   A <- 0

After K arrivals, the island's server sends D = (theta_r at the last merge) - theta_r to the global server, while its
nodes continue. The global server applies each D on arrival by the same rule, with eta_g, beta_g and d_g, and sends
Theta back, which the island's server merges on arrival:

    theta_r <- (1 - alpha) theta_r + alpha Theta

The island's server counts the next K arrivals from this merge, so Deltas that arrive while D and Theta travel change
theta_r but are part of no D.

Bytes: P b up and P b down per round of a node inside its island, for P parameters of b bytes. Between islands, P b up
and P b down per D, counted for the island's first node. If D and Theta take no time, that is P b / (H K) per step of a
node, as a mean over the nodes.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.training.order import NOBODY, Order, hold, ticks
from exogym.errors import ArgumentError, check_count
from exogym.network import Network
from exogym.strategy.async_diloco import RuleServer
from exogym.strategy.clocked import ClockedStrategy, check_numbers, check_rounds
from exogym.strategy.strategy import InnerOptions
from exogym.strategy.traffic import Plan, Traffic


class MergingServer(RuleServer):
    """An island's server, which applies its nodes' Deltas by delayed Nesterov and merges the global parameters.

    Args:
        d, eta, beta: d_l, eta_l and beta_l.
        accumulation: K, the arrivals from a merge until the next D is due.
        alpha: the weight of Theta in a merge.

    Attributes:
        merged: theta_r at the last merge, (P,) per block.
        arrivals: arrivals since the last merge.

    >>> import torch
    >>> server = MergingServer([torch.zeros(1)], d=9, eta=0.1, beta=0.5, accumulation=2, alpha=0.5)
    >>> for _ in range(2):
    ...     server.apply([torch.ones(1)])
    >>> server.update()
    [tensor([0.2000])]
    >>> server.merge([torch.ones(1)])
    >>> server.theta, server.update()
    ([tensor([0.4000])], None)
    """

    kept, counted = (*RuleServer.kept, "merged"), (*RuleServer.counted, "arrivals")

    def __init__(self, theta: list[Tensor], d: int, eta: float, beta: float, accumulation: int, alpha: float):
        super().__init__(theta, "delayed_nesterov", K=d, eta=eta * d, beta=beta)
        self.accumulation, self.alpha = accumulation, alpha
        self.merged, self.arrivals = [x.clone() for x in theta], 0

    def apply(self, delta: list[Tensor], staleness: int = 0, steps: int = 1, batch_size: int = 1) -> None:
        super().apply(delta)
        self.arrivals += 1

    def update(self, last: bool = False) -> list[Tensor] | None:
        """Return D if there are K arrivals since the last merge (with `last`, if there are any), otherwise None."""
        if self.arrivals < (1 if last else self.accumulation):
            return None
        return [old - new for old, new in zip(self.merged, self.theta, strict=True)]

    def merge(self, theta: list[Tensor]) -> None:
        """Merge the global server's `theta`, (P,) per block, into the island's theta."""
        for mine, merged, new in zip(self.theta, self.merged, theta, strict=True):
            merged.copy_(mine.lerp_(new, self.alpha))
        self.arrivals, self.version = 0, self.version + 1


class Relays:
    """Carries relays, the messages between the islands' servers and the global server above them.

    An island's server sends its update up; the global server applies it and sends its parameters down, which the
    island's server merges. An island has at most one relay in transit; no node waits for a relay, and relays use no
    node's bandwidth. A relay counts for the first node of its island, and takes as long as this node's message to a
    server.

    Args:
        islands: each island's nodes.
        servers: each island's server.
        top: the global server.
    """

    def __init__(
        self, islands: list[list[int]], servers: list[MergingServer], top: RuleServer, fleet: Fleet, order: Order
    ):
        check_islands(islands, order.clock.network)
        self.islands, self.servers, self.top = islands, servers, top
        self.fleet, self.order = fleet, order
        self.rises = torch.zeros(len(islands), dtype=torch.bool)  # whether an island's relay travels up
        self.messages = [[torch.zeros_like(x) for x in top.theta] for _ in islands]

    def begin(self, island: int) -> None:
        """Send the update of an island's server if one is due and no relay of the island is in transit."""
        if self.order.relays[island] == NOBODY and (update := self.servers[island].update()) is not None:
            self.order.relay(island, self._send(island, update, True, self.order.now))

    def arrive(self) -> None:
        """Process the arrival of the next relay."""
        island = self.order.relayed()
        end = self._deliver(island, self.order.now)
        if end != NOBODY:
            self.order.relay(island, end)

    def settle(self) -> list[int]:
        """Complete the relays in transit, and return the tick of each island's merge, or `NOBODY`."""
        ends = self.order.relays.tolist()
        for island in sorted((i for i, end in enumerate(ends) if end != NOBODY), key=lambda i: (ends[i], i)):
            ends[island] = self._complete(island, ends[island])
        return ends

    def finish(self, ends: list[int]) -> None:
        """Send the updates left after `settle`, which returned `ends`; nodes wait for their island's merge."""
        order = self.order
        for island, nodes in enumerate(self.islands):
            update = self.servers[island].update(last=True)
            if update is not None:
                now = max(ends[island], int(ticks(order.clock)[nodes].max()))
                ends[island] = self._complete(island, self._send(island, update, True, now))
        for nodes, end in zip(self.islands, ends, strict=True):
            hold(order.clock, nodes, end)

    def _complete(self, island: int, end: int) -> int:
        """Deliver the island's relay at the tick `end`, and the answer; return the tick of the merge."""
        after = self._deliver(island, end)
        return end if after == NOBODY else self._complete(island, after)

    def _deliver(self, island: int, now: int) -> int:
        """Apply or merge the island's relay, and return the tick at which the answer arrives, or `NOBODY`."""
        message = self.messages[island]
        if not self.rises[island]:
            self.servers[island].merge(message)
            return NOBODY
        self.top.apply(message, 0, 1, 1)
        return self._send(island, self.top.theta, False, now)

    def _send(self, island: int, values: list[Tensor], up: bool, now: int) -> int:
        """Send `values`, (P,) per block, up or down, and return the tick at which they arrive."""
        comm, first = self.fleet.comm, self.islands[island][0]
        self.rises[island] = up
        for message, x, block in zip(self.messages[island], values, self.fleet.blocks, strict=True):
            message.copy_(x)
            event = comm.push(block.params, first, "relay") if up else comm.pull(block.params, [first], "relay")
            now = self.order.clock.relay(event, now)
        return now

    def state(self) -> dict[str, Tensor]:
        named = {f"{i}.{b}": x for i, message in enumerate(self.messages) for b, x in enumerate(message)}
        return named | {"rises": self.rises}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for name, x in self.state().items():
            x.copy_(tensors[name])


def check_islands(islands: list[list[int]], network: Network) -> None:
    """Raise ArgumentError if nodes of one island are in different groups of the `network`."""
    group_of = network.group_of
    for nodes in islands:
        if group_of is not None and len(set(group_of[nodes].tolist())) > 1:
            raise ArgumentError(
                f"nodes {nodes[0]} to {nodes[-1]} are one island of the strategy, but they are in different groups of "
                "the network: choose island_size so that each island lies in one group"
            )


class HALoSStrategy(ClockedStrategy):
    """HALoS: asynchronous local SGD with a server in each island, and a global server that islands reach rarely.

    Use it when links between islands are slow and nodes differ in speed.

        each Delta: theta_r <- DN_l(theta_r, Delta);   after K of them: Theta <- DN_g(Theta, D);
        then theta_r <- (1 - alpha) theta_r + alpha Theta

    theta_r are the parameters of island r's server, and Theta the global server's, which evaluation uses. Delta is the
    parameters that a node pulled minus its parameters after its round, and D is theta_r at the last merge minus
    theta_r. DN is a step of delayed Nesterov, described in `exogym.contrib.halos`.

    Bytes: P b up and P b down per round of a node inside its island, for P parameters of b bytes, and P b up and P b
    down per D between islands, counted for the island's first node. The payload is P b / H per step of a node, plus P b
    / (H K) between islands as a mean over nodes, if D and Theta take no time. Memory: one more row per node, for the
    parameters that it pulled, five rows per island's server and three for the global server.

    Args:
        inner_optim: inner optimizer. Each node keeps its optimizer state between rounds.
        H: inner steps of a node's round; with `dylu`, of the fastest node's round.
        island_size: n, the number of consecutive nodes in an island (the paper's region); the last island may be
            smaller. With `Network.groups`, each island must lie in one group.
        island_lr, island_momentum: eta_l and beta_l, learning rate and momentum of the islands' servers.
        island_delay: d_l, arrivals between two updates of an island's momentum. None means 4 n.
        accumulation: K, arrivals from a merge until the island's server sends D. None means 8 n.
        outer_lr, outer_momentum: eta_g and beta_g, learning rate and momentum of the global server.
        outer_delay: d_g, arrivals between two updates of the global momentum.
        merge: alpha, the weight of Theta when an island's server merges it, from 0 to 1.
        dylu: see `AsyncDiLoCoStrategy`. The paper's runs use it.
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The learning-rate schedule follows the
            fleet's step.

    With 4 nodes in an island, the defaults are the authors' settings for 4 islands of 4 nodes. eta_l and eta_g weigh a
    single arrival, unlike the outer_lr of `AsyncDiLoCoStrategy`, which weighs a whole period.

    D and Theta take no time unless there is a network, on which they take as long as a message between the island's
    first node and a server, and nodes' messages as long as messages inside the island. At the end of training, each
    node pushes the steps since its last push, and each island's server sends D if anything changed (`final_sync`).
    Buffers that training changes are mixed only inside islands. Planned faults (`fit(faults=...)`) and compute="vmap"
    are refused.

    >>> strategy = HALoSStrategy(inner_optim="adamw", H=8, island_size=4, lr=3e-4)
    """

    name, title, paper, payload = "halos", "HALoS", "arXiv:2506.04531", "P b / H + P b / (H accumulation)"
    tried = ()
    ranges = ("island_lr=0.05..0.5", "outer_lr=0.05..0.5", "merge=0.1..1.0")
    equation = "theta_r by delayed Nesterov on arrival; after K, Theta likewise; theta_r <- mix(theta_r, Theta)"
    needs = "a server per island and one above; no node waits"
    identities = (
        "one island, K=1, outer_lr=1, outer_momentum=0 = async_diloco, K=d_l, eta=eta_l d_l",
        "merge=0: each island alone = async_diloco",
    )
    grace_s = 0.0

    def __init__(
        self,
        inner_optim: Any = "adamw",
        H: int = 8,
        *,
        island_size: int = 2,
        island_lr: float = 0.2,
        island_momentum: float = 0.9,
        island_delay: int | None = None,
        accumulation: int | None = None,
        outer_lr: float = 0.15,
        outer_momentum: float = 0.5,
        outer_delay: int = 2,
        merge: float = 0.25,
        dylu: bool = False,
        **options: Unpack[InnerOptions],
    ):
        check_rounds(H, type(self).__name__)
        check_count("island_size", island_size)
        self.island_delay = 4 * island_size if island_delay is None else island_delay
        self.accumulation = 8 * island_size if accumulation is None else accumulation
        for name in ("island_delay", "accumulation"):
            check_count(name, getattr(self, name))
        check_count("outer_delay", outer_delay)
        check_numbers(
            ("island_lr", island_lr, math.inf), ("island_momentum", island_momentum, 1), ("merge", merge, 1),
            ("outer_lr", outer_lr, math.inf), ("outer_momentum", outer_momentum, 1),
        )  # fmt: skip
        super().__init__(inner_optim, **options)
        self.H, self.dylu, self.island_size = H, dylu, island_size
        self.island_lr, self.island_momentum = island_lr, island_momentum
        self.outer_lr, self.outer_momentum, self.outer_delay, self.merge = outer_lr, outer_momentum, outer_delay, merge

    def server(self, fleet: Fleet) -> MergingServer:
        """Return a new server of one island, whose theta_r is the fleet's initial parameters."""
        theta = [block.params[0] for block in fleet.blocks]
        return MergingServer(
            theta, self.island_delay, self.island_lr, self.island_momentum, self.accumulation, self.merge
        )

    def global_server(self, fleet: Fleet) -> RuleServer:
        """Return a new global server, whose Theta is the fleet's initial parameters."""
        theta = [block.params[0] for block in fleet.blocks]
        d = self.outer_delay
        return RuleServer(theta, "delayed_nesterov", K=d, eta=self.outer_lr * d, beta=self.outer_momentum)

    def relays(self, islands: list[list[int]], servers: list[Any], fleet: Fleet, order: Order) -> Relays:
        return Relays(islands, servers, self.global_server(fleet), fleet, order)

    def plan(self, P: float, N: int, b: float) -> Plan:
        n, K = min(self.island_size or N, N), self.accumulation
        both = [("island", self.H, 1), ("relay", self.H * K, n)]  # n nodes share a relay
        traffic = tuple(Traffic(kind, P * b, H, count, way) for way, H, count in both for kind in ("push", "pull"))
        return Plan(type(self).__name__, traffic, self.H * K / n, local_steps=self.local_steps)
