"""The strategies, once: whoever enters the table is held against every law, in one process, several, and on hosts.

A method of `exogym.contrib` enters a table of its own, and is held against the three laws of tests/contrib.
"""

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from exogym.strategy import (
    CHOCOStrategy,
    CocktailSGDStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DESLOCStrategy,
    DiLoCoStrategy,
    EDiTStrategy,
    EF21Strategy,
    FedAvgStrategy,
    FedNovaStrategy,
    FedOptStrategy,
    FedProxStrategy,
    GossipStrategy,
    GPAStrategy,
    GradientPushStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    OneBitAdamStrategy,
    PeriodicModule,
    PierStrategy,
    PostLocalSGDStrategy,
    PowerSGDStrategy,
    PULSELoCoStrategy,
    QSGDStrategy,
    QuantizedReduceStrategy,
    ScaffoldStrategy,
    SignSGDStrategy,
    SimpleReduceStrategy,
    SlowMoStrategy,
    SNOOStrategy,
    SparseLoCoStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
    TopKStrategy,
)
from exogym.strategy.capabilities import ChoosesClients
from exogym.strategy.communicate import all_reduce, exchange
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.registry import STRATEGIES as KNOWN
from exogym.strategy.registry import parse_strategy
from exogym.strategy.sparta import SparseCommunicator

NODES, P = 4, 178
PAGE = Path(__file__).parent.parent / "docs" / "strategies.md"
OWN = Path(__file__).parent.parent / "docs" / "strategies/own.md"
TABLES = Path(__file__).parent.parent / "docs" / "reference/strategies.md"
QUANTISED = 6 * (math.ceil(18 * 8 / 8) + 4)


class OneNode(Strategy):
    """A user's strategy with state of its own: an average of the parameters every third step, and a momentum."""

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        self.momentum = [torch.zeros_like(p) for p in self._parameters()]
        self.seen = 0

    def step(self):
        self.update_parameters()
        self.seen += 1
        with torch.no_grad():
            for p, m in zip(self._parameters(), self.momentum, strict=True):
                if self.seen % 3 == 0:
                    all_reduce(p, op="mean")
                m.mul_(0.5).add_(p, alpha=1e-3 * (self.rank + 1))
                p.sub_(m, alpha=1e-2)
        super().step()


class Gossip(Strategy):
    """Each node averages with another one at a time, which changes; the last of an odd number is alone."""

    def step(self):
        self.update_parameters()
        partner = self.rank ^ 1 if self.local_step % 2 else self.num_nodes - 1 - self.rank
        for p in self._parameters() if partner < self.num_nodes else ():
            p.data.add_(exchange(p.data, partner)).mul_(0.5)
        super().step()


class Stacked(OneNode):
    stacked = True

    def step(self):
        self.communicate_gradients()
        self.update_parameters()
        Strategy.step(self)


def composition():
    modules = [SparseCommunicator(sparsification_rate=0.1), AveragingCommunicator(H=4, island_size=2)]
    return CommunicateOptimizeStrategy("adamw", modules, lr=0.02, max_norm=1.0)


class Entry(NamedTuple):
    """A strategy, and what the laws must know of it.

    Attributes:
        make: returns a fresh one.
        payload: (bytes of a row, steps) -> bytes that each of four nodes hands over; None: no formula.
        any_size: it is for any number of nodes; otherwise it says what each of four does.
        alone: one node alone ends the run that four nodes end.
    """

    make: Callable[[], Strategy]
    payload: Callable[[int, int], float] | None = None
    any_size: bool = True
    alone: bool = True

    @property
    def on_rows(self) -> bool:
        """Whether it is written for the rows of a fleet, not for one node."""
        return self.make().driven_by == "rounds"

    @property
    def is_stacked(self) -> bool:
        """Whether it is written for one node and gets the tensors of all."""
        return not self.on_rows and self.make().stacked

    @property
    def every_step(self) -> bool:
        """Whether nodes meet at every step, so that none may be slow."""
        return self.make().needs_gradients


