"""Three findings from the atlas's table, chosen by a rule, and confirmed or refuted by seeds that chose nothing.

These rules were fixed before any training. All losses are test losses with the chosen settings, at all places where at
least two methods were tuned and DDP is one of them. Only methods that trained at all these places take part.

    cheap    of the methods whose loss is at most 5 % above DDP's, the method that sends the least
             effect: log(1.05 x DDP's loss / the method's loss)
    best     the method with the best mean rank, against DDP; if DDP is first, DDP against the second
             effect: log(the other's loss / the method's loss)
    tuning   the method whose defaults lose most
             effect: log(loss with the defaults / loss with the chosen settings) - half of the table's value

An effect is a mean over places. Five other seeds measure each effect again. The interval is Student's t over these
seeds, at 95 %. A finding is confirmed if the whole interval is above 0, refuted if the whole interval is below 0, and
otherwise open. The interval says nothing about other places.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from research.atlas.intervals import interval
from research.atlas.measures import Result, comparable, ranks_of, results_of
from research.atlas.table import FRESH, Table

MARGIN = 1.05
Asked = tuple[str, str, str]  # place, method, and "tuned" or "default"
Losses = Mapping[Asked, Sequence[float]]  # of each seed


@dataclass(frozen=True)
class Finding:
    """A statement about methods, and the runs that measure its effect.

    Attributes:
        name: "cheap", "best" or "tuning".
        says: the statement in words, as the fresh seeds test it.
        why: what chose the statement. Fresh seeds do not test this.
        refuted_by: what would refute the statement.
        places: the places over which the effect is a mean.
        low, high: the method (with "tuned" or "default") whose loss the statement says is low, and the other.
        offset: the constant in the effect, log(loss of `high` / loss of `low`) + offset.
    """

    name: str
    says: str
    why: str
    refuted_by: str
    places: Sequence[str]
    low: tuple[str, str]
    high: tuple[str, str]
    offset: float

    @property
    def asks(self) -> Iterator[Asked]:
        """The runs that the effect needs."""
        for place in self.places:
            yield (place, *self.low)
            yield (place, *self.high)

    def effects(self, losses: Losses) -> list[float]:
        """Return each seed's effect. A failed run has an infinite loss."""
        seeds = range(len(losses[self.places[0], *self.low]))
        return [
            self.offset
            + statistics.fmean(
                _log(losses[place, *self.high][seed]) - _log(losses[place, *self.low][seed]) for place in self.places
            )
            for seed in seeds
        ]


@dataclass(frozen=True)
class Confirmed:
    """A finding with its effect over fresh seeds: mean and interval. They are NaN if a run failed.

    Attributes:
        by_place: dict from place to the logarithm of the loss ratio, a mean over seeds, without the constant.
    """

    finding: Finding
    effect: float
    low: float
    high: float
    by_place: Mapping[str, float] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        return "confirmed" if self.low > 0 else "refuted" if self.high < 0 else "open"


def findings_of(table: Table) -> list[Finding]:
    """Return the findings of a table, at most three: "cheap" needs a method that is cheap enough."""
    places = comparable({place: results_of(table, place, times=False) for place in table.places})
    ranks = ranks_of(places)
    if ranks is None or "ddp" not in ranks.mean:
        return []
    by_name = {place: {result.method: result for result in results} for place, results in places.items()}
    names = list(places)
    return [
        *_cheap(by_name, names, list(ranks.mean)),
        _best(names, ranks.mean),
        *_tuning(by_name, names, list(ranks.mean)),
    ]


def confirmed(finding: Finding, table: Table) -> Confirmed | None:
    """Return the effect of a finding over fresh seeds, or None while the table lacks a run of it."""
    losses: dict[Asked, list[float]] = {}
    for row in table.rows:
        kind, again, _ = row["kind"].partition(" again")
        if again:
            loss = math.inf if row["loss"] is None else row["loss"]
            losses.setdefault((row["place"], row["method"], kind), []).append(loss)
    if any(len(losses.get(asked, ())) != len(FRESH) for asked in finding.asks):
        return None
    effects = finding.effects(losses)
    if not all(map(math.isfinite, effects)):
        return Confirmed(finding, math.nan, math.nan, math.nan)
    by_place = {
        place: statistics.fmean(_log(x) for x in losses[place, *finding.high])
        - statistics.fmean(_log(x) for x in losses[place, *finding.low])
        for place in finding.places
    }
    return Confirmed(finding, *interval(effects), by_place)


def _cheap(by_name: Mapping[str, Mapping[str, Result]], places: Sequence[str], methods: Sequence[str]) -> list[Finding]:
    def over_ddp(method: str, value: str) -> float:
        pairs = [(getattr(results[method], value), getattr(results["ddp"], value)) for results in by_name.values()]
        return math.exp(statistics.fmean(_log(mine) - _log(ddp) for mine, ddp in pairs))

    good = [m for m in methods if m != "ddp" and over_ddp(m, "loss") <= MARGIN and over_ddp(m, "tx_bytes") < 1]
    if not good:
        return []
    best = min(good, key=lambda method: over_ddp(method, "tx_bytes"))
    return [Finding(
        "cheap",
        f"`{best}` sends 1/{1 / over_ddp(best, 'tx_bytes'):,.0f} of `ddp`'s bytes, and "
        f"its test loss is at most {MARGIN - 1:.0%} above `ddp`'s.",
        "no other method within this margin sends less",
        f"a test loss of `{best}` more than {MARGIN - 1:.0%} above `ddp`'s",
        places, (best, "tuned"), ("ddp", "tuned"), math.log(MARGIN),
    )]  # fmt: skip


def _best(places: Sequence[str], ranks: Mapping[str, float]) -> Finding:
    first, *rest = ranks
    other = rest[0] if first == "ddp" else "ddp"
    equal = [f"`{method}`" for method in rest if f"{ranks[method]:.1f}" == f"{ranks[first]:.1f}"]
    has = f"shares the best mean rank with {' and '.join(equal)}" if equal else "has the best mean rank"
    return Finding(
        "best", f"The test loss of `{first}` is lower than `{other}`'s.", f"`{first}` {has}",
        f"a test loss of `{first}` above `{other}`'s", places, (first, "tuned"), (other, "tuned"), 0.0,
    )  # fmt: skip


def _tuning(
    by_name: Mapping[str, Mapping[str, Result]], places: Sequence[str], methods: Sequence[str]
) -> list[Finding]:
    def gain(method: str) -> float:
        pairs = [(results[method].default_losses, results[method].losses) for results in by_name.values()]
        return statistics.fmean(_log(statistics.fmean(a)) - _log(statistics.fmean(b)) for a, b in pairs)

    gains = {method: value for method in methods if math.isfinite(value := gain(method)) and value > 0}
    if not gains:
        return []
    most = max(gains, key=gains.__getitem__)
    share, half = 1 - math.exp(-gains[most]), 1 - math.exp(-gains[most] / 2)
    return [Finding(
        "tuning",
        f"The settings that trials chose for `{most}` lower its test loss by at least {half:.0%}.",
        f"the table has {share:.0%}, the most of these methods, and the statement half of it on a logarithmic scale",
        f"a test loss less than {half:.0%} below its defaults'", places, (most, "tuned"), (most, "default"),
        -gains[most] / 2,
    )]  # fmt: skip


def _log(value: float) -> float:
    return math.log(value) if 0 < value < math.inf else math.inf
