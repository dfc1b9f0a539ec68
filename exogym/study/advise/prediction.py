"""Predict seconds, bytes and utilization of strategies on a network, from formulas alone.

The byte formulas of a strategy's modules give the collectives that the strategy repeats (`Traffic`), and the network
gives each collective's seconds c. A collective is due every E steps and may overlap with tau steps. With T, the seconds
of the slowest node's step:

    seconds per step = T + sum over collectives of max(0, c - min(tau, E) T) / E
    `utilisation`    = mean step of a node / seconds per step

If nodes train asynchronously, node w takes R_w = H_w T_w + c_w + q_w seconds for a round of H_w steps, where T_w is its
step time, c_w its communication time, and q_w the time for which it waits for a quorum (0 for a quorum of one). A step
of the fleet is N local steps by any nodes:

    seconds per step = N / sum over w of H_w / R_w
    `utilisation`    = mean over w of H_w T_w / R_w

A server's line with the rate B carries messages of S bytes from each of its nodes. If the sum over w of S / (B R_w)
exceeds 1, all rounds are delayed equally until the sum is 1: N equal nodes then take R = N S / B.

If groups of nodes synchronize over lines of different speeds, c is the time that nodes lose in a synchronization,
averaged over many random groups.

If a server samples only a set S_r of nodes in round r, the prediction samples rounds of H steps as the strategy does. A
round begins when the previous round has ended, and nodes outside S_r don't compute:

    seconds per step = mean over r of (max over i in S_r of H T_i + c) / H
    `utilisation`    = sum over r and i in S_r of H T_i / (N times all of these seconds)

A strategy keeps up if the slowest node computes for at least 90 % of its time. The slowest node has the longest T_w, or
the longest T_w + c_w / H_w if nodes train asynchronously.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from exogym.clock import DEVICES, Device, StepTime, seconds_of
from exogym.communicator import sent_factor
from exogym.core.clock.devices import DEFAULT_UTILISATION
from exogym.errors import ArgumentError, check_choice, check_count, check_number, checked
from exogym.network import Network, readable_bandwidth, readable_seconds
from exogym.network.pricing import AGREEMENTS, LATE, Members
from exogym.strategy import Strategy
from exogym.strategy.registry import parse_strategy
from exogym.strategy.traffic import Plan, Traffic
from exogym.streams import numpy_generator
from exogym.study.advise.advice import Advice, Row
from exogym.study.advise.beliefs import SAME, Belief, Choice, beliefs_of, chosen, known, known_skews, likeness
from exogym.study.advise.plans import period_of, plan_of, title_of
from exogym.study.advise.published import at_scale

# Methods whose advice was evaluated on small tasks, then methods for very slow lines
DEFAULT_STRATEGIES = (
    "ddp", "powersgd", "demo", "sparta", "qreduce",
    "diloco:H=10", "diloco:H=30", "diloco:H=100", "streaming_diloco:H=30", "sparseloco:H=10", "sparseloco:H=30",
    "sparseloco:H=100", "noloco:H=30", "fedavg:H=30",
    "diloco:H=500", "async_diloco:H=100:dylu=true", "streaming_diloco:H=100:fragment_sync_delay=1:bits=4",
    "diloco:H=100:eager=true",
)  # fmt: skip
# Measured over predicted time of collectives: by formula, the 5 % to 95 % quantiles of 204 published measurements; from
# probes, those of warm collectives (docs/predictions.md)
SPREAD = {"formula": (0.9, 1.7), "measured": (0.9, 1.1)}
STEPS = 1000  # each node's steps with DDP by default
UTILISATION = 0.9  # the share of its time for which the slowest node should compute
MEETINGS = 400  # random groups, over all turns, if groups synchronize and lines differ
ARRIVALS = 1000  # arrivals at all servers, or 8 per node if that is more, for the mean waits
FULL = 0.98  # the share of its time from which a server's line counts as full
NOTED_S = 0.001  # a latency from which predictions for hosts need tcp=True
TICKS_PER_S = 10**9  # of `StepTime.ticks`, nanoseconds
LEAST = 1e-30  # decimals of an amount per step, so that free amounts compare as equal
LEAST_SAMPLES, DRAWS = 4, 200_000  # for random steps: stretches, and steps drawn over all nodes and stretches


@dataclass(frozen=True)
class Work:
    """A node's step in operations instead of seconds.

    Args:
        flops: floating-point operations per step of a node (see `exogym.clock.flops_of`).
        device: a name in `exogym.clock.DEVICES`, or a `Device`.
        utilisation: the fraction of its peak that the device reaches.

    Raises:
        ArgumentError: the device is unknown or a number is out of range.

    >>> print(Work(6e14, "a100"))
    6e+14 operations a step on a100: 40% of 3.12e+14 per second
    """

    flops: float
    device: str | Device = "h100"
    utilisation: float = DEFAULT_UTILISATION

    def __post_init__(self) -> None:
        _ = self.seconds  # checks all arguments

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return seconds_of(self.flops, self.device, self.utilisation)

    @property
    def is_nvidia(self) -> bool:
        """Whether the device is NVIDIA's, by its source."""
        return "NVIDIA" in (DEVICES[self.device] if isinstance(self.device, str) else self.device).source

    def __str__(self) -> str:
        name = self.device if isinstance(self.device, str) else "the device"
        peak = (DEVICES[self.device] if isinstance(self.device, str) else self.device).flops_per_s
        return f"{self.flops:.3g} operations a step on {name}: {self.utilisation:.0%} of {peak:.3g} per second"


