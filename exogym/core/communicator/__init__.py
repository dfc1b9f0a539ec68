"""The communicator: an algorithm's only access to other nodes.

The first axis of every tensor is the row axis: row r of an argument is the value that node `ranks[r]` passes, and row r
of a result is the value that it gets back. A result that is equal for all nodes is one row expanded to all rows (stride
0), so it takes one row's memory.

The exact reduction sums rows pairwise in a fixed tree over global ids, (0+1)+(2+3)+.... If one of two neighbors in the
tree is absent, the other's value passes through unchanged. The bits of a sum therefore don't depend on which process
holds which row.

The communicator records each call as an `Event`. For each of the n members, the event has the payload S (the bytes that
the member passes) and the bytes that it sends (tx) and receives (rx) under the named algorithm:

    ring all-reduce       tx = rx = 2 (n-1)/n S        all-gather       tx = rx = (n-1) S
    server all-reduce     tx = rx = S                  reduce-scatter   tx = rx = (n-1)/n S
    tree all-reduce       binomial tree, up and down   exchange, mix    S per partner
    broadcast, reduce     binomial tree
    send                  S out of one node, into another

Four nodes in one process, and the events of their calls:

>>> import torch
>>> wire, seen = Wire(range(4)), list[Event]()
>>> comm = Communicator(range(4), 4, wire)
>>> ledger: Ledger = comm.ledger
>>> ledger.listeners.append(seen.append)
>>> x = torch.arange(8.0).view(4, 2)
>>> comm.all_reduce(x)[0].tolist(), seen[0].algorithm, ledger.tx_bytes.tolist()
([3.0, 4.0], 'ring', [12.0, 12.0, 12.0, 12.0])
>>> reduce_rows(x, range(4), "max").tolist()
[6.0, 7.0]
>>> ship(wire, {"x": x}, source=0)["x"] is x
True
>>> tell(wire, {"step": 3}), gather(wire, 1)
({'step': 3}, [1])
>>> hand_over(wire, {0: x[0]}, [Parcel(0, 1, (2,), x.dtype, False)])[1].tolist()
[0.0, 1.0]
>>> sent_factor("all_reduce", "ring", 4)  # payloads that a member sends
1.5
>>> barrier(wire)
>>> say(wire, "not said", about="tests")
>>> columns: Columns = wire.columns  # a node of several devices has more parts
>>> columns.part, columns.parts
(0, 1)
>>> Parcel(giver=0, taker=1, shape=(2,), dtype=torch.float32, is_swap=False).taker
1
"""

from exogym.core.communicator.communicator import TRANSPORTS, Communicator
from exogym.core.communicator.ledger import Event, Ledger, sent_factor
from exogym.core.communicator.messages import barrier, blank, described, gather, hand_over, say, ship, tell
from exogym.core.communicator.wire import (
    ALONE,
    CHUNK_ELEMENTS,
    Columns,
    Move,
    Parcel,
    Wire,
    reduce_rows,
    tree_sum,
)

__all__ = [
    "ALONE",
    "CHUNK_ELEMENTS",
    "TRANSPORTS",
    "Columns",
    "Communicator",
    "Event",
    "Ledger",
    "Move",
    "Parcel",
    "Wire",
    "barrier",
    "blank",
    "described",
    "gather",
    "hand_over",
    "reduce_rows",
    "say",
    "sent_factor",
    "ship",
    "tell",
    "tree_sum",
]
