"""Work with run folders: find runs, see their state, load and export their records, and draw several runs together.

    runs.list("runs")          each run, comparison and sweep in a folder; a comparison's runs are PARENT/CHILD
    runs.load("runs/digits")   one run: description, records, events, summary; a comparison or sweep: its table
    runs.draw([...], "out")    the curves of any runs in one picture
    runs.summary("runs/cmp")   a comparison or sweep in short: a row for each strategy or cell, and a verdict

All data come from the files that `exogym.core.record.run_folder` describes, which may be read at any time: while a run
writes them, after a kill in the middle of a line, and while a folder is being removed. If a folder has contents that no
run writes, `list` shows it as "unreadable" with the reason.

>>> import tempfile
>>> from pathlib import Path
>>> import torch
>>> from exogym import LocalTrainer
>>> from exogym.strategy import DiLoCoStrategy
>>> from exogym.testing import small_problem
>>> model, data = small_problem()
>>> trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
>>> folder = tempfile.TemporaryDirectory()
>>> place = Path(folder.name, "first")
>>> _ = trainer.fit(DiLoCoStrategy(H=2, lr=0.01), num_nodes=2, max_steps=4, batch_size=8, run_dir=place)
>>> found: Listed = listed(place, "first")
>>> found.state, found.step, age_s(found) < 3600, [each.name for each in list(folder.name)]
('done', 4, True, ['first'])
>>> quick: StoredRun = stand(place)  # without its records
>>> run: Run = load_run(place)
>>> len([*read_lines(place / "records.jsonl")]) == len(run.records)
True
>>> track = track_of(place)  # its evaluations
>>> heads, rows = to_table([("first", run)])
>>> paths = draw([run], Path(folder.name, "drawn"), titles=["DiLoCo"])
>>> load(place) == run
True
>>> folder.cleanup()
"""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exogym.core.base.processes import is_alive
from exogym.core.record.run_folder import standing
from exogym.errors import ArgumentError, nearest, needs
from exogym.files import end_of
from exogym.logger import NOT_IN_JSON, in_json
from exogym.record import read_file, read_object, row_of, rows_in
from exogym.strategy.names import short_names
from exogym.study.compare.comparison import OF_PICTURE, plain_name, write_csv
from exogym.study.compare.folder import OUTCOME, Folder
from exogym.study.compare.plots import Curve
from exogym.study.compare.plots import draw as draw_curves
from exogym.study.compare.summary import SINGLE, Summary, Track, name_of, summary_of, target_of, target_of_best
from exogym.study.notes import read_notes

if TYPE_CHECKING:
    import pandas

TAIL_BYTES = 1 << 16  # bytes at the end of a running run's records in which to look for the newest
FROM_JSON = {text: float(name) for name, text in NOT_IN_JSON.items()}
PARENTS = {"comparison": "run.json", "sweep": "sweep.json"}  # kind to the file that marks it
UNREADABLE = "unreadable"  # state of a folder with contents that no run writes
LONGEST_NAME = 1000  # characters of a strategy's name
ENDED = {"finished": "done", "interrupted": "stopped"}  # states of a comparison or sweep to states of a run
Row = dict[str, Any]


@dataclass(frozen=True)
class Listed:
    """One line of a list of runs: facts about a run, comparison or sweep. Unknown values are `None`.

    Attributes:
        name: the run's folder, relative to the listed folder, such as "digits" or "comparison/ddp-seed-0".
        kind: "run", "comparison" or "sweep".
        state: running, done, stopped, failed, lost (the files say running, but the process has ended) or unreadable.
        strategy: the strategy's text, or its short name, or its class name.
        task: the task of the comparison or sweep.
        step, total_steps: the run's steps.
        loss, accuracy: the averaged model's values at its newest evaluation.
        tx_bytes: bytes that a node has sent so far, mean over nodes.
        wall_s, time_s: seconds that the training has taken, and predicted seconds on a network.
        started_s, heard_s: times of the run's start and of its last heartbeat, in seconds since 1970.
        tags, note, title: the user's tags, note and title.
        reason: why the folder is unreadable.
    """

    name: str
    path: Path
    kind: str
    state: str
    strategy: str | None = None
    task: str | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    tx_bytes: float | None = None
    wall_s: float | None = None
    time_s: float | None = None
    started_s: float | None = None
    heard_s: float | None = None
    tags: Sequence[str] = ()
    note: str = ""
    title: str = ""
    reason: str | None = None

    def to_json(self) -> Row:
        """Return this line as a dict of JSON values."""
        return asdict(self) | {"path": os.fspath(self.path), "tags": builtins.list(self.tags)}


