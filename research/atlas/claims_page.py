"""The page of claims at several sizes, written only from a table of results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.core.base.files import replacing
from exogym.study.compare.comparison import markdown
from research.atlas.claims import (
    APART,
    CENTRAL,
    SIZES,
    TRIALS,
    AtSize,
    Central,
    Outcome,
    Verdict,
    disagree,
    judged,
    runs_of,
    studies_at,
)
from research.atlas.gaps import PAPER, gaps_of
from research.atlas.table import RATES, Table
from research.atlas.training import Study
from research.atlas.tuning import INNER_RATES, axes_of_method, without
from research.reproduce.checks import WORDS, mean_text
from research.reproduce.page import HOLDS

PLURAL = {
    Outcome.YES: "come out", Outcome.MORE: "come out more with size", Outcome.NO: "do not come out at these sizes",
    Outcome.CONTRADICTED: "are contradicted",
}  # fmt: skip
ABOUT = """\
Does a paper's claim fail here because it is false, because our models are small, or because our rates are bad? We test
the central claims again at three sizes. A *cell* is a method with its fixed options. Trials choose its other options,
such as the outer rate; each cell that has such options gets the same number of trials. Then the cells of a claim are
trained at the same inner rates. The losses are on test data, with three seeds that no trial has seen; ± is their
standard deviation.
[Reproductions](reproductions.md) has each paper's finding, our question, and results with fixed rates.
"""
READING = """\
- The **low** and the **high** inner rate are {rates}.
  The cells of a claim share them. So a method that bears a higher inner rate than another gets no credit for that.
  The runs of {long} are long, so these claims have only the low rate.
- The first of a cell's {trials} trials has the task's defaults, and the others have random options. Cells with the same
  options to tune try the same random points, so many cells chose the same one. Each trial also has an inner rate:
  {tried}.
  It is then dropped. So options may have been chosen for their trial's rate: none were tried at the high rate, and few
  at the low one.
- **Effect** of comparing A with B: log(B's loss / A's loss), so 0.01 is about 1 %. An effect above 0 supports the
  claim. The effect is of one comparison, and the verdict of all checks: a claim may fail by another check. Some claims
  allow that A is a little worse: {allowed}.
- **Slope**: the effect's growth if the parameters grow e = 2.7 times, with its 95 % interval over the three seeds. The
  seeds share their settings and the test data, so an interval says nothing about other settings or other data.
- At one inner rate, a claim **comes out** if all its checks hold at all sizes. It **comes out more with size** if they
  hold at the largest size, and the slope's interval is above 0. This is less than "comes out": a check fails at a
  smaller size. It **is contradicted** if, at the largest size, a check fails and the effect's interval is below what
  the claim allows, and the slope's interval is not above 0; if a run failed, the effect is below it in all seeds.
  Otherwise it **does not come out at these sizes**. If the two rates disagree, it does not come out. But "comes out"
  with "comes out more with size" gives the second.
- ‡: a cell's highest and lowest loss differ by more than {apart}. Some of these runs hardly learn. Do not read such
  effects and gaps: a different seed could turn them around. The verdicts have no such exception.
- No interval is corrected for the number of claims.
- Losses are the same to the last digit only on the same kind of processor. On another kind, rounding differs, and
  training amplifies it. We repeated 16 runs of R1 on another kind: 15 differ by at most 0.6 %, about as much as two
  seeds, and one trial differs by 2.2 %. Also one of three runs of SCAFFOLD differs, by 6 %. So another processor may
  choose other options.

At first the trials also chose the inner rate. Methods with many options then got lower inner rates than methods with
few, which decided some claims. Then R8 came out, R1 came out more with size, R4, R6, R7 and R11 did not come out, R5,
R13 and sparse-bytes were contradicted, and SCAFFOLD was hardly tuned. With more trials, a trial's one seed chose rates
at which every third run fails to learn. So now the cells of a claim share inner rates. With AdamW, the low rate is the
rate that most cells of the first results had chosen, so their runs count again; with SGD it is 0.01, which no trial had
tried. The high rate is twice as high. The rules are stricter, too: intervals decide, not just all three seeds. R7 and
R8 now keep the paper's outer momentum of 0.9, and R13 has the published code's `aggregation=contributors`. R8's effect
now compares what its title names. We decided all this after the first results, and for each claim before its new runs,
with three exceptions. Six runs of DiLoCo at the high rate (sizes medium and full) are from the try with more trials, so
we had seen them. [Reproductions](reproductions.md) already had SCAFFOLD and FedAvg at full size with SGD's rates of
0.01 and 0.02, so for scaffold the full size is no fresh test. And until all these runs were done, a claim was
contradicted if the interval was below 0, also where the claim allows a difference. R5 and sparse-bytes were then
contradicted; but three seeds cannot tell whether they are worse than they allow.

