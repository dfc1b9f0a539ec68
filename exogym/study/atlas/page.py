"""The atlas's page in Markdown, written only from its table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.core.base.files import replacing
from exogym.core.progress import readable_bytes
from exogym.network import readable_seconds
from exogym.strategy.registry import STRATEGIES
from exogym.study.atlas.findings import confirmed, findings_of
from exogym.study.atlas.measures import NETWORKS, Ranks, Result, comparable, front_of, ranks_of, results_of
from exogym.study.atlas.places import KINDS, OTHERS, PLACES, VARIANTS
from exogym.study.atlas.plots import draw_fronts, draw_ranks
from exogym.study.atlas.table import Table
from exogym.study.compare.comparison import markdown

ABOUT = """\
Which method, if all methods are tuned alike? Each method gets the same number of trials, of the same number of steps
and examples. The first trial has the method's defaults. [Optuna](https://optuna.org) proposes the other trials within
the ranges that each method declares: the inner learning rate, and rates such as the outer learning rate. The trial with
the lowest loss on validation data wins. Then the winner's settings and the defaults are trained again with three other
seeds, and the table shows their loss on test data, which no trial has seen.

- Options that change the bytes, such as H or a density, are not tuned: they belong to the method's name.
- `ditto`, `fedbn`, `fedper` and `fedrep` train a personal model for each client. Here they are judged by the shared
  model; [Federated learning](federated.md) compares personal models.
- **Sent** has the bytes that a node sends in the whole run.
- The times are what `exogym advise` predicts for the whole run on three networks. Each node computes as fast as one
  core of the machine that made this page. The models are small, so these times are mostly communication.
- A method in **bold** is on a Pareto front: no other method has a lower loss with fewer bytes, or in less time on one
  of the networks.
- **Gain** says how much lower the test loss is than with the method's defaults. It is negative if the trials, with one
  seed and half of the held-out examples, chose settings that are worse than the defaults with other seeds.
- **Sensitivity** is the median trial's loss over the best trial's. At 1, the settings hardly matter.

The results are in {results}. These commands train missing runs, and write this page:

```bash
{commands}
```

To add your results, train the same places with the same budget, and merge the two files:

```bash
exogym benchmark add runs/atlas/atlas.json --page {page}
```
"""


def write(table: Table, path: Path) -> None:
    """Write the page into `path`, and its pictures into the folder images/ beside the page."""
    images = path.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    places = _places(table)
    for place, results in places.items():
        draw_fronts(place, results, path.parent / _picture(path, place))
    ranks = ranks_of(comparable(places))
    if ranks is not None:
        draw_ranks(ranks, path.parent / _picture(path, "ranks"))
    with replacing(path) as file:
        file.write("\n".join(_blocks(table, path, places, ranks)))


def text_of(table: Table, path: Path) -> str:
    """Return the page's text."""
    places = _places(table)
    return "\n".join(_blocks(table, path, places, ranks_of(comparable(places))))


def _places(table: Table) -> dict[str, list[Result]]:
    return {place: results for place in table.places if (results := results_of(table, place))}


def _picture(page: Path, name: str) -> str:
    return f"images/{page.stem}_{name}.png"


