"""Loggers for external trackers: Weights & Biases and TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from exogym.core.record.rows import OF_THE_STEP, plain
from exogym.errors import ExoGymError, checked
from exogym.logger.base import Logger, Record, check_writable
from exogym.logger.files import OnDisk

CHARACTERS = 6000  # of an option's text


def need(package: str, extra: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ExoGymError(f"{name} needs {package}, which is not installed: pip install 'exogym[{extra}]'")


def new_values(record: Record, shared: Record) -> Iterator[tuple[str, Any]]:
    """Yield a record's names and values, except the step's values in `shared`, the averaged model's record."""
    for name, value in record.items():
        repeated = record.get("node") is not None and name in OF_THE_STEP and value == shared.get(name)
        if name not in ("step", "node") and value is not None and not repeated:
            yield name, plain(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested dicts.

    >>> dict(flat({"seed": 0, "strategy": {"name": "DiLoCoStrategy", "H": 2}}))
    {'seed': 0, 'strategy.name': 'DiLoCoStrategy', 'strategy.H': 2}
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def as_param(value: Any) -> str:
    """Return `value` as text of at most `CHARACTERS` characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 3] + "..."


def in_one_line(error: BaseException) -> str:
    text = " ".join((str(error).strip() or repr(error)).split())
    return text if len(text) <= 400 else text[:397] + "..."


class ByStep(Logger):
    """Collects a step's records and passes them on as {name: number}, with names such as `node_3/train_loss`."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._values: dict[str, Any] = {}
        self._shared: Record = {}

    def log(self, record: Record) -> None:
        """Receive one record. If it begins a new step, first write the values collected for the last step."""
        if record["step"] != self._step:
            self._flush()
            self._step = record["step"]
        node = record.get("node")
        prefix = "" if node is None else f"node_{node}/"
        self._values |= {prefix + name: value for name, value in new_values(record, self._shared)}
        if node is None:
            self._shared = record

    def _flush(self) -> None:
        if self._values and self._step is not None:
            self._write(self._step, self._values)
        self._step, self._values, self._shared = None, {}, {}

    _write: Any  # (step, values) -> None


class WandbLogger(ByStep):
    """Send records to Weights & Biases, with one `log` call per step and the axis `step` in charts.

    Values of single nodes have names such as `node_3/train_loss`; values of the whole step (bytes, lr, seconds) are
    logged once. A resumed run becomes a new W&B run with the same name.

    Args:
        project, experiment_name: W&B's project and the run's name in it.
        mode: "online", "offline" (nothing is sent until `wandb sync`) or "disabled". Default: W&B's settings.
        config: values to add to the run's configuration in W&B.
        dir: the folder in which W&B creates its folder. Default: the current folder.

    Raises:
        ExoGymError: wandb is not installed.

    >>> logger = WandbLogger(project="diloco", experiment_name="H=100", mode="offline")
    """

    @checked
    def __init__(
        self, project: str | None = None, experiment_name: str | None = None, mode: str | None = None,
        config: Mapping[str, Any] | None = None, dir: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        need("wandb", "wandb", "WandbLogger")
        self.project, self.experiment_name, self.mode = project, experiment_name, mode
        self.config, self.dir = dict(config or {}), None if dir is None else str(dir)
        self._run: Any = None

    def start(self, run: Mapping[str, Any]) -> None:
        """Start a new W&B run. An active W&B run stays active."""
        import wandb

        self.finish({})
        if self.dir is not None:
            check_writable(self.dir, "dir")
        given: dict[str, Any] = {"project": self.project, "name": self.experiment_name, "mode": self.mode}
        if wandb.run is not None:
            given["reinit"] = "create_new"
        self._run = wandb.init(config={**run, **self.config}, dir=self.dir, **given)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _write(self, step: int, values: dict[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the remaining values and end the W&B run."""
        if self._run is not None:
            self._flush()
            self._run.summary.update({name: value for name, value in summary.items() if value is not None})
            self._run.finish()
            self._run = None


class TensorBoardLogger(ByStep, OnDisk):
    """Write TensorBoard event files. Values of single nodes have names such as `node_3/train_loss`.

    Each run has its own `folder` in `log_dir`: `run_1`, `run_2`, ... A resumed run continues in the last folder, where
    TensorBoard hides events after the resumed step.

    Raises:
        ExoGymError: tensorboard is not installed.

    >>> logger = TensorBoardLogger("runs/diloco")
    """

    @checked
    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        need("tensorboard", "tensorboard", "TensorBoardLogger")
        self.log_dir, self.folder = Path(log_dir), Path(log_dir)
        self._writer: Any = None

    def start(self, run: Mapping[str, Any]) -> None:
        """Open an event file and write the run's description into it as text."""
        from torch.utils.tensorboard import SummaryWriter

        self.finish({})
        self.trouble = None
        check_writable(self.log_dir, "log_dir")
        step = run.get("resumed_step")
        numbers = [int(path.name[4:]) for path in self.log_dir.glob("run_*") if path.name[4:].isdecimal()]
        self.folder = self.log_dir / f"run_{max(max(numbers, default=0) + (step is None), 1)}"
        self._writer = SummaryWriter(str(self.folder), purge_step=None if step is None else step + 1)
        self._writer.add_text("run", f"```\n{json.dumps(dict(run), indent=2, default=str)}\n```", step or 0)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        with self.writing(self.log_dir):
            if self._writer is None:
                return
            for name, value in values.items():
                add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
                add(name, value, step)
            self._writer.flush()

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the remaining values and close the file."""
        if self._writer is not None:
            self._flush()
        with self.writing(self.log_dir):
            if self._writer is not None:
                self._writer.close()
                self._writer = None
