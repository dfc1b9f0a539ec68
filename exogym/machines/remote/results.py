"""The results of a run as files: model, history, description and traffic. Nothing is pickled."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym.core.base.files import regular_text, write_json
from exogym.core.communicator import ship, tell
from exogym.core.record.history import History
from exogym.core.record.schema import FILES
from exogym.core.saving.export import load_model, save_model, split_history
from exogym.errors import ExoGymError
from exogym.machines.remote.orders import FIT, PROGRESS, RUN, RUNS
from exogym.machines.remote.world import own_wire
from exogym.trainer import Trainer

if TYPE_CHECKING:
    from exogym.machines.remote.launcher import SSHLauncher

MODEL, HISTORY, FACTS = "model.safetensors", "history.safetensors", "facts.json"


def names(fit: int) -> list[str]:
    """Return the names of the files with the results of a script's `fit` call number `fit`, in writing order.

    >>> names(1)
    ['fit_1.model.safetensors', 'fit_1.history.safetensors', 'fit_1.facts.json']
    """
    return [f"fit_{fit}.{name}" for name in (MODEL, HISTORY, FACTS)]


@dataclass
class FitResults:
    """A `Trainer`'s records after a fit: its history, description and traffic."""

    history: History = field(default_factory=History)
    description: dict[str, Any] = field(default_factory=dict)
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)


def write(folder: Path, fit: int, trainer: Trainer) -> None:
    """Write the results of a trainer's fit into `folder`, each file completely or not at all."""
    model_name, history_name, facts_name = names(fit)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(trainer.model, folder / model_name)
    trainer.history.save(folder / history_name)
    write_json(folder / facts_name, {"description": trainer.description, "traffic": trainer.traffic}, indent=None)


def run_folder_of(folder: Path, fit: int) -> Path:
    """Return the run folder of a script's `fit` call number `fit`: the launch's `folder` for the first one.

    >>> run_folder_of(Path("runs/train"), 1).name, run_folder_of(Path("runs/train"), 2).name
    ('train', 'fit_2')
    """
    return folder if fit == 1 else folder / f"fit_{fit}"


def make_room(folder: Path) -> None:
    """Move the records of an earlier start of this run out of `folder`, into a new subfolder (`start_1`, ...)."""
    if found := [folder / name for name in FILES if (folder / name).exists()]:
        aside = next(path for n in itertools.count(1) if not (path := folder / f"start_{n}").exists())
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)


def carry_out(
    launcher: SSHLauncher, folder: Path, fit: int, target: str, *words: Any, module: bool, shows_progress: bool,
    save_dir: str | None, mirrors: bool = True,
) -> int:  # fmt: skip
    """Run a script on the hosts until its `fit` call number `fit` ends, fetch the results, and return the exit code.

    Args:
        launcher: starts the script on the hosts.
        folder: the folder on this machine for logs and results.
        target: the script's path, or with `module=True` a module's name.
        words: the script's arguments.
        shows_progress: whether to show the run's progress.
        save_dir: the run's folder for checkpoints.
        mirrors: whether to copy the run folder to this machine while rank 0 writes it on the master.
    """
    code = launcher.launch(
        target, *words, module=module, folder=folder, save_dir=save_dir,
        environment={FIT: str(fit), RUN: folder.name, PROGRESS: str(int(shows_progress))},
        mirror=run_folder_of(folder, fit) if mirrors else None,
    )  # fmt: skip
    if mirrors:
        bring_run(launcher, folder, fit)
    if not code:
        bring(launcher, folder, fit)
    return code


def bring_run(launcher: SSHLauncher, folder: Path, fit: int) -> None:
    """Copy the existing files of a fit's run folder from the master, where rank 0 wrote them."""
    there = run_folder_of(folder, fit)
    for name in FILES:
        try:
            launcher.fetch(f"{RUNS}/{there.relative_to(folder.parent)}/{name}", there / name)
        except ExoGymError:
            if name == FILES[0]:  # the run has not begun, or the master is lost
                return


def bring(launcher: SSHLauncher, folder: Path, fit: int) -> None:
    """Copy a fit's results to `folder` on this machine, from the first host that has all of them.

    Raises:
        ExoGymError: no host has the results.
    """
    config = launcher.config
    hosts = [host for host in config.hosts if host in launcher.finished] or [config.master]
    places = [(host, folder) for host in hosts]
    places += [(host, aside(folder, config.ranks(config.hosts.index(host))[0])) for host in hosts]
    for number, (host, place) in enumerate(places):
        try:
            for name in names(fit):
                launcher.fetch(f"{RUNS}/{place.relative_to(folder.parent)}/{name}", folder / name, host)
            return
        except ExoGymError:
            if number == len(places) - 1:
                raise


def aside(folder: Path, rank: int) -> Path:
    """Return the folder in which process `rank` (not rank 0) saves the results, in case rank 0's host is lost."""
    return folder / f"rank_{rank}"


def read(folder: Path, fit: int, model: nn.Module) -> FitResults:
    """Read the results that `write` saved: return the records, and load the weights into `model`.

    Raises:
        ExoGymError: a file is missing, incomplete, or from another model.
    """
    found = facts_of(folder, fit)
    load_model(model, folder / names(fit)[0])
    return found


def facts_of(folder: Path, fit: int) -> FitResults:
    """Read the results that `write` has saved, without the model."""
    _, history_name, facts_name = names(fit)
    try:
        facts = json.loads(regular_text(folder / facts_name))
        return FitResults(History.load(folder / history_name), facts["description"], facts["traffic"])
    except Exception as error:
        raise ExoGymError(f"the results in {folder} cannot be read: {error!r}; train again") from error


def replay(folder: Path, fit: int, model: nn.Module) -> FitResults:
    """Load an earlier fit's results in every process. Rank 0 reads the files and sends them to the other processes."""
    first, failure = None, None
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        try:
            first = read(folder, fit, model)
        except ExoGymError as error:
            failure = str(error)
    wire = own_wire()
    if (failure := tell(wire, failure)) is not None:
        raise ExoGymError(str(failure))
    arrays, plain = split_history(first.history) if first else ({}, {})
    facts: Any = first and {"history": plain, "description": first.description, "traffic": first.traffic}
    facts = tell(wire, facts)
    told = ship(wire, {name: x.detach() for name, x in model.state_dict().items()}, 0)
    if first is None:
        model.load_state_dict(told)
    state = facts["history"] | {name: x.numpy() for name, x in ship(wire, arrays, 0).items()}
    return FitResults(History.from_state(state), facts["description"], facts["traffic"])
