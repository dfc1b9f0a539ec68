"""Which strategy suits a network: predicted seconds, bytes and utilisation, from formulas alone.

A strategy is reduced to the collectives it repeats (`Traffic`), from the byte formulas of its module; the network
prices them. With T the step of the slowest node and c the cost of a collective that is due every E steps and may be
under way for tau of them,

    seconds per step = T + sum over collectives of max(0, c - min(tau, E) T) / E
    utilisation      = mean step of a node / seconds per step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exogym.clock import DEVICES, Device, StepTime, seconds_of
from exogym.clock.devices import DEFAULT_UTILISATION
from exogym.clock.steps import TICKS_PER_S
from exogym.communicator.ledger import FACTORS
from exogym.errors import ArgumentError, check_choice, check_count, checked
from exogym.network import Network, readable_seconds, required_bandwidth
from exogym.progress import readable_bytes
from exogym.strategy import Strategy
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, Module
from exogym.strategy.demo import DCTMomentum
from exogym.strategy.diloco import DiLoCoCommunicator
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.registry import parse_strategy
from exogym.strategy.simple_reduce import GradientAverage
from exogym.strategy.sparta import SparseCommunicator

__all__ = ["Advice", "Plan", "Row", "Traffic", "advise", "plan_of", "required_bandwidth"]

DEFAULT_STRATEGIES = (
    "ddp",
    "demo",
    "diloco:H=10",
    "diloco:H=100",
    "diloco:H=500",
    "fedavg:H=10",
    "sparta:p_sparta=0.005",
    "sparta_diloco:H=100:p_sparta=0.005",
    "streaming:H=100",
    "eager:H=100",
)
LEAST_SAMPLES, DRAWS = 4, 200_000  # stretches where steps differ by chance, and steps drawn, of all nodes and stretches


@dataclass(frozen=True)
class Traffic:
    """A collective that a strategy repeats.

    Attributes:
        kind: as the communicator names it.
        payload_bytes: what each giver hands over.
        every_steps: steps from one to the next; may be a mean, and so a fraction.
        members: nodes that take part; None: all.
        algorithm: how; None: left to `advise`.
        overlap_steps: steps it may be under way before it is waited for.
    """

    kind: str
    payload_bytes: float
    every_steps: float = 1.0
    members: int | None = None
    algorithm: str | None = None
    overlap_steps: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What a strategy sends. `couples_every` is the steps after which all of the model has been exchanged once."""

    name: str
    traffic: tuple[Traffic, ...]
    couples_every: float


@dataclass(frozen=True)
class Row:
    """What is predicted for one strategy.

    Attributes:
        seconds_per_step: of the fleet; never under the slowest node's step.
        tx_bytes_per_step: that a node sends, mean over nodes.
        waiting_share: share of a node's time, mean over nodes, in which it waits for others or the wire.
        utilisation: share in which it computes; the two sum to 1.
        algorithms: how each collective is carried out.
        meets_target: whether the utilisation reaches the target.
    """

    strategy: str
    seconds_per_step: float
    tx_bytes_per_step: float
    waiting_share: float
    utilisation: float
    couples_every: float
    algorithms: tuple[str, ...]
    meets_target: bool