These commands train missing runs, and write this page from {results}:

```bash
{commands}
```

To repeat a claim without these results, name it and another page:

```bash
python -m research reproduce R1 --trials {trials} --page runs/repeat/claims.md --out runs/repeat
```
"""


def write(table: Table, path: Path, claims: Sequence[str] = ()) -> dict[str, Verdict]:
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
    blocks += _summary(done, table)
    blocks += [
        "## How to read the tables\n",
        READING.format(
            results=f"[{results}]({results})",
            commands="\n".join(_commands(done, table, path)),
            rates=", or ".join(f"{low} and {high} with {name}" for name, (low, high) in INNER_RATES.items()),
            allowed=_and([f"{name} by {each.allowed:.1%}" for name, each in CENTRAL.items() if each.allowed]),
            trials=" or ".join(map(str, sorted({about["trials"] for about in table.places.values()}))) or TRIALS,
            long=_and([name for name, each in CENTRAL.items() if len(each.kinds) == 1]),
            tried=_tried(table),
            apart=APART,
        ),
    ]
    blocks += _gaps(table)
    for each in done.values():
        blocks += [*_section(each, table), *_by_hand(each.central, table, next(iter(each.at)))]
    return "\n".join(blocks)


def _judged(table: Table, claims: Sequence[str]) -> dict[str, Verdict]:
    found = {name: judged(central, table) for name, central in CENTRAL.items() if not claims or name in claims}
    return {name: each for name, each in found.items() if each is not None}


def _commands(done: Mapping[str, Verdict], table: Table, path: Path) -> Iterator[str]:
    """Yield a command for each number of trials. The command for the most common number names no claim: it has all."""
    cells = {name: _pair(each.central)[0] for name, each in done.items()}
    trials = {name: table.places[study.place]["trials"] for name, study in cells.items()}
    numbers = sorted(set(trials.values()), key=[*trials.values()].count) or [TRIALS]
    for count in numbers[:-1]:
        names = " ".join(name for name, each in trials.items() if each == count)
        yield f"python -m research reproduce {names} --trials {count} --page {path}"
    yield f"python -m research reproduce --trials {numbers[-1]} --page {path}"


def _in_short(done: Mapping[str, Verdict], table: Table) -> Iterator[str]:
    """Yield the verdicts in a few lines, by fixed rules."""
    if not done:
        return
    outcomes = {kind: [name for name, each in done.items() if each.outcome is kind] for kind in Outcome}
    counts = "; ".join(
        f"{len(names)} {kind if len(names) == 1 else PLURAL[kind]} ({', '.join(names)})"
        for kind, names in outcomes.items()
        if names
    )
    lines = [
        f"{len(done)} of {len(CENTRAL)} claims are complete: {counts}.",
        *_of_shared_runs(done),
        *_of_contradicted({name: done[name] for name in outcomes[Outcome.CONTRADICTED]}),
        *(text for name, text in _second(table).get("in_short", {}).items() if name in done),
        *_of_single_rates(done, table),
        *_of_parts({name: each for name, each in done.items() if each.outcome is not Outcome.YES}),
    ]
    parameters = max(at.parameters for each in done.values() for at in _largest(each))
    steps = max(table.places[study.place]["steps"] for each in done.values() for study in _pair(each.central))
    lines.append(
        f"This refutes no paper at its size. The largest model here has {parameters:,} parameters, and runs have at "
        f"most {steps:,} steps, in most cases with 33 outer rounds. Papers have hundreds of rounds."
    )
    yield "## In short\n"
    yield "\n".join(f"- {line}" for line in lines) + "\n"


def _of_shared_runs(done: Mapping[str, Verdict]) -> Iterator[str]:
    pairs: dict[tuple[Study, ...], list[str]] = {}
    users: dict[Study, list[str]] = {}
    for name, each in done.items():
        pairs.setdefault(tuple(_pair(each.central)), []).append(name)
        for study in dict.fromkeys(studies_at(each.central, "full").values()):
            users.setdefault(study, []).append(name)
    for names in pairs.values():
        if len(names) > 1:
            yield f"{_and(names)} compare the same runs: count them once."
    study, names = max(users.items(), key=lambda item: len(item[1]))
    if len(names) > 1:
        yield f"{_and(names)} share the runs of `{study.method}`, so their verdicts are not independent."


def _of_contradicted(contradicted: Mapping[str, Verdict]) -> Iterator[str]:
    if not contradicted:
        return
    sizes = {name: [math.expm1(-at.effect) for at in _largest(each)] for name, each in contradicted.items()}
    shown = {
        name: " / ".join("a run failed" if math.isnan(size) else f"{size:.1%}" for size in each)
        for name, each in sizes.items()
    }
    yield (
        "At the largest size, contradicted claims have a loss above the other method's by: "
        f"{', '.join(f'{name} {size}' for name, size in shown.items())}."
    )


def _of_single_rates(done: Mapping[str, Verdict], table: Table) -> Iterator[str]:
    """Yield which claims come out at one of two inner rates, and which have only one."""
    for kind in RATES:
        mixed = {name: each for name, each in done.items() if each.outcome is not Outcome.YES and len(each.at) > 1}
        once = [
            name + ("‡" if any(_pair_unclear(each, kind, size, table) for size in SIZES) else "")
            for name, each in mixed.items()
            if each.at[kind].outcome is Outcome.YES
        ]
        if once:
            yield f"At the {kind} alone, {_and(once)} would come out."
        if single := [name for name, each in done.items() if [*each.at] == [kind]]:
            has = "has" if len(single) == 1 else "have"
            yield f"{_and(single)} {has} only the {kind}, so coming out is easier there."


def _of_parts(others: Mapping[str, Verdict]) -> Iterator[str]:
    kept = {name: _always(each) for name, each in others.items()}
    if any(kept.values()):
        counts = ", ".join(f"{name} ({of[0]} of {of[1]} checks)" for name, of in kept.items() if of)
        yield f"Parts of these claims hold at all sizes and inner rates: {counts}."


def _pair(central: Central) -> list[Study]:
    studies = studies_at(central, "full")
    return [studies[central.better], studies[central.worse]]


def _largest(each: Verdict) -> list[AtSize]:
    """Return the results at the largest size, for each inner rate."""
    return [list(judged.sizes.values())[-1] for judged in each.at.values()]


def _always(each: Verdict) -> tuple[int, int] | None:
    """Return how many checks hold at all sizes and inner rates, and the number of checks; None if none does."""
    checks = list(zip(*(at.seen for judged in each.at.values() for at in judged.sizes.values()), strict=True))
    count = sum(all(seen.holds for seen in check) for check in checks)
    return (count, len(checks)) if count else None


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _summary(done: Mapping[str, Verdict], table: Table) -> Iterator[str]:
    if not done:
        yield "No claim has all its runs yet.\n"
        return
    lines = [
        [
            name, each.central.claim.title, _outcome(each),
            *(" / ".join(_effect_at(each, kind, size, table) for kind in each.at) for size in SIZES),
            " / ".join(_slope(at.slope, at.low, at.high) for at in each.at.values()),
        ]
        for name, each in done.items()
    ]  # fmt: skip
    yield "If a field has two values, they are at the low / high inner rate.\n"
    heads = ["claim", "title", "verdict", *(f"effect, size {size}" for size in SIZES), "slope"]
    yield markdown(heads, lines) + "\n"


def _outcome(each: Verdict) -> str:
    """Return the verdict, and those at the two inner rates if they differ."""
    found = [str(at.outcome) for at in each.at.values()]
    return str(each.outcome) + (f" ({' / '.join(found)})" if len({*found}) > 1 else "")


def _effect_at(each: Verdict, kind: str, size: str, table: Table) -> str:
    return _effect(each.at[kind].sizes[size].effect) + ("‡" if _pair_unclear(each, kind, size, table) else "")


def _pair_unclear(each: Verdict, kind: str, size: str, table: Table) -> bool:
    """Return whether the seeds of one of the two cells that a claim compares disagree."""
    studies = studies_at(each.central, size)
    return any(_unclear(table, studies[label], kind) for label in (each.central.better, each.central.worse))


def _unclear(table: Table, study: Study, kind: str) -> bool:
    return disagree([run.last["val_loss"] for run in runs_of(table, study, kind)])


def _effect(effect: float) -> str:
    return "a run failed" if math.isnan(effect) else f"{effect:+.3f}"


def _slope(slope: float, low: float, high: float) -> str:
    return "a run failed" if math.isnan(slope) else f"{slope:+.3f} ({low:+.3f} to {high:+.3f})"


def _gaps(table: Table) -> Iterator[str]:
    found = {kind: gaps for kind in RATES if (gaps := gaps_of(table, kind)) is not None}
    if not found:
        return
    yield "## DiLoCo's gap to DDP over nodes and size\n"
    yield (
        "The test loss relative to DDP's, at equal tokens and inner rates, with one size more than in the claims. The\n"
        "**exponent** is the slope of the loss's logarithm over the parameters' logarithm, with the 95 % interval of\n"
        "the fit. If the interval is wide, these four points do not give an exponent. The last column has the\n"
        "exponents of [arXiv:2503.09799](https://arxiv.org/abs/2503.09799), for 35M to 2.4B parameters. They fall\n"
        "with N, so there the gap shrinks with size. Its larger models see more tokens. Here all sizes see the same\n"
        "tokens. The **gap's growth** is the slope of the logarithm of loss / DDP's loss over the parameters'\n"
        "logarithm, with its 95 % interval over the three seeds.\n"
    )
    lines = [
        [
            label,
            kind.removesuffix(" rate"),
            *(_gap(gap) + "‡" * mark for gap, mark in zip(gaps.gaps[label], gaps.unclear[label], strict=True)),
            "" if label == "DDP" else _slope(*gaps.growth[label]),
            _exponent(*gaps.exponents[label]),
            f"{PAPER[label]:.3f}",
        ]
        for kind, gaps in found.items()
        for label in gaps.gaps
    ]
    counts = next(iter(found.values())).parameters.values()
    heads = ["", "inner rate", *(f"{count:,} parameters" for count in counts), "gap's growth", "exponent", "paper"]
    yield markdown(heads, lines) + "\n"


def _gap(gap: float) -> str:
    return "a run failed" if math.isnan(gap) else f"{gap:+.1%}"


def _exponent(mean: float, low: float, high: float) -> str:
    return "a run failed" if math.isnan(mean) else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _section(each: Verdict, table: Table) -> Iterator[str]:
    central = each.central
    yield f"## {central.name}: {central.claim.title}\n"
    kept = f" Not tuned: {', '.join(f'`{name}`' for name in central.kept)}." if central.kept else ""
    kept += "".join(f" {_and(labels)}: `{option}`, not tuned." for option, labels in _options(central).items())
    worse = f"`{central.worse}`" if central.of_worse == "val_loss" else f"the {_on_test(WORDS[central.of_worse])}"
    late = "" if central.of_worse == "val_loss" else (
        " \"Late in training\" is the mean over the last quarter of the evaluations, without the last one."
    )  # fmt: skip
    effect = f"The effect compares only `{central.better}` with {worse}."
    yield f"{central.claim.paper}. {effect}{late}{kept}{_alike(central)}\n"
    studies = studies_at(central, "full")
    cells = ", ".join(
        f"{label} is `{study.method}`{_differs([*studies.values()], study, table)}" for label, study in studies.items()
    )
    yield f"{_trained([*studies.values()], table)} Cells: {cells}.\n"
    lines = [[label, *_losses(each, label, table)] for label in central.claim.cells]
    sizes = next(iter(each.at.values())).sizes
    heads = [f"test loss, {' / '.join(kind.removesuffix(' rate') for kind in each.at)} rate"]
    heads += [f"size {size}, {at.parameters:,} parameters" for size, at in sizes.items()]
    yield markdown(heads, lines) + "\n"
    largest = list(sizes)[-1]
    for kind, at_rate in each.at.items():
        for size, at in at_rate.sizes.items():
            for seen in at.seen:
                if size == largest or not seen.holds:
                    yield f"- {kind.capitalize()}, size {size}, {HOLDS[seen.holds]}: {_on_test(seen.says)}."
    smaller = [seen for at_rate in each.at.values() for at in list(at_rate.sizes.values())[:-1] for seen in at.seen]
    if any(seen.holds for seen in smaller):
        yield "- At the smaller sizes, all other checks hold."
    yield ""


def _trained(studies: Sequence[Study], table: Table) -> str:
    """Return a sentence on what the cells of a claim train at the largest size."""
    places = [table.places[study.place] for study in studies]
    task, _, how = places[0]["heading"].partition(". ")
    partition = how.partition("examples, ")[2].partition(", adamw")[0]
    schedule = how.rpartition(")")[0].rpartition("(")[2]
    steps = " or ".join(f"{n:,}" for n in sorted({place["steps"] for place in places}))
    tested = f", {places[0]['tested']:,} test examples" if "tested" in places[0] else ""
    alike = len({place["nodes"] for place in places}) == 1
    nodes = f"{places[0]['nodes']} nodes with {places[0]['batch_size']} examples a step, " if alike else ""
    return f"Runs at size full: {task}; {nodes}{steps} steps, {partition}, {schedule} schedule{tested}."


def _differs(studies: Sequence[Study], study: Study, table: Table) -> str:
    """Return in what a cell's nodes differ from the other cells', or ""."""
    found = []
    if len({table.places[each.place]["nodes"] for each in studies}) > 1:
        about = table.places[study.place]
        count = about["nodes"]
        found.append(f"{count} node{'s' * (count > 1)} with {about['batch_size']} examples a step")
    if len({table.places[each.place]["steps"] for each in studies}) > 1:
        found.append(f"{table.places[study.place]['steps']:,} steps")
    if study.cell.speeds:
        found.append(f"speeds {', '.join(f'{speed:g}' for speed in study.cell.speeds)}")
    return f" ({'; '.join(found)})" if found else ""


def _tried(table: Table) -> str:
    """Return the inner rates of the trials, by optimizer, as text. A trial without a rate has the task's."""
    rates: dict[str, set[float]] = {}
    for row in table.rows:
        if row["kind"] == "trial" and "lr" in row["options"]:
            optimizer = "SGD" if "inner_optim=sgd" in row["method"] else "AdamW"
            rates.setdefault(optimizer, set()).add(float(row["options"]["lr"]))
    ends = ", ".join(f"{min(each):.2g} to {max(each):.2g} with {name}" for name, each in sorted(rates.items()))
    return f"{ends}; the first trial has the task's" if ends else "none yet"


