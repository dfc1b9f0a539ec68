"""Time, bytes and money of a whole run, and limits that the run must keep.

`advise` counts the steps that a strategy probably needs to the loss that DDP reaches after the given steps. A run of S
steps on N nodes takes S times the seconds of a step. With failures (`Failures`) it takes `utilisation` / `goodput`
times as long. With spot machines (`Spot`) that restart from checkpoints, it takes

    1 + N lambda (r + c / 2)   times as long, and sends   1 + N lambda c / 2   times the bytes

Money is the price of a node's hour times N times the run's hours, plus the price of a GB times the GB that all nodes
send to each other. The devices of a node share the node's price, and bytes between these devices cost nothing.

A data cap counts the bytes that a node's line sends and receives in a period. The busiest line counts:

    bytes in a period = bytes of the run * min(1, period / seconds of the run)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from exogym.core.progress import readable_bytes
from exogym.errors import ArgumentError, check_count, check_number
from exogym.network import parse_seconds, readable_seconds
from exogym.network.units import parse_bytes
from exogym.study.advise.spot import Spot

HOUR_S = 3600.0
PERIODS = {"h": HOUR_S, "day": 24 * HOUR_S, "week": 7 * 24 * HOUR_S, "month": 30 * 24 * HOUR_S}
STEPS = 1000  # steps of a run if the caller gives no number of steps
_MONEY = re.compile(r"([$€£¥]?)\s*(\d+\.?\d*|\.\d+)\s*([$€£¥]?|[A-Z]{3})")


class Predicted(Protocol):
    """The numbers of a `Row` that a run's cost depends on."""

    @property
    def seconds_per_step(self) -> float: ...
    @property
    def tx_bytes_per_step(self) -> float: ...
    @property
    def line_bytes_per_step(self) -> float: ...
    @property
    def utilisation(self) -> float: ...
    @property
    def goodput(self) -> float | None: ...
    @property
    def couples_every(self) -> float: ...
    @property
    def cost(self) -> Cost | None: ...


R = TypeVar("R", bound="Predicted")


class Money(NamedTuple):
    """An amount of money. The currency is a symbol or three letters, as the user wrote it.

    >>> str(Money(1.5, "$")), str(Money(1234.5678, "EUR"))
    ('$1.5', '1235 EUR')
    """

    amount: float
    currency: str

    def __str__(self) -> str:
        amount = f"{self.amount:.4g}" if self.amount < 1000 else f"{self.amount:.0f}"
        return f"{amount} {self.currency}" if self.currency.isalpha() else f"{self.currency}{amount}"


@dataclass(frozen=True)
class Prices:
    """Prices of a run.

    Attributes:
        hour: money for a node's hour.
        gb: money for a GB that a node sends to other nodes.
        currency: the currency of both.

    >>> Prices.of("1.20USD/h, 0.09USD/GB")
    Prices(hour=1.2, gb=0.09, currency='USD')
    >>> Prices.of("100")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: price='100' has no unit: write '100USD/h' (for each node and hour) or '100USD/GB' (for each GB sent)
    """  # noqa: E501

    hour: float
    gb: float
    currency: str

    @classmethod
    def of(cls, text: str) -> Prices:
        """Read a price of a node's hour, a price of a GB, or both with a comma between.

        Raises:
            ArgumentError: a price has no currency or no known unit, or two currencies or two equal units are given.
        """
        found: dict[str, Money] = {}
        for part in _parts("price", text):
            amount, _, unit = (piece.strip() for piece in part.partition("/"))
            money = _money(amount)
            if money is None or unit not in ("h", "GB"):
                n = part.rstrip("/ ")
                wrong = "is no price" if "/" in part or not _is_number(part) else "has no unit"
                n = n if _is_number(n) else "1.20"
                raise ArgumentError(
                    f"price={part!r} {wrong}: write '{n}USD/h' (for each node and hour) or '{n}USD/GB' (for each GB "
                    "sent)"
                )
            if unit in found:
                raise ArgumentError(f"price={text!r} gives two prices for each {unit}: give one")
            found[unit] = money
        (currency, *others) = dict.fromkeys(money.currency for money in found.values())
        if others:
            raise ArgumentError(f"price={text!r} has two currencies, {currency} and {others[0]}: write one")
        none = Money(0.0, currency)
        return cls(found.get("h", none).amount, found.get("GB", none).amount, currency)

    def __str__(self) -> str:
        named = {"a node's hour": self.hour, "a GB that a node sends": self.gb}
        return (
            " and ".join(f"{what} costs {Money(x, self.currency)}" for what, x in named.items() if x) or "all is free"
        )


