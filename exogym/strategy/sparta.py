"""SPARTA: sparse parameter averaging.

Beton et al., Improving the Efficiency of Distributed Training using Sparse Parameter Averaging, ICLR 2025 workshop
(openreview stFPf3gzq1). theta_i are the parameters of node i, of N nodes. After the inner step of step t, with an index
set I_t that all nodes share:

    theta_i[I_t] <- (1/N) sum_j theta_j[I_t]

I_t is a share p of the P parameters of b bytes, which all nodes draw from (seed, step) without communication. Payload:
p P b bytes per node and step, ring all-reduce. Values of q bits take p P q / 8 + 4 bytes in an all-gather, because
packed values can't be summed in a ring. With top-k, one node announces k 4-byte indices (broadcast), then all nodes
send k values as above.

If nodes are absent, the mean is over the n present ones: tx = rx = 2 (n-1)/n times the payload in a ring, n-1 times
with quantization. Absent nodes keep their values and draw the same index sets after their return. A single present node
changes and sends nothing. A node that was down returns with the parameters of a node that stayed (P b bytes, broadcast)
and its own inner optimizer state. A node that missed an average keeps its own values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.base.rng import generator
from exogym.core.compress import dequantize, quantize
from exogym.core.fleet import Block, Fleet
from exogym.core.fleet.fleet import rows_of, shared_row, where_present
from exogym.errors import check_choice, check_count, check_number, checked
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.diloco import DiLoCoCommunicator
from exogym.strategy.options import split
from exogym.strategy.outer import OuterRates, OuterRule
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic

METHODS = ("random", "sequential", "partitioned", "topk")


def random_indices(total: int, p: float, g: torch.Generator) -> Tensor:
    """Draw each of the indices 0 to total-1 independently with probability `p`, and return them in ascending order.

    The gaps between drawn indices are geometric: gap = 1 + floor(log u / log(1 - p)) with u uniform in (0, 1). Only
    these gaps are drawn, in O(p total) time.
    """
    if p >= 1:
        return torch.arange(total)
    parts, last = [], -1
    expected = total * p
    count = int(expected + 4 * math.sqrt(expected) + 16)
    while last < total:
        u = 1.0 - torch.rand(count, generator=g, dtype=torch.float64)
        gaps = (u.log() / math.log1p(-p)).floor_().clamp_(max=total).long() + 1
        positions = gaps.cumsum(0) + last
        parts.append(positions)
        last = int(positions[-1])
    indices = torch.cat(parts)
    return indices[indices < total]


class SparseCommunicator(PeriodicModule):
    """Average a share p of the parameters after every `interval`-th step.

    Args:
        sparsification_rate: p, from 0 (nothing) to 1 (everything).
        compression_method: how nodes choose the indices to average. "random": each index with probability p, drawn anew
            each time. "sequential": a fixed random permutation, cut into ceil(1/p) nearly equal chunks, which take
            turns. "partitioned": as sequential, with a new permutation after each cycle. "topk": nodes take turns to
            announce the k = max(1, round(p P)) of P indices at which their parameters moved furthest from their last
            averaged values, and all nodes average these.
        quantization_bits: None or 32 for full precision; 2 to 8, or 16, for absmax codes of this many bits, packed into
            bytes. The average of the decoded values is within scale / 2 of the exact average, where scale is the
            distance between two codes. Rounding discards every change of a parameter below scale / 2, so if p is near 1
            such a parameter never moves.
        interval: steps between averages.
        final_average: average all parameters once at the end of training (`final_sync`), a payload of P b bytes.

    A single node changes nothing.
    """

    weighted_means = True

    @checked
    def __init__(
        self,
        sparsification_rate: float = 0.005,
        compression_method: str = "random",
        quantization_bits: int | None = None,
        *,
        interval: int = 1,
        final_average: bool = True,
    ):
        super().__init__()
        check_number("p_sparta", sparsification_rate, least=0, most=1, more=": the share of parameters to average")
        check_choice("compression_method", compression_method, METHODS)
        check_count("interval", interval)
        if quantization_bits not in (None, 32):
            quantize(torch.zeros(1, 1), quantization_bits)
        self.p, self.method, self.interval_steps = sparsification_rate, compression_method, interval
        self.bits = None if quantization_bits == 32 else quantization_bits
        self.final_average = final_average
        self.acts_on = "elements" if self.bits is None and compression_method != "topk" else "row"

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        count, every = self.p * P, self.interval_steps
        if not count or N == 1:
            return []
        indices = [Traffic("broadcast", 4 * count, every)] if self.method == "topk" else []
        if self.bits is None:
            return [*indices, Traffic("all_reduce", count * b, every)]
        return [*indices, Traffic("all_gather", count * self.bits / 8 + 4, every)]

    def couples_every(self, N: int) -> float:
        return self.interval_steps / self.p if self.p and N > 1 else math.inf

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self._orders: dict[tuple[int, int], Tensor] = {}
        if self.method == "topk":
            self.row_state = {f"reference.{b}": block.params.clone() for b, block in enumerate(fleet.blocks)}

    def communicate(self, fleet: Fleet, step: int) -> None:
        if self.p == 0 or len(fleet.comm.present) == 1:
            return
        for b, block in enumerate(fleet.blocks):
            x = block.params
            chosen = self._announced(fleet, b, step) if self.method == "topk" else self.indices(block, b, step)
            if len(chosen) == 0:
                continue
            chosen = block.layout.here(chosen).to(x.device)
            mean = self._average(fleet, x[:, chosen] if len(chosen) < x.shape[1] else x, b, step)
            x[:, chosen] = where_present(fleet, mean, x[:, chosen])
            if self.method == "topk":
                reference = self.row_state[f"reference.{b}"]
                reference[:, chosen] = where_present(fleet, mean, reference[:, chosen])

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        if self.method == "topk":  # its new values are the averaged values
            for b, block in enumerate(fleet.blocks):
                rows = rows_of(fleet, nodes)
                self.row_state[f"reference.{b}"][rows] = block.params[rows]

    def indices(self, block: Block, b: int, step: int) -> Tensor:
        """Return the index set of block `b` at `step`, ascending, which depends only on (seed, block, step)."""
        total, turn = block.layout.total, step // self.interval_steps - 1
        if self.method == "random":
            return random_indices(total, self.p, generator(self.run.seed, "sparta", b, step))
        chunks = math.ceil(1 / self.p - 1e-9)
        cycle = turn // chunks if self.method == "partitioned" else 0
        if (b, cycle) not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key[0] != b}
            order = torch.randperm(total, generator=generator(self.run.seed, "sparta order", b, cycle))
            self._orders[b, cycle] = order
        return self._orders[b, cycle].tensor_split(chunks)[turn % chunks].sort().values

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        if not self.final_average:
            return
        for block in fleet.blocks:
            fleet.comm.all_reduce(block.params, "mean", out=block.params)
        fleet.synchronise_buffers()

    def _announced(self, fleet: Fleet, b: int, step: int) -> Tensor:
        x, reference = fleet.blocks[b].params, self.row_state[f"reference.{b}"]
        k = max(1, round(self.p * x.shape[1]))
        present = fleet.comm.present
        announcer = present[(step // self.interval_steps - 1) % len(present)]
        proposal = torch.zeros(len(x), k, dtype=torch.int32, device=x.device)
        for row, rank in enumerate(fleet.ranks):
            if rank == announcer:
                proposal[row] = (x[row] - reference[row]).abs().topk(k).indices.sort().values.int()
        return shared_row(fleet, fleet.comm.broadcast(proposal, src=announcer))[0].long()

    def _average(self, fleet: Fleet, values: Tensor, b: int, step: int) -> Tensor:
        if self.bits is None:
            return fleet.comm.all_reduce(values, "mean")
        count, bits = values.shape[1], self.bits
        codes, scale = quantize(values, bits)
        mean = fleet.comm.sum_decoded((codes, scale), lambda c, s: dequantize(c, s, bits, count), "mean")
        return mean.to(values.dtype)


class SPARTAStrategy(CommunicateOptimizeStrategy):
    """SPARTA: after each step, nodes average a small share of their parameters.

    Use it to keep nodes close with few bytes at every step.

        theta_i[I_t] <- mean_j theta_j[I_t]          I_t: a share p of the indices, equal on all nodes

    theta_i are the parameters of node i, and t is the step. Payload: p P b bytes per node and step for P parameters of
    b bytes, and P b bytes once at the end of training.

    Args:
        p_sparta: p, the share of the parameters averaged at each step.
        compression_method, quantization_bits, interval: see `SparseCommunicator`.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`.

    >>> strategy = SPARTAStrategy(p_sparta=0.001, inner_optim='adamw', lr=1e-4)
    """

    name, title, paper, payload = "sparta", "SPARTA", "openreview stFPf3gzq1", "p_sparta P b"
    ranges = ()
    equation = "theta_i[I_t] <- mean_j theta_j[I_t], I_t a share p of all indices"
    needs = "all nodes, every step; few bytes"
    identities = ("p=1 = fedavg with H=1", "p=0 = nodes alone", "N=1 = inner optimizer")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        p_sparta: float = 0.005,
        *,
        compression_method: str = "random",
        quantization_bits: int | None = None,
        interval: int = 1,
        **options: Unpack[InnerOptions],
    ):
        sparta = SparseCommunicator(p_sparta, compression_method, quantization_bits, interval=interval)
        super().__init__(inner_optim, [sparta], **options)


class SPARTADiLoCoOptions(OuterRates, InnerOptions, total=False):
    """Options that `SPARTADiLoCoStrategy` shares with other strategies."""


class SPARTADiLoCoStrategy(CommunicateOptimizeStrategy):
    """SPARTA between DiLoCo's outer steps: nodes average some parameters after each step, and all every H steps.

    Use it when DiLoCo's nodes drift apart: it allows a larger H.

        theta_i[I_t] <- mean_j theta_j[I_t] at each step;   theta <- OuterOpt(theta, mean_i (theta - theta_i)) every H

    theta_i are the parameters of node i, I_t is a share p of the indices, chosen anew at each step t, theta are the
    outer parameters, and OuterOpt is the outer optimizer.

    Payload: (H / sparta_interval) p P b + P b bytes per node and H steps, for P parameters of b bytes. SPARTA keeps the
    nodes' mean, so its average right before an outer step does not change that step. The last synchronization is an
    outer step. Absent nodes are handled as in SPARTA and DiLoCo; a node that was down returns with DiLoCo's theta, P b
    bytes.

    Args:
        p_sparta, compression_method, quantization_bits: arguments of SPARTA; see `SPARTAStrategy`.
        sparta_interval: steps between SPARTA's averages.
        outer_optim, H, outer_lr, outer_lr_scheduler, outer_warmup_rounds, weighting: arguments of DiLoCo; see
            `DiLoCoStrategy`.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`.

    >>> strategy = SPARTADiLoCoStrategy(p_sparta=0.005, H=100, lr=3e-4)
    """

    name, title, paper = "sparta_diloco", "SPARTA+DiLoCo", "openreview stFPf3gzq1"
    ranges = ("outer_lr=0.1..1.5",)
    payload = "p_sparta P b + P b / H"
    equation = "as sparta at each step, and as diloco every H steps"
    needs = "all nodes, every step (few bytes) and every H steps"
    identities = ("p=0 = diloco", "p=1, SGD, outer SGD(lr=1) = ddp", "H over all steps = sparta")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        outer_optim: Any = "sgd",
        H: RoundLength = 100,
        p_sparta: float = 0.005,
        *,
        sparta_interval: int = 1,
        compression_method: str = "random",
        quantization_bits: int | None = None,
        weighting: str = "uniform",
        **options: Unpack[SPARTADiLoCoOptions],
    ):
        rule, others = split(options, OuterRule)
        sparta = SparseCommunicator(
            p_sparta, compression_method, quantization_bits, interval=sparta_interval,
            final_average=False,
        )  # fmt: skip
        diloco = DiLoCoCommunicator(H, outer_optim, weighting=weighting, **rule)
        super().__init__(inner_optim, [sparta, diloco], **others)
