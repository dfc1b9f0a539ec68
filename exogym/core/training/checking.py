"""Check a run's options before anything is made or trained."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from exogym.core.base.retired import retired
from exogym.core.combinations import check
from exogym.core.compute.finite import POLICIES
from exogym.core.compute.spans import WAYS
from exogym.core.compute.worker import AUTOCAST
from exogym.core.engine.engines import NAMED, named_engine, several_devices
from exogym.core.training.options import FitOptions
from exogym.errors import ArgumentError, check_choice, check_count, check_number, check_switch
from exogym.faults import Faults
from exogym.strategy.strategy import Strategy

__all__ = ["checked_options"]

CHOICES = {"compute": WAYS, "on_nonfinite": POLICIES, "precision": AUTOCAST}


def checked_options(asked: FitOptions, of_data: Mapping[str, str] | None = None) -> FitOptions:
    """Check each option, then the options' combinations. Return the options, with texts turned into values.

    `of_data` has features of the data (`exogym.data.Stream.features`) to check together with the options. Raise
    ArgumentError if a value has the wrong type, is out of range, or contradicts another option.
    """
    _check_kinds(asked)
    _check_plain(asked)
    _check_values(asked)
    options = replace(
        asked, save_dir=_absolute(asked, folder_of_checkpoints(asked)), run_dir=_absolute(asked, asked.run_dir),
        balance=asked.sharing,
        node=None if asked.node is None else several_devices("fit").of(asked.node, asked.num_nodes),
    )  # fmt: skip
    if asked.network is not None:
        from exogym.network import Network

        options = replace(options, network=Network.of(asked.network))
    if options.faults is not None and options.faults.bad_nodes:
        options = replace(options, strategy=options.strategy.beside(options.faults))
    check({**options.features(), **(of_data or {})})
    _check_counts(options)
    return options


def _check_kinds(options: FitOptions) -> None:
    """Check types and named choices, each option alone."""
    if not isinstance(options.strategy, Strategy):
        is_text = isinstance(options.strategy, str)
        raise ArgumentError(
            f"strategy={options.strategy!r} is not a Strategy: pass an instance such as "
            "exogym.strategy.DiLoCoStrategy(H=100)"
            + (", or exogym.strategy.registry.parse_strategy of this text" if is_text else "")
        )
    for name, choices in {**CHOICES, "processes": ()}.items():
        value = getattr(options, name)
        if isinstance(value, str) and value not in choices and (instead := retired(value, name)) is not None:
            raise ArgumentError(f"{name}={value!r}: {instead}")
    for name, choices in CHOICES.items():
        check_choice(name, getattr(options, name), choices)
    engine = options.placement.engine
    if isinstance(engine, str):
        check_choice("engine", engine, NAMED)
    elif not (engine is None or isinstance(engine, tuple(map(named_engine, NAMED)))):
        raise ArgumentError(f"{engine=} must be 'ray', or an exogym.engine.Ray with its options")
    if not isinstance(options.faults, Faults | None):
        raise ArgumentError(
            f"faults={options.faults!r} must be an exogym.faults.Faults, such as Faults(drop_rate=0.01)"
        )


def _check_plain(options: FitOptions) -> None:
    """Check each option whose declared type alone says which values are allowed: a switch, a count or a folder."""
    for option in fields(options):
        name, value, kind = option.name, getattr(options, option.name), option.type
        if kind == "bool":
            check_switch(name, value)
        elif name == "seed":  # of any size, also below 0
            if type(value) is not int:
                raise ArgumentError(f"seed={value!r} must be a whole number")
        elif kind == "int" or (kind == "int | None" and value is not None):
            check_count(name, value)
        elif kind == "str | Path | None" and (not isinstance(value, str | os.PathLike | None) or value == ""):
            raise ArgumentError(f"{name}={value!r} must be the path of a folder")


def _check_values(options: FitOptions) -> None:
    """Check other numbers, and callbacks, each option alone."""
    if options.max_memory_usage is not None:
        check_number("max_memory_usage", options.max_memory_usage, over=0, most=1, more=", a share of the memory")
    if not isinstance(options.callbacks, Sequence) or isinstance(options.callbacks, str | bytes):
        raise ArgumentError(
            f"callbacks={options.callbacks!r} must be a list of functions that take one argument, the loop"
        )
    for callback in options.callbacks:
        if not callable(callback):
            raise ArgumentError(f"callbacks: {callback!r} is not callable: pass a function that takes the loop")


def _check_counts(options: FitOptions) -> None:
    """Check options against the numbers of nodes and examples."""
    if options.faults is not None and options.faults.trace is not None:
        options.faults.trace.check(options.num_nodes)
    if options.faults is not None and options.faults.bad_nodes:
        options.faults.bad(options.num_nodes)
    if options.weighing is not None:
        options.weighing.check_speeds(options.num_nodes, "nodes")
    if options.nodes is not None:
        options.nodes.check(options.batch_size)


def _absolute(options: FitOptions, folder: str | Path | None) -> str | Path | None:
    """Return a folder's absolute path if processes elsewhere use it: their current folder may differ."""
    return folder if folder is None or options.placement.engine is None else Path(folder).absolute()


def folder_of_checkpoints(options: FitOptions) -> str | Path | None:
    """Return the checkpoint folder (`save_dir` or a folder in `run_dir`), or None if no option asks for checkpoints."""
    asked = options.checkpoint_interval or options.resume or options.placement.max_restarts
    if options.save_dir is None and asked and isinstance(options.run_dir, str | os.PathLike):
        return Path(options.run_dir) / "checkpoints"
    return options.save_dir


def asked_to_go_on(options: FitOptions) -> bool:
    """Return whether this fit resumes: by `resume=True`, or because the variable EXOGYM_RESUME names its run_dir."""
    if not isinstance(options.run_dir, str | os.PathLike):
        return options.resume
    from exogym.core.record.run_folder import RESUME

    wanted = os.environ.get(RESUME)
    return options.resume or (wanted is not None and os.path.realpath(wanted) == os.path.realpath(options.run_dir))