@checked
def advise(
    *,
    parameters: float,
    num_nodes: int,
    network: Network | str,
    step_seconds: StepTime | Work | Any = None,
    speeds: Sequence[float] | None = None,
    bytes_per_element: float = 4,
    strategies: Sequence[str | Strategy | Plan] | None = None,
    algorithm: str = "cheapest",
    steps: int = STEPS,
    skew: float | None = None,
) -> Advice:
    """Predict how fast a fleet would train on a network with each strategy.

    Args:
        parameters: P, the number of the model's trainable parameters.
        num_nodes: N, the number of nodes.
        network: a `Network`, or text for `Network.parse`.
        step_seconds: time of a node's step, as a `StepTime`, a number of seconds, or text such as "20ms"; or a list
            with the time of each node; or its operations as `Work`.
        speeds: the nodes' relative speeds, above 0 (not with a `StepTime`, which has its own). At speed 0.5, a step
            takes twice as long.
        bytes_per_element: b, bytes per element on the wire (4 for fp32, 2 for bf16).
        strategies: texts as on the command line ("diloco:H=20"), strategies, or your own `Plan`s. `advise` recommends
            the strategy that is expected to reach DDP's loss first. Only if no other is left, this is DDP although the
            fastest node alone is faster, or an asynchronous strategy whose slowest node waits for over 10 % of the
            time.
        algorithm: "cheapest" uses the algorithm of the network's library, or the fastest one if the library is "any". A
            network without a library gets NCCL if step_seconds is `Work` on an NVIDIA GPU, and otherwise gloo.
            "recorded" uses the algorithm that the strategy's events name.
        steps: each node's steps with DDP. Other strategies are rated at the steps that they probably need to the same
            loss.
        skew: how unequal the nodes' labels are, from 0 to 1 (`exogym.data.label_skew`): 0 if examples are distributed
            at random, 0.8 if each node has two of ten labels. Earlier runs on data with a similar skew count most. If
            it is None, all count equally.

    Raises:
        ArgumentError: a number is out of range, a strategy or one of its options is unknown, or no strategy has a
            formula.

    >>> advice = advise(parameters=1e8, num_nodes=8, network="lan-1g", step_seconds=0.2,
    ...     strategies=["ddp", "diloco:H=100"])
    >>> [(row.strategy, round(row.seconds_per_step, 2)) for row in advice.rows]
    [('diloco:H=100', 0.26), ('ddp', 6.18)]
    """
    check_number("parameters", parameters, over=0)
    check_number("bytes_per_element", bytes_per_element, over=0)
    check_count("num_nodes", num_nodes)
    check_count("steps", steps)
    check_choice("algorithm", algorithm, ("cheapest", "recorded"))
    if skew is not None:
        check_number("skew", skew, least=0, most=1)
    if step_seconds is None:
        raise ArgumentError(
            "the time of a step is missing: pass step_seconds='80ms', or step_seconds=Work(6e14, 'h100') for its "
            "operations"
        )
    work = step_seconds if isinstance(step_seconds, Work) else None
    network = Network.of(network)
    if algorithm == "cheapest" and network.library is None and not network.tcp and network.measurement is None:
        network = network.with_library("nccl" if work is not None and work.is_nvidia else "gloo")
    time = step_time(step_seconds if work is None else work.seconds, speeds, network, num_nodes)
    plans, left_out = _plans(strategies or DEFAULT_STRATEGIES, parameters, num_nodes, bytes_per_element)
    alike, rows, beliefs = likeness(skew, known_skews()), [], {}
    for plan in plans:
        method, period = plan.method or plan.name, period_of(plan)
        ours = beliefs_of({method: period}, steps, known(), alike)[method]
        belief, source = at_scale(ours, method, period, steps, parameters, num_nodes, skew or 0.0)
        beliefs[plan.name] = belief
        row = _row(plan, num_nodes, network, time, algorithm)
        rows.append(replace(row, ddp_steps=belief.steps, steps=math.ceil(steps * belief.steps), source=source))
    rows.sort(key=lambda row: (not row.can_train, row.seconds))
    lines = _assumptions(parameters, num_nodes, network, time, bytes_per_element, algorithm)
    if work is not None:
        lines.insert(1, str(work))
    lines += [
        *_of_plans(plans, num_nodes, network, time),
        f"steps/DDP's: to the loss that DDP reaches after {steps} steps, from a rule of thumb and these sources"
        + ("" if skew is None else f"; of our own tasks, those with a label skew near {skew:.2f} count most"),
        *_sources(rows),
    ]
    able = [row for row in rows if row.can_train]
    if not able:
        best, because = None, "no strategy that can be trained here is among them"
    else:
        own_pace = {plan.name for plan in plans if plan.local_steps is not None}
        rare = {row.strategy: _LATE for row in able if row.strategy in own_pace and not row.keeps_up}
        rare |= {row.strategy: _SLOW for row in able if beliefs[row.strategy] == SAME and row.speedup < 1}
        best, because = _first_to_arrive(able, beliefs, rare, steps)
        if best.strategy not in rare:
            lines += [f"{name}: not recommended by formula, because {why}" for name, why in rare.items()]
    return Advice(rows, best, because, lines, num_nodes=num_nodes, left_out=left_out)