def _second(table: Table) -> dict[str, Any]:
    """Return the results of research/claims_by_hand.py, beside the table, or an empty dict."""
    file = table.path.with_name(f"{table.path.stem}_by_hand.json")
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def _by_hand(central: Central, table: Table, kind: str) -> Iterator[str]:
    """Yield what a second program found in the cells of the largest size."""
    second = _second(table)
    lines, same = [], second.get("same_batches", {"cells": {}})["cells"]
    for study, labels in _labels(central).items():
        key = f"{study.place}|{study.method}"
        ours = [run.last["val_loss"] for run in runs_of(table, study, kind)]
        theirs = [part.get(key, {}).get("val_loss") for part in (second.get("cells", {}), same)]
        if ours and any(theirs):
            lines.append([" and ".join(labels), mean_text(ours), *(mean_text(each) if each else "" for each in theirs)])
    if lines:
        yield (
            "A second program without ExoGym's strategies and trainer trained only these cells, at the largest size\n"
            f"and the {kind}, on other batches or on ExoGym's batches\n"
            "([code](../claims_by_hand.py)). So it checks the code, not the settings:\n"
        )
        yield markdown(["test loss", "ExoGym", "on other batches", "on the same batches"], lines) + "\n"
    if central.name in second.get("notes", {}):
        yield f"{second['notes'][central.name]}\n"


