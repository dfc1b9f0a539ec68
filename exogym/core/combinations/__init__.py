"""What cannot be combined: one table of pairs of features, each with its reason and what to do instead.

A feature is something that a run has, under the name a user writes: an option (`privacy`), an option with a value
(`compute="vmap"`), what a strategy does ("packed values"), or what was left out ("no network"). Modules, strategies
and the options of `fit` say which features they have (`features()`), and `check` raises for the first row of the table
whose two features a run has. A strategy is checked when it is made, the whole run before it trains. Features that show
later (who started the process, what the model and the data are like) are checked where they are seen, still before
training.

To refuse another pair, add a row to its group in `GROUPS`, and, if its feature is new, a line to `FEATURES` and to the
`features()` of what has it. A number too large for another one is no pair: it is checked where the numbers are.

>>> check({"privacy": "privacy", "robust": "robust='krum'"})
Traceback (most recent call last):
...
exogym.errors.ArgumentError: privacy with robust='krum': ...; leave one of them out
"""

from exogym.core.combinations.refusing import check, features_of, refuse
from exogym.core.combinations.table import FEATURES, GROUPS, REFUSED, Refused

__all__ = ["FEATURES", "GROUPS", "REFUSED", "Refused", "check", "features_of", "refuse"]