# Reasons for which a strategy is recommended only if there are no others.
_LATE = f"the slowest node computes for less than {UTILISATION:.0%} of the time, so its updates arrive late"
_SLOW = "the fastest node alone reaches the same loss sooner"
_WORK = "pass step_seconds=Work(...) with these three arguments"
advise.__wrapped__.not_taken = dict.fromkeys(("flops", "device", "device_utilisation"), _WORK)  # type: ignore[attr-defined]


def step_time(step_seconds: Any, speeds: Sequence[float] | None, network: Network, num_nodes: int) -> StepTime:
    """Return the nodes' step times.

    Raises:
        ArgumentError: `speeds` is combined with a `StepTime`; the network, speeds or step times are for another number
            of nodes; or a step takes no time.
    """
    if speeds is not None and isinstance(step_seconds, StepTime):
        raise ArgumentError(
            "speeds cannot be combined with a StepTime: pass the speeds to it, as in StepTime('20ms', speeds=[1, 0.5])"
        )
    several = None if speeds is None else list(speeds)
    time = step_seconds if isinstance(step_seconds, StepTime) else StepTime(step_seconds, speeds=several)
    counts = {"network": network.num_nodes}
    counts |= {"step_seconds": time.num_nodes} if several is None else {"speeds": len(several)}
    for what, count in counts.items():
        if count is not None and count != num_nodes:
            raise ArgumentError(
                f"{what} is for {count} nodes, but num_nodes={num_nodes}: pass {what} for {num_nodes} nodes"
            )
    if not time.seconds.all():
        raise ArgumentError(f"step_seconds={step_seconds!r}: a step must take time, so pass more than 0 s")
    return time