@dataclass(frozen=True)
class Limits:
    """Limits that a run must keep. None means no limit.

    Attributes:
        deadline_s: seconds that the run may take.
        cap_bytes: bytes that each node's line may carry, sent and received, in `period`.
        period: "h", "day", "week" or "month" (30 days).
        money: money that the run may cost.

    >>> print(Limits.of("12h, 1TB/month, 50USD"))
    a deadline of 12 h, 1 TB a month on each line and 50 USD
    >>> Limits.of("100")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: within='100' has no unit: write '100h' (a deadline), '100GB/month' (bytes on each node's line) or '100USD' (money)
    """  # noqa: E501

    deadline_s: float | None = None
    cap_bytes: float | None = None
    period: str = "month"
    money: Money | None = None

    @classmethod
    def of(cls, text: str) -> Limits:
        """Read a deadline, a data cap and money, in any order, with commas between. The units say which is which.

        Raises:
            ArgumentError: a limit has no unit or an unknown unit, is not over 0, or is given twice.
        """
        found: dict[str, Any] = {}
        new: dict[str, Any]
        for part in _parts("within", text):
            if _is_number(part):
                raise ArgumentError(
                    f"within={part!r} has no unit: write '{part}h' (a deadline), '{part}GB/month' (bytes on each "
                    f"node's line) or '{part}USD' (money)"
                )
            amount, slash, period = (piece.strip() for piece in part.partition("/"))
            money, size = _money(part), re.search(r"[A-Za-z]*B$", amount)
            if money is not None:  # before bytes: RUB and THB end in B, too
                if not money.amount:
                    raise ArgumentError(f"within={part!r} must be over 0")
                new = {"money": money}
            elif slash or size:
                if period not in PERIODS:
                    raise ArgumentError(f"within={part!r} has no period: write '{amount}/month' ({', '.join(PERIODS)})")
                new = {"cap_bytes": parse_bytes(amount, "within"), "period": period}
            else:
                new = {"deadline_s": parse_seconds(part, "within")}
                if not new["deadline_s"]:
                    raise ArgumentError(f"within={part!r} must be over 0 seconds")
            if new.keys() & found.keys():
                raise ArgumentError(f"within={text!r} gives two limits of one kind: give one")
            found |= new
        return cls(**found)

    def __str__(self) -> str:
        texts = []
        if self.deadline_s is not None:
            texts.append(f"a deadline of {readable_seconds(self.deadline_s)}")
        if self.cap_bytes is not None:
            texts.append(f"{readable_bytes(self.cap_bytes)} {_each(self.period)} on each line")
        if self.money is not None:
            texts.append(str(self.money))
        return ", ".join(texts[:-1]) + " and " * (len(texts) > 1) + texts[-1] if texts else "no limit"