def _on_test(text: str) -> str:
    return text.replace("validation loss", "test loss")


def _options(central: Central) -> dict[str, list[str]]:
    """Return a dict from each further option to the labels of its cells, or to ["All cells"]."""
    found: dict[str, list[str]] = {}
    for label in central.claim.cells.keys() & central.also.keys():
        found.setdefault(central.also[label], []).append(f"`{label}`")
    return {
        option: ["All cells"] if len(labels) == len(central.claim.cells) else sorted(labels)
        for option, labels in found.items()
    }


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


def _losses(each: Verdict, label: str, table: Table) -> Iterator[str]:
    for size in SIZES:
        study = studies_at(each.central, size)[label]
        key = study.place, study.method
        losses: list[str] = []
        options: Mapping[str, str] = {}
        for kind in each.at:
            rows = [row for row in table.rows if (row["place"], row["method"], row["kind"]) == (*key, kind)]
            losses.append(mean_text([math.inf if row["loss"] is None else row["loss"] for row in rows]))
            losses[-1] += "‡" if _unclear(table, study, kind) else ""
            options = without(rows[0]["options"], {"lr"})
        chosen = ", ".join(f"{name}={value}" for name, value in options.items())
        if not chosen and len(axes_of_method(study.method, "adamw")) > 1:
            chosen = "defaults"
        yield " / ".join(losses) + (f" ({chosen})" if chosen else "")
