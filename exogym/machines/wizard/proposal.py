"""A plan for a task on hosts that were measured: what to run, how long it should take, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exogym.core.progress import readable_bytes
from exogym.errors import ArgumentError, checked
from exogym.network import Network, readable_seconds
from exogym.study.advise import Advice, Row, advise

PERIODS = (10, 30, 100, 300)  # of DiLoCo, as far as a run has a few rounds of it
LEAST_ROUNDS = 4
EVERY_STEP = ("ddp", "sparta:p_sparta=0.005")
UNEQUAL = 1.25  # times as slow: worth sharing the load out
START = "10 to 20 s"  # until the processes of two hosts have met
FORWARD = 1 / 3  # of a training step is what an evaluation of as many examples takes, where it was not measured


@dataclass(frozen=True)
class Proposal:
    """What to run and what to expect of it.

    Attributes:
        strategy: as on the command line, with its H.
        steps, batch_size: of each node.
        seconds: of training with evaluations, without the start and copies.
        alone_s: that the fastest host would take for as many examples by itself.
        speedup, speedup_range: of the steps, over the fastest host alone; as predicted, and its likely least and most.
        because: why this strategy and this batch.
        hints: what else the measurement says.
        advice: all strategies that were compared.
    """

    strategy: str
    steps: int
    batch_size: int
    seconds: float
    alone_s: float
    speedup: float
    speedup_range: tuple[float, float]
    because: list[str]
    hints: list[str]
    advice: Advice

    def __str__(self) -> str:
        least, most = self.speedup_range
        lines = [
            f"strategy {self.strategy}, {self.steps} steps of {self.batch_size} examples on each node",
            f"about {readable_seconds(self.seconds)} of training, plus {START} to start; the fastest computer alone "
            f"would need about {readable_seconds(self.alone_s)} for as many examples; without evaluations "
            f"{self.speedup:.3g} times as fast, likely {least:.3g} to {most:.3g}",
            *(f"because {text}" for text in self.because),
        ]
        return "\n".join(lines + self.hints)


@checked
def propose(
    *,
    network: Network,
    parameters: float,
    steps: int,
    batch_size: int,
    step_s: Sequence[float] | None = None,
    strategy: str | None = None,
    evaluations: int = 0,
    evaluated: int = 0,
) -> Proposal:
    """Return a plan for hosts that were measured.

    The strategy is the recommendation of `exogym advise`: among strategies under which the slowest node computes nine
    tenths of its time, the strategy that exchanges the whole model most often; otherwise the fastest. The batch is the
    task's, for which its learning rate was chosen.

    Args:
        network: measured, with a step of each node.
        parameters: trainable numbers of the model.
        step_s: of each node, instead of those measured with the network.
        strategy: this one instead of the recommended.
        evaluations, evaluated: how often, and on how many examples, rank 0 evaluates, which is on the first host.

    Raises:
        ArgumentError: the network is no measurement with steps, or no such strategy.

    >>> links = Network.measured(all_reduce={4: 1e-3, 10_000: 2e-3}, num_nodes=2)
    >>> plan = propose(network=links, parameters=2410, steps=400, batch_size=4, step_s=[1e-3, 1e-3])
    >>> plan.strategy, plan.alone_s
    ('diloco:H=30', 0.8)
    """
    measurement = network.measurement
    nodes = network.num_nodes
    seconds = step_s if step_s is not None or measurement is None else measurement.step_s
    if seconds is None or nodes is None:
        raise ArgumentError("network= holds no measured step of the task: run exogym doctor --measure --task NAME")
    periods = [H for H in PERIODS if steps // H >= LEAST_ROUNDS]
    compared = [*EVERY_STEP, *(f"diloco:H={H}" for H in periods or [max(1, steps // LEAST_ROUNDS)])]
    if strategy is not None and strategy not in compared:
        compared.append(strategy)
    advice = advise(
        parameters=parameters, num_nodes=nodes, network=network, step_seconds=list(seconds), strategies=compared,
        algorithm="recorded",
    )  # fmt: skip
    row = advice.recommended if strategy is None else _row_of(advice, strategy)
    if row is None:
        raise ArgumentError("no strategy can be recommended: choose one with --strategy")
    known = None if measurement is None else measurement.evaluation_s
    forward_s = [evaluated / batch_size * s * FORWARD for s in seconds]
    evaluation_s = [evaluations * s for s in (forward_s if known is None else known)]
    because = [advice.because if strategy is None else "you chose it", _sent(row)]
    because.append(f"the task's learning rate was chosen for {batch_size} examples in a batch")
    hints = []
    if max(seconds) > UNEQUAL * min(seconds):
        hints.append(
            f"the slowest computer takes {max(seconds) / min(seconds):.2g} times as long for a step as the fastest: "
            "--balance steps divides the load by speed"
        )
    if known is None and evaluations:
        hints.append("no evaluation was measured; the estimate takes a third of a step for as many examples")
    if row.speedup < 1:
        hints.append("the fastest computer alone would be faster than all computers together")
    return Proposal(
        row.strategy, steps, batch_size, steps * row.seconds_per_step + evaluation_s[0],
        steps * nodes * min(seconds) + evaluation_s[int(np.argmin(seconds))], row.speedup,
        row.speedup_range or (row.speedup, row.speedup), because, hints, advice,
    )  # fmt: skip


def _row_of(advice: Advice, strategy: str) -> Row:
    return next(row for row in advice.rows if row.strategy == strategy)


def _sent(row: Row) -> str:
    sent = readable_bytes(row.tx_bytes_per_step)
    return f"each node computes {row.utilisation:.0%} of its time and sends {sent} a step"