def _blocks(table: Table, path: Path, places: Mapping[str, Sequence[Result]], ranks: Ranks | None) -> Iterator[str]:
    file = path.with_suffix(".json").name
    yield "# Atlas\n"
    yield ABOUT.format(results=f"[{file}]({file})", page=path.name, commands="\n".join(_commands(table, path)))
    planned = [str(place) for place in (*PLACES, *OTHERS) if str(place) not in table.places]
    if planned:
        yield f"Named beforehand, but not trained yet: {_listed(dict.fromkeys(planned))}.\n"
    ours = sorted(name for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym."))
    for place in map(str, PLACES):
        trained = {row["method"] for row in table.rows if row["place"] == place}
        left = [f"`{method}`" for method in (*ours, *VARIANTS) if method not in trained]
        if trained and left:
            yield f"At {place}, these methods are not trained yet: {_listed(dict.fromkeys(left))}.\n"
    yield from _findings(table, path)
    if ranks is not None:
        yield from _ranking(comparable(places), ranks, _picture(path, "ranks"))
    for place, results in places.items():
        yield from _section(table.places[place], place, results, _picture(path, place))
    yield from _gains(places)
    if table.left_out:
        yield "## Left out\n"
        yield "\n".join(f"- {study}: {why}" for study, why in table.left_out.items()) + "\n"


def _kind(place: str) -> str:
    return place.rpartition("-")[0]


def _commands(table: Table, path: Path) -> Iterator[str]:
    """Yield a command for each group of places with the same methods."""
    groups: dict[tuple[int, tuple[str, ...], int, int], list[str]] = {}
    for place, about in table.places.items():
        methods = tuple(sorted({row["method"] for row in table.rows if row["place"] == place}))
        groups.setdefault((about["trials"], methods, about["nodes"], about["steps"]), []).append(_kind(place))
    for (trials, methods, nodes, steps), kinds in groups.items():
        yield (
            f"exogym benchmark --trials {trials} --tasks {','.join(kinds)} --nodes {nodes} "
            f"--strategies {','.join(methods)} --steps {steps} --page {path.name}"
        )


def _findings(table: Table, path: Path) -> Iterator[str]:
    """Yield the findings, with the verdict of fresh seeds."""
    found = findings_of(table)
    if not found:
        return
    yield "## Findings\n"
    yield (
        "A rule that was fixed before any training chooses these statements from the tables below. Then five other\n"
        "seeds decide: a statement is confirmed if the whole 95 % interval over seeds is above 0, and refuted if the\n"
        "whole interval is below 0. The effect is a logarithm of losses, a mean over all places. The interval says\n"
        "nothing about other tasks. The rule is in `exogym.study.atlas.findings`; this command trains the seeds:\n\n"
        f"```bash\nexogym benchmark confirm --page {path.name}\n```\n"
    )
    for number, finding in enumerate(found, 1):
        seen = confirmed(finding, table)
        if seen is None:
            verdict = "Not trained again yet."
        elif math.isnan(seen.effect):
            verdict = "**Open**: a run with a fresh seed failed."
        else:
            verdict = (
                f"**{seen.outcome.capitalize()}**: the effect is {seen.effect:.3f} "
                f"({seen.low:.3f} to {seen.high:.3f}) on five fresh seeds."
            )
        yield f"{number}. {finding.says} {verdict} This would refute it: {finding.refuted_by}."
    yield ""


def _ranking(places: Mapping[str, Sequence[Result]], ranks: Ranks, picture: str) -> Iterator[str]:
    yield "## Over all places\n"
    yield (
        f"Mean rank by test loss over {_listed(places)}, of the methods that trained at all of them. The intervals\n"
        "are from 2,000 resamples of places and seeds. Two methods differ more than by chance if their mean ranks\n"
        f"differ by more than {ranks.critical:.1f}.\n"
    )
    lines = [
        [f"`{method}`", f"{mean:.1f}", f"{ranks.low[method]:.1f} to {ranks.high[method]:.1f}"]
        for method, mean in ranks.mean.items()
    ]
    yield markdown(["method", "mean rank", "95% of resamples"], lines) + "\n"
    yield f"![Mean ranks with their intervals]({picture})\n"


def _section(about: Mapping[str, Any], place: str, results: Sequence[Result], picture: str) -> Iterator[str]:
    yield f"## {place}\n"
    yield f"{KINDS[_kind(place)].says}. {about['heading']}. {about['trials']} trials for each method.\n"
    fronts = {"sent": front_of({r.method: (r.tx_bytes, r.loss) for r in results})}
    fronts |= {name: front_of({r.method: (r.predicted_s[name], r.loss) for r in results}) for name in NETWORKS}
    shown = set.union(*fronts.values())
    lines = []
    for result in results:
        name = f"**`{result.method}`**" if result.method in shown else f"`{result.method}`"
        lines.append([
            name, _loss(result), "" if result.accuracy is None else f"{result.accuracy:.1%}",
            "" if math.isnan(result.tx_bytes) else readable_bytes(result.tx_bytes),
            *("" if (s := result.predicted_s[net]) is None else readable_seconds(s) for net in NETWORKS),
            _gain(result.gain), f"{result.sensitivity:.2f}",
            ", ".join(f"{option}={value}" for option, value in result.options.items()) or "defaults",
        ])  # fmt: skip
    heads = ["method", "test loss", "accuracy", "sent/node", *NETWORKS, "gain", "sensitivity", "settings"]
    yield markdown(heads, lines) + "\n"
    yield f"![Test loss against bytes and predicted time]({picture})\n"


def _loss(result: Result) -> str:
    if not math.isfinite(result.loss):
        return "failed"
    return f"{result.loss:.4f}" + ("" if math.isnan(result.std) else f" ± {result.std:.4f}")


def _gain(share: float) -> str:
    return "" if math.isnan(share) else f"{share:.1%}"


def _gains(places: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Yield what tuning gained, for the methods that gain most."""
    gains: dict[str, dict[str, float]] = {}
    for place, results in places.items():
        for result in results:
            gains.setdefault(result.method, {})[place] = result.gain
    order = sorted(gains, key=lambda method: -max(-math.inf if math.isnan(x) else x for x in gains[method].values()))
    yield "## What tuning gains\n"
    yield "How much lower the test loss is than with the method's defaults.\n"
    lines = [[f"`{m}`", *(_gain(gains[m].get(p, math.nan)) for p in places)] for m in order]
    yield markdown(["method", *places], lines) + "\n"


def _listed(names: Mapping[str, Any]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else str(last)
