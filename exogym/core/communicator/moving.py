"""Collectives that send rows from node to node: broadcast, gather, swap, mix, and messages to a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from exogym.core.communicator.flights import Flights
from exogym.core.communicator.ledger import Event
from exogym.core.communicator.messages import as_bytes, from_bytes, hand_over, row_of_source, rows_of_givers
from exogym.core.communicator.wire import Parcel, reduce_rows
from exogym.errors import ArgumentError


class Moving(Flights):
    """The collectives of a `Communicator` that send rows without reducing them over all nodes."""

    def broadcast(self, x: Tensor, src: int = 0, *, members: Sequence[int] | None = None) -> Tensor:
        """Send node `src`'s row to every member (by default, every present node). Other rows keep their values.

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

        Returns (n, ...). In the recorded algorithm, only `dst` has this result; on hosts, every process gets it.
        """
        self._member(dst)
        size, n = self._row_bytes(x), len(self.present)
        at_dst = np.array([member == dst for member in self.present])
        self._add(
            "gather", "direct", self.present, size, np.where(at_dst, 0.0, size), np.where(at_dst, size * (n - 1), 0.0)
        )
        return self.wire.rows(x, self.present)

    def all_gather(self, x: Tensor, members: Sequence[int] | None = None) -> Tensor:
        """Send the rows of all n members (by default, the present nodes), in id order, to each member.

        Returns (rows, n, ...): one copy, expanded to all rows.
        """
        group = self.present if members is None else self._sorted([members])[0]
        everyone = self.wire.rows(x, group)
        self.record("all_gather", "ring", group, self._row_bytes(x))
        return everyone[None].expand(len(x), *everyone.shape)

    def scatter(self, x: Tensor, src: int = 0) -> Tensor:
        """Send slice k of node `src`'s row to the k-th of n present nodes. `x` is (rows, n, ...).

        Returns (rows, ...), with zeros for absent nodes.
        """
        check_slices(x, self.present, "scatter")
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
        """Send slice k of each present node's row to the k-th of the n present nodes. `x` is (rows, n, ...).

        Each slice goes directly to its receiver, so each node sends and receives (n-1)/n of its payload. Returns (rows,
        n, ...), in which rows of absent nodes keep their values.
        """
        check_slices(x, self.present, "all_to_all")
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

        A node that is absent or has no partner must have its own number in `partner`; it sends nothing and keeps its
        row.
        """
        if len(partner) != self.num_nodes or not all(0 <= other < self.num_nodes for other in partner):
            raise ArgumentError(
                f"partner={list(partner)} must name a node from 0 to {self.num_nodes - 1} for each node"
            )
        size, swapped = self._row_bytes(x), [rank for rank, other in enumerate(partner) if rank != other]
        for rank, other in enumerate(partner):
            if partner[other] != rank:
                raise ArgumentError(
                    f"exchange works in pairs, but node {rank} names {other} and node {other} names {partner[other]}: "
                    "pass partners that name each other"
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

        A tensor of S bytes in one direction counts as a "send": S bytes sent by the giver and received by the taker. A
        swap of two such tensors counts as an "exchange", in which each of the two nodes sends and receives S bytes.
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
        """Mix decoded rows by `matrix` as `mix` does, but send only the packed `payload`.

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
        """Record a mix in which each giver passes `size` bytes, and return its (giver, taker) pairs."""
        if tuple(matrix.shape) != (self.num_nodes, self.num_nodes):
            raise ArgumentError(
                f"matrix must have the shape ({self.num_nodes}, {self.num_nodes}), but has {tuple(matrix.shape)}"
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
        for row, rank in enumerate(self.wire.ranks):
            givers = torch.nonzero(matrix[rank]).flatten().tolist()
            if givers == [rank]:
                out[row] = flat[row] * float(matrix[rank, rank])
            elif givers:
                rows = torch.stack([flat[row] if i == rank else theirs[rank][i] for i in givers])
                out[row] = reduce_rows(rows, givers, "sum", matrix[rank][givers])
        return out.view_as(x)

    def barrier(self) -> None:
        """Make all present nodes wait for each other. There is no payload."""
        self.record("barrier", "tree", self.present, 0)

    # A server apart from the nodes, which every process simulates, so all processes hold its values

    def push(self, x: Tensor, src: int, algorithm: str = "server") -> Event:
        """Record that node `src` sends its row of `x` (rows, ...) up to the server.

        Args:
            algorithm: "server"; "island" for the server of the node's island; "relay" for a message from the island's
                server to the server above it, which counts for `src` but occupies no node (`Clock.relay`).
        """
        return self.record("push", algorithm, [self._member(src)], self._row_bytes(x))

    def pull(self, x: Tensor, members: Sequence[int], algorithm: str = "server") -> Event:
        """Record that the server sends each of `members` a row like those in `x` (rows, ...)."""
        (group,) = self._sorted([members])
        return self.record("pull", algorithm, group, self._row_bytes(x))

    # Bookkeeping

    def _rows_here(self, ids: Sequence[int]) -> list[int]:
        return [self.wire.row_of[i] for i in ids if i in self.wire.row_of]


def check_slices(x: Tensor, members: Sequence[int], name: str) -> None:
    if x.dim() < 2 or x.shape[1] != len(members):
        raise ArgumentError(f"{name} needs one slice per node: (rows, {len(members)}, ...), not {tuple(x.shape)}")
