"""The judge's summary as text, its page in Markdown, and its numbers for `--json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from exogym.core.base.files import replacing
from exogym.network import readable_seconds
from exogym.study.compare.comparison import markdown
from research.judge.judging import Advised, Case, Judgement, Score, believed, percentiles, resampled, shares

WORST = 12  # cases in the list of mistakes
BY: dict[str, Callable[[Case], str]] = {
    "place": lambda case: case.place, "network": lambda case: case.network, "size": lambda case: case.size,
    "target": lambda case: f"{case.level:g}",
}  # fmt: skip
ABOUT = """\
How good is the advice? This page replays finished trainings on twelve networks. A *case* is a task with a number
of nodes, a network, a model's size and a target loss. In each case the page compares the advised method with the method
that reaches the target first.

In {cases} cases, the rule of `exogym advise`, choosing among the {count} candidates below, has a median regret of
{median}. In {near} of the cases it chooses the best method, or one at most 2 % slower. But in
{far} its choice takes more than 20 % longer; this includes {never} in which it never
reaches the target. These are {tasks} tasks, each seen many times; in brackets are 95 % of resamples of the tasks. We
adjusted the rule after we had seen them, so expect less for a new task: trust it as a first guess. In {alone} of the
cases the fastest node alone would be faster than every candidate, which no regret counts.

{pilot}

The candidates: {candidates}.

- **Regret** is how much longer the advised method takes than the best one. It is infinite, "never", if the method does
  not reach the target within the trained steps.
- **Target**: DDP's test loss after half of the table's steps, and losses 2 % and 10 % above it. Every method has all
  steps to reach it.
- **Size**: the model's own size with its measured step, and the bytes and seconds of a model of 100M parameters whose
  step takes a second. The losses are the small model's in both.
- The seconds of the advised method and of the best one follow from the same formula. So the regret has only errors in
  the number of steps. [Predictions](../../docs/predictions.md) says how good the formula is on real
  hosts.
- **Networks**: *one slow line*: 1 Gbit/s, but one node has 50 Mbit/s. *one slow computer*: 1 Gbit/s, but one node
  computes at a quarter of the speed. *20 up, 100 down*: Mbit/s, as at home. *two islands*: 10 Gbit/s inside, 100 Mbit/s
  and 20 ms between them. *4-hour trace*: the rate changes every ten minutes.
- **Tied**: the choice is not the best, but at most 2 % slower. In {tied} of {cases} cases the second-best method is
  within 2 % of the best.
- The **fastest node alone** takes as many steps as DDP, and computes all nodes' examples itself. `exogym advise` prints
  its time if it is probably shorter.
- **advise** is what `exogym advise` recommends without training. The judged task's own runs are left out of the earlier
  runs that it knows. **advise --pilot 0.1** adds a pilot of a tenth of DDP's steps.