def _plans(
    strategies: Sequence[str | Strategy | Plan], parameters: float, num_nodes: int, bytes_per_element: float
) -> tuple[list[Plan], dict[str, str]]:
    """Return the plans of all strategies with a formula, and the reason for each strategy without a formula.

    Raises:
        ArgumentError: a strategy or an option is unknown, or no strategy has a formula.
    """
    plans, left_out = [], {}
    for given in strategies:
        if isinstance(given, Plan):
            plans.append(given)
            continue
        if isinstance(given, str):
            parse_strategy(given)  # an unknown name or option is an error, even among other strategies
        try:
            plans.append(plan_of(given, parameters, num_nodes, bytes_per_element))
        except ArgumentError as error:
            left_out[title_of(given)] = str(error)
    if not plans:
        raise ArgumentError("; ".join(left_out.values()) or "strategies is empty: pass at least one")
    for name, count in Counter(plan.name for plan in plans).items():
        if count > 1:
            raise ArgumentError(
                f"strategies contains {name!r} {count} times: pass each strategy once, and give each Plan its own name"
            )
    return plans, left_out


def _first_to_arrive(
    rows: Sequence[Row], beliefs: Mapping[str, Belief], rare: Collection[str], steps: int
) -> tuple[Row, str]:
    """Return the row that is expected to reach DDP's loss after `steps` steps first, and the reason.

    Strategies in `rare` are chosen only if there are no others.
    """
    each = {row.strategy: max(row.seconds_per_step, LEAST) for row in rows}
    choice: Choice = chosen({name: s for name, s in each.items() if name not in rare} or each, beliefs)
    best = next(row for row in rows if row.strategy == choice.method)
    because = f"it has the smallest expected time to the loss that DDP reaches after {steps} steps"
    if best.source:
        factor = math.exp(beliefs[best.strategy].sd)
        because += f". It probably takes {best.ddp_steps:.2g} times DDP's steps, give or take a factor of {factor:.1f}"
        because += f" ({best.source})"
    return best, because


def _sources(rows: Sequence[Row]) -> list[str]:
    """Return a line per source of the numbers of steps, with the strategies to which it applies."""
    named: dict[str, list[str]] = {}
    for row in rows:
        named.setdefault(row.source, []).append(row.strategy)
    return [f"{', '.join(names)}: {source}" for source, names in named.items() if source]


def _assumptions(
    parameters: float, num_nodes: int, network: Network, time: StepTime, b: float, algorithm: str
) -> list[str]:
    steps = time.mean_s(num_nodes)
    spread = "" if steps.min() == steps.max() else f" to {readable_seconds(float(steps.max()))}"
    if algorithm == "recorded":
        how = "the algorithm its event names"
    elif network.library in (None, "any"):
        how = "the fastest algorithm known for it"
    else:
        how = f"{network.library}'s own algorithm (another one with --library, or library= of the network)"
    counts_copies = network.memory_bps is not None and network.measurement is None
    free = "packing" if counts_copies else "packing and adding up"
    left_out = ["buffers (BatchNorm's)", "the final synchronization"]
    left_out += ["the waiting of messages between hosts (a network with tcp=True has it)"] * _waits_unseen(network)
    spread_of = "{:.1f} to {:.1f}".format
    by_formula = (
        f"by formula, collectives took others {spread_of(*SPREAD['formula'])} times as long as predicted; measure your "
        f"network (exogym doctor --measure) for {spread_of(*SPREAD['measured'])}"
    )
    return [
        f"{num_nodes} nodes, {parameters:.4g} parameters of {b:g} bytes on the wire, {network!r}",
        f"a step takes a node {readable_seconds(float(steps.min()))}{spread}; {free} take{'s' * counts_copies} no time",
        f"each collective by {how}; links are full duplex and carry nothing else; gradients follow the backward pass",
        f"left out: {', '.join(left_out)}, and what the model learns from an example",
        *([by_formula] if network.measurement is None else []),
    ]


