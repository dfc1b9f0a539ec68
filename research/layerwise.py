"""Compute a replica's utilization, if each layer is sent as early as possible and needed as late as possible.

This is the simulator of Douillard et al., Streaming DiLoCo, arXiv:2501.18512, section 3.1, built from its description.

With P parameters in L layers, a step is a chain of 3L - 1 equal operations: forward through layers 1..L, then backward
from L to 1. In the backward pass, a layer computes the gradient of its activations (except layer 1), then the gradient
of its parameters. One link works at the same time as the chain. If the step sends a layer, the layer's reduction (P/L
elements) joins the link's queue after the layer's last backward operation. The layer's forward pass in a later step
waits for the reduction. H is the number of steps between two sends, and F the number of fragments:

    method       a layer is sent                                  and needed
    ddp          at every step                                    at the next step
    diloco       at every H-th step                               at the next step
    streaming    at every H-th step, fragment p of F              tau steps later than the next step
                 at steps round((p+1) H/F), layers p, p+F, ...

Utilization is computing time divided by total time, once the pattern repeats. A reduction of m bytes among N replicas
takes 2 (N-1)/N m/B, the lower bound that the papers use (Patarasuk, Yuan, 2009).
"""

from __future__ import annotations

import math
from typing import Any

from exogym.errors import ArgumentError, check_choice, check_count, check_number
from exogym.network import parse_bandwidth, parse_seconds

METHODS = ("ddp", "diloco", "streaming")
CYCLES = 4  # enough for the pattern to repeat: a layer sent in one cycle is needed in the next
SEARCH_BPS = (1.0, 1e18)


def compute_utilisation(
    bandwidth: Any, step_seconds: Any, parameters: float, method: str = "ddp", **settings: Any
) -> float:
    """Return a replica's utilization: the share of the time in which it computes, from 0 to 1.

    Args:
        bandwidth: bandwidth of each replica's link, in bits per second or as text.
        step_seconds, parameters, method, settings: as in `Iteration`.

    >>> round(compute_utilisation("13.3Gbps", 0.1, 1e9, "diloco"), 2)  # the paper's table says 90 %
    0.9
    """
    return Iteration(step_seconds, parameters, method, **settings).utilisation(parse_bandwidth(bandwidth))


def required_bandwidth(
    utilisation: float, step_seconds: Any, parameters: float, method: str = "ddp", **settings: Any
) -> float:
    """Return the lowest bandwidth, in bits per second, that gives a replica the utilization `utilisation`.

    Args:
        utilisation: the wanted utilization, over 0 and under 1.
        step_seconds, parameters, method, settings: as in `Iteration`.

    Raises:
        ArgumentError: no bandwidth suffices because the latency alone takes too long; an argument is out of range.

    >>> round(required_bandwidth(0.9, 0.1, 1e9, "diloco", H=100) / 1e9, 1)
    13.6
    """
    check_number("utilisation", utilisation, over=0, under=1)
    iteration = Iteration(step_seconds, parameters, method, **settings)
    low, high = map(math.log, SEARCH_BPS)
    most = iteration.utilisation(math.exp(high))
    if most < utilisation:
        raise ArgumentError(
            f"`utilisation`={utilisation!r} is out of reach: with this latency even an infinite bandwidth gives "
            f"{most:.3f}; send less often (H), or overlap more"
        )
    if iteration.utilisation(math.exp(low)) >= utilisation:
        return SEARCH_BPS[0]
    while high - low > 1e-5:  # utilisation grows with the bandwidth: halve the interval
        middle = (low + high) / 2
        low, high = (low, middle) if iteration.utilisation(math.exp(middle)) >= utilisation else (middle, high)
    return math.exp(high)


class Iteration:
    """A method's settings: which layers it sends at each step of a cycle of `H` steps.

    Args:
        step_seconds: seconds of a step's forward and backward pass.
        parameters: P, the number of parameters; each layer has P / layers.
        method: "ddp", "diloco" or "streaming".
        layers: L, the number of layers.
        H: steps between two sends of the same layer (not for "ddp").
        num_nodes: N, the number of replicas.
        bits_per_element: bits per element on the link; 16 is bf16.
        fragment_layers: layers per fragment (for "streaming"); fragment p of F fragments has the layers p, p + F, p + 2
            F, ...
        overlap_steps: tau, the steps that run while a fragment is sent (for "streaming"). A result is needed tau steps
            after the next step.
        latency: seconds added to each layer's reduction.

    Raises:
        ArgumentError: an unknown method, a count below 1, or a quantity out of range.
    """

    def __init__(
        self,
        step_seconds: Any,
        parameters: float,
        method: str,
        *,
        layers: int = 24,
        H: int = 100,
        num_nodes: int = 2,
        bits_per_element: float = 16,
        fragment_layers: int = 3,
        overlap_steps: int = 0,
        latency: Any = 0.0,
    ):
        check_choice("method", method, METHODS)
        for name, given in (
            ("layers", layers),
            ("H", H),
            ("num_nodes", num_nodes),
            ("fragment_layers", fragment_layers),
        ):
            check_count(name, given)
        check_count("overlap_steps", overlap_steps, least=0)
        for name, number in (("parameters", parameters), ("bits_per_element", bits_per_element)):
            check_number(name, number, over=0)
        self.step_s = parse_seconds(step_seconds, "step_seconds")
        if not self.step_s:
            raise ArgumentError("step_seconds=0: a step must take time")
        if overlap_steps and (method != "streaming" or overlap_steps >= H):
            raise ArgumentError(
                f"overlap_steps={overlap_steps} needs method='streaming' and a larger H; you gave {method!r}, H={H}"
            )
        self.layers, self.overlap_steps = layers, overlap_steps
        self.latency_s = parse_seconds(latency)
        self.layer_bits = 2 * (num_nodes - 1) / num_nodes * parameters / layers * bits_per_element
        self.H = 1 if method == "ddp" else H
        self.sent: dict[int, set[int]] = {self.H: set(range(layers))}
        if method == "streaming":
            fragments = -(-layers // fragment_layers)
            self.sent = {}
            for p in range(fragments):
                step = max(1, round((p + 1) * H / fragments))
                self.sent.setdefault(step, set()).update(range(p, layers, fragments))

    def utilisation(self, bandwidth_bps: float) -> float:
        message_s = self.latency_s + self.layer_bits / bandwidth_bps
        node_s = self.step_s / (3 * self.layers - 1)
        cycles = CYCLES + self.layers if self.H == 1 else CYCLES
        now = link_free = before = 0.0
        arrivals: dict[int, tuple[int, float]] = {}  # layer -> (first step that needs it, time of its arrival)
        for step in range(1, cycles * self.H + 1):
            sent = self.sent.get((step - 1) % self.H + 1, set())
            if not sent and not arrivals:
                now += self.step_s
            else:
                for layer in range(self.layers):
                    if layer in arrivals and arrivals[layer][0] <= step:
                        now = max(now, arrivals.pop(layer)[1])
                    now += node_s
                for layer in reversed(range(self.layers)):
                    now += node_s if layer == 0 else 2 * node_s
                    if layer in sent:
                        link_free = max(link_free, now) + message_s
                        arrivals[layer] = (step + 1 + self.overlap_steps, link_free)
            if step == (cycles - 1) * self.H:
                before = now
        return self.H * self.step_s / (now - before)