- **rule of thumb** and **pilot** have no earlier runs. **table** and **pilot and table** have {prior}
  instead of the shipped runs. **90 % utilization** is `--target-utilisation 0.9`. `exogym advise` no
  longer has these two options. The formulas are in [Priors](../../docs/network.md#priors).
- We chose the targets, the use of beliefs and the weight of the label skew after seeing these results. We also chose
  then that `ddp` is not advised where one node alone is faster, and that a task's places count as one. If all places
  count alike, 57 % and not 63 % of **advise**'s choices are within 2 % of the best, but 42 % and not 38 % of
  **table**'s choices. So the results may be too good. The numbers of the rule of thumb and its weight are older.
  `roles` and `words` have the text of the atlas's `characters`, but learn something else. `strokes` counts as the same
  task as `pictures`.
- All runs have tuned rates, the earlier runs and the judged ones. With a strategy's defaults the order may differ.
- No adviser sees a run of the judged task, but a pilot sees the beginning of one seed's curves, interpolated between
  evaluations.
- Methods whose nodes do not wait for each other are left out: the network decides their losses.

This command computes the page from [finished trainings](#the-trainings). With `--json` it prints the numbers of all
cases:

```bash
{command}
```
"""


def summary(judgement: Judgement) -> str:
    """Return the advisers' scores as a table in Markdown."""
    heads, rows = _scores(judgement)
    return markdown(heads, rows)


def write(
    judgement: Judgement, path: Path, command: str, prior: str, places: Mapping[str, Mapping[str, Any]], train: str
) -> None:
    """Write the page.

    Args:
        command: the command that writes the page.
        prior: a text that says where the beliefs come from.
        places: what the judged table says about its places.
        train: the commands that train the judged table.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    chosen = judgement.answered("advise")
    regrets = np.array([case.regret(answer) for case, answer in chosen])
    ends = zip(shares(regrets), *resampled(chosen, shares), strict=True)
    told = [f"{share:.0%} ({low:.0%} to {high:.0%})" for share, low, high in ends]
    about = ABOUT.format(
        count=len(judgement.candidates), candidates=", ".join(f"`{name}`" for name in judgement.candidates),
        tied=judgement.tied, alone=f"{judgement.slow / len(judgement.cases):.0%}", cases=len(judgement.cases),
        tasks=len(judgement.tasks), prior=prior, command=command, median=_share(percentiles(regrets)[0]),
        pilot=_of_pilot_and_scope(judgement), near=told[0], far=told[1], never=told[2],
    )  # fmt: skip
    with replacing(path) as out:
        out.write("\n".join(["# How good is the advice\n", about, *_blocks(judgement), *_trainings(places, train)]))


def _of_pilot_and_scope(judgement: Judgement) -> str:
    score = judgement.scores.get("advise --pilot 0.1")
    pilot = "" if score is None else (
        f"With a pilot of a tenth of DDP's steps, the median regret is {_share(score.median)}, or "
        f"{_share(score.median_with_cost)} if the pilot's own time counts. "
    )  # fmt: skip
    nodes = sorted({case.question.nodes for case in judgement.cases})
    most = max(case.question.parameters for case in judgement.cases if case.size == "own")
    return f"{pilot}The trained models have at most {int(most):,} parameters, on {' or '.join(map(str, nodes))} nodes."


def to_dict(judgement: Judgement) -> dict[str, Any]:
    """Return all scores and cases for JSON. Infinite numbers become None."""
    cases = []
    for k, case in enumerate(judgement.cases):
        answers = {name: given[k] for name, given in judgement.answers.items()}
        cases.append({
            "place": case.place, "network": case.network, "size": case.size, "level": case.level, "best": case.best,
            "seconds": {method: _finite(s) for method, s in case.seconds.items()},
            "advised": {name: None if a is None else _answer(case, a) for name, a in answers.items()},
        })  # fmt: skip
    scores = judgement.scores
    return {"hindsight": judgement.hindsight, "scores": {n: s and _plain(s) for n, s in scores.items()}, "cases": cases}


def _answer(case: Case, answer: Advised) -> dict[str, Any]:
    return {
        "method": answer.method, "regret": _finite(case.regret(answer)), "cost_s": _finite(answer.cost_s),
        "sure": answer.sure and _finite(answer.sure),
    }  # fmt: skip


def _plain(score: Score) -> dict[str, Any]:
    return {
        name: [_finite(x) for x in value] if isinstance(value, tuple) else value if value is None else _finite(value)
        for name, value in asdict(score).items()
    }


def _finite(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None


def _blocks(judgement: Judgement) -> Iterator[str]:
    yield "## Advisers\n"
    yield summary(judgement) + "\n"
    yield (
        f"- **best single method** is `{judgement.hindsight}`. It was chosen with all results in hand.\n"
        "- **all, one seed** trains every candidate to the end with one of the three seeds, and advises the fastest.\n"
        "  No pilot sees more. Its regret comes from the seeds: it sees one seed, and the truth is the mean of three.\n"
        "- **sure**: first the mean stated probability of being right, then how often the adviser was right (at most\n"
        "  5 % slower than the best).\n"
        "- **search** is the time that the search for the method adds, as a share of the best method's time. Only the\n"
        "  last two columns count it.\n"
    )
    names = list(judgement.answers)
    for title, value_of in BY.items():
        yield f"## By {title}\n"
        yield "Median and 95th percentile of the regret.\n"
        rows = []
        for value in dict.fromkeys(map(value_of, judgement.cases)):
            regrets = [
                [case.regret(answer) for case, answer in judgement.answered(name) if value_of(case) == value]
                for name in names
            ]
            rows.append([value, *(", ".join(map(_share, percentiles(each))) if each else "" for each in regrets)])
        yield markdown([title, *names], rows) + "\n"
    yield from _mistakes(judgement)


def _scores(judgement: Judgement) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, score in judgement.scores.items():
        if score is None:
            continue
        sure = "" if score.sure is None else f"{score.sure:.0%}, {score.right:.0%}"
        searched = score.cost > 0
        rows.append([
            name, str(score.cases), _ranged(score.median, score.median_range), _ranged(score.high, score.high_range),
            f"{score.best:.0%}", f"{score.tied:.0%}", f"{score.never:.0%}", sure,
            _share(score.cost) if searched else "",
            _share(score.median_with_cost) if searched else "", _share(score.high_with_cost) if searched else "",
        ])  # fmt: skip
    heads = [
        "adviser", "cases", "median regret", "95th percentile", "best", "tied", "never arrives", "sure", "search",
        "median with search", "95th with search",
    ]  # fmt: skip
    return heads, rows


def _share(x: float) -> str:
    return f"{x:.1%}" if math.isfinite(x) else "never"


def _ranged(x: float, ends: tuple[float, float]) -> str:
    return f"{_share(x)} ({_share(ends[0])} to {_share(ends[1])})"


def _mistakes(judgement: Judgement) -> Iterator[str]:
    """Yield the worst advice of the adviser with beliefs, at most one case for each place, advised and best method."""
    answers = judgement.answers.get("advise")
    if answers is None:
        return
    wrong = sorted(
        ((case.regret(answer), case, answer) for case, answer in zip(judgement.cases, answers, strict=True) if answer),
        key=lambda each: -each[0],
    )
    kinds: dict[tuple[str, ...], tuple[float, Case, Advised]] = {}
    for each in wrong:
        kinds.setdefault((each[1].place, each[2].method, each[1].best), each)
    yield "## Where it is wrong\n"
    yield (
        "The worst advice of `exogym advise`, with one case for each place, advised method and best method. Steps are\n"
        "multiples of DDP's steps, as believed and as they were.\n"
    )
    lines = []
    for regret, case, answer in list(kinds.values())[:WORST]:
        if regret <= 0:
            continue
        beliefs = believed(case.question)
        steps = [f"{beliefs[m].steps:.2g} believed, {_times(case, m)}" for m in (answer.method, case.best)]
        lines.append([
            case.place, case.network, case.size, f"{case.level:g}", f"`{answer.method}`", steps[0], f"`{case.best}`",
            steps[1], readable_seconds(case.seconds[case.best]), _share(regret),
        ])  # fmt: skip
    heads = [
        "place", "network", "size", "target / DDP's loss", "advised", "advised's steps", "best", "best's steps",
        "best's time", "regret",
    ]  # fmt: skip
    yield markdown(heads, lines) + "\n"


def _trainings(places: Mapping[str, Mapping[str, Any]], train: str) -> Iterator[str]:
    """Yield what was trained, and the commands that train it."""
    yield "## The trainings\n"
    lines = [[place, about["heading"], f"{about['parameters']:,}", str(about["trials"])]
             for place, about in places.items()]  # fmt: skip
    yield markdown(["place", "what was trained", "parameters", "trials for each method"], lines) + "\n"
    yield f"These commands train the runs again:\n\n```bash\n{train}\n```\n"


def _times(case: Case, method: str) -> str:
    ratio = case.steps[method] / case.steps["ddp"]
    return f"{ratio:.2g} real" if math.isfinite(ratio) else "never arrived"
