"""What cannot be combined: one table of pairs of features, each with its reason and what to do instead.

A feature is something that a run has, under the name a user writes: an option (`privacy`), an option with a value
(`compute="vmap"`), or what a strategy does ("packed values"). Modules, strategies and the options of `fit` say which
features they have (`features()`), and `check` raises for the first row of the table whose two features
a run has. A strategy is checked when it is made, the whole run before it trains.

To refuse another pair, add a row to `REFUSED`, and, if its feature is new, a line to `FEATURES` and to the `features()`
of what has it.

>>> check({"privacy": "privacy", "robust": "robust='krum'"})
Traceback (most recent call last):
...
exogym.errors.ArgumentError: privacy with robust='krum': ...; leave one of them out
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from exogym.errors import ArgumentError

# every feature that a row names, and what has it
FEATURES: dict[str, str] = {
    "privacy": "an averaging of clients with `privacy=DifferentialPrivacy(...)`",
    "robust": "`robust=` with a rule: a median, a trimmed mean or Krum",
    'robust="norm_cap"': "`robust=` with a cap on norms",
    "secure_aggregation": "`secure_aggregation=`",
    "transport": "`transport=` with any way",
    'transport="ring" or "tree"': "`transport=` with a way that adds up as it goes",
    "tuner": "`tuner=` with any tuner",
    'tuner="drift"': "a tuner that sees the drift of nodes",
    'tuner="autocorrelation"': "a tuner that sees the outer gradients",
    "client_fraction": "`client_fraction=` under 1",
    "island_size": "`island_size=` of an averaging",
    "over_sampling, deadline_s or min_reports": "a server that asks more clients than it needs",
    "gradient_modules": "modules that act on the gradients of all nodes at every step",
    "corrections": "a module that corrects each node's own gradients",
    "packed values": "a strategy that sends something else than sums: packed values, indices, a node's own parameters",
    "no all-reduce": "a strategy that never takes an all-reduce",
    "several modules": "a strategy of more than one module",
    "outer steps in parts or late": "`num_fragments=` over 1, or `delay=` or `fragment_sync_delay=` over 0",
    "a mean of its own": "a strategy or module whose means are not those of the communicator (`weighted_means`)",
    "parts of a mean": "a module that averages factors or shards only (`only_means`)",
    "values right in the mean only": "a module that sends sparse entries, rounds by chance, or has error feedback "
    "(`right_in_mean`)",
    "a clock of its own": "a strategy whose nodes do not wait for each other",
    "gradients at every step": "a strategy whose nodes meet at every step",
    "node": "`fit(node=NodeMesh(...))`",
    "node in several processes": "`fit(node=NodeMesh(...))` with a process for each device",
    "stages": "`fit(node=NodeMesh(stages=...))`",
    "compute": "`fit(compute=...)` but `compute='loop'`",
    "processes": "`fit(processes=...)` but 1",
    "engine": "`fit(engine=...)`",
    'precision="fp16"': "`fit(precision='fp16')`",
    "max_memory_usage": "`fit(max_memory_usage=...)`",
    'balance="batch" or "steps"': "`fit(balance=...)` where nodes weigh what they have done",
    'balance="steps"': "`fit(balance='steps')`",
}


class Refused(NamedTuple):
    """Two features of `FEATURES` that cannot be combined, why, and what to do instead."""

    one: str
    other: str
    reason: str
    instead: str


_ONE_CHANGES_ALL = (
    "noise and epsilon are reckoned for a mean, which one client changes by at most C/(qN); a rule takes the value of "
    "one client or of a few, so one changes it by about C, and the reported epsilon would be false"
)
_NEEDS_MEAN = "a rule takes the place of means, and there is none here that it could take"
_PARTS = "one process or one for each device computes a node that is split over devices, step by step"
_OWN_MEANS = "nodes would weigh what they have done, and only the communicator's means (op='mean') know those weights"

# Rows are looked at from the top: the first that a run has both features of is what it says.
REFUSED: tuple[Refused, ...] = (
    # how means are taken
    Refused("privacy", "robust", _ONE_CHANGES_ALL, "leave one of them out"),
    Refused(
        "privacy",
        'robust="norm_cap"',
        "privacy clips each update to C itself, and a cap by the clients' norms would tell them without noise",
        "leave robust out, and lower clip",
    ),
    Refused(
        "privacy",
        "tuner",
        "a tuner reads what clients have moved, or how many took part, without noise, and publishes what it chooses; "
        "epsilon does not count that",
        "leave tuner out, and give H as a number or a function of the round",
    ),
    Refused(
        'tuner="drift"',
        "robust",
        "drift is measured around the mean of what nodes moved, and a rule puts something else in its place",
        "leave one of them out, or take a ByteBudget",
    ),
    Refused(
        'tuner="drift"',
        "secure_aggregation",
        "nodes add up how far each has moved without masks",
        "leave one of them out, or take a ByteBudget",
    ),
    *(
        Refused(feature, other, reason, "take a ByteBudget, or leave tuner out")
        for feature in ('tuner="drift"', 'tuner="autocorrelation"')
        for other, reason in (
            ("no all-reduce", "it goes by the mean that nodes take when they meet, and here they take none"),
            ("several modules", "it goes by the mean of one module, and would have to see which"),
        )
    ),
    Refused(
        'tuner="autocorrelation"',
        "outer steps in parts or late",
        "it goes by the mean of all outer gradients at once, where nodes meet",
        "take DiLoCo without delay, or leave tuner out",
    ),
    Refused(
        "tuner",
        "gradient_modules",
        "gradients meet at every step, whatever a tuner chooses, so it measures something else and keeps no budget",
        "leave tuner out, or take a strategy without gradient modules",
    ),
    Refused("privacy", "island_size", "privacy is of a server's mean, and islands have none", "leave island_size out"),
    Refused(
        "privacy",
        "over_sampling, deadline_s or min_reports",
        "epsilon counts clients that take part by chance alone, not by who is fast",
        "leave over_sampling, deadline_s and min_reports out",
    ),
    Refused(
        "robust",
        'transport="ring" or "tree"',
        "a rule needs the nodes' own values, and this transport adds them up on the way",
        "leave transport out, or take 'server'",
    ),
    Refused(
        "secure_aggregation",
        "robust",
        "the server sees nobody's own values, which a rule compares",
        "leave robust out",
    ),
    Refused(
        "secure_aggregation",
        'robust="norm_cap"',
        "the server sees nobody's own values, and a cap tells norms",
        "leave robust out",
    ),
    Refused(
        "secure_aggregation",
        'transport="ring" or "tree"',
        "masked values go through a server",
        "leave transport out",
    ),
    Refused(
        "secure_aggregation",
        "packed values",
        "a server that sees sums alone cannot hand on what others read",
        "leave secure_aggregation out",
    ),
    Refused("robust", "a mean of its own", _NEEDS_MEAN, "leave robust out, or take 'norm_cap'"),
    Refused("robust", "parts of a mean", _NEEDS_MEAN, "leave robust out, or take 'norm_cap'"),
    Refused(
        "robust",
        "values right in the mean only",
        "a median of mostly zeros is zero, and a node does not keep what it sent, so training stops; a rule over those "
        "alone who sent an entry would take a bad node's entries whole",
        "leave robust out, or take 'norm_cap'",
    ),
    Refused("transport", "no all-reduce", "only an all-reduce may go in several ways", "leave transport out"),
    *(
        Refused(
            feature,
            'transport="ring" or "tree"',
            "the clients of the next round get the parameters from a server, since they may not have been among those "
            "who averaged",
            f"leave transport out, or {feature}",
        )
        for feature in ("client_fraction", "privacy")
    ),
    Refused(
        "over_sampling, deadline_s or min_reports",
        "island_size",
        "a server that asks more clients than it needs takes one mean of those that report",
        "leave island_size out",
    ),
    Refused(
        "gradient_modules",
        "corrections",
        "gradient modules act on the gradients of all nodes at every step, and a correction on each node's own",
        "use one or the other",
    ),
    *(
        Refused(
            "gradient_modules",
            feature,
            "gradient modules act on the gradients of all nodes at every step, and here nodes rest",
            "use one or the other",
        )
        for feature in ("client_fraction", "privacy")
    ),
    # a node of several devices
    Refused("node", "compute", _PARTS, "leave compute out"),
    Refused("node", "processes", _PARTS + " (under python -m exogym.launch)", "leave processes out"),
    Refused("node", "engine", _PARTS + " (under python -m exogym.launch)", "leave engine out"),
    Refused(
        "stages",
        'precision="fp16"',
        "the scale of the loss is not known to the stages before it",
        "use 'bf16' or 'fp32'",
    ),
    Refused(
        "node in several processes",
        "secure_aggregation",
        "secure_aggregation looks at all of a node's row, of which each process has a part",
        "leave secure_aggregation out, or train in one process",
    ),
    Refused(
        "node in several processes",
        "max_memory_usage",
        "what a step takes is not known before the model is split",
        "give minibatch_size instead",
    ),
    # nodes that weigh what they have done
    Refused(
        'balance="batch" or "steps"',
        "a clock of its own",
        "there no node waits for another, and dylu=True gives slow nodes fewer steps",
        "leave balance out",
    ),
    Refused(
        'balance="steps"',
        "gradients at every step",
        "there every step is of all nodes together",
        "use balance='batch' or 'nodes', or a strategy with local steps (DiLoCo, FedAvg, SPARTA)",
    ),
    Refused(
        'balance="batch" or "steps"',
        "privacy",
        "epsilon counts each client alike, and one that weighs more than others changes the mean by more than C/(qN)",
        "use balance='nodes', or leave privacy out",
    ),
    Refused(
        'balance="batch" or "steps"',
        "robust",
        "a rule counts each node once, and these nodes weigh what they have done",
        "use balance='nodes', or leave robust out",
    ),
    Refused(
        'balance="batch" or "steps"',
        "a mean of its own",
        _OWN_MEANS,
        "use balance='nodes', or SimpleReduce, DiLoCo, FedAvg, SPARTA or SPARTADiLoCo. In a class of yours "
        "weighted_means = True says that all it averages are means of the communicator",
    ),
)


def check(features: Mapping[str, str]) -> None:
    """Refuse features that cannot be combined.

    Args:
        features: name in `FEATURES` to what was given, as `{"robust": "robust='krum'"}`.

    Raises:
        ArgumentError: the first row of `REFUSED` whose two features are among them: what was given, why, what to do.

    >>> check({"robust": "robust='krum'", "client_fraction": "client_fraction=0.5"})
    """
    for row in REFUSED:
        if row.one in features and row.other in features:
            raise ArgumentError(f"{features[row.one]} with {features[row.other]}: {row.reason}; {row.instead}")


def table() -> str:
    """Return `REFUSED` as a table in Markdown.

    >>> table().splitlines()[0]
    '| feature | with | is refused, since | instead |'
    """
    heads = ("feature", "with", "is refused, since", "instead")
    lines = [heads, ("---",) * len(heads), *((f"`{r.one}`", f"`{r.other}`", r.reason, r.instead) for r in REFUSED)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
