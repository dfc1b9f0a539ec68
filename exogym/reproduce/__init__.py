"""Claims of papers, trained again in small: what was found, what we find, and whether it comes out.

A claim (`claim`) is a declaration: what to train, as `Cell`s, and checks, pure functions of what came out (`checks`).
`claims` has them, by families, and `catalogue` all; `training` trains the cells of some, each in run folders of its
own, so that what has ended is never trained again and claims share what they have in common; `page` writes the results
up.
"""

from exogym.reproduce.catalogue import CLAIMS, claims_of
from exogym.reproduce.claim import Cell, Claim, Found, Run, Seen, Verdict
from exogym.reproduce.page import Page
from exogym.reproduce.training import Reproduction

__all__ = ["CLAIMS", "Cell", "Claim", "Found", "Page", "Reproduction", "Run", "Seen", "Verdict", "claims_of"]