def _of_plans(plans: Sequence[Plan], num_nodes: int, network: Network, time: StepTime) -> list[str]:
    """Return the assumptions that depend on the strategies' collectives."""
    lines = _of_probes(network, plans, num_nodes)
    lines += [LATE] * any(t.overlap_steps for plan in plans for t in plan.traffic)
    lines += filter(None, [_bottleneck(plan, num_nodes, network, time) for plan in plans if plan.local_steps])
    if any(plan.local_steps for plan in plans):
        lines.append(
            "asynchronous nodes wait only for a quorum or a full server line; N local steps are a step of the fleet"
        )
    return lines


def _waits_unseen(network: Network) -> bool:
    """Return whether messages wait on hosts because of latencies, which the network's formulas ignore."""
    if network.measurement is not None or network.tcp or network.library == "gloo" or network.num_nodes == 1:
        return False
    return float(network.links.slowest(np.arange(network.num_nodes or 2))[1]) >= NOTED_S


def _of_probes(network: Network, plans: Sequence[Plan], num_nodes: int) -> list[str]:
    """Return notes on a measured network: which collectives were probed, and which were not."""
    measurement = network.measurement
    if measurement is None:
        return []
    kinds = ", ".join(measurement.probes) or "no collective"
    lines = [f"measured: {kinds}; others by formula, on measured links or on links that give the measured times"]
    late_s = max((probes.set_up_s for probes in measurement.probes.values()), default=0.0)
    lines += [f"the first collective takes {readable_seconds(late_s)} more, once; left out"] if late_s else []
    beyond = [
        measurement.probes[t.kind].beyond(t.payload_bytes)
        for plan in plans
        for t in plan.traffic
        if t.kind in measurement.probes and (t.members is None or t.members == num_nodes)
    ]
    return lines + [text for text in dict.fromkeys(beyond) if text is not None]


def _row(plan: Plan, num_nodes: int, network: Network, time: StepTime, algorithm: str) -> Row:
    """Return a strategy's row, with the range of its speed-up for slower and faster collectives."""
    one = _row_of_rounds if plan.local_steps is not None else _row_of_fleet
    low, high = SPREAD["formula" if network.measurement is None else "measured"]
    most, row, least = (one(plan, num_nodes, network, time, algorithm, scale) for scale in (low, 1.0, high))
    return replace(row, speedup_range=(least.speedup, most.speedup))


def _row_of_fleet(plan: Plan, num_nodes: int, network: Network, time: StepTime, algorithm: str, scale: float) -> Row:
    stalls, sent, names = 0.0, 0.0, list[str]()
    mean_s = time.mean_s(num_nodes)
    every = min((t.every_steps for t in plan.traffic if not t.overlap_steps), default=math.inf)
    agreeing_s = scale * (AGREEMENTS + plan.needs_gradients) * network.message_s if num_nodes > 1 else 0.0
    asked = [t for t in plan.traffic if plan.rounds is not None and t.members is not None]
    if asked:
        step_s, busy = _of_asked(plan, asked, num_nodes, network, time, scale)
    else:
        step_s, busy = _slowest_step_s(time, num_nodes, every), np.ones(num_nodes)
    for traffic, times in Counter(plan.traffic).items():
        count = min(num_nodes if traffic.members is None else traffic.members, num_nodes)
        turns = _meetings(network, num_nodes, count) if traffic not in asked else []
        way = _way(traffic, network, turns[0][0] if turns else count, algorithm)
        alone_s = partial(_cost_s, traffic, network, way, traffic.every_steps * step_s, scale * times)
        if traffic not in asked:
            cost_s = _lost_s(turns, alone_s, traffic.every_steps * mean_s) if turns else alone_s(count)
            overlap = min(traffic.overlap_steps, traffic.every_steps)
            busy_s = scale * times * network.processor_s(traffic.kind, traffic.payload_bytes, count, way)
            hidden_s = overlap * step_s + (agreeing_s if overlap else 0.0)  # nodes agree before they wait
            stalls += max(busy_s, cost_s - hidden_s) / traffic.every_steps
        of_all = float(busy.mean()) if traffic in asked else 1.0
        handed = times * traffic.payload_bytes * of_all / traffic.every_steps
        sent += handed * (sent_factor(traffic.kind, way, count) if count > 1 else 0.0)
        names += [f"{way or 'ring'} {traffic.kind}"] * times
    stalls += agreeing_s * _stretches(plan)
    seconds = step_s + stalls
    computing = min(1.0, float((busy * mean_s).mean()) / seconds)
    busiest = float(busy[mean_s == mean_s.max()].mean() * mean_s.max()) / seconds
    return Row(
        plan.name, seconds, sent, 1 - computing, computing, float(busy.sum()) * float(mean_s.min()) / seconds,
        plan.couples_every, tuple(names), busiest >= UTILISATION, plan.can_train,
    )  # fmt: skip


