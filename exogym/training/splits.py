"""What goes with nodes of several processes, looked at before anything is started."""

from __future__ import annotations

from typing import cast

from exogym.communicator import Krum
from exogym.errors import ArgumentError, check_choice
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.outer import OuterRule
from exogym.training.options import FitOptions


def check_split(options: FitOptions) -> int:
    """Return how many processes each node of a fit in several processes is.

    Raises:
        ArgumentError: nodes of different sizes, or something that does not go with nodes of several processes.
    """
    meshes = set(options.meshes)
    (mesh, *others) = meshes
    if others:
        raise ArgumentError("nodes of different devices are simulated in one process; in several all have one split")
    for name, asked, instead in (
        ("balance", options.balance is not None, "all devices of all nodes do the same"),
        ("network", options.network is not None, "a clock needs one process for each row; predict in one process"),
        ("reduction='native'", options.reduction == "native", "take the exact one"),
    ):
        if asked:
            raise ArgumentError(f"{name} with node= in several processes: {instead}; leave it out")
    if options.strategy.driven_by != "rounds":
        raise ArgumentError(
            f"{type(options.strategy).__name__} is written for one node and does not say what it acts on, so nobody "
            "knows whether it would do the same with a part of each parameter: take a strategy that acts on rows (DDP, "
            "DiLoCo, FedAvg, SPARTA, ...), or leave node= out"
        )
    _check_modules(cast(CommunicateOptimizeStrategy, options.strategy))
    return mesh.size


def _check_modules(strategy: CommunicateOptimizeStrategy) -> None:
    """Refuse what looks at a node's whole row outside of modules, and modules that do not say what they act on."""
    means = strategy.averaging
    for name, asked in (
        ("secure_aggregation", means.secure is not None),
        (f"robust={means.robust!r}", means.cap is not None or isinstance(means.rule, Krum)),
        ("tuner", strategy.tuning is not None),
        ("faults with bad_nodes", strategy.faults is not None),
    ):
        if asked:
            raise ArgumentError(
                f"{name} looks at all of a node's row, and with node= in several processes each has a part of it: "
                "leave it out, or train in one process"
            )
    for module in strategy.modules:
        said = (vars(kind) for kind in type(module).__mro__ if not kind.__module__.startswith("exogym."))
        ours = type(module).__module__.startswith("exogym.")
        if not ours and "acts_on" not in vars(module) and not any("acts_on" in names for names in said):
            raise ArgumentError(
                f"{type(module).__name__} does not say what it acts on, and with node= in several processes each has a "
                'part of every parameter: give the class acts_on = "elements" (any columns will do), "tensors" (whole '
                'parameters) or "row" (all of a node\'s)'
            )
        rule = getattr(module, "rule", None)
        if isinstance(rule, OuterRule) and rule.spec.acts_on != "elements" and module.acts_on == "elements":
            raise ArgumentError(
                f"outer_optim={rule.spec!r} looks at whole tensors, and with node= in several processes each has a "
                "part of them: take one that treats each element by itself ('sgd', 'adam', ...)"
            )
        check_choice(f"{type(module).__name__}.acts_on", module.acts_on, ("elements", "tensors", "row"))
