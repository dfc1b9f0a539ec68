"""Publications' measurements at scale: how many steps methods take to DDP's loss.

Each row of `published.csv` is a cell of a publication's table, which compares a method with data-parallel training at
equal tokens. The column `where` names the table, and `read` how we read it: as text, as HTML or in the repository.
`loss_ratio` is the method's loss over DDP's. The scaling law of Hoffmann et al. (arXiv:2203.15556) for P parameters and
D tokens (20 P if not stated) converts it to a multiple m of DDP's steps:

    L = 1.69 + 406.4 / P^0.34 + 410.7 / D^0.28,    s = - d log L / d log D,    log m = log(loss_ratio) / s

For a model of P parameters on N nodes and a method that synchronizes every H steps, the distance to a cell i is

    d_i = |log10(P / P_i)| + |log2(N / N_i)| + 1 if the cell's rates were not tuned for the method, or if it continues a
          model that DDP pretrained,  + skew / (0.3 log 10) if the question's data have a label skew

A cell has the weight 10^(-d_i) in the weighted median of all log m_i + 0.12 log(H / H_i): ten times less for each
factor of ten in parameters and each factor of two in nodes. Cells of the same strategy with other options count only if
no cell has the same options. The uncertainty and the probability that the method never reaches the loss follow from
`exogym.study.advise.beliefs`, where each cell is a place of this weight.

Our own tasks are one more point, with 0.1M parameters on 4 to 16 nodes, at the distance d_0. If d is the distance of
the nearest cell, the publications have the weight 10^(-d) / (10^(-d) + 10^(-d_0)), and our tasks the rest. From d_0 = 1
on, the rule of thumb's uncertainty is added to our tasks' uncertainty, because at 124M parameters they are off by a
factor of 1.8 for the published methods.

>>> from exogym.study.advise.beliefs import Belief
>>> belief, source = at_scale(Belief(1.0, 0.5, 0.2), "diloco:H=30", 30, 50_000, 1e9, 4)
>>> round(belief.steps, 2), source
(1.09, 'arXiv:2501.18512 and arXiv:2503.09799, 90M to 10B parameters on 2 to 8 nodes; nearest 1.3B on 4')
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from exogym.study.advise.beliefs import (
    ALIKE,
    LEAST_NEVER,
    MORE_PER_LOG,
    MOST_NEVER,
    REFERENCE,
    ROUNDS,
    SPREAD,
    WORTH,
    Belief,
    h_of,
    known,
    without_h,
)

TABLE = Path(__file__).with_name("published.csv")
OURS = 1e5, 4, 16  # our own tasks: parameters of the largest, least and most nodes
LEAST = 0.05  # the weight from which publications, or our tasks, are named as a source
CELL_ROUNDS = 100  # synchronizations of a published run; the shortest have about as many


@dataclass(frozen=True)
class Cell:
    """A cell of a publication's table.

    Attributes:
        source: the publication's number on arXiv.
        strategy: the method, as text.
        nodes, parameters: N, and P.
        tokens: D, of all nodes together.
        loss_ratio: the method's loss over DDP's at equal tokens. The loss is the logarithm of a printed perplexity.
        but: "pretrained" if the runs continue a model that DDP pretrained, "untuned" if the method has DDP's learning
            rates, or "".
    """

    source: str
    strategy: str
    nodes: int
    parameters: float
    tokens: float
    loss_ratio: float
    but: str

    @property
    def log_steps(self) -> float:
        """The logarithm of the method's steps over DDP's, to DDP's loss."""
        return math.log(self.loss_ratio) / slope(self.parameters, self.tokens)

    def distance(self, parameters: float, num_nodes: int) -> float:
        """Return the distance to a model and fleet: factors of ten in parameters plus factors of two in nodes."""
        away = abs(math.log10(parameters / self.parameters)) + abs(math.log2(num_nodes / self.nodes))
        return away + (self.but != "")


def slope(parameters: float, tokens: float) -> float:
    """Return s = - d log L / d log D of the scaling law.

    >>> round(slope(1e9, 20e9), 3)
    0.058
    """
    of_tokens = 410.7 / tokens**0.28
    return 0.28 * of_tokens / (1.69 + 406.4 / parameters**0.34 + of_tokens)


@cache
def cells() -> tuple[Cell, ...]:
    """Return all published cells."""
    found = []
    for row in csv.DictReader(TABLE.read_text("utf-8").splitlines()):
        loss = math.log if row["measure"] == "perplexity" else float
        ratio, parameters = loss(float(row["method"])) / loss(float(row["ddp"])), float(row["parameters"])
        tokens = float(row["tokens"] or 20 * parameters)
        found.append(Cell(row["source"], row["strategy"], int(row["nodes"]), parameters, tokens, ratio, row["but"]))
    return tuple(found)


