"""The page of claims at several sizes, written only from a table of results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from exogym.core.base.files import replacing
from exogym.study.atlas.claims import CENTRAL, Central, Judged, judged, studies_at
from exogym.study.atlas.gaps import PAPER, gaps_of
from exogym.study.atlas.table import Table
from exogym.study.compare.comparison import markdown
from exogym.study.reproduce.checks import WORDS, mean_text
from exogym.study.reproduce.page import HOLDS

ABOUT = """\
Does a paper's claim fail here because it is false, because our models are small, or because our rates are bad? We test
the central claims again at three sizes, and tune the rates of every cell with the same number of trials, as in
[Tune several methods alike](sweeps.md#tune-several-methods-alike). The losses are on test data, with three seeds that
no trial has seen. The [reproductions](reproductions.md) have the papers' findings and our questions, with fixed rates.

- The **effect** is the logarithm of the loss ratio between the cell that the claim calls worse and the cell that it
  calls better: 0.01 is about 1 %.
- Its **slope** says how much the effect grows if a model has e times as many parameters, with the lowest and the
  highest slope of a seed. If size made no difference, the slope would be above 0 in all three seeds in one case of
  eight.
- The verdicts speak of short runs of small models: at H = 30, most runs have 30 outer rounds. The papers' runs have
  hundreds or more.
- Few trials tune roughly. The first trial has the method's defaults, and the others are random. Cells with the same
  ranges get the same random settings.
- We train claims in the order of their cost, the cheapest first, as far as our time lasts. We fixed this order before
  the training, too.
- A claim **comes out** if all its checks hold at all sizes. It **comes out more with size** if they hold at the largest
  size, and the slope is above 0 in every seed. It **is contradicted** if, at the largest size, the effect is below 0 in
  every seed, and the slope is not above 0 in every seed. Otherwise it **does not come out at these sizes**. We fixed
  these rules before the training.

This command trains missing runs, and writes this page from {results}:

```bash
exogym reproduce --trials {trials} --page docs/{page}
```
"""


def write(table: Table, path: Path, claims: Sequence[str] = ()) -> dict[str, Judged]:
    """Write the page with all claims whose runs are complete, or with those named. Return their verdicts by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text_of(table, path, claims))
    return _judged(table, claims)


def text_of(table: Table, path: Path, claims: Sequence[str] = ()) -> str:
    """Return the page's text."""
    done = _judged(table, claims)
    trials = max((about["trials"] for about in table.places.values()), default=0)
    results = path.with_suffix(".json").name
    blocks = [
        "# Claims at three sizes\n",
        ABOUT.format(results=f"[{results}]({results})", trials=trials, page=path.name),
    ]
    left = [name for name in CENTRAL if name not in done] if done and not claims else []
    blocks += [f"Not trained yet: {', '.join(left)}.\n"] if left else []
    blocks += _summary(done)
    blocks += _gaps(table)
    for each in done.values():
        blocks += _section(each, table)
    return "\n".join(blocks)


def _judged(table: Table, claims: Sequence[str]) -> dict[str, Judged]:
    found = {name: judged(central, table) for name, central in CENTRAL.items() if not claims or name in claims}
    return {name: each for name, each in found.items() if each is not None}


def _summary(done: Mapping[str, Judged]) -> Iterator[str]:
    if not done:
        yield "No claim has all its runs yet.\n"
        return
    sizes = next(iter(done.values())).sizes
    lines = [
        [
            name, each.central.claim.title, str(each.outcome),
            *("a run failed" if math.isnan(at.effect) else f"{at.effect:+.3f}" for at in each.sizes.values()),
            "" if math.isnan(each.slope) else f"{each.slope:+.3f} ({each.low:+.3f} to {each.high:+.3f})",
        ]
        for name, each in done.items()
    ]  # fmt: skip
    heads = ["claim", "title", "verdict", *(f"effect, size {size}" for size in sizes), "slope"]
    yield markdown(heads, lines) + "\n"


def _gaps(table: Table) -> Iterator[str]:
    found = gaps_of(table)
    if found is None:
        return
    yield "## DiLoCo's gap to DDP over nodes and size\n"
    yield (
        "The test loss relative to DDP's, at equal tokens. The **exponent** is the slope of the loss's logarithm over\n"
        "the parameters' logarithm, with the lowest and the highest slope of a seed. The last column has the\n"
        "exponents of [arXiv:2503.09799](https://arxiv.org/abs/2503.09799), for 35M to 2.4B parameters. Its larger\n"
        "models see more tokens. Here all sizes see the same tokens.\n"
    )
    lines = [
        [label, *(f"{gap:+.1%}" for gap in gaps), _exponent(*found.exponents[label]), f"{PAPER[label]:.4f}"]
        for label, gaps in found.gaps.items()
    ]
    heads = ["", *(f"{count:,} parameters" for count in found.parameters.values()), "exponent", "paper"]
    yield markdown(heads, lines) + "\n"


def _exponent(mean: float, low: float, high: float) -> str:
    return "a run failed" if math.isnan(mean) else f"{mean:.4f} ({low:.4f} to {high:.4f})"


def _section(each: Judged, table: Table) -> Iterator[str]:
    central = each.central
    yield f"## {central.name}: {central.claim.title}\n"
    kept = f" Its options {', '.join(central.kept)} are not tuned." if central.kept else ""
    worse = f"`{central.worse}`" if central.of_worse == "val_loss" else f"the {WORDS[central.of_worse]}"
    yield f"{central.claim.paper}. The claim calls `{central.better}` better than {worse}.{kept}\n"
    lines = [[label, *_losses(central, label, table, each)] for label in central.claim.cells]
    heads = ["test loss", *(f"size {size}, {at.parameters:,} parameters" for size, at in each.sizes.items())]
    yield markdown(heads, lines) + "\n"
    for size, at in each.sizes.items():
        for seen in at.seen:
            yield f"- Size {size}, {HOLDS[seen.holds]}: {seen.says}."
    yield ""


def _losses(central: Central, label: str, table: Table, each: Judged) -> Iterator[str]:
    for size in each.sizes:
        study = studies_at(central, size)[label]
        rows = [row for row in table.rows if (row["place"], row["method"]) == (study.place, study.method)]
        tuned = [row for row in rows if row["kind"] == "tuned"]
        losses = [float("inf") if row["loss"] is None else row["loss"] for row in tuned]
        options = ", ".join(f"{name}={value}" for name, value in tuned[0]["options"].items()) or "defaults"
        yield f"{mean_text(losses)} ({options})"
