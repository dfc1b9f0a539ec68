"""Papers' claims, trained again at small size: the paper's finding, our finding, and a verdict.

A claim (`claim`) lists `Cell`s to train, and checks, which are pure functions of the results (`checks`). `claims` has a
file for each family of claims, and `catalogue` lists all claims. `training` trains cells, each in its own run folders.
So finished runs are never trained again, and claims share their common cells. `page` writes the page.

This example trains your own claim with 20 steps and gives the result of its check:

>>> import tempfile
>>> from research.reproduce.checks import lower
>>> cells = {name: Cell(name, task="pictures", nodes=2, steps=20) for name in ("ddp", "single")}
>>> claim = Claim("more", "Two nodes beat one", "none", "", "Is DDP ahead?", cells, [lower("ddp", "single")])
>>> with tempfile.TemporaryDirectory() as folder:
...     training = Reproduction(folder, seeds=[0])
...     found: Found = {label: training.results(cell) for label, cell in cells.items()}
...     page = Page(f"{folder}/claims.md", {"more": claim})
>>> run: Run = found["ddp"][0]
>>> [type(seen).__name__ for seen in claim.seen(found)]
['Seen']
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["CLAIMS", "Cell", "Claim", "Found", "Page", "Reproduction", "Run", "Seen", "Verdict", "claims_of"]

if TYPE_CHECKING:
    from research.reproduce.catalogue import CLAIMS, claims_of
    from research.reproduce.claim import Cell, Claim, Found, Run, Seen, Verdict
    from research.reproduce.page import Page
    from research.reproduce.training import Reproduction
else:
    __getattr__, __dir__ = lazily(__name__)
