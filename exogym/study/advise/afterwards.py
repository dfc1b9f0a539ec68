"""How far a prediction was off, once the run is over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from exogym.errors import ArgumentError
from exogym.network import Network, readable_seconds
from exogym.strategy import Strategy
from exogym.strategy.traffic import Plan, Traffic
from exogym.study.advise.plans import plan_of
from exogym.study.advise.prediction import advise


def what_it_sends(strategy: Strategy, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return "plan" and "parameters" of a run, for its description; {} where no formula of a step is known.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> run = {"model": [["w", [1000], "torch.float32"]], "num_nodes": 2}
    >>> what_it_sends(DiLoCoStrategy(H=10), run)["plan"]["traffic"][0]["payload_bytes"]
    4000.0
    """
    sizes = [(math.prod(shape), getattr(torch, name.removeprefix("torch."))) for _, shape, name in description["model"]]
    parameters = sum(count for count, _ in sizes)
    bytes_per_element = sum(count * dtype.itemsize for count, dtype in sizes) / parameters
    try:
        plan = plan_of(strategy, parameters, description["num_nodes"], bytes_per_element)
    except ArgumentError:
        return {}
    # nodes that do not wait for each other have no step of the fleet; who is asked for a round is not traffic alone
    if plan.local_steps is not None or plan.rounds is not None:
        return {}
    sent = [{name: value for name, value in asdict(t).items() if value is not None} for t in plan.traffic]
    return {"parameters": parameters, "plan": {"couples_every": plan.couples_every, "traffic": sent}}


def held_against(network: Network, description: Mapping[str, Any], step_s: Sequence[float] | None) -> str:
    """Return a line on the step that was predicted and the one that a run took, by the run's description.

    Args:
        network: that the prediction starts from; with it the seconds of a step on each host, if they were measured.
        description: of a run on hosts, with `what_it_sends` and "seconds_per_step".
        step_s: seconds of a step on each host, for a network that does not have them: those of the run.

    Raises:
        ArgumentError: a network of another number of nodes, or no seconds of a step.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> network = Network.of({"num_nodes": 2, "collectives": {"exact all_reduce": {"4000": 1.0}}})
    >>> run = {"model": [["w", [1000], "torch.float32"]], "num_nodes": 2, "seconds_per_step": 0.25}
    >>> held_against(network, run | what_it_sends(DiLoCoStrategy(H=10), run), [0.1, 0.1])
    'a step was predicted to take 200 ms and took 250 ms: 20.0 % less; 100 ms of it communication'
    """
    known = None if network.measurement is None else network.measurement.step_s
    steps = known if known is not None else step_s
    if steps is None:
        raise ArgumentError("how long a step takes is not known: measure it, exogym doctor --measure --task NAME")
    sent = description["plan"]
    plan = Plan("run", tuple(Traffic(**fields) for fields in sent["traffic"]), sent["couples_every"])
    row = advise(
        parameters=description["parameters"], num_nodes=description["num_nodes"], network=network,
        step_seconds=list(steps), strategies=[plan], algorithm="recorded",
    ).rows[0]  # fmt: skip
    predicted_s, took_s = row.seconds_per_step, description["seconds_per_step"]
    off = predicted_s / took_s - 1
    said = (
        f"a step was predicted to take {readable_seconds(predicted_s)} and took {readable_seconds(took_s)}: "
        f"{abs(off):.1%} {'more' if off > 0 else 'less'}; {readable_seconds(predicted_s - max(steps))} of it "
        "communication"
    )
    return said.replace("%", " %")
