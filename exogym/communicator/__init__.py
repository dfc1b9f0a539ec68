"""The communicator: the only thing an algorithm sees of the other nodes.

Every tensor carries the row axis first: row r of an argument is what node `ranks[r]` hands over, and
row r of a result is what it gets back. A result that is the same for all nodes comes back as one row
expanded to all (stride 0), so it costs the memory of one.

The exact reduction sums rows pairwise in a fixed tree over global ids, (0+1)+(2+3)+..., an absent id
passing its sibling through; so the bits of a sum do not depend on who holds which row.

Each call is recorded around the wire as an `Event` with, per member, the payload (bytes handed over)
and the bytes sent and received by the named collective algorithm (S: payload, n: members):

    ring all-reduce       tx = rx = 2 (n-1)/n S        all-gather       tx = rx = (n-1) S
    server all-reduce     tx = rx = S                  reduce-scatter   tx = rx = (n-1)/n S
    tree all-reduce       binomial tree, up and down   exchange, mix    S per partner
    broadcast, reduce     binomial tree
    send                  S out of one, into another
"""

from exogym.communicator.communicator import TRANSPORTS, Communicator
from exogym.communicator.inside import ALONE, Inside
from exogym.communicator.ledger import Event, Ledger
from exogym.communicator.robust import RULES, Krum, Median, Rule, TrimmedMean, rule_of
from exogym.communicator.secure import SecureAggregation
from exogym.communicator.shipping import blank, described, ship
from exogym.communicator.wire import CHUNK_ELEMENTS, Parcel, Wire, reduce_rows, tree_sum

__all__ = [
    "ALONE",
    "CHUNK_ELEMENTS",
    "RULES",
    "TRANSPORTS",
    "Communicator",
    "Event",
    "Inside",
    "Krum",
    "Ledger",
    "Median",
    "Parcel",
    "Rule",
    "SecureAggregation",
    "TrimmedMean",
    "Wire",
    "blank",
    "described",
    "reduce_rows",
    "rule_of",
    "ship",
    "tree_sum",
]
