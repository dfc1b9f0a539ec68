"""The atlas's page in Markdown, written only from its table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exogym.core.base.files import replacing
from exogym.core.progress import readable_bytes
from exogym.network import readable_seconds
from exogym.strategy.registry import STRATEGIES
from exogym.study.compare.comparison import markdown
from research.atlas.equal import METHODS, places_at_rates, ranks_at_rates
from research.atlas.findings import Confirmed, Finding, confirmed, findings_of
from research.atlas.measures import NETWORKS, Ranks, Result, comparable, front_of, ranks_of, results_of
from research.atlas.places import KINDS, OTHERS, PLACES, VARIANTS
from research.atlas.plots import draw_fronts, draw_ranks
from research.atlas.short import DOUBTFUL, MARK, doubtful, lines_in_short, rounds_of
from research.atlas.table import RATES, Table
from research.atlas.tuning import INNER_RATES

ABOUT = """\
Which method, if all methods are tuned alike? Each method gets the same number of trials, of the same number of steps
and examples. The first trial has the method's defaults. [Optuna](https://optuna.org) proposes the other trials within
the ranges that each method declares: the inner learning rate, and rates such as the outer learning rate. The trial with
the lowest loss on validation data wins. Then the winner's settings and the defaults are trained again with three other
seeds, and the table shows their loss on test data, which no trial has seen.

A *place* is a task with a number of nodes: digits-16 has 16 nodes. For your own machines,
[Choosing a strategy](../../docs/understand/choosing.md) and `exogym advise` say where to begin.
"""
READING = """\
- Options that change the bytes, such as H or a density, are not tuned: they belong to the method's name. Each section
  says which H the methods with rounds have.
- `ditto`, `fedbn`, `fedper` and `fedrep` train a personal model for each client. Here they are judged by the shared
  model; [Federated learning](../../docs/federated.md) compares personal models.
- Nodes of asynchronous methods have equal speeds here, so their advantage with unequal nodes does not show.
- **Sent/node**: bytes that a node sends in the whole run.
- **Times** are what `exogym advise` predicts for the whole run on three networks, with the bytes that the run sent.
  Each node computes as fast as one core of the machine that trained the place. The models are small, so these times
  are mostly communication.
- **Bold**: for bytes, or for time on one of the networks, no other method has at most its cost and a lower mean loss.
  Differences may be noise of the seeds.
- Settings are the best of few trials, and methods with different ranges try different inner rates. A difference of a
  few percent between a method with one option and a method with three may come from this.
- All seeds and all methods of a task are measured on the same test examples, whose number each section gives. So no
  interval here says what other examples would give.
- At the places of the tasks `digits` and `spoken` the two halves of the held-out examples are unlike: their files have
  an order, and the halves take every second example. With the defaults, the median method's test loss is 1.1 to 2.1
  times its validation loss with `digits`, and 4.3 times with `spoken`. So trials choose less well there: with the
  chosen settings it is 1.6 to 3.2 times, and 5.7 times.
- Losses are the same to the last digit only on the same kind of processor: elsewhere rounding differs, and training
  amplifies it. [Claims](claims.md) has examples.
- **Gain**: how much lower the test loss is than with the method's defaults. A negative gain means that the trials chose
  worse settings than the defaults. Trials have one seed and half of the held-out examples.
- **Sensitivity**: the median trial's validation loss, divided by the best trial's. At 1, the settings hardly matter.
"""
RATES_ALIKE = """\
Methods with one option and methods with three try different inner rates. A method may rank better only because its
trials met a better rate. So here {methods} have the same two inner rates, {rates}. Ten methods were named before any
training, and the table has these. Their other options stay as tuned. This command trains the runs:

```bash
python -m research benchmark rates --page {page}
```

This comparison is not neutral either. We chose the two rates after we had seen the tuned results, and trials tried the
low one, too: where a method had chosen it, its low-rate runs are its tuned runs. Other options were chosen at the
method's own rate, so a method without other options has an advantage here. `demo` has its own optimizer, so the same
number means another rate there.
"""
REPEAT = """\
The results are in {results}. These commands train missing runs, and write this page. They need `exogym[search]`, and
`--out` keeps the runs:

```bash
{commands}
```

To repeat a row without these results, name its method and another folder:

```bash
{one}
```

To add methods or places that the table lacks, train them with the same budget, and merge the two files:

```bash
python -m research benchmark add runs/repeat/atlas.json --page {page}
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
    yield "# Atlas\n"
    yield ABOUT
    findings = [(finding, confirmed(finding, table)) for finding in findings_of(table)]
    yield from lines_in_short(table, places, ranks, findings)
    yield from _missing(table)
    yield from _findings(findings, table, path, doubtful(places))
    if ranks is not None:
        yield from _ranking(comparable(places), ranks, _picture(path, "ranks"))
    yield from _at_rates(places, path)
    yield "## How to read the tables\n"
    yield READING
    for place, results in places.items():
        yield from _section(table, place, results, _picture(path, place))
    yield from _gains(places)
    yield from _repeat(table, path)
    if table.left_out:
        yield "## Left out\n"
        yield "\n".join(f"- {study}: {why}" for study, why in table.left_out.items()) + "\n"


def _missing(table: Table) -> Iterator[str]:
    """Yield which places and methods were planned and are not trained yet."""
    planned = [str(place) for place in (*PLACES, *OTHERS) if str(place) not in table.places]
    if planned:
        yield f"Planned, and not in this table yet: {_listed(dict.fromkeys(planned))}.\n"
    ours = sorted(name for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym."))
    for place in map(str, PLACES):
        trained = {row["method"] for row in table.rows if row["place"] == place}
        left = [f"`{method}`" for method in (*ours, *VARIANTS) if method not in trained]
        if trained and left:
            yield f"At {place}, these methods are not trained yet: {_listed(dict.fromkeys(left))}.\n"


def _repeat(table: Table, path: Path) -> Iterator[str]:
    """Yield the commands that train all rows, and one that trains a single row again."""
    if not table.places:
        return
    file, (place, about) = path.with_suffix(".json").name, next(iter(table.places.items()))
    method = next(row["method"] for row in table.rows if row["place"] == place)
    yield "## Repeat and add\n"
    yield REPEAT.format(
        results=f"[{file}]({file})", page=path, commands="\n".join(commands(table, path)),
        one=f"python -m research benchmark --trials {about['trials']} --tasks {_kind(place)} --nodes {about['nodes']} "
        f"--strategies {method} --steps {about['steps']} --out runs/repeat",
    )  # fmt: skip


def _kind(place: str) -> str:
    return place.rpartition("-")[0]


def commands(table: Table, path: Path) -> Iterator[str]:
    """Yield a command for each group of places with the same methods."""
    groups: dict[tuple[int, tuple[str, ...], int, int], list[str]] = {}
    for place, about in table.places.items():
        methods = tuple(sorted({row["method"] for row in table.rows if row["place"] == place}))
        groups.setdefault((about["trials"], methods, about["nodes"], about["steps"]), []).append(_kind(place))
    for (trials, methods, nodes, steps), kinds in groups.items():
        yield (
            f"python -m research benchmark --trials {trials} --tasks {','.join(kinds)} --nodes {nodes} "
            f"--strategies {','.join(methods)} --steps {steps} --page {path}"
        )


def _findings(
    found: Sequence[tuple[Finding, Confirmed | None]], table: Table, path: Path, doubted: Sequence[str]
) -> Iterator[str]:
    """Yield the findings, with the verdict of fresh seeds. `doubted`: places with badly tuned DDP."""
    if not found:
        return
    yield "## Findings\n"
    yield (
        "A rule that was fixed before any training chooses these statements from the tables below. Then five other\n"
        "seeds decide, on the same test examples. They train the chosen settings again, and repeat no trial.\n"
        "Statements are about the geometric mean over the places of [Over all places](#over-all-places). The effect\n"
        'is the mean of log(other loss / the method\'s loss). A statement "at most 5% above" adds log(1.05). A\n'
        "statement on a gain subtracts half of the gain's logarithm. For example, 78 % lower is a factor of 4.5,\n"
        "whose square root is 2.1, so 53 % lower. If the effect is above 0, the statement holds in the mean. It is\n"
        "confirmed if the whole 95 % interval over seeds is above 0, refuted if the whole interval is below 0, and\n"
        "otherwise open. The interval says nothing about other tasks. The rule is in\n"
        "`research.atlas.findings`; this\n"
        f"command trains the seeds:\n\n```bash\npython -m research benchmark confirm --page {path}\n```\n"
    )
    for number, (finding, seen) in enumerate(found, 1):
        if seen is None:
            verdict = "Not trained again yet."
        elif math.isnan(seen.effect):
            verdict = "**Open**: a run with a fresh seed failed."
        else:
            verdict = (
                f"**{seen.outcome.capitalize()}**: the effect is {seen.effect:.3f} "
                f"({seen.low:.3f} to {seen.high:.3f}) on five fresh seeds. {_by_place(finding, seen)}"
            ) + _without(finding, table, doubted)
        yield (
            f"{number}. {finding.says} {verdict} This would refute it: {finding.refuted_by}, with the whole interval "
            f"below 0. It was chosen because {finding.why}."
        )
    yield ""


def _by_place(finding: Finding, seen: Confirmed) -> str:
    """Return the places at which the statement holds best and worst, as ratios of losses."""
    ratios = {place: math.exp(-effect) - 1 for place, effect in seen.by_place.items()}
    best, worst = min(ratios, key=lambda p: ratios[p]), max(ratios, key=lambda p: ratios[p])
    other = "its defaults'" if finding.high[0] == finding.low[0] else f"`{finding.high[0]}`'s"
    return (
        f"By place, its loss is between {_changed(ratios[best])} ({best}) and {_changed(ratios[worst])} ({worst}) "
        f"than {other}."
    )


def _changed(ratio: float) -> str:
    return f"{abs(ratio):.0%} {'higher' if ratio > 0 else 'lower'}"


def _without(finding: Finding, table: Table, doubted: Sequence[str]) -> str:
    """Return a sentence with the effect without the places at which DDP was badly tuned, if DDP is compared there."""
    left = [place for place in finding.places if place not in doubted]
    if not left or len(left) == len(finding.places) or all(method != "ddp" for _, method, _ in finding.asks):
        return ""
    seen = confirmed(replace(finding, places=left), table)
    if seen is None or math.isnan(seen.effect):
        return ""
    return (
        f" {MARK} Without {' and '.join(doubted)} it is {seen.effect:.3f} ({seen.low:.3f} to {seen.high:.3f}): "
        f"{seen.outcome}."
    )


def _ranking(places: Mapping[str, Sequence[Result]], ranks: Ranks, picture: str) -> Iterator[str]:
    yield "## Over all places\n"
    yield (
        f"Mean rank by test loss over {_listed(places)}, of the methods that trained at all of them. The intervals\n"
        "are from 2,000 resamples of places and seeds; with so few places they are too narrow. Two methods differ\n"
        f"more than by chance if their mean ranks differ by more than {ranks.critical:.1f}. For this limit, places\n"
        "with the same data count as one.\n"
    )
    lines = [
        [f"`{method}`", f"{mean:.1f}", f"{ranks.low[method]:.1f} to {ranks.high[method]:.1f}"]
        for method, mean in ranks.mean.items()
    ]
    yield markdown(["method", "mean rank", "95% of resamples"], lines) + "\n"
    yield f"![Mean ranks with their intervals]({picture})\n"


def _at_rates(places: Mapping[str, Sequence[Result]], path: Path) -> Iterator[str]:
    """Yield what methods reach at equal inner rates, or nothing while no place is whole."""
    ranks, shown = ranks_at_rates(places), places_at_rates(places)
    if not shown:
        return
    methods = [method for method in METHODS if any(r.method == method for each in shown.values() for r in each)]
    yield "## At equal inner rates\n"
    yield RATES_ALIKE.format(
        methods=_listed(dict.fromkeys(f"`{method}`" for method in methods)), page=path,
        rates=" and ".join(INNER_RATES["adamw"]),
    )  # fmt: skip
    if left := comparable(places).keys() - shown.keys():
        yield f"Not trained yet at these rates: {_listed(dict.fromkeys(sorted(left)))}.\n"
    tuned = ranks_of(shown)
    if tuned is not None and ranks:
        yield (
            f"Mean ranks over {_listed(shown)}. Two methods differ more than by chance if their mean ranks differ by\n"
            f"more than {tuned.critical:.1f}.\n"
        )
        columns = {"tuned": tuned.mean} | {kind: each.mean for kind, each in ranks.items()}
        lines = [[f"`{m}`", *(f"{mean[m]:.1f}" for mean in columns.values())] for m in ranks[RATES[0]].mean]
        yield markdown(["method", *columns], lines) + "\n"
    yield "How much higher the test loss is than `ddp`'s at the same rate: at the low rate, and at the high one.\n"
    others = [method for method in methods if method != "ddp"]
    lines = [
        [place, *(", ".join(_over(at[m], at["ddp"], kind) for kind in RATES) if m in at else "" for m in others)]
        for place, at in ((place, {r.method: r for r in each}) for place, each in shown.items())
    ]
    table = markdown(["place", *(f"`{method}`" for method in others)], lines) + "\n"
    yield table
    if MARK in table:
        yield f"{MARK} There `ddp` is more than 10% worse than with its defaults, which flatters other methods.\n"


def _over(result: Result, ddp: Result, kind: str) -> str:
    loss, other = (statistics.fmean(each.at_rates[kind]) for each in (result, ddp))
    if not math.isfinite(loss):
        return "failed"
    if not 0 < other < math.inf:
        return "" if other == 0 else "`ddp` failed"
    mark = f" {MARK}" if other > (1 - DOUBTFUL) * statistics.fmean(ddp.default_losses) else ""
    return f"{loss / other - 1:+.1%}{mark}"


def _section(table: Table, place: str, results: Sequence[Result], picture: str) -> Iterator[str]:
    about = table.places[place]
    rounds = rounds_of([row for row in table.rows if row["place"] == place])
    yield f"## {place}\n"
    tested = f" {about['tested']:,} test examples." if "tested" in about else ""
    yield (
        f"{KINDS[_kind(place)].says}. {about['heading']}.{tested} Trials for each method: {about['trials']}."
        + (f" {rounds}." if rounds else "")
        + "\n"
    )
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
            _gain(result.gain), "" if math.isnan(result.sensitivity) else f"{result.sensitivity:.2f}",
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