@dataclass(frozen=True)
class StoredRun:
    """What a run's folder says about the run, without records and events."""

    path: Path
    about: Row
    status: Row
    summary: Row

    @property
    def description(self) -> Row:
        return dict(self.about.get("description") or {})

    @property
    def state(self) -> str:
        return _state(self.about, self.status)


@dataclass(frozen=True)
class Run(StoredRun):
    """A run, read from its folder. Columns have the same names as in `trainer.history`.

    Attributes:
        description: the options that decide the run.
        about: all of run.json.
        status: the state and step; {} if unknown.
        records: rows of the averaged model (`node` is `None`) and of the nodes, in the order of steps.
        events: the run's events, in order.
        summary: the averaged model's last record, and bytes by collective; {} until the run ends.
    """

    records: builtins.list[Row]
    events: builtins.list[Row]

    def __repr__(self) -> str:
        return f"<Run {os.fspath(self.path)!r}: {self.state}, {len(self.records)} records, {len(self.events)} events>"

    @property
    def columns(self) -> builtins.list[str]:
        """The names of all columns in the records, in the order of their first appearance."""
        return builtins.list(dict.fromkeys(name for row in self.records for name in row))

    def column(self, name: str, node: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return a column's steps (K,) and numbers (K,), for the averaged model or for a node.

        Raises:
            ArgumentError: no record has the column. The message suggests the most similar name.
        """
        if name not in self.columns:
            raise ArgumentError(f"{self.path} has no column {name!r}: {nearest(name, self.columns)}")
        rows = [row for row in self.records if row.get("node") == node and isinstance(row.get(name), int | float)]
        return np.array([row["step"] for row in rows], int), np.array([row[name] for row in rows], float)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the records as a pandas DataFrame. `node` is empty in the averaged model's rows."""
        frame: pandas.DataFrame = needs("pandas").DataFrame(self.records, columns=self.columns)
        return frame

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the records to a CSV file. Missing values are empty."""
        write_csv(path, self.columns, self.records)


def list(folder: str | os.PathLike[str] = "runs") -> builtins.list[Listed]:
    """Return all runs, comparisons and sweeps below `folder`, newest first, each parent before its runs.

    Raises:
        ArgumentError: the folder does not exist or cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     list(folder)
    []
    """
    top = Path(folder)
    try:
        folders = _folders(top)
    except OSError as error:
        raise ArgumentError(f"runs={os.fspath(folder)!r} cannot be listed ({error.strerror}): pass a folder") from error
    found = [family for path in folders if (family := _family(path, in_json(path.name)))]
    found.sort(key=lambda family: -(family[0].started_s or 0.0))
    return [listed for family in found for listed in family]


def load(path: str | os.PathLike[str]) -> Run | Summary:
    """Load a run, or the table and verdict of a comparison or sweep. Both have `to_pandas()`.

    Raises:
        ArgumentError: the folder holds no run, or a comparison or sweep without a completed run.

    >>> load("runs/none")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: 'runs/none' contains no run: pass a run's folder, as listed by exogym runs list
    """
    if what_is(path)[0] != "run":
        if (found := summary(path)) is None:
            raise ArgumentError(f"{os.fspath(path)!r} has no completed run yet: load it after its first run has ended")
        return found
    return load_run(path)


def load_run(path: str | os.PathLike[str]) -> Run:
    """Load the run in a folder.

    Raises:
        ArgumentError: the folder holds no run. For a comparison or sweep the message names its runs.
    """
    found = stand(path)
    lines = {"records": builtins.list(read_lines(found.path / "records.jsonl"))}
    lines["events"] = builtins.list(read_lines(found.path / "events.jsonl"))
    return Run(found.path, found.about, found.status, found.summary, **lines)


def stand(path: str | os.PathLike[str]) -> StoredRun:
    """Read a run's folder without its records and events, so the time does not depend on their number.

    Raises:
        ArgumentError: as in `load_run`.
    """
    path = Path(path)
    try:
        about, status = read_file(path / "run.json"), standing(path)
        kind = _parent(path, about)
        summary = {} if kind else _numbers(read_file(path / "summary.json"))
    except ArgumentError as error:
        raise ArgumentError(f"{str(path)!r} cannot be read: {error}") from None
    if not about and not status:
        raise ArgumentError(f"{str(path)!r} contains no run: pass a run's folder, as listed by exogym runs list")
    if kind:
        inside = [child.name for child in _children(path)]
        raise ArgumentError(
            f"{str(path)!r} is a {kind}: pass one of its runs, {', '.join(inside[:20]) or 'as soon as it has runs'}"
        )
    return StoredRun(path, about, status, summary)


def read_lines(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Yield the records or events in a file of JSON lines, without incomplete lines. A missing file yields nothing.

    Raises:
        ArgumentError: a line has contents that no run writes. The message names the line.
    """
    for row in rows_in(path):
        yield _numbers(row)


def track_of(path: str | os.PathLike[str]) -> Track | None:
    """Return the evaluations of the run in a folder; None if it has no evaluation yet.

    Raises:
        ArgumentError: a line of the run's records has contents that no run writes.
    """
    before = dict[int, float]()

    def noted() -> Iterator[Row]:
        for row in read_lines(Path(path) / "records.jsonl"):
            if row.get("node") is None:
                yield row
            elif row["node"] == 0 and isinstance(row.get("wall_s"), float):
                before[row["step"]] = row["wall_s"]

    return Track.of_rows(builtins.list(noted()), before)


def summary(folder: str | os.PathLike[str], target_loss: float | None = None) -> Summary | None:
    """Summarize a comparison's or sweep's completed runs. Return None if there are no completed runs.

    Args:
        target_loss: the validation loss to reach. Default: the target loss of the comparison or sweep.

    Raises:
        ArgumentError: the folder holds no comparison or sweep, or has contents that no run writes.

    >>> import tempfile
    >>> from exogym.compare import compare
    >>> from exogym.tasks import load_task
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = compare(load_task("digits"), "ddp,diloco:H=2", max_steps=4, seeds=1, out=place, progress=False)
    ...     found = summary(*Path(place).iterdir())
    >>> [row["strategy"] for row in found.rows]
    ['ddp', 'diloco:H=2']
    """
    path = Path(folder)
    try:
        kind = _parent(path, read_file(path / "run.json"))
        about = read_file(path / PARENTS[kind]) if kind else {}
    except ArgumentError as error:
        raise ArgumentError(f"{str(path)!r} cannot be read: {error}") from None
    labels = about.get("cells" if kind == "sweep" else "strategies")
    if not isinstance(labels, dict):
        raise ArgumentError(f"{str(path)!r} contains no comparison or sweep: pass a comparison's or sweep's folder")
    saved = about.get("summary")
    is_whole = about.keys() >= {"target_loss", "target", "undecided"}
    if target_loss is None and is_whole and isinstance(saved, builtins.list) and about.get("state") == "finished":
        rows, finding = [_numbers(row) for row in saved], str(about.get("finding"))
        return Summary(rows, finding, about["target_loss"], str(about["target"]), about["undecided"])
    given = (about.get("setting") or {}).get("seeds") or (about.get("arguments") or {}).get("seeds") or 0
    seeds = builtins.list(range(given)) if isinstance(given, int) else given
    inside, tracks, said = Folder(path, labels), dict[tuple[str, int], Track](), dict[str, tuple[str, str]]()
    for label in labels:
        states = [read_object(inside.child(label, seed) / OUTCOME).get("state") for seed in seeds]
        for seed, state in zip(seeds, states, strict=True):
            track = track_of(inside.child(label, seed)) if state == "finished" else None
            if track is not None:
                tracks[label, seed] = track
        ended, failed = sum(state is not None for state in states), states.count("failed")
        notes = [f"{ended} of {len(seeds)} runs have ended"] * (ended < len(seeds))
        notes += [f"{failed} of {len(seeds)} runs failed"] * (failed > 0)
        said[label] = str((about.get("titles") or {}).get(label, label)), "; ".join(notes)
    if not tracks:
        return None
    if target_loss is None:
        target_loss = about.get("wanted_loss") or (about.get("timing") or {}).get("wanted_loss")
    is_sweep = kind == "sweep" and target_loss is None
    return summary_of(said, seeds, tracks, target_of_best(tracks) if is_sweep else target_of(tracks, target_loss))


def draw(
    runs: Sequence[Run], folder: str | os.PathLike[str], titles: Sequence[str] | None = None, heading: str = ""
) -> builtins.list[Path]:
    """Draw the runs' validation losses together into PNG files in `folder`. Return their paths.

    The files are loss_vs_steps.png, loss_vs_bytes.png and, if all runs have predicted seconds, loss_vs_time.png.

    Raises:
        ArgumentError: `runs` is empty, or a run has no evaluation.
    """
    needs("matplotlib", "demo")
    if not runs:
        raise ArgumentError("runs is empty: pass at least one run to draw")
    curves = [_curve(run, title) for run, title in zip(runs, titles or [run.path.name for run in runs], strict=True)]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    is_timed = all(curve.time_s is not None for curve in curves)
    axes = {name: x for name, x in OF_PICTURE.items() if is_timed or x != "time"}
    for name, x in axes.items():
        draw_curves([folder / name], curves, x, None, heading)
    return [folder / name for name in axes]


def _curve(run: Run, title: str) -> Curve:
    track = Track.of_rows(run.records)
    if track is None:
        raise ArgumentError(
            f"{run.path} has no validation loss to draw: train it with a val_dataset, or with a smaller val_interval"
        )
    label, of = short_name(run.description.get("strategy")) or title, track.columns
    time_s = of["time_s"] if track.has("time_s") else None
    return Curve(title, of["step"], of["val_loss"][None], of["tx_bytes"], time_s, label=label)


def listed(path: str | os.PathLike[str], name: str, parent: Row | None = None) -> Listed | None:
    """Return a folder's line in the list of runs; None if the folder holds no run.

    `parent` is the description of the comparison or sweep to which the run belongs."""
    path = Path(path)
    try:
        return _listed(path, name, parent)
    except (ArgumentError, OSError) as error:
        return _unreadable(path, name, error)


def _listed(path: Path, name: str, parent: Row | None) -> Listed | None:
    _check_name(path)
    status, about = standing(path), read_file(path / "run.json")
    if not status and not isinstance(about.get("description"), dict):
        return None
    last = _numbers(read_file(path / "summary.json")) or _newest(path / "records.jsonl")
    description, task = about.get("description") or {}, (parent or {}).get("task")
    strategy = (_written if parent is None else short_name)(description.get("strategy"))
    if description.get("num_nodes") == 1 and _is_alone(path, parent or {}):
        strategy = SINGLE
    return Listed(
        name, path, "run", _state(about, status), strategy, task,
        status.get("step"), status.get("total_steps"), last.get("val_loss"), last.get("val_accuracy"),
        last.get("tx_bytes"), last.get("wall_s"), last.get("time_s"), status.get("started_s") or about.get("started_s"),
        status.get("heartbeat_s"), **_notes(path),
    )  # fmt: skip


def _is_alone(path: Path, parent: Row) -> bool:
    """Return whether a comparison's or sweep's run is `single`. Its own description names DDP's strategy."""
    cells, of_all = parent.get("cells") or {}, (parent.get("arguments") or {}).get("strategy")
    texts = {label: str(cell.get("strategy", of_all)) for label, cell in cells.items()}
    texts |= {label: label for label in parent.get("strategies") or {}}
    label = path.name.rpartition("-seed-")[0]
    return any(name_of(text) == SINGLE and plain_name(each) == label for each, text in texts.items())


def _unreadable(path: Path, name: str, error: Exception) -> Listed | None:
    """Return the line about a folder with contents that no run writes; None if the folder was just removed."""
    if isinstance(error, OSError) and not path.exists():
        return None
    why = f"it cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
    return Listed(name, path, "run", UNREADABLE, reason=in_json(why))


def _check_name(path: Path) -> None:
    """Raise ArgumentError if a browser or terminal cannot show the folder's name."""
    if in_json(path.name) != path.name:
        raise ArgumentError(f"the folder's name is not UTF-8 ({os.fsencode(path.name)!r}): rename it")


def _family(path: Path, name: str) -> builtins.list[Listed]:
    """Return a folder's lines: one run, or a comparison or sweep with its runs, or []."""
    try:
        _check_name(path)
        about = read_file(path / "run.json")
        kind = _parent(path, about)
        if kind is None:
            run = listed(path, name)
            return [] if run is None else [run]
        about = read_file(path / PARENTS[kind])
    except (ArgumentError, OSError) as error:
        above = _unreadable(path, name, error)
        return [] if above is None else [above, *_inside(path, name, {})]
    children = _inside(path, name, about)
    state = str(about.get("state"))
    if state == "running":
        state = _of_process(about)
    begun = [run.started_s for run in children if run.started_s is not None]
    heard = [run.heard_s for run in children if run.heard_s is not None]
    spent = [run.wall_s for run in children if run.wall_s is not None]
    strategies = about.get("strategies")
    return [
        Listed(
            name, path, kind, ENDED.get(state, state), ",".join(strategies) if isinstance(strategies, dict) else None,
            about.get("task"), sum(run.state == "done" for run in children), about.get("runs_wanted") or len(children),
            min((run.loss for run in children if run.loss is not None), default=None),
            wall_s=sum(spent) if spent else None, started_s=min(begun, default=None), heard_s=max(heard, default=None),
            **_notes(path),
        ),
        *children,
    ]  # fmt: skip


def _inside(path: Path, name: str, about: Row) -> builtins.list[Listed]:
    """Return the lines about a comparison's or sweep's runs."""
    found = [listed(child, f"{name}/{in_json(child.name)}", about) for child in _children(path)]
    return [run for run in found if run is not None]


def _notes(path: Path) -> dict[str, Any]:
    notes = read_notes(path)
    return {"tags": notes.tags, "note": notes.note, "title": notes.title}


def short_name(strategy: Any) -> str | None:
    """Return the name by which `--strategies` knows a described strategy, or else its class name.

    >>> short_name({"name": "DiLoCoStrategy"}), short_name({"name": "Mine"}), short_name("x")
    ('diloco', 'Mine', None)
    """
    if not isinstance(strategy, dict) or "name" not in strategy:
        return None
    name = str(strategy["name"])[:LONGEST_NAME]
    return short_names().get(name, name)


def _written(strategy: Any) -> str | None:
    """Return a described strategy as `--strategies` writes it, with the options that fit on a line."""
    name = short_name(strategy)
    if name is None:
        return None
    options = [f"{key}={x}" for key, x in strategy.items() if key != "name" and isinstance(x, int | float | str)]
    return ":".join([name, *options])[:LONGEST_NAME]


def _parent(path: Path, about: Row) -> str | None:
    """Return "comparison" or "sweep" if a folder is one. A run's description is an object, a comparison's is text."""
    if (path / PARENTS["sweep"]).is_file():
        return "sweep"
    return "comparison" if isinstance(about.get("strategies"), dict) else None


def what_is(path: str | os.PathLike[str]) -> tuple[str, Row]:
    """Return "run", "comparison" or "sweep", and the contents of its file; {} if the file is missing or unreadable.

    >>> what_is("no/such/folder")
    ('run', {})
    """
    if sweep := read_object(Path(path) / PARENTS["sweep"]):
        return "sweep", sweep
    about = read_object(Path(path) / "run.json")
    return ("comparison" if isinstance(about.get("strategies"), dict) else "run"), about


def _children(path: Path) -> builtins.list[Path]:
    try:
        return _folders(path)
    except OSError:
        return []


def _folders(path: Path) -> builtins.list[Path]:
    """Return the folders in a folder, except hidden folders and links."""
    with os.scandir(path) as entries:
        return sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] != ".")


