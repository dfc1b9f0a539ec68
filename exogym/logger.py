"""Loggers: where the records of a run go while it trains. CSV, JSON lines, Weights & Biases, TensorBoard, or your own.

A record is a row of the history, `exogym.record.history`: a dict with `step`, `node` (None: the averaged model),
`train_loss`, ...; what is missing is None. Records come in the order of steps, the averaged model's first. Your own
logger is a function of a record, or a class with `log`, and with `start` and `finish` if it needs them:

>>> records = []
>>> logger = combine([records.append, JSONLinesLogger("runs/metrics.jsonl")])
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import inspect
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from exogym.base.files import cut_torn_line, make_folder, replacing
from exogym.errors import ArgumentError, ExoGymError, checked
from exogym.progress import notice
from exogym.record.history import OF_THE_STEP, plain

Record = Mapping[str, Any]
_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode  # made once: half the time of a record
NOT_IN_JSON = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Logger:
    """What a logger may do; only `log` is needed.

    >>> class Best(Logger):
    ...     loss = float("inf")
    ...     def log(self, record):
    ...         self.loss = min(self.loss, record["val_loss"] or self.loss)
    """

    is_silent = False  # whether records need not be made at all

    def start(self, run: Mapping[str, Any]) -> None:
        """Prepare, before training; `run` describes the run, and `run["resumed_step"]`, if there, is where it goes on.

        Raises:
            ArgumentError: what this logger writes to cannot be written.
        """

    def log(self, record: Record) -> None:
        """Take one record."""
        raise NotImplementedError(f"{type(self).__name__} needs a method log(record)")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Finish, after training, also one that failed or was interrupted; `summary` is the last averaged record."""


class _Function(Logger):
    """A callable, or an object with `log` that is no Logger."""

    def __init__(self, target: Any) -> None:
        self.log = getattr(target, "log", target)  # type: ignore[method-assign]
        self.start = getattr(target, "start", self.start)  # type: ignore[method-assign]
        self.finish = getattr(target, "finish", self.finish)  # type: ignore[method-assign]


