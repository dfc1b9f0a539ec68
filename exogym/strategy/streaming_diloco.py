"""Streaming DiLoCo: the model is cut into fragments, and nodes synchronize one fragment after the other.

Douillard et al., Streaming DiLoCo with overlapping communication, arXiv:2501.18512. Fragment p = 0, ..., F-1 of the
model has the outer parameters theta_p, and node i the parameters theta_{i,p}. Nodes send it after the steps t > 0 with
(t - t_p) mod H = 0, where t_p = floor(p H / F). The fragment arrives tau steps later, and a node keeps the share alpha
of its parameters:

    Delta_p     = (1/N) sum_i Q(theta_p - theta_{i,p})                     # Q: 32 bits, int8, or 4-bit E3M0
    and after step t + tau:
    theta_p     <- OuterOpt_p(theta_p, Delta_p)                            # Nesterov, as DiLoCo
    theta_{i,p} <- alpha theta_{i,p} + (1 - alpha) theta_p

Delta_p uses the last theta_p, although node i continued from the mixed value. With alpha = 0, a node discards the tau
local steps that it took while the fragment was pending. With alpha = 1, communication has no effect on the nodes.

A fragment of n elements of b bytes has the payload n b bytes, ring all-reduce. All fragments take P b bytes every H
steps for P parameters, as in DiLoCo, but at most the largest fragment is sent at once. With 8 or 4 bits, the payload is
ceil(n bits / 8) bytes and 4 bytes for each tensor's scale, in an all-gather (such codes can't be summed in a ring), tx
= rx = (N-1) payload, with sums in fp32. Buffers are averaged once every H steps.

At the end of training (`final_sync`), a pending fragment arrives, and each other fragment is sent once more unless it
arrived after the last step. Steps taken while a fragment was pending are not sent at the end. Absent nodes are handled
as in DiLoCo, separately for each fragment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from exogym.core.compress import E3M0, Absmax, Quantized
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_choice, check_count, check_number, checked
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.fragments import Piece, fragments
from exogym.strategy.options import split
from exogym.strategy.outer import OuterAndInnerOptions, OuterRule
from exogym.strategy.outer_parameters import OuterFragments, OuterParameters
from exogym.strategy.rounds import check_one_length
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic

QUANTIZERS = {4: E3M0, 8: lambda: Absmax(8)}


class StreamingCommunicator(OuterFragments):
    """Take the outer steps of Streaming DiLoCo. `StreamingDiLoCoStrategy` describes the arguments."""

    weighted_means = True

    @checked
    def __init__(
        self,
        H: int,
        num_fragments: int,
        rule: OuterRule,
        *,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        pattern: str = "strided",
        bits: int = 32,
        offsets: Sequence[int] | None = None,
    ):
        super().__init__()
        check_one_length(H, type(self).__name__)
        check_count("num_fragments", num_fragments)
        check_count("fragment_sync_delay", fragment_sync_delay, least=0)
        check_choice("pattern", pattern, ("strided", "sequential"))
        if bits not in (32, *QUANTIZERS):
            raise ArgumentError(f"bits={bits!r} must be 32, 8 or 4")
        if fragment_sync_delay >= H:
            raise ArgumentError(f"fragment_sync_delay={fragment_sync_delay} must be below the round's H={H} steps")
        check_number("fragment_update_alpha", fragment_update_alpha, least=0, most=1)
        if not isinstance(offsets, Sequence | None):
            raise ArgumentError(f"offsets={offsets!r} must be a list with one step per fragment")
        if offsets is not None and len(offsets) != num_fragments:
            raise ArgumentError(
                f"offsets={list(offsets)} has {len(offsets)} steps, but num_fragments={num_fragments}: give one step "
                "for each fragment"
            )
        if offsets is not None and not all(0 <= t < H for t in offsets):
            raise ArgumentError(f"offsets={list(offsets)}: every step must be at least 0 and below H={H}")
        self.H, self.num_fragments, self.rule, self.pattern, self.bits = H, num_fragments, rule, pattern, bits
        self.acts_on = "elements" if bits == 32 else "row"  # codes share a scale per tensor
        self.delay, self.alpha = fragment_sync_delay, fragment_update_alpha
        self.offsets = [p * H // num_fragments for p in range(num_fragments)] if offsets is None else list(offsets)

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        F = self.num_fragments
        kind, size = ("all_reduce", b) if self.bits == 32 else ("all_gather", self.bits / 8)
        return [Traffic(kind, P / F * size, self.H / F, overlap_steps=self.delay)]

    def couples_every(self, N: int) -> float:
        return self.H + self.delay

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        rounds = -(-run.total_steps // self.H)
        self.outer = [
            OuterParameters(
                fleet, self.rule, rounds, fragment=fragment, delay=self.delay, keep=self.alpha,
                codec=None if self.bits == 32 else self._codec,
            )
            for fragment in fragments(fleet, self.num_fragments, self.pattern)
        ]  # fmt: skip

    def _codec(self, piece: Piece) -> Quantized:
        return Quantized(QUANTIZERS[self.bits](), [(1, slot.numel) for slot in piece.slots])

    def sends(self, step: int) -> list[int]:
        """Return the numbers of the fragments that nodes send after `step`."""
        return [p for p, t in enumerate(self.offsets) if (step - t) % self.H == 0]

    def next_event(self, step: int) -> int:
        sent = min(step + self.H - (step - t) % self.H for t in self.offsets)
        return min([sent, *(self._next_arrival(p, step) for p in range(self.num_fragments))])

    def _next_arrival(self, p: int, step: int) -> int:
        """Return the first step after `step` at which fragment p arrives."""
        first = (self.offsets[p] or self.H) + self.delay
        return max(first, step + self.H - (step - first) % self.H)

    def communicate(self, fleet: Fleet, step: int) -> None:
        sent = self.sends(step)
        for p, outer in enumerate(self.outer):
            arrived = outer.communicate(fleet, step, (step - 1) // self.H if p in sent else None)
            if arrived and p == 0:
                fleet.synchronise_buffers()

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        for p, outer in enumerate(self.outer):
            left = outer.flight is None and self._next_arrival(p, step - 1) != step
            if left or outer.flight is not None:
                outer.finish(fleet, step, (step - 1) // self.H if left else None)
                if p == 0:
                    fleet.synchronise_buffers()


class StreamingDiLoCoStrategy(CommunicateOptimizeStrategy):
    """Streaming DiLoCo: an outer step per fragment of the model. Averages may arrive late and be quantized.

    Use it when DiLoCo sends too much at once for the link.

        Delta_p = mean_i Q(theta_p - theta_{i,p});   tau steps later: theta_p <- OuterOpt(theta_p, Delta_p)
        theta_{i,p} <- alpha theta_{i,p} + (1 - alpha) theta_p

    Fragment p has the outer parameters theta_p, and node i the parameters theta_{i,p}. Q rounds to `bits` bits, and
    OuterOpt is the outer optimizer. Evaluation uses theta. Payload: P b bytes per node every H steps for P parameters
    of b bytes (at 32 bits), of at most the largest fragment at once.

    Args:
        inner_optim: inner optimizer. The paper uses AdamW.
        outer_optim, outer_lr, outer_lr_scheduler, outer_warmup_rounds, outer_momentum: see `DiLoCoStrategy`. The outer
            rate is 0.7 for 'sgd', and 0.4 in the paper.
        H: steps between two synchronizations of a fragment.
        num_fragments: F. The last fragment has the parameters outside of the model's layers (embeddings, the last norm,
            the head), and the others share the layers.
        fragment_sync_delay: tau, the steps from sending a fragment to its arrival, below H (1 in the paper).
        fragment_update_alpha: alpha, the share of its local parameters that a node keeps (0.5 in the paper).
        pattern: "strided" or "sequential" (`exogym.strategy.fragments`).
        bits: bits per element of Delta_p: 32 (exact), 8 (int8, scaled by each tensor's largest value) or 4 (E3M0, as in
            the paper).
        offsets: t_p of each fragment, from 0 to below H: fragment p is sent after the steps t > 0 with (t - t_p) mod H
            = 0. None means t_p = floor(p H / F).
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: arguments of the inner optimizer; see `Strategy`.

    Late averages overlap with computing. On hosts, this needs gloo and whole nodes in each process, without `faults` or
    `min_hosts`; otherwise nodes wait for each average right after sending it.

    >>> strategy = StreamingDiLoCoStrategy(H=100, num_fragments=4, fragment_sync_delay=1, bits=4)
    """

    name, title, paper, payload = "streaming_diloco", "Streaming DiLoCo", "arXiv:2501.18512", "P b / H"
    ranges = ("outer_lr=0.1..1.5", "outer_momentum=0.0..0.95")
    equation = (
        "Delta_p = mean_i Q(theta_p - theta_i,p); tau steps later: theta_p <- OuterOpt(theta_p, Delta_p), mixed in"
    )
    needs = "all nodes, every H/F steps; P/F elements have tau steps to arrive"
    identities = ("F=1, tau=0, alpha=0 = diloco", "equal offsets = diloco", "alpha=1 = nodes alone", "torchft's traces")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        outer_optim: Any = "sgd",
        H: int = 100,
        num_fragments: int = 2,
        *,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        pattern: str = "strided",
        bits: int = 32,
        offsets: Sequence[int] | None = None,
        **options: Unpack[OuterAndInnerOptions],
    ):
        rule, others = split(options, OuterRule)
        streaming = StreamingCommunicator(
            H, num_fragments, OuterRule(outer_optim, **rule), fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha, pattern=pattern, bits=bits, offsets=offsets,
        )  # fmt: skip
        super().__init__(inner_optim, [streaming], **others)
