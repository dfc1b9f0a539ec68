"""The communicator: collectives over the rows of a fleet, and the count of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.communicator.ledger import Groups
from exogym.core.communicator.messages import as_bytes, from_bytes, rows_of_givers
from exogym.core.communicator.moving import Moving, check_slices
from exogym.core.communicator.wire import ALONE, Columns, Wire, reduce_rows
from exogym.errors import ArgumentError, check_choice

OPERATIONS = ("sum", "mean", "max", "min")
TRANSPORTS = ("ring", "tree", "server")  # transports of an all-reduce


class Communicator(Moving):
    """Collectives over the rows of a fleet, each recorded in `ledger`.

    Args:
        ranks: the node number (global id) of each row in this process.
        num_nodes: nodes in the whole fleet.
        wire: carries rows between processes, or None if this process holds all rows.

    Attributes:
        present: ids that take part in calls without `groups`; default: all nodes.
        weights: (num_nodes,) weights of the nodes in every mean whose call passes no weights. None means equal weights.
        transport: the transport of every all-reduce, "ring", "tree" or "server", or None to use each call's
            `algorithm`. Bytes and time depend on it; the result doesn't.
        rule: robust rule that replaces every mean of parameters or gradients, or None. A wrapper of
            `exogym.contrib` sets it.
        secure: computes means without revealing any single node's values, or None. It is also set by a wrapper.

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
        """Reduce `x` (rows, ...) over each group, with the result on every member.

        Args:
            op: "mean", "sum", "max" or "min".
            groups: disjoint lists of global ids; default: one group of all present nodes.
            weights: (num_nodes,) weights of a weighted mean, normalized within each group. They replace the
                communicator's `weights`.
            out: (rows, ...) tensor for the results; it may be `x` itself. Rows outside all groups stay unchanged.
            algorithm: "ring", "tree" or "server": the algorithm whose bytes are counted, if the communicator has no
                `transport`.
            expected: for each of `groups`, its members before any dropped out, which secure aggregation needs.

        Returns:
            (rows, ...): the results. If one group has all nodes, they are a single row expanded to all rows; otherwise
            a full tensor, in which rows outside all groups keep their values.
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
                # If not all nodes are members, rows are set here, so the result can't be a pending transfer.
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
        return self.wire.columns if self.held is None else ALONE

    def share(self, group: Sequence[int], op: str = "mean") -> Tensor | None:
        """Return the weights of the nodes in a mean over `group`, (len(group),), which sum to 1.

        Returns None if the weights are equal, or if `op` is not "mean".
        """
        return None if self.weights is None or op != "mean" else _share(self.weights, group)

    def robust(self, op: str, share: Tensor | None) -> Any:
        """Return the robust rule that replaces the operation `op`, or None if no rule replaces it.

        Rules replace only means of parameters and gradients, not of buffers.

        Raises:
            ArgumentError: the mean has weights, which robust rules don't allow, because a bad node could claim any
                weight.
        """
        if self.rule is None or op != "mean" or self._tag != "parameters":
            return None
        if share is not None:
            raise ArgumentError(
                f"{self.rule} weights all nodes equally, but this mean has weights: pass weighting='uniform'"
            )
        return self.rule

    def begin_mean(self, x: Tensor, start: int, stop: int) -> None:
        """Begin the weighted sum of columns `start` to `stop` of `x` (1, F) over all nodes, in place, without waiting.

        The next `all_reduce(x, "mean")` waits for all sums begun on `x`, which must cover all columns, uses them for
        its result, and records their bytes. The wire must support `Wire.begin`.
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
            if flight is None:
                return self.wire.reduce(x, group, op, share, everywhere=everywhere)
            return self.result_of(lambda wire: wire.reduce(x, group, op, share, everywhere=everywhere), x[0], flight)
        with pulse.at(pulse.WAITING):
            for wait in waits:
                wait()
        return x[0].clone() if share is not None else x[0] / len(group)

    def sum_decoded(
        self, payload: Sequence[Tensor], decode: Callable[..., Tensor], op: str = "sum", *,
        size: float | None = None, like: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """All-gather the present nodes' packed `payload`, decode it, and reduce the values in the fixed tree.

        Use it for packed values that can't be summed while they are sent, such as sparse or quantized values.

        Args:
            payload: a sequence of tensors (rows, ...).
            decode: function of the payload's tensors that returns the values, (rows, ...).
            size: bytes of a node's payload if the tensors are larger, for example because the last byte in each process
                of a node has unused bits. None means the tensors' bytes.
            like: a row with the shape and dtype of decoded values. If it is None, the call doesn't overlap with
                computing.

        Returns:
            (rows, ...): the reduced values, expanded to all rows. An absent node's row gets its own decoded values.
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
        else:  # the packed bytes are sent, and every process decodes them
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
        """Reduce all nodes' rows of `x` (rows, ...), with the result on node `dst`.

        Returns (rows, ...), in which all other rows keep their values.
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
        """Reduce `x` (rows, n, ...), with slice k of the result on the k-th of n present nodes.

        Returns (rows, ...), with zeros for absent nodes.
        """
        _check_op(op, x)
        check_slices(x, self.present, "reduce_scatter")
        share = self.share(self.present, op)
        self.record("reduce_scatter", "ring", self.present, self._row_bytes(x))
        slices, result = self._swapped(x), torch.zeros_like(x[:, 0])
        for row in self._rows_here(self.present):
            theirs = slices[row].reshape(len(self.present), -1)
            result[row] = reduce_rows(theirs, self.present, op, share).view_as(result[row])
        return result


def _check_op(op: str, x: Tensor) -> None:
    """Raise ArgumentError for an unknown operation, and for a mean of whole numbers."""
    check_choice("op", op, OPERATIONS)
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ArgumentError(
            f"op='mean' of {x.dtype} numbers may be a fraction: convert with x.float(), or use op='sum'"
        )


def _share(weights: Tensor, group: Sequence[int]) -> Tensor:
    mine = weights[list(group)].double()
    total = mine.sum()
    if not (total > 0 and bool((mine >= 0).all())):
        raise ArgumentError(
            f"weights of nodes {list(group)} must be at least 0 with a sum over 0, but are {mine.tolist()}"
        )
    return mine / total
