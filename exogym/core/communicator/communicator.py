"""The communicator: collectives over the rows of a fleet, and the count of their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.communicator.ledger import Groups, Recorder
from exogym.core.communicator.messages import as_bytes, from_bytes, hand_over, row_of_source, rows_of_givers
from exogym.core.communicator.wire import ALONE, Columns, Parcel, Wire, reduce_rows
from exogym.errors import ArgumentError, check_choice

OPERATIONS = ("sum", "mean", "max", "min")
TRANSPORTS = ("ring", "tree", "server")  # the paths of an all-reduce


class Communicator(Recorder):
    """Collectives over the rows of a fleet, each recorded in `ledger`.

    Args:
        ranks: the node number (global id) of each row in this process.
        num_nodes: nodes in the whole fleet.
        wire: carries rows between processes, or None if this process holds all rows.

    Attributes:
        present: ids that take part in calls without groups; all nodes by default.
        weights: (num_nodes,) weights of the nodes in every mean whose call gives no weights. None means equal weights.
        transport: the path of every all-reduce: "ring", "tree" or "server". If it is None, each call's `algorithm` is
            the path. Bytes and time depend on the path; the result does not.
        rule: robust rule that replaces every mean of parameters or gradients, or None. A wrapper of
            `exogym.contrib` sets it.
        secure: computes means so that nobody sees a single node's values, or None. A wrapper sets it, too.

    >>> comm = Communicator(range(4), 4)
    >>> comm.all_reduce(torch.arange(4.0)[:, None]).tolist()
    [[1.5], [1.5], [1.5], [1.5]]
    >>> comm.ledger.tx_bytes.tolist()
    [6.0, 6.0, 6.0, 6.0]
    """

    def __init__(self, ranks: Sequence[int], num_nodes: int, wire: Wire | None = None):
        super().__init__(wire or Wire(ranks), num_nodes)
        self.ranks = self.wire.ranks
        self.weights: Tensor | None = None
        self.transport: str | None = None
        self.rule: Any = None
        self.secure: Any = None
        self._aggregations = 0
        self._in_flight: dict[int, list[Callable[[], Any]]] = {}

    # Reductions

    def all_reduce(
        self,
        x: Tensor,
        op: str = "mean",
        *,
        groups: Groups | None = None,
        weights: Tensor | None = None,
        out: Tensor | None = None,
        algorithm: str = "ring",
        expected: Groups | None = None,
    ) -> Tensor:
        """Reduce `x` (rows, ...) over each group and give every member the result.

        Args:
            op: "mean", "sum", "max" or "min".
            groups: disjoint lists of global ids; one group of all present nodes by default.
            weights: (num_nodes,) weights of a weighted mean, normalized within each group. They replace the
                communicator's `weights`.
            out: (rows, ...) tensor for the results; it may be `x` itself. Rows outside all groups stay unchanged.
            algorithm: "ring", "tree" or "server": the algorithm whose bytes count, if the communicator has no
                `transport`.
            expected: for each of `groups`, the members before some of them dropped out. Secure aggregation needs them.

        Returns:
            (rows, ...): the results. If one group has all nodes, the result is a single row, expanded to all rows.
                Otherwise it is a full tensor, in which rows outside all groups keep their own values.
        """
        _check_op(op, x)
        apart = groups is not None
        groups = self._sorted(groups)
        flat = x.reshape(len(x), -1)
        everyone = len(groups) == 1 and len(groups[0]) == self.num_nodes
        target = None if out is None else out.reshape(len(x), -1) if out.is_contiguous() else out.flatten(1)
        if target is None and not everyone:
            target = flat.clone()
        if weights is not None and op != "mean":
            raise ArgumentError(f"weights need op='mean', not {op!r}")
        result = None
        for k, group in enumerate(groups):
            share = self.share(group, op) if weights is None else _share(weights, group)
            kind, way = "all_reduce", self.transport or algorithm
            if op == "mean" and self.secure is not None:
                members = expected[k] if expected else group if apart else range(self.num_nodes)
                result = self.secure.mean(self.wire, flat, group, sorted(members), share, self._aggregations)
                self._aggregations += 1  # for new keys; no result depends on them
                for direction, size in self.secure.sent(flat.shape[1], self._row_bytes(x), len(members)):
                    if size:
                        self.record(direction, "server", group, size)
            elif (rule := self.robust(op, share)) is not None:
                result = rule.of(self.wire, flat, group, self._others)
                collective, path = rule.collective if way != "server" else (kind, way)
                self.record(collective, path, group, self._row_bytes(x))
            else:
                # What is used at once cannot be on its way: rows are set here if not all nodes are members.
                flight = self._flight if target is None else None
                result = self._reduced(flat, group, op, share, not apart, flight)
                self.record(kind, way, group, self._row_bytes(x))
            if target is not None:
                for row in self._rows_here(group):
                    target[row] = result
        if target is not None:
            if out is not None and target.data_ptr() != out.data_ptr():
                out.copy_(target.view_as(out))
            return out if out is not None else target.view_as(x)
        assert result is not None
        return result.view(1, *x.shape[1:]).expand_as(x)

    @property
    def _others(self) -> Columns:
        """The node's processes with the other columns of the averaged values."""
        return self.wire.columns if self._held is None else ALONE

    def share(self, group: Sequence[int], op: str = "mean") -> Tensor | None:
        """Return the (len(group),) weights of the nodes in a mean over `group`; their sum is 1.

        Returns None if the weights are equal, or if `op` is not "mean".
        """
        return None if self.weights is None or op != "mean" else _share(self.weights, group)

    def robust(self, op: str, share: Tensor | None) -> Any:
        """Return the robust rule that replaces the operation `op`, or None if no rule replaces it.

        Rules replace only means of parameters and gradients, not of buffers.

        Raises:
            ArgumentError: the mean has weights. Robust rules allow no weights, because a bad node could claim any
                weight.
        """
        if self.rule is None or op != "mean" or self._tag != "parameters":
            return None
        if share is not None:
            raise ArgumentError(
                f"{self.rule} counts all nodes alike, but this mean has weights: give weighting='uniform'"
            )
        return self.rule

    def begin_mean(self, x: Tensor, start: int, stop: int) -> None:
        """Begin the weighted sum of columns `start` to `stop` of `x` (1, F) over all nodes, in place. Return at once.

        The next `all_reduce(x, "mean")` waits for all sums that were begun on `x`, uses them for its result, and
        records their bytes. The sums must cover all columns of `x`. The wire must support this (`Wire.begin`).
        """
        share = self.share(range(self.num_nodes))
        if share is not None:
            x[0, start:stop].mul_(float(share[self.ranks[0]]))  # a Python number is not rounded to half precision
        self._in_flight.setdefault(x.data_ptr(), []).append(self.wire.begin(x[0, start:stop]))

    def _reduced(
        self, x: Tensor, group: Sequence[int], op: str, share: Tensor | None, everywhere: bool, flight: int | None
    ) -> Tensor:
        waits = self._in_flight.pop(x.data_ptr(), None)
        if waits is None:
            return self.result_of(lambda wire: wire.reduce(x, group, op, share, everywhere=everywhere), x[0], flight)
        with pulse.at(pulse.WAITING):
            for wait in waits:
                wait()
        return x[0].clone() if share is not None else x[0] / len(group)

    def sum_decoded(
        self, payload: Sequence[Tensor], decode: Callable[..., Tensor], op: str = "sum", *,
        size: float | None = None, like: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """All-gather the packed `payload` of the present nodes, decode it, and reduce the values in the fixed tree.

        Use this call for packed values that cannot be summed on their way, such as sparse or quantized values.

        Args:
            payload: a sequence of tensors (rows, ...).
            decode: function of the payload's tensors that returns the values, (rows, ...).
            size: bytes of a node's payload, if the tensors are larger. For example, the last byte in each process of a
                node may have unused bits. None means the tensors' bytes.
            like: a row with the shape and dtype of decoded values. Without `like`, the call does not overlap with
                computing.

        Returns:
            (rows, ...): the reduced values, expanded to all rows. A row of an absent node gets its own decoded values.
        """
        group, everyone = self.present, len(self.present) == self.num_nodes
        share = self.share(group, op)
        rule = self.robust(op, share)
        self.record("all_gather", "ring", group, sum(map(self._row_bytes, payload)) if size is None else size)
        own = decode(*payload) if self.wire.shares_memory or not everyone else None
        if own is not None and self.wire.shares_memory:  # then decoding first is faster
            _check_op(op, own)
            flat = own.reshape(len(own), -1)
            mean = (
                self.wire.reduce(flat, group, op, share)
                if rule is None
                else rule.of(self.wire, flat, group, self._others)
            )
            reduced = mean.view(own.shape[1:])
        else:  # the packed bytes travel, and every process decodes them
            packed = as_bytes(payload)

            def found(wire: Wire) -> Tensor:
                decoded = decode(*from_bytes(wire.rows(packed, group), payload))
                _check_op(op, decoded)
                flat = decoded.reshape(len(group), -1)
                mean = reduce_rows(flat, group, op, share) if rule is None else rule.of_rows(flat, group, self._others)
                return mean.view(decoded.shape[1:])

            if like is None or rule is not None or not everyone:
                reduced = found(self.wire)
            else:
                reduced = self.result_of(found, like, self._flight)
        if own is None or everyone:
            return reduced.expand(len(self.ranks), *reduced.shape)
        result = own.clone()
        result[self._rows_here(group)] = reduced
        return result

    def reduce(self, x: Tensor, dst: int = 0, op: str = "sum") -> Tensor:
        """Reduce all nodes' rows of `x` (rows, ...) and give the result to node `dst`.

        Returns (rows, ...), in which all other rows keep their own values.
        """
        _check_op(op, x)
        self._member(dst)
        result, flat, share = x.clone(), x.reshape(len(x), -1), self.share(self.present, op)
        self._record_tree("reduce", dst, self._row_bytes(x))
        theirs = rows_of_givers(self.wire, flat, [(i, dst) for i in self.present if i != dst])
        for row in self._rows_here([dst]):
            rows = torch.stack([flat[row] if i == dst else theirs[dst][i] for i in self.present])
            result[row] = reduce_rows(rows, self.present, op, share).view_as(x[row])
        return result

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        """Reduce `x` (rows, n, ...), and give slice k of the result to the k-th of n present nodes.

        Returns (rows, ...), with zeros for absent nodes.
        """
        _check_op(op, x)
        _check_slices(x, self.present, "reduce_scatter")
        share = self.share(self.present, op)
        self.record("reduce_scatter", "ring", self.present, self._row_bytes(x))
        slices, result = self._swapped(x), torch.zeros_like(x[:, 0])
        for row in self._rows_here(self.present):
            theirs = slices[row].reshape(len(self.present), -1)
            result[row] = reduce_rows(theirs, self.present, op, share).view_as(result[row])
        return result

    # Moving rows

    def broadcast(self, x: Tensor, src: int = 0, *, members: Sequence[int] | None = None) -> Tensor:
        """Give every member (by default, every present node) the row of node `src`. Other rows keep their own values.

        Returns (rows, ...). If all nodes are members, the result is one row, expanded to all rows.
        """
        group = self.present if members is None else self._sorted([members])[0]
        row = row_of_source(self.wire, x, self._member(src), group)
        self._record_tree("broadcast", src, self._row_bytes(x), group)
        if len(group) == self.num_nodes:
            return row.expand_as(x)
        result = x.clone()
        result[self._rows_here(group)] = row
        return result

    def gather(self, x: Tensor, dst: int = 0) -> Tensor:
        """Collect the rows of the n present nodes, in id order, for node `dst`.

        Returns (n, ...). In the recorded algorithm, only `dst` has this result. On hosts, every process gets it.
        """
        self._member(dst)
        size, n = self._row_bytes(x), len(self.present)
        at_dst = np.array([member == dst for member in self.present])
        self._add(
            "gather", "direct", self.present, size, np.where(at_dst, 0.0, size), np.where(at_dst, size * (n - 1), 0.0)
        )
        return self.wire.rows(x, self.present)

    def all_gather(self, x: Tensor, members: Sequence[int] | None = None) -> Tensor:
        """Give the rows of all n members (by default, the present nodes), in id order, to each member.

        Returns (rows, n, ...): one copy, expanded to all rows.
        """
        group = self.present if members is None else self._sorted([members])[0]
        everyone = self.wire.rows(x, group)
        self.record("all_gather", "ring", group, self._row_bytes(x))
        return everyone[None].expand(len(x), *everyone.shape)

    def scatter(self, x: Tensor, src: int = 0) -> Tensor:
        """Give slice k of node `src`'s row to the k-th of n present nodes. `x` is (rows, n, ...).

        Returns (rows, ...), with zeros for absent nodes.
        """
        _check_slices(x, self.present, "scatter")
        self._member(src)
        n, size = len(self.present), self._row_bytes(x)
        at_src = np.array([member == src for member in self.present])
        sent, got = np.where(at_src, size * (n - 1) / n, 0.0), np.where(at_src, 0.0, size / n)
        self._add("scatter", "direct", self.present, size, sent, got, givers=[src])
        result = torch.zeros_like(x[:, 0])
        for k, rank in enumerate(self.present):
            given = {src: x[self.wire.row_of[src], k].contiguous()} if src in self.wire.row_of else {}
            taken = hand_over(self.wire, given, [Parcel(src, rank, x.shape[2:], x.dtype, False)])
            for row in self._rows_here([rank]):
                result[row] = taken[rank]
        return result

    def all_to_all(self, x: Tensor) -> Tensor:
        """Each present node sends slice k of its row to the k-th of the n present nodes. `x` is (rows, n, ...).

        Each slice goes directly to its receiver, so each node sends and receives (n-1)/n of its payload. Returns (rows,
        n, ...), in which rows of absent nodes keep their values.
        """
        _check_slices(x, self.present, "all_to_all")
        self.record("all_to_all", "pairwise", self.present, self._row_bytes(x))
        return self._swapped(x)

    def _swapped(self, x: Tensor) -> Tensor:
        here, swapped = self._rows_here(self.present), self.wire.all_to_all(x, self.present)
        if here == list(range(len(x))):
            return swapped
        result = x.clone()
        result[here] = swapped
        return result

    def exchange(self, x: Tensor, partner: Sequence[int]) -> Tensor:
        """Swap rows in pairs: row r gets the row of `partner[ranks[r]]`. Returns (rows, ...).

        If a node is absent or has no partner, its entry in `partner` must be its own number. Such a node sends nothing
        and keeps its row.
        """
        if len(partner) != self.num_nodes or not all(0 <= other < self.num_nodes for other in partner):
            raise ArgumentError(
                f"partner={list(partner)} must name a node from 0 to {self.num_nodes - 1} for each node"
            )
        size, swapped = self._row_bytes(x), [rank for rank, other in enumerate(partner) if rank != other]
        for rank, other in enumerate(partner):
            if partner[other] != rank:
                raise ArgumentError(
                    f"exchange works in pairs: node {rank} names {other}, but {other} names {partner[other]}; "
                    "give partners that name each other"
                )
            if rank < other:
                self._add("exchange", "pairwise", [rank, other], size, np.full(2, float(size)), np.full(2, float(size)))
        result = x.clone()
        links = [(rank, partner[rank]) for rank in swapped]
        for rank, theirs in rows_of_givers(self.wire, x, links).items():
            result[self.wire.row_of[rank]] = theirs[partner[rank]]
        return result

    def hand_over(self, given: Mapping[int, Tensor], parcels: Sequence[Parcel]) -> dict[int, Tensor]:
        """Carry tensors from node to node. Return the tensors that this process's nodes get (see `messages.hand_over`).

        A tensor of S bytes that goes in one direction counts as a "send": the giver sends S bytes, and the taker
        receives S bytes. A swap of two such tensors counts as an "exchange": each of the two nodes sends and receives S
        bytes.
        """
        for giver, taker, shape, dtype, is_swap in parcels:
            if giver != taker:
                size = float(math.prod(shape) * dtype.itemsize)
                outward, back = np.array([size, size * is_swap]), np.array([size * is_swap, size])
                kind, way = ("exchange", "pairwise") if is_swap else ("send", "direct")
                self._add(kind, way, [giver, taker], size, outward, back, givers=None if is_swap else [giver])
        return hand_over(self.wire, given, parcels)

    def mix(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Mix rows by `matrix` W (n, n): row i becomes the sum over j of W[i, j] x_j, where x_j is node j's row.

        If W[i, j] is not zero, node j sends its row to node i. A node's payload and tx count its row's bytes once for
        each receiver; its rx counts a row's bytes once for each sender. The sum goes through the fixed tree. Returns
        (rows, ...).
        """
        return self.mix_all([x], matrix)[0]

    def mix_all(self, xs: Sequence[Tensor], matrix: Tensor) -> list[Tensor]:
        """Mix the rows of several tensors as `mix` does, with one message per pair of neighbors for all tensors."""
        size = float(sum(map(self._row_bytes, xs)))
        links = self._record_mix(matrix, size)
        return [self._mixed(x, matrix, rows_of_givers(self.wire, x.reshape(len(x), -1), links)) for x in xs]

    def mix_decoded(self, payload: Sequence[Tensor], decode: Callable[..., Tensor], matrix: Tensor) -> Tensor:
        """Mix decoded rows by `matrix` as `mix` does. Only the packed `payload` travels.

        Args:
            payload: a sequence of tensors (rows, ...).
            decode: function of the payload's tensors that returns the values, (rows, ...). It must decode each row by
                itself.
        """
        links, own = self._record_mix(matrix, float(sum(map(self._row_bytes, payload)))), decode(*payload)
        if self.wire.shares_memory:  # then decoding first is faster
            return self._mixed(own, matrix, rows_of_givers(self.wire, own.reshape(len(own), -1), links))
        theirs: dict[int, dict[int, Tensor]] = {}
        for taker, packed in rows_of_givers(self.wire, as_bytes(payload), links).items():
            decoded = decode(*from_bytes(torch.stack([*packed.values()]), payload))
            theirs[taker] = dict(zip(packed, decoded.reshape(len(packed), -1), strict=True))
        return self._mixed(own, matrix, theirs)

    def _record_mix(self, matrix: Tensor, size: float) -> list[tuple[int, int]]:
        """Record a mix in which each giver hands over `size` bytes. Return its (giver, taker) pairs."""
        if tuple(matrix.shape) != (self.num_nodes, self.num_nodes):
            raise ArgumentError(
                f"matrix has the shape {tuple(matrix.shape)}, wanted ({self.num_nodes}, {self.num_nodes})"
            )
        links = (matrix != 0).cpu().numpy()
        np.fill_diagonal(links, False)
        met = np.flatnonzero(links.any(0) | links.any(1)).tolist()  # other nodes exchange nothing
        ways = [(giver, taker) for taker, giver in np.argwhere(links).tolist()]
        if met:
            sent, got = links.sum(0)[met] * size, links.sum(1)[met] * size
            self._add("mix", "neighbours", met, size, sent, got, links=tuple(ways))
        return ways

    def _mixed(self, x: Tensor, matrix: Tensor, theirs: Mapping[int, Mapping[int, Tensor]]) -> Tensor:
        flat = x.reshape(len(x), -1)
        out = torch.zeros_like(flat)
        for row, rank in enumerate(self.ranks):
            givers = torch.nonzero(matrix[rank]).flatten().tolist()
            if givers == [rank]:
                out[row] = flat[row] * float(matrix[rank, rank])
            elif givers:
                rows = torch.stack([flat[row] if i == rank else theirs[rank][i] for i in givers])
                out[row] = reduce_rows(rows, givers, "sum", matrix[rank][givers])
        return out.view_as(x)

    def barrier(self) -> None:
        """Let all present nodes wait for each other. The nodes hand over no payload."""
        self.record("barrier", "tree", self.present, 0)

    # Bookkeeping

    def _rows_here(self, ids: Sequence[int]) -> list[int]:
        return [self.wire.row_of[i] for i in ids if i in self.wire.row_of]


def _check_op(op: str, x: Tensor) -> None:
    """Raise ArgumentError for an unknown operation, and for a mean of whole numbers."""
    check_choice("op", op, OPERATIONS)
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ArgumentError(
            f"op='mean' of {x.dtype} numbers may be a fraction: convert with x.float(), or take op='sum'"
        )


def _check_slices(x: Tensor, members: Sequence[int], name: str) -> None:
    if x.dim() < 2 or x.shape[1] != len(members):
        raise ArgumentError(f"{name} needs one slice per node: (rows, {len(members)}, ...), not {tuple(x.shape)}")


def _share(weights: Tensor, group: Sequence[int]) -> Tensor:
    mine = weights[list(group)].double()
    total = mine.sum()
    if not (total > 0 and bool((mine >= 0).all())):
        raise ArgumentError(
            f"weights of nodes {list(group)} are {mine.tolist()}, wanted weights of 0 or more, with a sum over 0"
        )
    return mine / total
