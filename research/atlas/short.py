"""The atlas's answers in a few lines, by fixed rules from its results.

Within a limit of bytes, the answer at a place is the method with the lowest mean test loss. Another method counts as
equal if the 95 % interval of their difference has 0: Student's t of the three seeds' differences. For speed, the answer
on a network is the fastest method whose mean test loss is at most DDP's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exogym.study.compare.comparison import markdown
from research.atlas.equal import places_at_rates, ranks_at_rates
from research.atlas.findings import Confirmed, Finding
from research.atlas.intervals import interval
from research.atlas.measures import NETWORKS, Ranks, Result, comparable, mean_ranks
from research.atlas.places import KINDS
from research.atlas.table import Table

LIMITS = {"any bytes": 1, "1/10 of `ddp`'s bytes": 10, "1/100 of `ddp`'s bytes": 100}
SLACK = 1.01  # a limit allows 1 % more bytes, so that a last synchronization leaves no method with H = 10 out
DOUBTFUL = -0.1  # DDP's gain, from which its tuned settings are no fair reference
MARK = "†"
MOST_NAMED = 2  # pairs of methods


def doubtful(places: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return the places at which tuned DDP is far worse than its defaults, so differences from it flatter others."""
    return [place for place, results in comparable(places).items() if _is_doubtful(_ddp(results))]


def lines_in_short(
    table: Table,
    places: Mapping[str, Sequence[Result]],
    ranks: Ranks | None,
    findings: Sequence[tuple[Finding, Confirmed | None]] = (),
) -> Iterator[str]:
    """Yield the section "In short", or nothing if no place has DDP and another method.

    Args:
        findings: the table's findings, each with its effect on fresh seeds, or None if they are not trained yet.
    """
    shared = comparable(places)
    if not shared:
        return
    yield "## In short\n"
    yield "\n".join(f"- {line}" for line in [
        *([] if ranks is None else [*_of_ranks(shared, ranks), *_of_defaults(shared, ranks)]), *_of_rates(places),
        *_of_findings(findings), *_of_tuning(places), *_of_limits(table, shared),
    ]) + "\n"  # fmt: skip
    others = {place: each for place, each in shared.items() if each[0] is not _ddp(each)}
    equal = sum(_contains_0(each[0].losses, _ddp(each).losses) for each in others.values())
    best = " and ".join(place for place in shared if place not in others)
    yield (
        f"At {equal} of {_count(len(shared), 'place')}, three seeds cannot tell the best method from `ddp`."
        + (f" At {best}, `ddp` itself has the lowest loss." if best else "") + "\n"
    )  # fmt: skip
    yield "Lowest test loss within a limit of bytes, and its difference from tuned `ddp`:\n"
    yield markdown(["place", *LIMITS], [[place, *_cells(results)] for place, results in shared.items()]) + "\n"
    notes = [
        "≈ n of m: m other methods are within the limit, and three seeds cannot tell n of them from this one. "
        "*Alone*: no other method is within the limit.",
        "The method has the lowest of the test losses that are shown, so its advantage is too large, most of all where "
        "m is large.",
        f"A limit allows {SLACK - 1:.0%} more.",
    ]
    for place, results in shared.items():
        if _is_doubtful(ddp := _ddp(results)):
            notes.append(
                f"{MARK} At {place}, tuned `ddp` is {-ddp.gain:.0%} worse than its own defaults, so differences from "
                "it flatter other methods."
            )
    yield "\n".join(f"- {note}" for note in notes) + "\n"
    yield (
        "Fastest method for the same number of steps, of those whose mean test loss is at most tuned `ddp`'s, and how\n"
        "many times faster than `ddp` it is. Three seeds often cannot tell these two losses apart. Larger models,\n"
        "whose steps take longer, gain less.\n"
    )
    yield markdown(["place", *NETWORKS], [[place, *_fastest(results)] for place, results in shared.items()]) + "\n"


def _ddp(results: Sequence[Result]) -> Result:
    return next(result for result in results if result.method == "ddp")


def _is_doubtful(ddp: Result) -> bool:
    return ddp.gain < DOUBTFUL


def _mark(results: Sequence[Result]) -> str:
    return f" {MARK}" if _is_doubtful(_ddp(results)) else ""


def _cells(results: Sequence[Result]) -> Iterator[str]:
    ddp, mark = _ddp(results), _mark(results)
    for share in LIMITS.values():
        able = [r for r in results if r.tx_bytes <= SLACK * ddp.tx_bytes / share and math.isfinite(r.loss)]
        if not able:
            yield "none"
            continue
        best = min(able, key=lambda result: result.loss)
        others = [result for result in able if result is not best]
        equal = sum(_contains_0(best.losses, other.losses) for other in others)
        difference = "" if best is ddp else f" {best.loss / ddp.loss - 1:+.1%}{mark}"
        yield f"`{best.method}`{difference} ({f'≈ {equal} of {len(others)}' if others else 'alone'})"


