"""Advice on which strategy suits a network, from formulas and earlier small runs.

`advise` predicts seconds, bytes and waiting for a model of any size. `plans` lists the collectives of each strategy.

>>> advice: Advice = advise(parameters=1e8, num_nodes=8, network="100Mbps,20ms", step_seconds=0.5)
>>> row: Row = advice.rows[0]
>>> row.utilisation + row.waiting_share, advice.recommended in advice.rows
(1.0, True)
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["Advice", "Answer", "Plan", "Row", "Traffic", "Work", "advise", "plan_of"]

if TYPE_CHECKING:
    from exogym.strategy.traffic import Plan, Traffic
    from exogym.study.advise.advice import Advice, Answer, Row
    from exogym.study.advise.plans import plan_of
    from exogym.study.advise.prediction import Work, advise
else:
    __getattr__, __dir__ = lazily(__name__)
