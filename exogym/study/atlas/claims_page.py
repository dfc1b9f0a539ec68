"""The page of claims at several sizes, written only from a table of results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.core.base.files import replacing
from exogym.study.atlas.claims import CENTRAL, AtSize, Central, Judged, Outcome, judged, runs_of, studies_at
from exogym.study.atlas.gaps import PAPER, gaps_of
from exogym.study.atlas.table import Table
from exogym.study.atlas.training import Study
from exogym.study.compare.comparison import markdown
from exogym.study.reproduce.checks import WORDS, mean_text
from exogym.study.reproduce.page import HOLDS

PLURAL = {
    Outcome.YES: "come out", Outcome.MORE: "come out more with size", Outcome.NO: "do not come out at these sizes",
    Outcome.CONTRADICTED: "are contradicted", Outcome.UNTUNED: "are hardly tuned: no verdict",
}  # fmt: skip
ABOUT = """\
Does a paper's claim fail here because it is false, because our models are small, or because our rates are bad? We test
the central claims again at three sizes, and tune the rates of every cell with the same number of trials, as in
[Tune several methods alike](sweeps.md#tune-several-methods-alike). A *cell* is a method with its fixed options. The
losses are on test data, with three seeds that no trial has seen. [Reproductions](reproductions.md) has each paper's
finding, our question, and results with fixed rates.
"""
READING = """\
- **Effect** of comparing A with B: log(B's loss / A's loss), so 0.01 is about 1 %. An effect above 0 supports the
  claim. Some claims only say "at most 3 % worse": there, a small effect below 0 agrees.
- **Slope**: the effect's growth if the parameters grow e = 2.7 times, and in brackets the lowest and the highest slope
  of a seed. If size made no difference, the slope would be above 0 in all three seeds in one case of eight.
- So few trials find only rough rates. The first trial has the method's defaults, and the others are random. Cells with
  the same ranges get the same random settings.
- A claim **comes out** if all its checks hold at all sizes. It **comes out more with size** if they hold at the largest
  size, and the slope is above 0 in every seed. It **is contradicted** if, at the largest size, a check fails, the
  effect is below 0 in every seed, and the slope is not above 0 in every seed. Otherwise it **does not come out at these
  sizes**. We fixed these rules before the training. Only "a check fails" is newer; it changed no verdict.
- A claim **is hardly tuned** if at least half of a cell's trials failed at the largest size. Then it has no verdict. We
  added this rule when most trials of SCAFFOLD had diverged.

These commands train missing runs, and write this page from {results}:

```bash
{commands}
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
    results = path.with_suffix(".json").name
    blocks = ["# Claims at three sizes\n", ABOUT, *_in_short(done, table)]
    left = [name for name in CENTRAL if name not in done] if done and not claims else []
    blocks += [f"Not complete yet: {', '.join(left)}.\n"] if left else []
    blocks += _summary(done)
    blocks += [
        "## How to read the tables\n",
        READING.format(results=f"[{results}]({results})", commands="\n".join(_commands(done, table, path))),
    ]
    blocks += _gaps(table)
    second = _second(path)
    for each in done.values():
        blocks += _section(each, table)
        blocks += _by_hand(each.central, table, second)
    return "\n".join(blocks)


def _judged(table: Table, claims: Sequence[str]) -> dict[str, Judged]:
    found = {name: judged(central, table) for name, central in CENTRAL.items() if not claims or name in claims}
    return {name: each for name, each in found.items() if each is not None}


def _commands(done: Mapping[str, Judged], table: Table, path: Path) -> Iterator[str]:
    """Yield a command for each number of trials. The command for the most common number names no claim: it has all."""
    trials = {name: table.places[_pair(each.central)[0].place]["trials"] for name, each in done.items()}
    numbers = sorted(set(trials.values()), key=[*trials.values()].count) or [0]
    for count in numbers[:-1]:
        names = " ".join(name for name, each in trials.items() if each == count)
        yield f"exogym reproduce {names} --trials {count} --page {path}"
    yield f"exogym reproduce --trials {numbers[-1]} --page {path}"


def _in_short(done: Mapping[str, Judged], table: Table) -> Iterator[str]:
    """Yield the verdicts in a few lines, by fixed rules."""
    if not done:
        return
    outcomes = {kind: [name for name, each in done.items() if each.outcome is kind] for kind in Outcome}
    counts = "; ".join(
        f"{len(names)} {kind if len(names) == 1 else PLURAL[kind]} ({', '.join(names)})"
        for kind, names in outcomes.items()
        if names
    )
    lines = [f"{len(done)} of {len(CENTRAL)} claims are complete: {counts}."]
    same: dict[tuple[Study, ...], list[str]] = {}
    for name, each in done.items():
        same.setdefault(tuple(_pair(each.central)), []).append(name)
    lines += [f"{_and(names)} compare the same runs: count them once." for names in same.values() if len(names) > 1]
    if contradicted := outcomes[Outcome.CONTRADICTED]:
        sizes = {name: math.expm1(-_largest(done[name]).effect) for name in contradicted}
        shown = {name: f"{sizes[name]:.1%}" for name in sorted(sizes, key=lambda name: sizes[name])}
        shown |= {name: "a run failed" for name, size in sizes.items() if math.isnan(size)}
        lines.append(
            '"Contradicted" means worse in three of three seeds at the largest size. Chance alone does this in one '
            f"case of eight, so look at how much higher the loss is: "
            f"{', '.join(f'{name} {size}' for name, size in shown.items())}."
        )
    if "R13" in contradicted or "sparse-bytes" in contradicted:
        lines.append(
            "R13 and sparse-bytes train SparseLoCo with ExoGym's default `aggregation=mean`. The published code has "
            "`aggregation=contributors`. In the [atlas](atlas.md#characters-4) this variant beats DiLoCo."
        )
    others = [name for name, each in done.items() if each.outcome is not Outcome.YES]
    kept = {name: _always(done[name]) for name in others}
    if any(kept.values()):
        counts = ", ".join(f"{name} ({of[0]} of {of[1]} checks)" for name, of in kept.items() if of)
        lines.append(f"Parts of these claims hold at all sizes: {counts}.")
    parameters, steps = (max(about[name] for about in table.places.values()) for name in ("parameters", "steps"))
    lines.append(
        f"This refutes no paper at its size. The largest model here has {parameters:,} parameters, and runs have at "
        f"most {steps:,} steps, in most cases with 33 outer rounds. Papers have hundreds of rounds."
    )
    yield "## In short\n"
    yield "\n".join(f"- {line}" for line in lines) + "\n"


def _pair(central: Central) -> list[Study]:
    studies = studies_at(central, "full")
    return [studies[central.better], studies[central.worse]]


def _largest(each: Judged) -> AtSize:
    return list(each.sizes.values())[-1]


def _always(each: Judged) -> tuple[int, int] | None:
    """Return how many checks hold at all sizes, and the number of checks; None if none does."""
    checks = list(zip(*(at.seen for at in each.sizes.values()), strict=True))
    count = sum(all(seen.holds for seen in check) for check in checks)
    return (count, len(checks)) if count else None


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


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
    worse = f"`{central.worse}`" if central.of_worse == "val_loss" else f"the {_on_test(WORDS[central.of_worse])}"
    late = "" if central.of_worse == "val_loss" else (
        " \"Late in training\" is the mean over the last quarter of the evaluations, without the last one."
    )  # fmt: skip
    yield f"{central.claim.paper}. The effect compares `{central.better}` with {worse}.{late}{kept}{_alike(central)}\n"
    lines = [[label, *_losses(central, label, table, each)] for label in central.claim.cells]
    heads = ["test loss", *(f"size {size}, {at.parameters:,} parameters" for size, at in each.sizes.items())]
    yield markdown(heads, lines) + "\n"
    for size, at in each.sizes.items():
        for seen in at.seen:
            yield f"- Size {size}, {HOLDS[seen.holds]}: {_on_test(seen.says)}."
        for label, (failed, trials) in at.hardly_tuned.items():
            yield f"- Size {size}: {failed} of {trials} trials of `{label}` failed, so it is hardly tuned."
    yield ""


def _second(path: Path) -> dict[str, Any]:
    """Return the results of benchmarks/claims_by_hand.py, beside the page's results, or an empty dict."""
    file = path.with_name(f"{path.stem}_by_hand.json")
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def _by_hand(central: Central, table: Table, second: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a second program found in the cells of the largest size."""
    lines, same = [], second.get("same_batches", {"cells": {}})["cells"]
    for study, labels in _labels(central).items():
        key = f"{study.place}|{study.method}"
        ours = [run.last["val_loss"] for run in runs_of(table, study)]
        theirs = [part.get(key, {}).get("val_loss") for part in (second.get("cells", {}), same)]
        if ours and any(theirs):
            lines.append([" and ".join(labels), mean_text(ours), *(mean_text(each) if each else "" for each in theirs)])
    if lines:
        yield (
            "A second program without ExoGym's strategies and trainer trained these cells at the largest size, on\n"
            "other batches and on ExoGym's batches ([code](../benchmarks/claims_by_hand.py)):\n"
        )
        yield markdown(["test loss", "ExoGym", "second program", "on the same batches"], lines) + "\n"
    if central.name in second.get("notes", {}):
        yield f"{second['notes'][central.name]}\n"


def _on_test(text: str) -> str:
    return text.replace("validation loss", "test loss")


def _alike(central: Central) -> str:
    """Return a sentence on cells that have the same runs, because their rates are tuned."""
    same = [_and(labels) for labels in _labels(central).values() if len(labels) > 1]
    return f" {same[0]} have the same runs, because their rates are tuned." if same else ""


def _labels(central: Central) -> dict[Study, list[str]]:
    """Return a dict from each study of the largest size to the labels of its cells."""
    labels: dict[Study, list[str]] = {}
    for label, study in studies_at(central, "full").items():
        labels.setdefault(study, []).append(f"`{label}`")
    return labels


def _losses(central: Central, label: str, table: Table, each: Judged) -> Iterator[str]:
    for size in each.sizes:
        study = studies_at(central, size)[label]
        rows = [row for row in table.rows if (row["place"], row["method"]) == (study.place, study.method)]
        tuned = [row for row in rows if row["kind"] == "tuned"]
        losses = [float("inf") if row["loss"] is None else row["loss"] for row in tuned]
        options = ", ".join(f"{name}={value}" for name, value in tuned[0]["options"].items()) or "defaults"
        yield f"{mean_text(losses)} ({options})"
