"""What a run leaves behind: the final model, its history, its description, its traffic. Nothing in it is pickled."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym.core.base.files import write_json
from exogym.core.record.history import History
from exogym.core.record.schema import FILES
from exogym.core.saving.export import load_history, load_model, save_history, save_model, split_history
from exogym.errors import ExoGymError
from exogym.machines.remote.orders import FIT, PROGRESS, RUN, RUNS
from exogym.machines.remote.world import send, tell

if TYPE_CHECKING:
    from exogym.machines.remote.launcher import SSHLauncher

MODEL, HISTORY, FACTS = "model.safetensors", "history.safetensors", "facts.json"
SEEN = "measured.json"


def names(fit: int) -> list[str]:
    """Return the file names of the results of a script's `fit` number so-and-so, the last one written last.

    >>> names(1)
    ['fit_1.model.safetensors', 'fit_1.history.safetensors', 'fit_1.facts.json']
    """
    return [f"fit_{fit}.{name}" for name in (MODEL, HISTORY, FACTS)]


@dataclass
class FitResults:
    """Beside the model's numbers: what `Trainer` has after a fit."""

    history: History = field(default_factory=History)
    description: dict[str, Any] = field(default_factory=dict)
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)


def write(folder: Path, fit: int, model: nn.Module, results: FitResults) -> None:
    """Write the results of a fit into `folder`, each file whole or not at all."""
    model_name, history_name, facts_name = names(fit)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder / model_name)
    save_history(results.history, folder / history_name)
    write_json(folder / facts_name, {"description": results.description, "traffic": results.traffic}, indent=None)


def run_folder_of(folder: Path, fit: int) -> Path:
    """Return the run folder of a script's `fit`, in the folder of the launch: of the first one it is the same.

    >>> run_folder_of(Path("runs/train"), 1).name, run_folder_of(Path("runs/train"), 2).name
    ('train', 'fit_2')
    """
    return folder if fit == 1 else folder / f"fit_{fit}"


def make_room(folder: Path) -> None:
    """Put what an earlier start of the run told in `folder` aside, into one beside it: this start begins anew."""
    if found := [folder / name for name in FILES if (folder / name).exists()]:
        aside = next(path for n in itertools.count(1) if not (path := folder / f"start_{n}").exists())
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)


def carry_out(
    launcher: SSHLauncher, folder: Path, fit: int, target: str, *words: Any, module: bool, shows_progress: bool,
    save_dir: str | None, mirrors: bool = True,
) -> int:  # fmt: skip
    """Launch a script, wait until its `fit` so-and-so has ended, and bring what came of it; return the exit code.

    Args:
        folder: the launch's; save_dir: the run's.
        mirrors: whether the run folder is in there, too.
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
    """Copy the existing part of a fit's run folder from the master, where rank 0 wrote it."""
    there = run_folder_of(folder, fit)
    for name in FILES:
        try:
            launcher.fetch(f"{RUNS}/{there.relative_to(folder.parent)}/{name}", there / name)
        except ExoGymError:
            if name == FILES[0]:  # the run never began, or the master is gone
                return


def bring(launcher: SSHLauncher, folder: Path, fit: int) -> None:
    """Copy the results of a launch's fit to `folder` here, from the first host that has them.

    Raises:
        ExoGymError: no host has them.
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
    """Return where a process that was not the first leaves the results, should the first one be lost."""
    return folder / f"rank_{rank}"


def read(folder: Path, fit: int, model: nn.Module) -> FitResults:
    """Read what `write` wrote; the numbers go into `model`.

    Raises:
        ExoGymError: a file is missing or torn, or of another model.
    """
    found = facts_of(folder, fit)
    load_model(model, folder / names(fit)[0])
    return found


def write_seen(folder: Path, description: Mapping[str, Any], hosts: Sequence[str]) -> Path | None:
    """Write what a run saw of its hosts, by its description, as `Network.of` reads it; None where it saw too little."""
    if (seen := description.get("seen")) is None:
        return None
    write_json(folder / SEEN, seen | {"hosts": list(hosts)})
    return folder / SEEN


def facts_of(folder: Path, fit: int) -> FitResults:
    """Read the files of `write`, except the model."""
    _, history_name, facts_name = names(fit)
    try:
        facts = json.loads((folder / facts_name).read_text("utf-8"))
        return FitResults(load_history(folder / history_name), facts["description"], facts["traffic"])
    except Exception as error:
        raise ExoGymError(f"the results in {folder} cannot be read: {error!r}; run again") from error


def replay(folder: Path, fit: int, model: nn.Module) -> FitResults:
    """In every process of a world take over what an earlier fit left on rank 0's host."""
    first, failure = None, None
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        try:
            first = read(folder, fit, model)
        except ExoGymError as error:
            failure = str(error)
    if (failure := tell(failure)) is not None:
        raise ExoGymError(str(failure))
    arrays, plain = split_history(first.history) if first else ({}, {})
    facts: Any = first and {"history": plain, "description": first.description, "traffic": first.traffic}
    facts = tell(facts)
    told = send(model.state_dict())
    if first is None:
        model.load_state_dict(told)
    state = facts["history"] | {name: x.numpy() for name, x in send(arrays).items()}
    return FitResults(History.from_state(state), facts["description"], facts["traffic"])
