"""SparseLoCo: DiLoCo that sends its outer gradients' largest entries in 2 bits, with error feedback for momentum.

Sarfi et al., arXiv:2508.15706. theta are the outer parameters, theta_i node i's parameters, e_i is its error, beta the
error's decay and eta the outer learning rate. Every H inner steps:

    e_i <- beta e_i + (theta - theta_i)
    (I_i, V_i) <- the k largest of each chunk of e_i;   V_i <- Q(V_i)
    e_i <- e_i - scatter(I_i, V_i)                        # Q's error stays in e_i, too
    theta <- theta - eta mean_i scatter(I_i, V_i);   theta_i <- theta

I_i are indices and V_i the values at these indices, which scatter puts back between zeros. Chunks are 64 x 64 blocks of
a matrix, or 4096 entries of a vector; a smaller chunk sends the same share of its entries, at least one. Q puts values
into 4 bins over 6 standard deviations and sends the mean of each bin (`Statistical`).

The mean is over all N nodes. The published code divides by the number of nodes that sent an entry
(aggregation="contributors"), and multiplies by eta twice instead of once. SparseLoCo has no outer momentum; with beta <
1, it forgets old errors on purpose.

Payload per round, if all chunks are whole, for P parameters: P k/chunk entries of bits + ceil(log2 chunk) bits each, by
default P 64/4096 14/8 bytes, 1/146 of fp32. An index into a smaller chunk of s entries has ceil(log2 s) bits. Each
tensor's indices and values fill whole bytes, and Q's tables add 4 2^bits bytes per tensor, 16 by default. All-gather,
tx = rx = (N-1) payload.

If nodes are absent, means are over the present ones. A node that missed the synchronization continues with its theta_i
and e_i, and its next difference is from the theta that it last received. A node that was down returns with e_i = 0 and
receives theta, P b bytes for parameters of b bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.compress import ChunkTopK, Statistical, with_feedback
from exogym.core.compress.compressor import chunked_bytes
from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of, shared_row, where_present
from exogym.errors import check_choice, check_count, check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic, shapes_of


class SparseOuterStep(PeriodicModule):
    """Take SparseLoCo's outer step after each round of H steps. `SparseLoCoStrategy` describes the arguments.

    State: the outer parameters theta, one copy for all nodes; each node's error and last received theta, (rows, P).
    """

    acts_on = "tensors"
    right_in_mean = True

    def __init__(
        self,
        H: RoundLength,
        topk: int,
        chunk: int,
        bits: int,
        error_decay: float,
        outer_lr: float,
        aggregation: str,
    ):
        super().__init__()
        self.take_rounds(H)
        check_choice("aggregation", aggregation, ("mean", "contributors"))
        check_count("topk", topk)
        check_count("chunk", chunk)
        check_number("error_decay", error_decay, least=0, most=1)
        check_number("outer_lr", outer_lr, least=0)
        self.topk, self.chunk, self.bits = topk, chunk, bits
        self.quantizer = None if bits == 32 else Statistical(bits)
        self.error_decay, self.outer_lr, self.aggregation = error_decay, outer_lr, aggregation
        self.weighted_means = aggregation == "mean"

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        if (shapes := shapes_of(P)) is not None:
            S = sum(chunked_bytes(shape, self.topk, self.chunk, self.quantizer, b) for shape in shapes)
            return [Traffic("all_gather", S, self.interval_steps)]
        value_bits = self.bits if self.quantizer else 8 * b
        kept = P * self.topk / self.chunk
        return [Traffic("all_gather", kept * (value_bits + math.ceil(math.log2(self.chunk))) / 8, self.interval_steps)]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.compressors = [ChunkTopK(block.layout, self.topk, self.chunk, self.quantizer) for block in fleet.blocks]
        self.row_state = {f"error.{b}": block.zeros() for b, block in enumerate(fleet.blocks)}
        self.row_state |= {f"received.{b}": block.params.clone() for b, block in enumerate(fleet.blocks)}
        self.shared_state = {f"theta.{b}": block.params[:1].clone() for b, block in enumerate(fleet.blocks)}

    def communicate(self, fleet: Fleet, step: int) -> None:
        away = rows_of(fleet, [rank for rank in fleet.ranks if rank not in fleet.comm.present])
        for b, block in enumerate(fleet.blocks):
            theta, e = self.shared_state[f"theta.{b}"], self.row_state[f"error.{b}"]
            received = self.row_state[f"received.{b}"]
            resting, difference = e[away], received - block.params
            difference[away] = 0  # absent nodes' values may not be finite, and such values cannot be encoded
            payload = with_feedback(self.compressors[b], e, difference, self.error_decay)
            e[away] = resting
            theta.add_(self._mean(fleet, self.compressors[b], payload, theta), alpha=-self.outer_lr)
            for x in (block.params, received):
                x.copy_(where_present(fleet, theta.expand_as(x), x))
        fleet.synchronise_buffers()

    def _mean(self, fleet: Fleet, compressor: ChunkTopK, payload: Sequence[Tensor], theta: Tensor) -> Tensor:
        """Return the mean of the sent values, (1, P): over all nodes, or for each entry over its senders."""
        wide = torch.promote_types(theta.dtype, torch.float32)

        def decode(*parts: Tensor) -> Tensor:
            sent = compressor.decode(*parts).to(wide)
            return sent if self.aggregation == "mean" else torch.stack([sent, compressor.mask(*parts).to(wide)], 1)

        op = "mean" if self.aggregation == "mean" else "sum"
        total = shared_row(fleet, fleet.comm.sum_decoded(payload, decode, op))
        mean = total if self.aggregation == "mean" else total[:, 0] / total[:, 1].clamp(min=1)
        return mean.to(theta.dtype)

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        rows = rows_of(fleet, nodes)
        for b, block in enumerate(fleet.blocks):
            self.row_state[f"error.{b}"][rows] = 0
            self.row_state[f"received.{b}"][rows] = block.params[rows]

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        return [self.shared_state[f"theta.{b}"][0] for b in range(len(fleet.blocks))]


class SparseLoCoStrategy(CommunicateOptimizeStrategy):
    """SparseLoCo: H local steps, then nodes exchange the largest entries of their differences from theta in few bits.

    Use it for few nodes on a very slow link: by default a round sends 1/146 of the parameters' fp32 bytes.

        e_i <- beta e_i + theta - theta_i;   V_i = Q(top_k(e_i));   e_i <- e_i - V_i;   theta <- theta - eta mean_i V_i

    theta are the outer parameters, which evaluation uses, theta_i node i's parameters, and e_i is its error. top_k
    picks each chunk's largest entries, and Q rounds them to few bits. With topk = chunk and bits=32, the strategy is
    DiLoCo with outer SGD(eta).

    Payload: P topk/chunk (bits + ceil(log2 chunk)) / 8 bytes per node every H steps, for P parameters.

    Args:
        inner_optim: inner optimizer. The paper uses AdamW.
        H: inner steps between outer steps, as a number or a pure function of the round (from 0).
        topk: entries sent per chunk (32 to 128 in the paper).
        chunk: entries of a chunk, a square number.
        bits: bits per sent value, 1 to 8, or 32 for exact values.
        error_decay: beta, the share of the error that a round keeps.
        outer_lr: eta, the outer learning rate.
        aggregation: "mean" divides each entry's sum by the number of nodes, "contributors" by the number of nodes that
            sent it.
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: arguments of the inner optimizer; see `Strategy`.

    >>> strategy = SparseLoCoStrategy(inner_optim='adamw', H=30, topk=64, lr=4e-4)
    """

    name, title, paper = "sparseloco", "SparseLoCo", "arXiv:2508.15706"
    ranges = ("outer_lr=0.3..1.5", "error_decay=0.8..1.0")
    temporary_rows = 3.0
    payload = "P topk / chunk (bits + ceil(log2(chunk))) / 8 / H"
    equation = (
        "e_i <- beta e_i + theta - theta_i; V_i = Q(top_k(e_i)); e_i <- e_i - V_i; theta <- theta - eta mean_i V_i"
    )
    needs = "all nodes, every H steps; 1/146 of fp32"
    identities = (
        "topk=chunk, bits=32 = diloco with outer SGD(lr)",
        "beta=1: sent + kept = the sum of differences",
        "H=1, beta=1, SGD, bits=32 = topk by chunks",
    )

    def __init__(
        self,
        inner_optim: Any = "adamw",
        H: RoundLength = 30,
        topk: int = 64,
        chunk: int = 4096,
        *,
        bits: int = 2,
        error_decay: float = 0.95,
        outer_lr: float = 1.0,
        aggregation: str = "mean",
        **options: Unpack[InnerOptions],
    ):
        outer = SparseOuterStep(H, topk, chunk, bits, error_decay, outer_lr, aggregation)
        super().__init__(inner_optim, [outer], **options)