@dataclass(frozen=True)
class Cost:
    """Predicted time, bytes and money of a whole run with one strategy.

    Attributes:
        steps: steps of each node.
        seconds: the run's time. With spot machines, all machines restart from a checkpoint after a loss.
        line_bytes: bytes, sent and received, on the busiest node's line in the cap's period; without a cap, in a month.
        money: the run's money, or None without prices.
        going_on_s, going_on_money: with spot machines, the time and money if the other machines continue.
        over: the limits that the run breaks, as text.
        excess: the largest share of a limit that the run takes: over 1 if it breaks a limit.
    """

    steps: float
    seconds: float
    line_bytes: float
    money: Money | None = None
    going_on_s: float | None = None
    going_on_money: Money | None = None
    over: tuple[str, ...] = ()
    excess: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as a dict for JSON."""
        plain = asdict(self) | {"over": list(self.over), "currency": self.money and self.money.currency}
        for name in ("money", "going_on_money"):
            plain[name] = plain[name] and plain[name].amount
        return plain

    def of_spot(self) -> dict[str, float | None]:
        """Return time and money of both ways to continue after the loss of a spot machine."""
        again, on = (money and money.amount for money in (self.money, self.going_on_money))
        return {
            "from_checkpoints_s": self.seconds, "from_checkpoints_money": again, "going_on_s": self.going_on_s,
            "going_on_money": on,
        }  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A whole run: its length, its prices, its limits, and its spot machines.

    Args:
        steps: steps of each node with DDP. Limits need it. Without it, costs are for 1000 steps. Another strategy
            counts the steps that it probably needs to the same loss.
        price: `Prices`, or text such as "1.20USD/h,0.09USD/GB": for each node and hour, and for each GB that a node
            sends.
        within: `Limits`, or text such as "12h,1TB/month,50USD": a deadline, a data cap for each node's line, and money.
        spot: the nodes run on spot machines.
        skew: how unequal the nodes' labels are, from 0 to 1 (`exogym.data.label_skew`): 0 if examples are
            dealt at random, 0.8 if each node has two of ten labels. Earlier runs on data with a similar skew
            then count most. If it is None, all count alike.

    Raises:
        ArgumentError: a text has a wrong unit, limits are given without steps, or money is limited without a price.

    >>> run = Run(10_000, price="1.20USD/h", within="12h")
    >>> str(run.prices), run.limits.deadline_s
    ("a node's hour costs 1.2 USD", 43200.0)
    """

    steps: int | None = None
    price: Prices | str | None = None
    within: Limits | str | None = None
    spot: Spot | None = None
    skew: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("steps", self.steps)
        if self.skew is not None:
            check_number("skew", self.skew, least=0, most=1)
        money, prices = self.limits.money, self.prices
        if money is not None and (prices is None or prices.currency != money.currency):
            wanted = "give the prices too, as price='1.20USD/h'" if prices is None else f"write it in {prices.currency}"
            raise ArgumentError(f"within={str(money)!r} limits the money: {wanted}")

    @property
    def prices(self) -> Prices | None:
        return Prices.of(self.price) if isinstance(self.price, str) else self.price

    @property
    def limits(self) -> Limits:
        return Limits.of(self.within) if isinstance(self.within, str) else self.within or Limits()

    @property
    def is_asked(self) -> bool:
        """Whether the caller asked for the whole run's cost."""
        return replace(self, skew=None) != Run()

    def cost(self, row: Predicted, num_nodes: int, steps: float) -> Cost:
        """Return the cost of a run of `steps` steps with a strategy's predicted step.

        Raises:
            ArgumentError: a predicted number is not finite.
        """
        spot, prices, limits = self.spot, self.prices, self.limits
        plain_s = steps * row.seconds_per_step
        if row.goodput is not None:
            plain_s *= row.utilisation / row.goodput if row.goodput else math.inf
        again = 1.0 if spot is None else spot.redone(num_nodes)
        seconds = plain_s if spot is None else spot.again_s(plain_s, num_nodes)
        sent = steps * row.tx_bytes_per_step * num_nodes
        carried = steps * row.line_bytes_per_step * again
        in_period = carried * min(1.0, PERIODS[limits.period] / seconds) if seconds else carried

        def money(paid_s: float, times: float) -> Money | None:
            if prices is None:
                return None
            hours = num_nodes * paid_s / HOUR_S
            return Money(prices.hour * hours + prices.gb * sent * times / 1e9, prices.currency)

        total, over, shares = money(seconds, again), [], [0.0]
        if not math.isfinite(seconds + in_period + (0.0 if total is None else total.amount)):
            wrong = "" if spot is None else f" ({spot})"
            raise ArgumentError(
                f"a run of {steps:.6g} steps would never end, or its bytes or money are too large for a number{wrong}: "
                "check the step's time, the prices, and how often and how long nodes stand still"
            )
        for most, got, text in (
            (limits.deadline_s, seconds, f"ends after {readable_seconds(seconds)}"),
            (limits.cap_bytes, in_period, f"carries {readable_bytes(in_period)} {_each(limits.period)}"),
            (limits.money and limits.money.amount, total and total.amount, f"costs {total}"),
        ):
            if most is not None and got is not None:
                shares.append(got / most)
                over += [text] if got > most else []
        on_s = None if spot is None else spot.going_on_s(plain_s)
        on_money = None if spot is None else money(plain_s, 1.0)
        return Cost(steps, seconds, in_period, total, on_s, on_money, tuple(over), max(shares))


