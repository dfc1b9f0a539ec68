"""A plan for training a task on measured hosts. It says what to run, the predicted time, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exogym.errors import ArgumentError, checked
from exogym.network import Network, readable_seconds
from exogym.progress import readable_bytes
from exogym.study.advise import Advice, Row, advise

PERIODS = (10, 30, 100, 300)  # candidates for DiLoCo's H; a run must have a few rounds
LEAST_ROUNDS = 4
EVERY_STEP = ("ddp", "sparta:p_sparta=0.005")
UNEQUAL = 1.25  # the slowest computer takes this many times as long: suggest to balance the load
START = "10 to 20 s"  # time until the processes of two hosts have met
FORWARD = 1 / 3  # assumed time of an evaluation, as a share of a training step with as many examples


@dataclass(frozen=True)
class Proposal:
    """A plan that says what to run, with the predicted times.

    Attributes:
        strategy: the strategy with its H, written as on the command line.
        steps, batch_size: each node's steps and batch size.
        seconds: predicted seconds of training with evaluations, without the start of the run and the copying of files.
        alone_s: predicted seconds in which the fastest host alone would train on the same number of examples.
        speedup, speedup_range: predicted speed-up of the training steps over the fastest host alone, and the range in
            which the speed-up probably lies.
        because: reasons for this strategy and batch size.
        hints: further advice from the measurement.
        advice: all compared strategies.
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
            f"about {readable_seconds(self.seconds)} of training, plus {START} to start. The fastest computer alone "
            f"would need about {readable_seconds(self.alone_s)} for as many examples. Apart from evaluations, all "
            f"computers together are {self.speedup:.3g} times as fast, probably {least:.3g} to {most:.3g} times",
            *(f"because {text}" for text in self.because),
        ]
        return "\n".join(lines + self.hints)


def candidates(steps: int) -> list[str]:
    """Return the strategies among which the wizard chooses for a run.

    >>> candidates(400)
    ['ddp', 'sparta:p_sparta=0.005', 'diloco:H=10', 'diloco:H=30', 'diloco:H=100']
    """
    periods = [H for H in PERIODS if steps // H >= LEAST_ROUNDS]
    return [*EVERY_STEP, *(f"diloco:H={H}" for H in periods or [max(1, steps // LEAST_ROUNDS)])]


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
    """Return a plan for measured hosts.

    The plan uses the strategy that `exogym advise` recommends for a run of so many steps.

    Args:
        network: a measured network, with the time of each node's step.
        parameters: trainable parameters of the model.
        steps, batch_size: each node's steps and batch size. The task's learning rate was chosen for the task's default
            batch size.
        step_s: seconds of each node's step, instead of the measured values.
        strategy: use this strategy instead of the recommended strategy.
        evaluations, evaluated: number of evaluations on the first host, and number of examples in each evaluation.

    Raises:
        ArgumentError: the network has no measured steps, or the strategy is unknown.

    >>> links = Network.measured(all_reduce={4: 1e-2, 10_000: 2e-2}, num_nodes=2)
    >>> plan = propose(network=links, parameters=2410, steps=400, batch_size=4, step_s=[1e-3, 1e-3])
    >>> plan.strategy, plan.alone_s
    ('diloco:H=30', 0.8)
    """
    measurement, seconds = network.measurement, step_s
    if seconds is None and measurement is not None:
        seconds = measurement.step_s
    if seconds is None:
        raise ArgumentError(
            "network= has no measured step of the task: measure one with exogym doctor --measure --task NAME"
        )
    nodes, compared = len(seconds), candidates(steps)
    if strategy is not None and strategy not in compared:
        compared.append(strategy)
    advice = advise(
        parameters=parameters, num_nodes=nodes, network=network, step_seconds=list(seconds), strategies=compared,
        algorithm="recorded", steps=steps,
    )  # fmt: skip
    row = advice.recommended if strategy is None else _row_of(advice, strategy)
    if row is None:
        raise ArgumentError("no strategy can be recommended: choose one with --strategy")
    known = None if measurement is None else measurement.evaluation_s
    forward_s = [evaluated / batch_size * s * FORWARD for s in seconds]
    evaluation_s = [evaluations * s for s in (forward_s if known is None else known)]
    reasons = [advice.because if strategy is None else "you chose it", _sent(row)]
    reasons.append(f"the task's learning rate was chosen for batches of {batch_size} examples")
    hints = []
    if max(seconds) > UNEQUAL * min(seconds):
        hints.append(
            f"a step takes {max(seconds) / min(seconds):.2g} times as long on the slowest computer as on the fastest: "
            "use --balance steps to divide the load by speed"
        )
    if known is None and evaluations:
        hints.append(
            "evaluations were not measured: the estimate assumes a third of a training step for as many examples"
        )
    if row.speedup < 1:
        hints.append("the fastest computer alone would be faster than all computers together")
    return Proposal(
        row.strategy, steps, batch_size, steps * row.seconds_per_step + evaluation_s[0],
        steps * nodes * min(seconds) + evaluation_s[int(np.argmin(seconds))], row.speedup,
        row.speedup_range or (row.speedup, row.speedup), reasons, hints, advice,
    )  # fmt: skip


def _row_of(advice: Advice, strategy: str) -> Row:
    if strategy in advice.left_out:
        raise ArgumentError(advice.left_out[strategy])
    return next(row for row in advice.rows if row.strategy == strategy)


def _sent(row: Row) -> str:
    sent = readable_bytes(row.tx_bytes_per_step)
    return f"each node computes {row.utilisation:.0%} of the time and sends {sent} per step"
