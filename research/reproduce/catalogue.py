"""All claims in order, and a search by name."""

from __future__ import annotations

from collections.abc import Sequence

from exogym.errors import ArgumentError, nearest
from research.reproduce.claim import Claim
from research.reproduce.claims import asynchronous, compression, diloco, federated, gossip, streaming


def _order(claim: Claim) -> tuple[int, str]:
    """Sort R1 to R15 first, by number."""
    number = claim.name[1:]
    return (int(number), "") if claim.name.startswith("R") and number.isdecimal() else (1000, claim.name)


_FAMILIES = (diloco, streaming, asynchronous, gossip, compression, federated)
CLAIMS: dict[str, Claim] = {  # by name
    claim.name: claim for claim in sorted((claim for family in _FAMILIES for claim in family.CLAIMS), key=_order)
}


def claims_of(names: Sequence[str]) -> list[Claim]:
    """Return the claims with these names, in capital or small letters; without names, all claims.

    Raises:
        ArgumentError: a name is unknown; the message gives the most similar name.

    >>> [claim.name for claim in claims_of(["r1", "R14"])]
    ['R1', 'R14']
    """
    known = {name.lower(): claim for name, claim in CLAIMS.items()}
    for name in names:
        if name.lower() not in known:
            raise ArgumentError(f"there is no claim {name!r}: {nearest(name, CLAIMS)}")
    return [known[name.lower()] for name in dict.fromkeys(names)] if names else [*CLAIMS.values()]