class _Several(Logger):
    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = list(loggers)
        self.is_silent = all(logger.is_silent for logger in loggers)

    def start(self, run: Mapping[str, Any]) -> None:
        started: list[Logger] = []
        try:
            for logger in self.loggers:
                logger.start(run)
                started.append(logger)
        except BaseException:
            for logger in started:
                logger.finish({})
            raise

    def log(self, record: Record) -> None:
        for logger in self.loggers:
            logger.log(record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        with contextlib.ExitStack() as stack:  # each is called, whatever the others raise
            for logger in reversed(self.loggers):
                stack.callback(logger.finish, summary)


def combine(loggers: Any) -> Logger:
    """Return one logger for None, a logger, a function of a record, or several of these.

    Raises:
        ArgumentError: anything else.

    >>> combine(None).is_silent, combine([print, None]).is_silent
    (True, False)
    """
    if isinstance(loggers, Logger):
        return loggers
    if loggers is None:
        return _Several([])
    if isinstance(loggers, list | tuple):
        return _Several([combine(logger) for logger in loggers if logger is not None])
    if isinstance(loggers, type):
        raise ArgumentError(f"logger={loggers.__name__} is a class: give an instance, {loggers.__name__}(...)")
    try:
        inspect.signature(getattr(loggers, "log", loggers)).bind({})
    except TypeError:
        wanted = "one of exogym.logger, an object with log(record), a function of a record, or a list of these"
        raise ArgumentError(f"logger={loggers!r} is not a logger: give {wanted}") from None
    except ValueError:
        pass  # a builtin that does not tell its arguments
    return _Function(loggers)


def in_json(value: Any) -> Any:
    """Return a value as strict JSON has it: numbers that it lacks are the texts "NaN", "Infinity", "-Infinity".

    >>> in_json({"loss": float("nan"), "at": [1, float("-inf")]})
    {'loss': 'NaN', 'at': [1, '-Infinity']}
    """
    if isinstance(value, Mapping):
        return {str(key): in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(item) for item in value]
    value = plain(value)
    return NOT_IN_JSON.get(repr(value), value) if isinstance(value, float) else value


def check_writable(folder: str | os.PathLike[str], name: str = "path") -> None:
    """Make `folder` and write a file into it, to see that it can be done; the file is removed again.

    Raises:
        ArgumentError: it cannot; folders made on the way are removed, and `name` is the argument in the message.
    """
    try:
        make_folder(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{name}={str(folder)!r} cannot be written ({error}): choose another folder") from error


class _OnDisk(Logger):
    """What is written to a disk. A full one does not end the training: that is said, once, and no more is written."""

    _given_up = False

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._given_up:
                notice(f"{path} is no longer written: {error}; the training goes on")
            self._given_up = True
            self._abandon()

    def _abandon(self) -> None:
        """Close what is open, without writing."""


class _FileLogger(_OnDisk):
    """Lines in a text file: a new run takes the file's place; a resumed one drops what came after its step and goes on.

    The file is opened at the first record, and each record is in it, whole, when `log` returns.
    """

    suffix = ""

    def __init__(self, path: str | os.PathLike[str] | None, experiment_name: str | None) -> None:
        name = (experiment_name or "metrics") + self.suffix
        self.path = Path(path if path is not None else name)
        if os.path.isdir(self.path) or str(path).endswith(("/", os.sep)):
            self.path = self.path / name
        self._file: IO[str] | None = None
        self._begun = False  # whether what the file holds is of this run
        self._columns: list[str] = []

    def start(self, run: Mapping[str, Any]) -> None:
        """Check that the file can be written; of a resumed run, drop the records after `run["resumed_step"]`."""
        self.finish({})
        self._columns, self._begun, self._given_up = [], False, False
        check_writable(self.path.parent)
        try:
            os.lstat(self.path)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:  # it cannot be a name
            raise ArgumentError(f"path={str(self.path)!r} cannot be written ({error}): name another file") from error
        try:
            open(self.path, "a").close()
            if (step := run.get("resumed_step")) is not None:
                self._begun = True
                self._keep(step)
        except OSError as error:
            raise ArgumentError(f"path={str(self.path)!r} cannot be written ({error}): name another file") from error
        except (ValueError, AttributeError, csv.Error) as error:
            raise ArgumentError(
                f"path={str(self.path)!r} is not a log of exogym ({error!r}), so the run cannot go on in it: name the "
                "resumed run's log, or a new file"
            ) from error

    def _opened(self) -> IO[str]:
        if self._file is None:
            mode = "a" if self._begun else "w"
            self._file = open(self.path, mode, buffering=1, encoding="utf-8", newline="")  # noqa: SIM115
            self._begun = True
        return self._file

    def _whole_lines(self) -> Iterator[str]:
        """Yield the lines of the file, without one that was torn when the run was killed."""
        with open(self.path, encoding="utf-8", newline="") as file:
            yield from (line for line in file if line.endswith("\n"))

    _keep: Any  # (step) -> None: drop the records after step

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        with self._writing(self.path):
            if self._file is not None:
                self._file.close()
                self._file = None

    def _abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            cut_torn_line(self.path)

    def log(self, record: Record) -> None:
        """Write one record."""
        with self._writing(self.path):
            if not self._given_up:
                self._add(record)

    _add: Any  # (record) -> None


class CSVLogger(_FileLogger):
    """Writes records to a CSV file with a header; missing values are empty.

    A metric that comes late makes a new column: the file is rewritten then, and only then, so its header is right at
    every moment. A file that is there already is replaced by a new run, and gone on with by a resumed one.

    Args:
        path: the file, or a folder for `<experiment_name>.csv`; default: that file in the current folder.
        experiment_name: names the file where `path` does not; default: "metrics".

    >>> logger = CSVLogger(path="runs/diloco.csv")
    >>> CSVLogger(experiment_name="sparta").path.name
    'sparta.csv'
    """

    suffix = ".csv"

    @checked
    def __init__(self, path: str | os.PathLike[str] | None = None, experiment_name: str | None = None) -> None:
        super().__init__(path, experiment_name)

    def _add(self, record: Record) -> None:
        if new := [name for name in record if name not in self._columns]:
            self._columns += new
            if self._begun:
                self.finish({})
                self._rewrite()
            else:
                csv.writer(self._opened(), lineterminator="\n").writerow(self._columns)
        row = [plain(record.get(name)) for name in self._columns]
        csv.writer(self._opened(), lineterminator="\n").writerow(row)

    def _keep(self, step: int) -> None:
        self._columns = next(csv.reader(self._whole_lines()), [])
        if self._columns and "step" not in self._columns:
            raise ValueError("it has no column 'step'")
        self._begun = bool(self._columns)
        self._rewrite(step)

    def _rewrite(self, last: float = math.inf) -> None:
        """Write the file anew with the columns of now and the rows up to step `last`."""
        with replacing(self.path) as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            for row in csv.DictReader(self._whole_lines()):
                if not row.get("step") or int(row["step"]) <= last:
                    writer.writerow(row)


class JSONLinesLogger(_FileLogger):
    """Writes each record as one line of JSON; numbers that JSON lacks are the texts "NaN", "Infinity", "-Infinity".

    A file that is there already is replaced by a new run, and gone on with by a resumed one.

    >>> logger = JSONLinesLogger("runs/diloco.jsonl")
    """

    suffix = ".jsonl"

    @checked
    def __init__(self, path: str | os.PathLike[str] | None = None, experiment_name: str | None = None) -> None:
        super().__init__(path, experiment_name)

    def _add(self, record: Record) -> None:
        try:
            line = _encode(dict(record))
        except (TypeError, ValueError):  # a tensor, or a number that JSON lacks
            line = json.dumps(in_json(record), allow_nan=False)
        self._opened().write(line + "\n")

    def _keep(self, step: int) -> None:
        with replacing(self.path) as file:
            for line in self._whole_lines():
                if (json.loads(line).get("step") or 0) <= step:
                    file.write(line)


def _need(package: str, extra: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ExoGymError(f"{name} needs {package}, which is not installed: pip install 'exogym[{extra}]'")


class _ByStep(Logger):
    """Gathers the records of a step, and hands them on as {name: number}, a node's as `node_3/train_loss`."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._values: dict[str, Any] = {}
        self._shared: Record = {}

    def log(self, record: Record) -> None:
        """Take one record; a step is handed on when the next one begins."""
        if record["step"] != self._step:
            self._flush()
            self._step = record["step"]
        node = record.get("node")
        if node is None:
            self._shared = record
        prefix = "" if node is None else f"node_{node}/"
        for name, value in record.items():
            repeated = node is not None and name in OF_THE_STEP and value == self._shared.get(name)
            if name not in ("step", "node") and value is not None and not repeated:
                self._values[prefix + name] = plain(value)

    def _flush(self) -> None:
        if self._values and self._step is not None:
            self._write(self._step, self._values)
        self._step, self._values, self._shared = None, {}, {}

    _write: Any  # (step, values) -> None


class WandbLogger(_ByStep):
    """Logs to Weights & Biases: one `log` a step, over the axis `step`; a node's values are `node_3/train_loss`.

    What belongs to the whole step (bytes, lr, seconds) is logged once. A resumed run is a new W&B run of that name.

    Args:
        project, experiment_name: W&B's project and the name of the run in it.
        mode: "online", "offline" (nothing is sent; `wandb sync` does it later) or "disabled"; default: W&B's settings.
        config: added to the run's description in W&B's configuration.
        dir: folder in which W&B makes its own; default: the current one.

    Raises ExoGymError where wandb is not installed.

    >>> logger = WandbLogger(project="diloco", experiment_name="H=100", mode="offline")
    """

    @checked
    def __init__(
        self, project: str | None = None, experiment_name: str | None = None, mode: str | None = None,
        config: Mapping[str, Any] | None = None, dir: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _need("wandb", "wandb", "WandbLogger")
        self.project, self.experiment_name, self.mode = project, experiment_name, mode
        self.config, self.dir = dict(config or {}), None if dir is None else str(dir)
        self._run: Any = None

    def start(self, run: Mapping[str, Any]) -> None:
        """Begin a W&B run, beside any that is active."""
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
        """Send what is left and end the W&B run."""
        if self._run is not None:
            self._flush()
            self._run.summary.update({name: value for name, value in summary.items() if value is not None})
            self._run.finish()
            self._run = None


class TensorBoardLogger(_ByStep, _OnDisk):
    """Writes TensorBoard event files; a node's values are `node_3/train_loss`.

    Each run has a `folder` of its own, `run_1`, `run_2`, ... in `log_dir`; a resumed one goes on in the last, and hides
    the events there after its step. Raises ExoGymError where tensorboard is not installed.

    >>> logger = TensorBoardLogger("runs/diloco")
    """

    @checked
    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        _need("tensorboard", "tensorboard", "TensorBoardLogger")
        self.log_dir, self.folder = Path(log_dir), Path(log_dir)
        self._writer: Any = None

    def start(self, run: Mapping[str, Any]) -> None:
        """Open an event file and write the description of the run into it, as text."""
        from torch.utils.tensorboard import SummaryWriter

        self.finish({})
        self._given_up = False
        check_writable(self.log_dir, "log_dir")
        step = run.get("resumed_step")
        numbers = [int(path.name[4:]) for path in self.log_dir.glob("run_*") if path.name[4:].isdecimal()]
        self.folder = self.log_dir / f"run_{max(max(numbers, default=0) + (step is None), 1)}"
        self._writer = SummaryWriter(str(self.folder), purge_step=None if step is None else step + 1)
        self._writer.add_text("run", f"```\n{json.dumps(dict(run), indent=2, default=str)}\n```", step or 0)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        with self._writing(self.log_dir):
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
        """Write what is left and close the file."""
        if self._writer is not None:
            self._flush()
        with self._writing(self.log_dir):
            if self._writer is not None:
                self._writer.close()
                self._writer = None
