"""Contributed methods, each in its own file, and wrappers that add rare options to a strategy.

A method here promises less than the strategies of `exogym.strategy`: its rule equals its reference, its bytes equal its
formula, and runs are repeatable, resumable and bitwise identical in any number of processes. A method has the inner
optimizer's options and its own, and refuses the features in `exogym.core.refusals.UNTRIED`, except those that its class
lists in `tried` and its own tests cover. Strategies are found by name, as in `compare --strategies edit`, or by class,
from here or from `exogym.strategy`.

A wrapper returns a changed copy of a core strategy or your own. `Robust` replaces its means by a robust rule (or a
`NormCap`), `Secure` lets a server average without seeing any node's values, and `ByteBudget` sets the length of rounds
so that a node stays within a budget of bytes.

>>> from exogym.strategy import FedAvgStrategy
>>> robust = Robust(FedAvgStrategy(H=5, lr=0.1), NormCap(1.0))  # updates over the cap are scaled down
>>> from exogym.strategy.registry import parse_strategy
>>> type(parse_strategy("edit:H=10")) is EDiTStrategy
True
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "ACCOStrategy",
    "ByteBudget",
    "CHOCOStrategy",
    "CocktailSGDStrategy",
    "DESLOCStrategy",
    "DecoupledDiLoCoStrategy",
    "DionStrategy",
    "DittoStrategy",
    "EDiTStrategy",
    "EF21Strategy",
    "FedAsyncStrategy",
    "FedBNStrategy",
    "FedDynStrategy",
    "FedNovaStrategy",
    "FedPerStrategy",
    "FedRepStrategy",
    "GPAStrategy",
    "GradientPushStrategy",
    "HALoSStrategy",
    "HeLoCoStrategy",
    "NormCap",
    "OneBitAdamStrategy",
    "PULSELoCoStrategy",
    "PierStrategy",
    "QFedAvgStrategy",
    "QuantizedReduceStrategy",
    "Robust",
    "SNOOStrategy",
    "Secure",
    "SlowMoStrategy",
]

ELSEWHERE = {  # names in papers, and what they are here
    "push_sum": "sgp", "int8": "qreduce:bits=8", "choco_sgd": "choco", "1bit_adam": "onebit_adam",
    "cocktail_sgd": "cocktail",
}  # fmt: skip

if TYPE_CHECKING:
    from exogym.contrib.acco import ACCOStrategy
    from exogym.contrib.byte_budget import ByteBudget
    from exogym.contrib.choco import CHOCOStrategy
    from exogym.contrib.cocktail import CocktailSGDStrategy
    from exogym.contrib.decoupled_diloco import DecoupledDiLoCoStrategy
    from exogym.contrib.desloc import DESLOCStrategy
    from exogym.contrib.dion import DionStrategy
    from exogym.contrib.ditto import DittoStrategy
    from exogym.contrib.edit import EDiTStrategy
    from exogym.contrib.ef21 import EF21Strategy
    from exogym.contrib.fedasync import FedAsyncStrategy
    from exogym.contrib.fedbn import FedBNStrategy
    from exogym.contrib.feddyn import FedDynStrategy
    from exogym.contrib.fednova import FedNovaStrategy
    from exogym.contrib.fedper import FedPerStrategy
    from exogym.contrib.fedrep import FedRepStrategy
    from exogym.contrib.gpa import GPAStrategy
    from exogym.contrib.gradient_push import GradientPushStrategy
    from exogym.contrib.halos import HALoSStrategy
    from exogym.contrib.heloco import HeLoCoStrategy
    from exogym.contrib.onebit_adam import OneBitAdamStrategy
    from exogym.contrib.pier import PierStrategy
    from exogym.contrib.pulseloco import PULSELoCoStrategy
    from exogym.contrib.qfedavg import QFedAvgStrategy
    from exogym.contrib.quantized_reduce import QuantizedReduceStrategy
    from exogym.contrib.robust import NormCap, Robust
    from exogym.contrib.secure_sums import Secure
    from exogym.contrib.slowmo import SlowMoStrategy
    from exogym.contrib.snoo import SNOOStrategy
else:
    __getattr__, __dir__ = lazily(__name__)
