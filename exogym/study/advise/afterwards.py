"""Compare the predicted seconds per step with the finished run's seconds per step."""

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
    """Return a run's collectives ("plan") and its number of parameters ("parameters"), to add to its description.

    Return {} if no formula gives the time of a step.

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
    # If nodes don't wait for each other, the fleet has no step. If clients are sampled, traffic alone is not enough.
    if plan.local_steps is not None or plan.rounds is not None:
        return {}
    sent = [{name: value for name, value in asdict(t).items() if value is not None} for t in plan.traffic]
    kept = {"couples_every": plan.couples_every, "needs_gradients": plan.needs_gradients, "traffic": sent}
    return {"parameters": parameters, "plan": kept}


def held_against(network: Network, description: Mapping[str, Any], step_s: Sequence[float] | None) -> str:
    """Return a line that compares a run's predicted seconds per step with its real seconds per step.

    Args:
        network: the network of the prediction, with each host's seconds per step if they were measured.
        description: the description of a run on hosts, with the entries of `what_it_sends` and "seconds_per_step".
        step_s: the run's computing seconds per step on each host, used if the network has no measured seconds.

    Raises:
        ArgumentError: the network has another number of nodes, or the seconds per step are unknown.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> network = Network.of({"num_nodes": 2, "collectives": {"exact all_reduce": {"4000": 1.0}}})
    >>> run = {"model": [["w", [1000], "torch.float32"]], "num_nodes": 2, "seconds_per_step": 0.25}
    >>> held_against(network, run | what_it_sends(DiLoCoStrategy(H=10), run), [0.1, 0.1])
    'a step took 250 ms; predicted were 200 ms (100 ms of it communication), 20.0 % too little'
    """
    known = None if network.measurement is None else network.measurement.step_s
    steps = known if known is not None else step_s
    if steps is None:
        raise ArgumentError("the time of a step is unknown: measure it with exogym doctor --measure --task NAME")
    sent = description["plan"]
    traffic, needs = tuple(Traffic(**fields) for fields in sent["traffic"]), sent.get("needs_gradients", False)
    plan = Plan("run", traffic, sent["couples_every"], needs_gradients=needs)
    row = advise(
        parameters=description["parameters"], num_nodes=description["num_nodes"], network=network,
        step_seconds=list(steps), strategies=[plan], algorithm="recorded",
    ).rows[0]  # fmt: skip
    predicted_s, took_s = row.seconds_per_step, description["seconds_per_step"]
    off = predicted_s / took_s - 1
    said = (
        f"a step took {readable_seconds(took_s)}; predicted were {readable_seconds(predicted_s)} "
        f"({readable_seconds(predicted_s - max(steps))} of it communication), "
        f"{abs(off):.1%} too {'much' if off > 0 else 'little'}"
    )
    return said.replace("%", " %")