STRATEGIES: dict[str, Entry] = {  # of the core, and of users
    "ddp": Entry(lambda: SimpleReduceStrategy(lr=0.02, max_norm=1.0), lambda row, steps: row * steps),
    "ddp momentum": Entry(lambda: SimpleReduceStrategy("sgd", lr=0.1), lambda row, steps: row * steps),
    "diloco": Entry(
        lambda: DiLoCoStrategy(lr=0.02, H=5, lr_scheduler="cosine", warmup_steps=3),
        lambda row, steps: row * math.ceil(steps / 5),
    ),
    "diloco adam": Entry(
        lambda: DiLoCoStrategy(lr=0.02, H=5, outer_optim="adam", outer_lr=0.01),
        lambda row, steps: row * math.ceil(steps / 5),
    ),
    "diloco uneven rounds": Entry(
        lambda: DiLoCoStrategy(lr=0.02, H=lambda r: r + 2, outer_lr_scheduler="cosine", outer_warmup_rounds=1)
    ),
    "diloco delayed": Entry(
        lambda: DiLoCoStrategy(lr=0.02, H=5, delay=3, outer_momentum=0.6),
        lambda row, steps: row * math.ceil(steps / 5),
    ),
    "diloco a round late": Entry(
        lambda: DiLoCoStrategy(lr=0.01, H=4, delay=4, outer_lr=0.4, outer_momentum=0.3),
        lambda row, steps: row * steps / 4,
    ),
    "diloco eager": Entry(
        lambda: DiLoCoStrategy(lr=0.02, H=4, eager=True, outer_lr=0.4, outer_momentum=0.5),
        lambda row, steps: row * steps / 4,
    ),
    "diloco islands": Entry(
        lambda: DiLoCoStrategy(lr=0.02, H=6, island_size=2, island_H=2), lambda row, steps: row * steps / 2
    ),
    "muloco": Entry(lambda: MuLoCoStrategy(lr=0.02, H=4, outer_lr=0.7), lambda row, steps: row * steps / 4),
    "post-local sgd": Entry(
        lambda: PostLocalSGDStrategy("adamw", lr=0.02, H=4, start_step=8),
        lambda row, steps: row * (8 + (steps - 8) / 4),
    ),
    "streaming diloco": Entry(  # at the end the last layer is sent once more
        lambda: StreamingDiLoCoStrategy(
            lr=0.02, H=8, fragment_sync_delay=1, fragment_update_alpha=0.5, outer_lr=0.4, pattern="sequential"
        ),
        lambda row, steps: row * steps / 8 + 4 * (2 * 16 + 2),
    ),
    "streaming diloco 4 bit": Entry(
        lambda: StreamingDiLoCoStrategy(lr=0.02, H=4, num_fragments=3, bits=4, outer_lr=0.4),
    ),
    "gossip": Entry(lambda: GossipStrategy("adamw", H=2, lr=0.02), lambda row, steps: 2 * row * steps / 2),
    "noloco": Entry(lambda: NoLoCoStrategy(H=4, lr=0.02), lambda row, steps: 2 * row * steps / 4),
    "noloco in threes": Entry(lambda: NoLoCoStrategy(H=4, group_size=3, lr=0.02)),
    "sparta": Entry(lambda: SPARTAStrategy(lr=0.02, p_sparta=0.1)),
    "sparta sequential": Entry(
        lambda: SPARTAStrategy(lr=0.02, p_sparta=0.5, compression_method="sequential"),
        lambda row, steps: row * 0.5 * steps + row,
    ),
    "sparta partitioned 4 bit": Entry(
        lambda: SPARTAStrategy(lr=0.02, p_sparta=0.5, compression_method="partitioned", quantization_bits=4),
        lambda row, steps: steps * (math.ceil(row / 4 / 2 * 4 / 8) + 4) + row,
    ),
    "sparta topk 8 bit": Entry(
        lambda: SPARTAStrategy(lr=0.02, p_sparta=0.1, compression_method="topk", quantization_bits=8, interval=4),
        lambda row, steps: QUANTISED + 6 * 18 * 4 / NODES + row,  # one node in turn announces the indices
    ),
    "sparta diloco": Entry(lambda: SPARTADiLoCoStrategy(lr=0.02, p_sparta=0.1, H=6)),
    "fedavg": Entry(lambda: FedAvgStrategy("adamw", lr=0.02, H=5), lambda row, steps: row * math.ceil(steps / 5)),
    "fedavg islands": Entry(
        lambda: FedAvgStrategy(lr=0.1, H=4, island_size=2, keep_inner_state=False),
        lambda row, steps: row * steps / 4,
    ),
    "fedavg sampling": Entry(
        lambda: FedAvgStrategy(lr=0.1, H=4, client_fraction=0.5), lambda row, steps: row * steps / 8
    ),
    "fedavg unequal work": Entry(
        lambda: FedAvgStrategy("adamw", lr=0.02, H=5, local_steps=[1, 5, 3, 2]), any_size=False, alone=False
    ),
    "fedavg epochs": Entry(lambda: FedAvgStrategy("adamw", lr=0.02, local_epochs=1), alone=False),
    "demo": Entry(
        lambda: DeMoStrategy(lr=0.01, compression_topk=4, compression_chunk=8, weight_decay=1e-3),
        # chunks of weight (16, 6), bias, BatchNorm's two, weight (2, 16), bias; at most 4 of each, 4 + 1 bytes
        lambda row, steps: steps * 5 * (4 * 2 + 4 * 2 + 4 * 2 + 4 * 2 + 4 * 2 + 2),
    ),
    "demo clipped": Entry(lambda: DeMoStrategy(lr=0.01, max_norm=0.1, compression_topk=4, compression_chunk=8)),
    # compressed gradients
    "topk": Entry(lambda: TopKStrategy(lr=0.1, density=0.1), lambda row, steps: steps * 18 * 8),
    "qsgd": Entry(lambda: QSGDStrategy(lr=0.02, bucket=50), lambda row, steps: steps * (math.ceil(P * 4 / 8) + 4 * 4)),
    "signsgd": Entry(lambda: SignSGDStrategy(lr=0.003), lambda row, steps: steps * math.ceil(P / 8)),
    "ef-signsgd": Entry(
        lambda: SignSGDStrategy(lr=0.1, error_feedback=True), lambda row, steps: steps * (math.ceil(P / 8) + 4 * 6)
    ),
    "powersgd": Entry(
        lambda: PowerSGDStrategy(lr=0.02, rank=4, start_step=2, min_rate=1.0),  # (16, 6) is worth it, (2, 16) is not
        lambda row, steps: 2 * row + (steps - 2) * 4 * (4 * (16 + 6) + P - 16 * 6),
    ),
    "sparseloco": Entry(
        lambda: SparseLoCoStrategy(lr=0.02, H=4, topk=24, chunk=64),
        # of (16, 6) 18 of each (8, 6), of three vectors 6, of (2, 16) 6 of each (2, 8), 1 of 2; indices of 6, 4, 4, 1
        lambda row, steps: steps / 4 * ((27 + 9) + 3 * (3 + 2) + (6 + 3) + (1 + 1) + 6 * 16),
    ),
    # federated
    "fedprox": Entry(lambda: FedProxStrategy(lr=0.1, mu=0.1, H=4), lambda row, steps: row * steps / 4),
    "fedopt": Entry(lambda: FedOptStrategy(lr=0.1, H=4, server_lr=0.03), lambda row, steps: row * steps / 4),
    "fedopt sampling": Entry(
        lambda: FedOptStrategy(lr=0.1, H=4, server_optim="momentum", client_fraction=0.5),
        lambda row, steps: row * steps / 8,
    ),
    "scaffold": Entry(lambda: ScaffoldStrategy(lr=0.1, H=4), lambda row, steps: 2 * row * steps / 4),
    "scaffold sampling": Entry(
        lambda: ScaffoldStrategy(lr=0.1, H=4, client_fraction=0.5, server_lr=0.8),
        lambda row, steps: 2 * row * steps / 8,
    ),
    "composition": Entry(composition),
    "one node": Entry(lambda: OneNode(lr=0.02, max_norm=1.0), lambda row, steps: row * steps / 3),
    "gossip by hand": Entry(lambda: Gossip(lr=0.02), alone=False),
    "stacked": Entry(lambda: Stacked(lr=0.02, max_norm=1.0), lambda row, steps: row * steps),
}
CONTRIB: dict[str, Entry] = {  # of `exogym.contrib`: their laws are in tests/contrib
    "slowmo": Entry(lambda: SlowMoStrategy("adamw", lr=0.02, H=4), lambda row, steps: row * steps / 4),
    "pier": Entry(
        lambda: PierStrategy(lr=0.02, H=4, outer_lr=0.7, outer_momentum=0.6, warmup=0.3),
        lambda row, steps: row * (4 * math.ceil(0.3 * steps / 4) + steps // 4 - math.ceil(0.3 * steps / 4)),
    ),
    "edit": Entry(lambda: EDiTStrategy(lr=0.02, H=2, memory=3, decay=0.2, reject=1.0, clip=0.15)),
    "gpa": Entry(lambda: GPAStrategy(lr=0.02, mu_x=0.8), lambda row, steps: row * steps),
    "snoo": Entry(lambda: SNOOStrategy(lr=0.02, H=4, outer_momentum=0.5), lambda row, steps: row * steps),
    "choco": Entry(lambda: CHOCOStrategy(lr=0.1, density=0.1, gamma=0.3), lambda row, steps: 2 * steps * 18 * 8),
    "choco signs": Entry(
        lambda: CHOCOStrategy("adamw", "exponential", 2, gamma=0.3, compressor="sign", lr=0.02),
        lambda row, steps: 3 * (math.ceil(P / 8) + 4 * 6) * steps / 2,
    ),
    "cocktail": Entry(  # shards of 45 entries: 18 are drawn, 9 are sent
        lambda: CocktailSGDStrategy(lr=0.02, p=0.4, topk=0.5, bucket=4), lambda row, steps: steps * 5 * (3 + 5 + 4 * 3)
    ),
    "gradient push": Entry(lambda: GradientPushStrategy("adamw", lr=0.02), lambda row, steps: (row + 8) * steps),
    "desloc": Entry(
        lambda: DESLOCStrategy(lr=0.02, H=2, H_u=4, H_v=6), lambda row, steps: row * steps * (1 / 2 + 1 / 4 + 1 / 6)
    ),
    "ef21": Entry(lambda: EF21Strategy("adamw", lr=0.02, density=0.1), lambda row, steps: steps * 18 * 8),
    "ef21 signs": Entry(
        lambda: EF21Strategy(lr=0.1, compressor="sign"), lambda row, steps: steps * (math.ceil(P / 8) + 4 * 6)
    ),
    "1-bit adam": Entry(  # chunks of 24, 4, 4, 4, 8 and 1 entries, six scales
        lambda: OneBitAdamStrategy(lr=0.01, warmup=0.3),
        lambda row, steps: row * math.ceil(0.3 * steps) + (steps - math.ceil(0.3 * steps)) * 5 * (6 + 4 * 6),
    ),
    "qreduce": Entry(lambda: QuantizedReduceStrategy(lr=0.02), lambda row, steps: steps * 5 * (math.ceil(P / 4) + 4)),
    "pulseloco": Entry(lambda: PULSELoCoStrategy(lr=0.005, H=4)),  # some entries move less than BF16 sees
    "fednova": Entry(
        lambda: FedNovaStrategy(lr=0.1, H=4, local_steps=[1, 4, 3, 2]),
        lambda row, steps: (row + 8) * steps / 4,
        any_size=False,
        alone=False,
    ),
}
OURS = {name: kind for name, kind in KNOWN.items() if kind.__module__.startswith("exogym.")}
METHODS = {name: kind for name, kind in OURS.items() if kind.__module__.startswith("exogym.contrib.")}
CORE = {name: kind for name, kind in OURS.items() if name not in METHODS}
ENTERED = {type(entry.make()) for entry in (STRATEGIES | CONTRIB).values()}
for entries, kinds in ((STRATEGIES, CORE), (CONTRIB, METHODS)):
    entries |= {  # a new algorithm enters by itself; where all is asynchronous, other laws hold (test_async)
        name: Entry(functools.partial(parse_strategy, name, lr=0.02, H=4))
        for name, kind in kinds.items()
        if kind.driven_by != "clock" and kind not in ENTERED
    }
# One of each kind, by what nodes send, when, and what they keep. A law of the house (processes, stops, faults, hosts)
# is fast for these and slow for the others; `test_laws` holds all laws over every strategy.
OF_EACH_KIND = (
    *("ddp", "demo", "powersgd"),  # gradients: as they are, with a rest that a node keeps, with factors that all keep
    *("diloco", "streaming diloco 4 bit"),  # rounds: an outer step, one of fragments
    *("gossip", "noloco"),  # a graph, pairs
    *("sparta", "fedavg sampling", "scaffold"),  # chosen indices, chosen nodes, corrections of local steps
    *("one node", "stacked"),  # a user's own
)


def table():
    """Return a Markdown table of payload, collectives and needs; strategies that share all of these share a line."""
    heads = ("name", "payload of a node per step", "collectives", "who communicates, and when")
    lines = {}
    for name, kind in sorted(OURS.items()):
        kinds = dict.fromkeys(traffic.kind for traffic in kind().plan(1e6, 4, 4).traffic)
        lines.setdefault((kind.payload, ", ".join(kinds), kind.needs), []).append(f"`{name}`")
    return _markdown(heads, [(", ".join(names), *cells) for cells, names in lines.items()])


def table_of_identities():
    """Return a Markdown table of ExoGym's strategies, with class, paper, equation and identities."""
    heads = ("name and class", "equation", "equal to")
    lines = [
        (f"{_linked(f'`{name}`', kind.paper)}, `{kind.__name__}`", f"`{kind.equation}`", "; ".join(kind.identities))
        for name, kind in sorted(OURS.items())
    ]
    return _markdown(heads, lines)


def _linked(name, paper):
    """Return the name as a link to its paper, or with the paper in parentheses if it has no address."""
    for site, address in (("arXiv:", "https://arxiv.org/abs/"), ("openreview ", "https://openreview.net/forum?id=")):
        if paper.startswith(site):
            return f"[{name}]({address}{paper.removeprefix(site)})"
    return f"{name} ({paper})"


def _markdown(heads, lines):
    return "".join(f"| {' | '.join(line)} |\n" for line in [heads, ("---",) * len(heads), *lines])


def table_of_the_page(head="| name | payload"):
    """Return docs/reference/strategies.md before its table with this head, the table, and the text after it."""
    page = TABLES.read_text("utf-8")
    start = page.index(head)
    end = page.find("\n\n", start) + 1 or len(page)
    return page[:start], page[start:end], page[end:]


def identities_of_the_page():
    return table_of_the_page("| name and class")


class Broken(PeriodicModule, ChoosesClients):
    """An average every third step, with one law broken on purpose."""

    interval_steps = 3

    def __init__(self, law=None):
        super().__init__()
        self.law = law

    def start(self, fleet, run):
        super().start(fleet, run)
        self.secret = torch.zeros(len(fleet), fleet.blocks[0].layout.numel)
        self.first = fleet.blocks[0].params.clone()

    def local_steps(self, first, last):
        return np.full(NODES, (last - first + 1) // 2) if self.law == "stretches" else None

    def communicate(self, fleet, step):
        for block in fleet.blocks:
            x = block.params
            if self.law == "repeatable":
                x += 1e-6 * (time.perf_counter_ns() % 1009)
            if self.law == "stopping":
                self.secret.mul_(0.9).add_(x, alpha=1e-3)
                x += self.secret
            if self.law == "placement":
                x /= 1 + 1e-3 * x.norm()
            fleet.comm.all_reduce(x, "mean", out=x)
            if self.law == "single node":
                fleet.comm.ledger.tx_bytes += 1
            if self.law == "bytes":
                fleet.comm.all_reduce(x, "mean")
            if self.law == "learns":
                x.copy_(self.first)


if __name__ == "__main__":  # make table
    before, _, after = table_of_the_page()
    TABLES.write_text(before + table() + after, "utf-8")
    before, _, after = identities_of_the_page()
    TABLES.write_text(before + table_of_identities() + after, "utf-8")