def _stretches(plan: Plan) -> float:
    """Return how many times per step nodes send or receive a late average; each time, they first agree."""
    waited = [t.every_steps for t in plan.traffic if not t.overlap_steps]
    late = {(t.every_steps, t.overlap_steps) for t in plan.traffic if t.overlap_steps}
    ends = sum((2 if overlap % every else 1) / every for every, overlap in late)
    return ends + (1 / min(waited) if waited else 0.0)


def _of_asked(
    plan: Plan, asked: Sequence[Traffic], num_nodes: int, network: Network, time: StepTime, scale: float
) -> tuple[float, np.ndarray]:
    """Return the seconds of a step if rounds sample nodes, and each node's share of steps, (N,)."""
    assert plan.rounds is not None
    H = max(1, round(asked[0].every_steps))
    steps, now_s = np.zeros(num_nodes, dtype=np.int64), np.zeros(num_nodes)
    most = max(LEAST_SAMPLES, min(MEETINGS, 20 * DRAWS // num_nodes))
    for turn, (groups, least_s) in enumerate(plan.rounds(time.mean_s(num_nodes)), 1):
        counts = np.zeros(num_nodes, dtype=np.int64)
        counts[[i for group in groups for i in group]] = H
        begin_s = float(now_s.max())
        now_s = now_s + time.ticks(steps, counts) / TICKS_PER_S
        steps += counts
        if least_s is not None:
            now_s[:] = max(float(now_s.max()), begin_s + least_s)
        for group in filter(None, groups):
            here_s = float(now_s[group].max())
            now_s[group] = here_s + sum(_cost_s(t, network, t.algorithm, here_s - begin_s, scale, group) for t in asked)
        if least_s is not None:
            now_s[:] = now_s.max()
        if turn == most or (turn >= LEAST_SAMPLES and not time.is_fixed and steps.sum() > DRAWS):
            break
    return float(now_s.max()) / (turn * H), steps / (turn * H)


def _cost_s(
    traffic: Traffic, network: Network, way: str | None, idle_s: float, times: float, members: Members
) -> float:
    """Return the seconds of a collective among `members`, whose lines were idle for `idle_s`, times `times`."""
    fan = (traffic.fan, traffic.fan) if traffic.kind == "mix" else None
    cost = network.cost(traffic.kind, traffic.payload_bytes / traffic.fan, members, way, fan=fan)
    return times * (
        network.duration_s(cost) + network.ramp_s(traffic.kind, traffic.payload_bytes, members, idle_s, way)
    )


def _meetings(network: Network, num_nodes: int, count: int) -> list[list[list[int]]]:
    """Return randomly drawn groups of several turns; [] if all groups cost the same.

    Groups have `count` nodes; remaining nodes have no group.
    """
    if count == num_nodes or not network.lines_differ:
        return []
    starts = range(0, num_nodes, count)
    turns = []
    for turn in range(max(1, MEETINGS // len(starts))):
        order = numpy_generator(0, "who meets", turn).permutation(num_nodes).tolist()
        turns.append([sorted(order[start : start + count]) for start in starts])
    return turns


def _lost_s(turns: list[list[list[int]]], cost_s: Callable[[list[int]], float], computing_s: np.ndarray) -> float:
    """Return the seconds by which a turn exceeds the slowest node's computation.

    Args:
        turns: the groups of each turn, which don't wait for each other.
        cost_s: seconds of a group's communication.
        computing_s: seconds for which each node computes in a turn, (N,).
    """
    now_s = np.zeros(len(computing_s))
    for groups in turns:
        now_s += computing_s
        for group in groups:
            now_s[group] = now_s[group].max() + cost_s(group)
    return float(now_s.max() / len(turns) - computing_s.max())


def _way(traffic: Traffic, network: Network, members: Members, algorithm: str) -> str | None:
    """Return a collective's algorithm. Hosts use the exact all-reduce."""
    if traffic.algorithm is not None:
        return traffic.algorithm
    if algorithm == "cheapest":
        return network.cheapest(traffic.kind, traffic.payload_bytes, members)[0]
    of_hosts = network.measurement is not None or network.tcp
    return "exact" if traffic.kind == "all_reduce" and of_hosts else None


def _row_of_rounds(plan: Plan, num_nodes: int, network: Network, time: StepTime, algorithm: str, scale: float) -> Row:
    """Return the row of an asynchronous strategy, whose nodes push to a server and pull from it."""
    T = time.mean_s(num_nodes)
    push, _, *relays = plan.traffic  # no node waits for relays between servers
    H, own_s, round_s, _ = _own_rounds(plan, num_nodes, network, time, scale)
    seconds = num_nodes / float((H / round_s).sum())
    computing = H * T / round_s
    sent = float((push.payload_bytes / round_s).mean()) * seconds if num_nodes > 1 else 0.0
    for relay in relays if num_nodes > 1 else []:
        sent += relay.payload_bytes / relay.every_steps if relay.kind == "push" else 0.0
    utilisation = min(1.0, float(computing.mean()))
    slowest = int(np.argmax(own_s / H))
    return Row(
        plan.name, seconds, sent, 1 - utilisation, utilisation, num_nodes * float(T.min()) / seconds,
        plan.couples_every, tuple(f"{t.algorithm} {t.kind}" for t in plan.traffic),
        float(computing[slowest]) >= UTILISATION, plan.can_train,
    )  # fmt: skip


@dataclass(frozen=True)
class _Server:
    """A server: its nodes, its line's rate, and the seconds for which a push and a pull occupy the line."""

    nodes: Sequence[int]
    bps: float
    push_s: float
    pull_s: float

    @property
    def longest_s(self) -> float:
        return max(self.push_s, self.pull_s)  # lines are full duplex


def _servers(plan: Plan, num_nodes: int, network: Network, scale: float) -> list[_Server]:
    """Return the servers to which a plan's nodes push: one, or one for each island."""
    push, pull, *relays = plan.traffic
    near, size = push.algorithm == "island", (relays[0].members if relays else None) or num_nodes
    servers = []
    for start in range(0, num_nodes, size):
        nodes = range(start, min(start + size, num_nodes))
        push_s, pull_s = (scale * network.server_s(t.payload_bytes, nodes, near) for t in (push, pull))
        servers.append(_Server(nodes, network.server_bps_of(nodes, near), push_s, pull_s))
    return servers


def _own_rounds(
    plan: Plan, num_nodes: int, network: Network, time: StepTime, scale: float
) -> tuple[Any, np.ndarray, np.ndarray, list[_Server]]:
    """Return the steps per round, each node's seconds per round, (N,), alone and among the others, and the servers.

    No node waits for relays between servers, but rounds are long enough for all relays to pass the top server's line.
    """
    assert plan.local_steps is not None
    T = time.mean_s(num_nodes)
    H = plan.local_steps(T)
    push, pull, *relays = plan.traffic

    def cost_s(t: Traffic, nodes: Sequence[int]) -> float:  # a node that runs the server sends to it for free
        return _cost_s(t, network, t.algorithm, math.inf, scale, nodes) if num_nodes > 1 else 0.0

    def alone_s(t: Traffic) -> np.ndarray:
        lines = (network.links.near if t.algorithm == "island" else network.links.outside)(np.arange(num_nodes))
        kinds = np.stack([np.broadcast_to(part, num_nodes) for part in lines])
        _, first, kind = np.unique(kinds, axis=1, return_index=True, return_inverse=True)
        return np.array([cost_s(t, [node]) for node in first.tolist()])[kind.ravel()]

    work_s, push_s, pull_s = np.broadcast_to(H * T, num_nodes), alone_s(push), alone_s(pull)
    own_s = work_s + push_s + pull_s
    if num_nodes == 1:
        return H, own_s, own_s, []

    @lru_cache(maxsize=1 << 16)
    def pulled_s(nodes: tuple[int, ...]) -> float:
        return cost_s(pull, nodes) if len(nodes) > 1 else float(pull_s[nodes[0]])

    servers = _servers(plan, num_nodes, network, scale)
    round_s = np.zeros(num_nodes)
    for server in servers:
        own = list(server.nodes)
        if plan.quorum == 1 and np.ptp(own_s) == 0:  # in turn, each after the one before
            round_s[own] = max(float(own_s[0]), len(own) * server.longest_s)
            continue
        round_s[own] = _rounds_at(server, work_s[own], push_s[own], pulled_s, plan.quorum, len(servers))
    if relays:
        everybody, rounds = range(num_nodes), relays[0].every_steps / push.every_steps
        relay_s = scale * network.server_s(relays[0].payload_bytes, everybody) / rounds
        servers.append(_Server(everybody, network.server_bps_of(everybody), relay_s, relay_s))
        round_s *= max(1.0, float((relay_s / round_s).sum()))
    return H, own_s, round_s, servers


def _bottleneck(plan: Plan, num_nodes: int, network: Network, time: StepTime) -> str | None:
    """Return a warning if a server's line limits a plan, or None."""
    _, own_s, round_s, servers = _own_rounds(plan, num_nodes, network, time, 1.0)
    for server in servers:
        own = list(server.nodes)
        if (server.longest_s / round_s[own]).sum() > FULL:
            many = math.ceil(float(own_s[own].mean()) / server.longest_s)
            return (
                f"{plan.name}: the server's line of {readable_bandwidth(server.bps)} is the bottleneck: the messages "
                f"of {len(own)} nodes' rounds occupy it for {readable_seconds(len(own) * server.longest_s)} each way. "
                f"It is full from about {many} nodes on"
            )
    return None


def _rounds_at(
    server: _Server,
    work_s: np.ndarray,
    push_s: np.ndarray,
    pull_s: Callable[[tuple[int, ...]], float],
    quorum: int,
    servers: int,
) -> np.ndarray:
    """Return the mean seconds per round of a server's n nodes, (n,). Its line is first come, first served, each way.

    Args:
        work_s, push_s: seconds for which each node computes in a round and then pushes, (n,).
        pull_s: seconds that nodes take to pull together.
        quorum: the number of pushes for which the server waits.
        servers: the number of servers of all nodes.
    """
    here: list[int] = []
    size, up_s, down_s = len(work_s), 0.0, 0.0  # the time from which on the line is free, up and down
    rounds, ends_s = np.zeros(size), np.zeros(size)
    coming = [(float(work_s[k]), False, k) for k in range(size)]  # time, whether its push has arrived, node
    heapq.heapify(coming)
    for _ in range(2 * max(ARRIVALS // servers, 8 * size)):
        now_s, has_arrived, k = heapq.heappop(coming)
        if not has_arrived:
            up_s = max(now_s, up_s)
            heapq.heappush(coming, (up_s + float(push_s[k]), True, k))
            up_s += server.push_s
            continue
        here.append(k)
        if len(here) < quorum or (quorum > 1 and coming[:1] and coming[0][0] <= now_s and coming[0][1]):
            continue  # simultaneous arrivals join
        down_s = max(now_s, down_s)
        end_s = down_s + pull_s(tuple(server.nodes[k] for k in here))
        down_s += len(here) * server.pull_s
        for other in here:
            heapq.heappush(coming, (end_s + float(work_s[other]), False, other))
        rounds[here] += 1
        ends_s[here] = end_s
        here = []
    for k in np.flatnonzero(rounds == 0).tolist():  # a round so long that no wait counts
        rounds[k], ends_s[k] = 1, work_s[k] + push_s[k] + pull_s((server.nodes[k],))
    return ends_s / rounds


def _slowest_step_s(time: StepTime, num_nodes: int, every: float) -> float:
    """Return the seconds per step if nodes wait for the slowest node after every `every` steps."""
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
    return mean_s + late_s * math.sqrt(steps / max(every, steps))  # a mean's spread shrinks with the square root