@dataclass(frozen=True)
class Advice:
    """Rows, fastest first, and what was assumed; `print` it for a table.

    Attributes:
        recommended: of those that meet the target the one that exchanges the whole model most often, then the one
            that sends most; None where none does. More communication keeps nodes closer together: a rule of thumb
            about quality, where the rest is arithmetic.
    """

    rows: list[Row]
    recommended: Row | None
    assumptions: list[str]

    def __str__(self) -> str:
        table = [("strategy", "s/step", "sent/node/step", "waiting", "computing", "by")]
        for row in self.rows:
            mark = " *" if row is self.recommended else ""
            shares = f"{row.waiting_share:.1%}", f"{row.utilisation:.1%}"
            sent = readable_bytes(row.tx_bytes_per_step)
            table.append((row.strategy + mark, f"{row.seconds_per_step:.4g}", sent, *shares, ", ".join(row.algorithms)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        return "\n".join([*lines, "", *(f"- {line}" for line in self.assumptions)])


@checked
def advise(
    *,
    parameters: float,
    num_nodes: int,
    network: Network | str,
    step_seconds: StepTime | Any = None,
    flops: float | None = None,
    device: str | Device = "h100",
    device_utilisation: float = DEFAULT_UTILISATION,
    bytes_per_element: float = 4,
    strategies: Sequence[str | Strategy | Plan] | None = None,
    target_utilisation: float = 0.9,
    algorithm: str = "cheapest",
) -> Advice:
    """Predict, for each strategy, how fast a fleet would train on a network.

    Args:
        parameters: P, trainable numbers of the model.
        num_nodes: N.
        network: a `Network`, or what `Network.parse` reads.
        step_seconds: of a step: a `StepTime`, a number, text, or one per node.
        flops: of a step of a node instead, from which `device` and `device_utilisation` make seconds.
        bytes_per_element: b on the wire: 4 for fp32, 2 for bf16.
        strategies: text as on the command line ("diloco:H=20"), also "streaming:H=100:fragments=8:bits=4:overlap=1"
            and "eager:H=100"; strategies; or `Plan`s of your own.
        target_utilisation: share of computing from which a strategy is good enough, over 0 and up to 1.
        algorithm: "cheapest" of those that the network knows for each collective, or "recorded", as the strategies
            name it in their events.

    Raises:
        ArgumentError: neither or both of `step_seconds` and `flops`, a number out of range, or a strategy whose
            modules no formula is known for.

    >>> advice = advise(parameters=1e8, num_nodes=8, network="lan-1g", step_seconds=0.2,
    ...     strategies=["ddp", "diloco:H=100"])
    >>> [(row.strategy, round(row.seconds_per_step, 2)) for row in advice.rows]
    [('diloco:H=100', 0.26), ('ddp', 6.15)]
    """
    if not 0 < parameters < math.inf:
        raise ArgumentError(f"parameters={parameters!r} must be a number of them, over 0")
    if not 0 < bytes_per_element < math.inf:
        raise ArgumentError(f"bytes_per_element={bytes_per_element!r} must be over 0")
    if not 0 < target_utilisation <= 1:
        raise ArgumentError(f"target_utilisation={target_utilisation!r} must be over 0 and up to 1")
    check_count("num_nodes", num_nodes)
    check_choice("algorithm", algorithm, ("cheapest", "recorded"))
    if (step_seconds is None) == (flops is None):
        raise ArgumentError("give the time of a step, step_seconds=, or its work, flops= (see exogym.clock.flops_of)")
    network = Network.of(network)
    if flops is not None:
        step_seconds = seconds_of(flops, device, device_utilisation)
    time = step_seconds if isinstance(step_seconds, StepTime) else StepTime(step_seconds)
    for name, count in (("network", network.num_nodes), ("step_seconds", time.num_nodes)):
        if count is not None and count != num_nodes:
            raise ArgumentError(f"{name} is for {count} nodes, wanted num_nodes={num_nodes}")
    if not time.seconds.all():
        raise ArgumentError("step_seconds=0: a step must take time")

    rows = []
    for given in DEFAULT_STRATEGIES if strategies is None else strategies:
        plan = given if isinstance(given, Plan) else plan_of(given, parameters, num_nodes, bytes_per_element)
        rows.append(_row(plan, num_nodes, network, time, algorithm, target_utilisation))
    rows.sort(key=lambda row: row.seconds_per_step)
    good = [row for row in rows if row.meets_target]
    best = min(good, key=lambda row: (row.couples_every, -row.tx_bytes_per_step), default=None)
    lines = _assumptions(parameters, num_nodes, network, time, bytes_per_element, algorithm)
    if flops is not None:
        name = device if isinstance(device, str) else "the device"
        peak = (DEVICES[device] if isinstance(device, str) else device).flops_per_s
        lines.insert(1, f"{flops:.3g} operations a step on {name}: {device_utilisation:.0%} of {peak:.3g} per second")
    wanted = f"{target_utilisation:.0%} computing"
    mark = f"* meets {wanted} and exchanges the whole model most often" if best else f"no strategy here meets {wanted}"
    return Advice(rows, best, [*lines, mark])


def _assumptions(
    parameters: float, num_nodes: int, network: Network, time: StepTime, b: float, algorithm: str
) -> list[str]:
    steps = time.mean_s(num_nodes)
    spread = "" if steps.min() == steps.max() else f" to {readable_seconds(float(steps.max()))}"
    how = "the fastest algorithm known for it" if algorithm == "cheapest" else "the algorithm its event names"
    return [
        f"{num_nodes} nodes, {parameters:.4g} parameters of {b:g} bytes on the wire, {network!r}",
        f"a step takes a node {readable_seconds(float(steps.min()))}{spread}; packing and adding up take no time",
        f"each collective by {how}; links are full duplex and carry nothing else",
        "gradients are sent after the whole backward pass; only streaming and eager overlap with computation",
        "buffers (BatchNorm's) and the last synchronisation are left out",
    ]


def _row(plan: Plan, num_nodes: int, network: Network, time: StepTime, algorithm: str, target: float) -> Row:
    stalls, sent, names = 0.0, 0.0, []
    every = min((t.every_steps for t in plan.traffic if not t.overlap_steps), default=math.inf)
    step_s = _slowest_step_s(time, num_nodes, every)
    for traffic in plan.traffic:
        count = min(num_nodes if traffic.members is None else traffic.members, num_nodes)
        members: Any = count if count == num_nodes else np.linspace(0, num_nodes - 1, count).astype(int).tolist()
        way = traffic.algorithm
        if way is None and algorithm == "cheapest":
            way = network.cheapest(traffic.kind, traffic.payload_bytes, members)[0]
        cost_s = network.duration_s(network.cost(traffic.kind, traffic.payload_bytes, members, way))
        stalls += max(0.0, cost_s - min(traffic.overlap_steps, traffic.every_steps) * step_s) / traffic.every_steps
        of_all = 1.0 if traffic.members is None or traffic.algorithm != "server" else count / num_nodes
        factor = _tx_factor(traffic.kind, way, count)
        sent += factor * traffic.payload_bytes * of_all / traffic.every_steps
        names.append(f"{way or 'ring'} {traffic.kind}")
    seconds = step_s + stalls
    computing = float(time.mean_s(num_nodes).mean()) / seconds
    return Row(
        plan.name, seconds, sent, 1 - computing, computing, plan.couples_every, tuple(names), computing >= target
    )


def _slowest_step_s(time: StepTime, num_nodes: int, every: float) -> float:
    """Return the seconds per step of nodes that wait for the slowest of them after every `every` steps."""
    if time.is_fixed:
        return float(time.mean_s(num_nodes).max())
    mean_s = float(time.mean_s(num_nodes).max())
    steps = max(1, round(min(every, DRAWS / num_nodes / LEAST_SAMPLES)))
    samples = max(LEAST_SAMPLES, DRAWS // (num_nodes * steps))
    nodes = np.repeat(np.tile(np.arange(num_nodes), samples), steps)
    drawn = np.arange(samples * steps).reshape(samples, 1, steps)
    ticks = time.step_ticks(nodes, np.broadcast_to(drawn, (samples, num_nodes, steps)).ravel())
    longest_s = ticks.reshape(samples, num_nodes, steps).sum(2).max(1).mean() / steps / TICKS_PER_S
    late_s = max(0.0, float(longest_s) - mean_s)
    return mean_s + late_s * math.sqrt(steps / max(every, steps))  # a mean over more steps spreads by the square root


def _tx_factor(kind: str, algorithm: str | None, n: int) -> float:
    """Return what a member sends, mean over members, as a multiple of its payload."""
    if n == 1:
        return 0.0
    if kind == "broadcast":
        return (n - 1) / n
    return FACTORS.get((kind, algorithm or "ring"), FACTORS[kind, "ring"])(n)


# From strategies to what they send


def plan_of(given: str | Strategy, parameters: float, num_nodes: int, bytes_per_element: float = 4) -> Plan:
    """Return what a strategy sends, by the formula of each of its modules.

    Raises:
        ArgumentError: an unknown strategy or option; a module that no formula is known for.

    >>> plan_of("diloco:H=50", 1e6, 4).traffic
    (Traffic(kind='all_reduce', payload_bytes=4000000.0, every_steps=50, members=None, algorithm=None, overlap_steps=0.0),)
    """  # noqa: E501
    if isinstance(given, str):
        name, _, options = given.partition(":")
        if name.lower() in _EXTRA:
            return _EXTRA[name.lower()](given, parameters, bytes_per_element, **_options(given, options))
        strategy = parse_strategy(given)
    else:
        strategy = given
    title = given if isinstance(given, str) else type(given).__name__
    if not isinstance(strategy, CommunicateOptimizeStrategy):
        raise ArgumentError(
            f"no formula is known for {title}, which is written for one node: give a Plan of its traffic"
        )
    parts = [_module_traffic(m, title, parameters, num_nodes, bytes_per_element) for m in strategy.modules]
    traffic = tuple(t for some, _ in parts for t in some)
    return Plan(title, traffic, min((couples for _, couples in parts), default=math.inf))


def _module_traffic(module: Module, title: str, P: float, N: int, b: float) -> tuple[list[Traffic], float]:
    """Return what a module sends, and after how many steps all of the model has been exchanged."""
    if isinstance(module, GradientAverage):
        return [Traffic("all_reduce", P * b)], 1
    if isinstance(module, DCTMomentum):  # chunks * k * (value + index)
        size = module.chunk**2
        index = 1 if size <= 256 else 2 if size <= 32768 else 4
        return [Traffic("all_gather", math.ceil(P / size) * min(module.topk, size) * (b + index))], 1
    if isinstance(module, DiLoCoCommunicator):
        return [Traffic("all_reduce", P * b, module.interval_steps)], module.interval_steps
    if isinstance(module, SparseCommunicator):
        return _sparse_traffic(module, P, N, b)
    if isinstance(module, AveragingCommunicator):
        if module.local_epochs is not None:
            raise ArgumentError(f"{title}: how many steps local_epochs takes depends on the data: give H instead")
        every = module.interval_steps
        clients = max(math.ceil(module.client_fraction * N - 1e-9), 1)
        island = min(module.island_size or clients, clients)
        way = "server" if clients < N else None
        rounds = 1 if island == clients else math.ceil(math.log(clients, max(island, 2)))
        members = clients if way else (None if island == N else island)
        return [Traffic("all_reduce", P * b, every, members, way)], every * rounds * N / clients
    raise ArgumentError(f"{title}: no formula is known for {type(module).__name__}: give a Plan of its traffic")


def _sparse_traffic(module: SparseCommunicator, P: float, N: int, b: float) -> tuple[list[Traffic], float]:
    count, every = module.p * P, module.interval_steps
    if not count or N == 1:
        return [], math.inf
    traffic = []
    if module.method == "topk":
        traffic.append(Traffic("broadcast", 4 * count, every))
    if module.bits is None:
        traffic.append(Traffic("all_reduce", count * b, every))
    else:
        traffic.append(Traffic("all_gather", count * module.bits / 8 + 4, every))
    return traffic, every / module.p


@checked
def _streaming(
    name: str, P: float, b: float, H: int = 100, fragments: int = 8, bits: float = 4, overlap: int = 1
) -> Plan:
    """Streaming DiLoCo (arXiv:2501.18512): each of F fragments every H steps, P/F elements of `bits`, both ways."""
    for option, value in (("H", H), ("fragments", fragments)):
        check_count(option, value)
    check_count("overlap", overlap, least=0)
    if not 0 < bits <= 64:
        raise ArgumentError(f"bits={bits!r} must be over 0 and at most 64")
    piece = Traffic("all_reduce", P / fragments * bits / 8, H / fragments, None, "exact", overlap)
    return Plan(name, (piece,), H)


@checked
def _eager(name: str, P: float, b: float, H: int = 100) -> Plan:
    """Eager DiLoCo (arXiv:2502.12996): P b bytes every H steps, under way for all of them."""
    check_count("H", H)
    return Plan(name, (Traffic("all_reduce", P * b, H, overlap_steps=H),), H)


_EXTRA = {"streaming": _streaming, "eager": _eager}


def _options(text: str, options: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part in filter(None, options.split(":")):
        name, _, value = part.partition("=")
        try:
            out[name.strip()] = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            raise ArgumentError(
                f"strategy {text!r}: {part!r} should look like option=number, as in 'streaming:H=100:bits=4'"
            ) from None
    return out