def least(rows: Sequence[R], amount: Callable[[Cost], float]) -> R:
    """Return the row whose cost has the smallest amount. Among equal rows, it is the row that exchanges the whole model
    most often."""
    return min(rows, key=lambda row: (math.inf if row.cost is None else amount(row.cost), row.couples_every))


def narrowed(
    rows: Sequence[R], run: Run, first: Callable[[Sequence[R], Callable[[Cost], float]], R] = least
) -> tuple[Sequence[R], R | None, str]:
    """Return the rows that keep a run's limits, the best row if the limits decide it, and the reason or a condition.

    Money that is limited asks for the fastest row, and limited time with prices for the cheapest. `first` chooses it,
    from rows and an amount of their costs. If no row keeps all limits, the best is the row that exceeds its limits
    least.
    """
    limits = run.limits
    costs = [(row, row.cost) for row in rows if row.cost is not None]
    if not run.within or not costs:
        return rows, None, ""
    fit = [row for row, cost in costs if not cost.over]
    if not fit:
        best, cost = min(costs, key=lambda pair: (pair[1].excess, pair[0].couples_every))
        return [], best, f"no strategy keeps {limits}; this one comes closest: it {', '.join(cost.over)}"
    number = f"{len(fit)} of {len(rows)}" if len(fit) < len(rows) else "all"
    kept = f"{limits}, which {number} strategies keep"
    by_time = limits.money is not None
    if not by_time and (limits.deadline_s is None or run.prices is None):
        return fit, None, kept

    def amount(cost: Cost) -> float:
        return cost.seconds if by_time or cost.money is None else cost.money.amount

    return fit, first(fit, amount), f"it is the {'fastest' if by_time else 'cheapest'} within {kept}"


def said(cost: Cost, run: Run, step_s: float) -> str:
    """Return a run's time, and the money and bytes that the user asked for, as text."""
    limits = run.limits
    texts = [f"{readable_seconds(cost.seconds)} for {cost.steps:.0f} steps of {readable_seconds(step_s)}"]
    texts += [] if cost.money is None else [str(cost.money)]
    if limits.cap_bytes is not None:
        texts.append(f"{readable_bytes(cost.line_bytes)} {_each(limits.period)} on a node's line")
    return ", ".join(texts)


def notes(run: Run) -> Iterator[str]:
    """Yield the assumptions behind a run's costs."""
    if run.prices is not None:
        yield f"{run.prices}; the devices of a node share the price; only bytes between nodes are paid"
    if run.limits.cap_bytes is not None:
        yield "the cap counts bytes that the busiest node's line sends and receives; a month has 30 days"
    if run.spot is not None:
        yield f"{run.spot}; limits and answer count restarts from checkpoints"


def _each(period: str) -> str:
    return "an hour" if period == "h" else f"a {period}"


def _parts(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ArgumentError(f"{name}={text!r} has an empty part: write values with commas between")
    return parts


def _money(text: str) -> Money | None:
    match = _MONEY.fullmatch(text.strip())
    if match is None or bool(match[1]) == bool(match[3]):
        return None
    return Money(float(match[2]), match[1] or match[3])


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