def _state(about: Row, status: Row) -> str:
    """Return a run's state. Without a status file it has just begun, or was killed at its start."""
    if status:
        return str(status.get("state"))
    return _of_process(about)


def _of_process(about: Row) -> str:
    """Return "running" or "lost", from the process that a file names."""
    process = about.get("process")
    if process is None or process.get("pid") is None:
        return "lost"
    return "lost" if is_alive(process) is False else "running"


def _newest(path: Path) -> Row:
    """Return the averaged model's newest record, with its newest evaluation's values, from the file's end."""
    end = end_of(path, TAIL_BYTES)
    lines = end.split(b"\n")[1 if len(end) == TAIL_BYTES else 0 : -1]  # complete lines
    found: Row = {}
    for line in reversed(lines):
        row = row_of(line)
        if row is not None and row.get("node") is None:
            found |= {name: value for name, value in row.items() if found.get(name) is None}
            if found.get("val_loss") is not None:
                break
    return _numbers(found)


def _numbers(row: Row) -> Row:
    """Return a record with its NaN and infinite numbers restored."""
    return {name: FROM_JSON.get(x, x) if isinstance(x, str) else x for name, x in row.items()}


def age_s(run: Listed) -> float | None:
    """Return the seconds since a run's last heartbeat, or since its start if there is no heartbeat yet."""
    at_s = run.heard_s or run.started_s
    return None if at_s is None else max(time.time() - at_s, 0.0)


def to_table(runs: Iterable[tuple[str, Run]]) -> tuple[builtins.list[str], builtins.list[builtins.list[Any]]]:
    """Return the headers and rows of a table with each run's last loss, accuracy, steps, bytes and seconds."""
    headers = ["run", "strategy", "state", "steps", "validation loss", "accuracy", "sent/node", "predicted", "trained"]
    rows = []
    for name, run in runs:
        last = run.summary or _newest(run.path / "records.jsonl")
        label = short_name(run.description.get("strategy"))
        values = [last.get(key) for key in ("val_loss", "val_accuracy", "tx_bytes", "time_s", "wall_s")]
        rows.append([name, label, run.state, run.status.get("step"), *values])
    return headers, rows