def at_scale(
    ours: Belief,
    method: str,
    period: int,
    steps: int,
    parameters: float,
    num_nodes: int,
    skew: float = 0.0,
    without: str = "",
) -> tuple[Belief, str]:
    """Return a belief for a model of the given size, and its sources in words.

    Args:
        ours: the belief from our own tasks.
        method: the strategy as text.
        period: the steps between its synchronizations.
        steps: DDP's steps to the target.
        parameters, num_nodes: P, and N.
        skew: the label skew of the data.
        without: a publication to leave out.
    """
    if method.partition(":")[0] == REFERENCE:
        return ours, ""
    small, least, most = OURS
    tasks = f"our {len(known())} tasks of at most {_short(small)} parameters on {least} to {most} nodes"
    ours_far = max(0.0, math.log10(parameters / small)) + max(0.0, math.log2(num_nodes / most))
    unsure = min(1.0, ours_far)
    ours = Belief(ours.mean, math.hypot(ours.sd, SPREAD * unsure), max(ours.never, LEAST_NEVER * unsure))
    found = [cell for cell in _alike(method) if cell.source != without]
    if not found:
        return ours, f"{tasks}; we could read no publication about it"
    skewed = skew / ALIKE / math.log(10)  # publications distribute their data at random
    far = np.array([cell.distance(parameters, num_nodes) + skewed for cell in found])
    H = h_of(method) or period
    log_steps = [cell.log_steps + MORE_PER_LOG * math.log(H / (h_of(cell.strategy) or H)) for cell in found]
    theirs = _median(np.array(log_steps), 10.0**-far, period, steps)
    share = 1 / (1 + 10 ** (float(far.min()) - ours_far))
    apart = share * (1 - share) * (theirs.mean - ours.mean) ** 2  # the variance between the two
    belief = Belief(
        share * theirs.mean + (1 - share) * ours.mean,
        math.sqrt(share * theirs.sd**2 + (1 - share) * ours.sd**2 + apart),
        share * theirs.never + (1 - share) * ours.never,
    )
    papers = _said([cell for cell, d in zip(found, far, strict=True) if d <= far.min() + 1], parameters, num_nodes)
    return belief, "; ".join([papers] * (share >= LEAST) + [tasks] * (share <= 1 - LEAST))


def _alike(method: str) -> list[Cell]:
    """Return the strategy's cells with the same options except H or, if there are none, with any options."""
    same = [cell for cell in cells() if cell.strategy.partition(":")[0] == method.partition(":")[0]]
    return [cell for cell in same if without_h(cell.strategy) == without_h(method)] or same


def _median(log_steps: np.ndarray, weights: np.ndarray, period: int, steps: int) -> Belief:
    """Return the belief around the weighted median."""
    order = log_steps.argsort()
    sums = weights[order].cumsum()
    median = float(log_steps[order][np.searchsorted(sums, sums[-1] / 2)])
    count = WORTH + float(sums[-1])
    squares = WORTH * SPREAD**2 + float(weights @ (log_steps - median) ** 2)
    arrived = float(sums[-1]) * min(1.0, steps / period / CELL_ROUNDS)
    never = min(MOST_NEVER, LEAST_NEVER + ROUNDS * period / steps) * WORTH / (WORTH + arrived)
    return Belief(median, math.sqrt(squares / count * (1 + 1 / count)), never)


def _said(used: list[Cell], parameters: float, num_nodes: int) -> str:
    """Return the cells' publications, their range, and the distance of the nearest cell."""
    *papers, last = sorted({f"arXiv:{cell.source}" for cell in used})
    names = (", ".join(papers) + " and " if papers else "") + last
    sizes, nodes = ({min(x), max(x)} for x in ([c.parameters for c in used], [c.nodes for c in used]))
    span = f"{' to '.join(map(_short, sorted(sizes)))} parameters on {' to '.join(map(str, sorted(nodes)))} nodes"
    nearest = min(used, key=lambda cell: cell.distance(parameters, num_nodes))
    text = f"{names}, {span}; nearest {_short(nearest.parameters)} on {nearest.nodes}"
    for what, ratio in (("parameters", parameters / nearest.parameters), ("nodes", num_nodes / nearest.nodes)):
        text += f", {max(ratio, 1 / ratio):.0f} times {'fewer' if ratio > 1 else 'more'} {what}" * (not 0.5 < ratio < 2)
    return text


def _short(count: float) -> str:
    """Return a short text for a number of parameters.

    >>> _short(1.3e9), _short(124e6), _short(1e5)
    ('1.3B', '124M', '0.1M')
    """
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