def _contains_0(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether the interval of the seeds' differences contains 0."""
    _, low, high = interval([x - y for x, y in zip(a, b, strict=True)])
    return low <= 0 <= high


def _fastest(results: Sequence[Result]) -> Iterator[str]:
    ddp, mark = _ddp(results), _mark(results)
    for network in NETWORKS:
        times = {r.method: s for r in results if (s := r.predicted_s[network]) is not None and r.loss <= ddp.loss}
        best = min(times, key=lambda method: times[method])
        yield "`ddp`" if best == "ddp" else f"`{best}` {times['ddp'] / times[best]:.1f}{mark}"


def _of_ranks(places: Mapping[str, Sequence[Result]], ranks: Ranks) -> Iterator[str]:
    yield (
        f"Mean ranks of the {len(ranks.mean)} methods that trained at all {_count(len(places), 'place')} with `ddp` go "
        f"{_range(ranks)}. Only differences above {ranks.critical:.1f} are more than chance, if places with the same "
        f"data count as one: they separate {_apart(ranks)}."
    )


def _range(ranks: Ranks) -> str:
    best, worst = min(ranks.mean.values()), max(ranks.mean.values())
    first = [f"`{method}`" for method, mean in ranks.mean.items() if f"{mean:.1f}" == f"{best:.1f}"]
    return f"from {best:.1f} ({', '.join(first)}) to {worst:.1f}"


def _apart(ranks: Ranks) -> str:
    """Say which pairs of methods differ by more than chance: each if they are few, else how many."""
    means = sorted(ranks.mean.items(), key=lambda item: item[1])
    pairs = [
        f"`{low}` from `{high}`" for k, (low, a) in enumerate(means) for high, b in means[k:] if b - a > ranks.critical
    ]
    if len(pairs) > MOST_NAMED:
        return f"{len(pairs)} pairs of methods"
    return " and ".join(pairs) or "**no two methods**"


def _of_defaults(places: Mapping[str, Sequence[Result]], ranks: Ranks) -> Iterator[str]:
    before = mean_ranks(places, list(ranks.mean), lambda result: result.default_losses)
    most = max(ranks.mean, key=lambda method: before[method] - ranks.mean[method])
    if before[most] > ranks.mean[most]:
        yield (
            f"Tuning changes the order most for `{most}`: its mean rank is {ranks.mean[most]:.1f} if all methods are "
            f"tuned, and {before[most]:.1f} if all have their defaults. `ddp` has {ranks.mean['ddp']:.1f} and "
            f"{before['ddp']:.1f}."
        )


def _of_rates(places: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    found = ranks_at_rates(places)
    if found:
        of = next(iter(found.values()))
        yield (
            f"At [equal inner rates](#at-equal-inner-rates), mean ranks of {len(of.mean)} methods over "
            f"{_count(len(places_at_rates(places)), 'place')} go "
            f"{' and '.join(f'{_range(ranks)} at the {kind}' for kind, ranks in found.items())}. Differences above "
            f"{of.critical:.1f} separate {' and '.join(f'{_apart(ranks)} at the {k}' for k, ranks in found.items())}."
        )


def _of_findings(found: Sequence[tuple[Finding, Confirmed | None]]) -> Iterator[str]:
    seen = [each.outcome for _, each in found if each is not None and not math.isnan(each.effect)]
    if seen:
        counts = ", ".join(f"{seen.count(word)} {word}" for word in ("confirmed", "open", "refuted") if word in seen)
        yield f"Fresh seeds tested {len(seen)} [findings](#findings): {counts}."


def _of_tuning(places: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    known = {(r.method, place): r for place, each in places.items() for r in each if not math.isnan(r.gain)}
    worse = {key: result.gain for key, result in known.items() if result.gain < 0}
    both = {key: (r.losses, r.default_losses) for key, r in known.items() if all(map(math.isfinite, r.default_losses))}
    clear = {key for key, losses in both.items() if not _contains_0(*losses)}
    by_chance = 0.025 * sum(bool(result.options) for result in known.values())  # one side of 95 % intervals
    if worse:
        method, place = min(worse, key=lambda key: worse[key])
        yield (
            f"In {len(worse)} of {len(known)} rows the chosen settings have a higher test loss than the defaults, in "
            f"{len(clear & worse.keys())} of them by more than the seeds' spread. If no settings mattered, chance "
            f"would give about {by_chance:.0f} such rows. In {len(clear - worse.keys())} rows it is lower by more than "
            f"this. The worst are `{method}`'s at {place}: its test loss is {-worse[method, place]:.0%} higher."
        )


def _of_limits(table: Table, places: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    sizes = [int(table.places[place]["parameters"]) for place in places]
    trials = _count(table.places[next(iter(places))]["trials"], "trial")
    size = " to ".join(f"{n:,}" for n in sorted({min(sizes), max(sizes)}))
    task, often = Counter(KINDS[place.rpartition("-")[0]].task for place in places).most_common(1)[0]
    alike = f" {often} of {len(sizes)} places have the task `{task}`, so mean ranks say most about it." * (often > 1)
    yield (
        f"Do not conclude more. The models have {size} parameters.{alike} Each method has "
        f"{trials} for one to four options. Some methods also replace the inner "
        "optimizer (`muloco`, `dion`, `demo`, `fednova`, `onebit_adam`), so not all of a difference is due to "
        "communication."
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def rounds_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which H the methods with rounds have, from the strategies' texts.

    >>> rounds_of([{"strategy": "diloco:H=10"}, {"strategy": "fedavg:H=10:lr=1"}, {"strategy": "ddp"}])
    'H = 10'
    """
    found = {part[2:] for row in rows for part in row["strategy"].split(":") if part.startswith("H=")}
    return f"H = {', '.join(sorted(found, key=int))}" if found else ""
