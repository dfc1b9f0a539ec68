"""Loggers, with the real packages: everything written is read back and compared with the history."""

import csv
import importlib.util
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exogym.core.record.history import History
from exogym.errors import ArgumentError, ExoGymError
from exogym.logger import (
    CSVLogger,
    JSONLinesLogger,
    Logger,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
    check_writable,
    combine,
)

RUN = {"num_nodes": 2, "strategy": {"name": "DiLoCo", "H": 2}}


@pytest.fixture
def history() -> History:
    """Four steps of two nodes, with an evaluation at the start and a late metric at step 4."""
    history = History()
    history.add_evaluation(0, 0, {"val_loss": 9.0})
    for k in range(2):
        history.add_stretch(
            steps=np.array([1, 2]) + 2 * k, epochs=[0, 0], losses=np.array([[0.1, 0.2], [0.3, 0.4]]) + k, lr=[0.1, 0.1],
            nodes=[0, 1], payload_bytes=k, tx_bytes=k, rx_bytes=k, final_bytes=(k + 1, k + 1, k + 1), wall_s=(k, k + 1),
        )  # fmt: skip
    history.add_evaluation(4, 0, {"val_loss": 3.0, "val_accuracy": 0.5})
    return history


def write(logger: Logger, records: Any, run: Mapping[str, Any] = RUN, finish: bool = True) -> Logger:
    logger.start(run)
    for record in records:
        logger.log(record)
    if finish:
        logger.finish({"val_loss": 3.0, "train_loss": None})
    return logger


def resume(logger: Logger, history: History, step: int) -> None:
    """Write as a run does that resumes at `step`."""
    logger.start(RUN | {"resumed_step": step})
    logger.restore(lambda: (record for record in history if record["step"] <= step))
    for record in history.rows_after(step):
        logger.log(record)
    logger.finish({})


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def cells(records: Any) -> list[dict[str, str]]:
    return [{name: "" if value is None else str(value) for name, value in record.items()} for record in records]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Files


def test_csv_holds_the_history(history: History, tmp_path: Path) -> None:
    logger = CSVLogger(path=tmp_path / "new" / "m.csv", experiment_name="ignored")
    write(logger, history)
    assert read_csv(logger.path) == cells(history)
    history.to_csv(tmp_path / "h.csv")
    assert (tmp_path / "h.csv").read_bytes() == logger.path.read_bytes()


def test_json_lines_hold_the_history(history: History, tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path / "m.jsonl")
    write(logger, history)
    assert read_lines(logger.path) == list(history)


def test_json_has_no_bare_nan(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path / "m.jsonl")
    write(logger, [{"step": 1, "a": float("nan"), "b": float("-inf"), "c": np.float32(np.inf), "d": "nan"}])
    (line,) = logger.path.read_text().splitlines()
    back = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert back == {"step": 1, "a": "NaN", "b": "-Infinity", "c": "Infinity", "d": "nan"}


def test_paths_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CSVLogger(tmp_path, experiment_name="a").path == tmp_path / "a.csv"
    assert CSVLogger(f"{tmp_path}/sub/").path == tmp_path / "sub" / "metrics.csv"
    assert JSONLinesLogger(experiment_name="b").path == Path("b.jsonl")
    monkeypatch.chdir(tmp_path)
    write(CSVLogger(), [{"step": 1, "node": None}])  # the default works
    assert (tmp_path / "metrics.csv").read_text() == "step,node\n1,\n"


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_every_record_is_in_the_file_when_log_returns(kind: Any, history: History, tmp_path: Path) -> None:
    logger = kind(tmp_path / "m")
    logger.start(RUN)
    assert list(tmp_path.iterdir()) == []  # nothing before the first record
    read = read_csv if kind is CSVLogger else read_lines
    for n, record in enumerate(history, 1):
        logger.log(record)
        assert len(read(logger.path)) == n
    logger.finish({})


def test_a_late_column_loses_no_row_and_rewrites_once(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "m.csv")
    first: list[dict[str, Any]] = [{"step": k, "node": None, "note": 'a "b",\nc'} for k in range(3)]
    late: list[dict[str, Any]] = [{"step": k, "node": 0, "late": k / 3, "later": 1} for k in range(3, 60)]
    logger.start(RUN)
    inodes = []
    for record in [*first, *late, {"step": 60}]:
        logger.log(record)
        inodes.append(logger.path.stat().st_ino)
        assert list(read_csv(logger.path)[0])[:3] == ["step", "node", "note"]
    logger.finish({})
    names: dict[str, Any] = dict.fromkeys(("step", "node", "note", "late", "later"))
    assert read_csv(logger.path) == cells(names | record for record in [*first, *late, {"step": 60}])
    assert len(set(inodes)) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["m.csv"]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_a_resumed_log_is_that_of_a_run_that_was_never_stopped(kind: Any, history: History, tmp_path: Path) -> None:
    whole, broken = kind(tmp_path / "whole"), kind(tmp_path / "broken")
    write(whole, history)
    killed = write(broken, [r for r in history if r["step"] <= 3], finish=False)
    with open(broken.path, "a") as file:
        file.write('{"step": 4, "no' if kind is JSONLinesLogger else "4,0,")  # torn by the kill
    resume(kind(broken.path), history, 2)
    assert broken.path.read_bytes() == whole.path.read_bytes()
    killed.finish({})


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_what_a_run_that_went_back_takes_again_is_in_the_file_once(kind: Any, history: History, tmp_path: Path) -> None:
    """Hosts that lose one go back some steps, in the middle of the run."""
    whole, again = kind(tmp_path / "whole"), kind(tmp_path / "again")
    write(whole, history)
    again.start(RUN)
    records = list(history)
    for record in records:
        again.log({**record, "train_loss": 0.0})
    again.restore(lambda: (record for record in records if record["step"] <= 2))
    for record in history.rows_after(2):
        again.log(record)
    again.finish({})
    assert again.path.read_text() == whole.path.read_text()


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_resuming_from_step_0_or_without_an_earlier_file(kind: Any, history: History, tmp_path: Path) -> None:
    whole, other = kind(tmp_path / "whole"), kind(tmp_path / "other")
    write(whole, history)
    for step in (2, 0):
        resume(other, history, step)
        assert other.path.read_bytes() == whole.path.read_bytes()
    other.path.write_text("")
    resume(other, history, 0)
    assert other.path.read_bytes() == whole.path.read_bytes()


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_a_new_run_takes_the_files_place(kind: Any, history: History, tmp_path: Path) -> None:
    logger = kind(tmp_path / "m")
    write(logger, history)
    before = logger.path.read_bytes()
    logger.path.write_text("something else\n" * 1000)
    write(logger, history)
    assert logger.path.read_bytes() == before


# What cannot be written


@pytest.mark.parametrize(
    "make",
    [
        lambda path: CSVLogger(path / "m.csv"),
        lambda path: JSONLinesLogger(path / "m.jsonl"),
        lambda path: TensorBoardLogger(path / "events"),
        lambda path: WandbLogger(project="p", mode="offline", dir=path / "w"),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_at_the_start(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before, own = CSVLogger(tmp_path / "fine" / "m.csv"), Own()
    with pytest.raises(ArgumentError, match=r"cannot be written .* choose another folder"):
        combine([before, own, make(tmp_path / "file" / "sub")]).start(RUN)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [tmp_path / "file"]
    assert own.calls == [("start", 2), ("finish", None)]


def test_a_path_that_is_a_folder(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "m.csv")
    (tmp_path / "m.csv").mkdir()
    with pytest.raises(ArgumentError, match="name another file"):
        logger.start(RUN)


def test_check_writable_removes_what_it_made_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ArgumentError, match=r"save='.*' cannot be written .*No space left"):
        check_writable(tmp_path / "a" / "c" / "d", "save")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


# Several, and the user's own


class Own:
    """A logger that derives from nothing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, run: Mapping[str, Any]) -> None:
        self.calls.append(("start", run["num_nodes"]))

    def log(self, record: Mapping[str, Any]) -> None:
        self.calls.append(record["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.calls.append(("finish", summary.get("val_loss")))


class Broken(Logger):
    def log(self, record: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        raise RuntimeError("broken")


def test_several_loggers_of_every_kind(history: History, tmp_path: Path) -> None:
    own, records, lines = Own(), list[Any](), JSONLinesLogger(tmp_path / "m.jsonl")
    logger = combine((own, [records.append, None], lines))
    assert not logger.is_silent
    write(logger, history)
    assert own.calls == [("start", 2), *(r["step"] for r in history), ("finish", 3.0)]
    assert records == read_lines(lines.path) == list(history)


def test_a_class_needs_only_log() -> None:
    steps = []

    class OnlyLog:
        def log(self, record: Mapping[str, Any]) -> None:
            steps.append(record["step"])

    write(combine(OnlyLog()), [{"step": 7}])
    assert steps == [7]
    write(combine(iter), [{"step": 7}])  # a builtin that does not tell its arguments is believed
    with pytest.raises(NotImplementedError, match=r"Logger does not define log\(record\)"):
        write(combine(Logger()), [{"step": 7}])


def test_none_and_one() -> None:
    assert combine(None).is_silent
    assert combine([]).is_silent
    write(combine(None), [{"step": 1}])
    logger = CSVLogger("m.csv")
    assert combine(logger) is logger


def test_each_logger_is_finished_whatever_the_others_do() -> None:
    own, other = Own(), Own()
    with pytest.raises(RuntimeError, match="broken"):
        combine([own, Broken(), other]).finish({"val_loss": 1})
    assert own.calls == other.calls == [("finish", 1)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("metrics.csv", "not a logger"),
        (3, "not a logger"),
        ([print, 3], "logger=3 is not a logger"),
        ({"path": "x"}, "not a logger"),
        (CSVLogger, r"pass an instance, CSVLogger\(...\)"),
        (logging.getLogger("x"), "not a logger"),
        (lambda: None, "function of a record"),
    ],
)
def test_what_is_no_logger(wrong: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        combine(wrong)


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        (CSVLogger, "file", "path"),
        (WandbLogger, "experiment", "experiment_name"),
        (MLflowLogger, "run_name", "experiment_name"),
        (TensorBoardLogger, "logdir", "log_dir"),
    ],
)
def test_a_misspelt_argument(kind: Any, wrong: str, right: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{kind.__name__}\(\) has no argument '{wrong}': .*{right}"):
        kind(**{wrong: "x"})


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        (WandbLogger, "wandb"),
        (TensorBoardLogger, "tensorboard"),
        (MLflowLogger, "mlflow"),
    ],
)
def test_a_missing_package(kind: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExoGymError, match=rf"{package}, .*pip install 'exogym\[{package}\]'"):
        kind("x")


def test_importing_brings_none_of_the_large_packages() -> None:
    code = (
        "import sys, exogym.logger, exogym.core.record.history, exogym.core.record.bar as b\n"
        "b.Bar(3, None).start({})\n"
        "exogym.logger.WandbLogger(project='p'); exogym.logger.TensorBoardLogger('x')\n"
        "exogym.logger.MLflowLogger(project='p')\n"
        "large = {'rich', 'wandb', 'tensorboard', 'pandas', 'mlflow'}\n"
        "print(sorted(large & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read event files back with TensorBoard's own reader: {tag: [(step, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected(history: History) -> dict[str, list[tuple[int, float]]]:
    """Return what a service is to get: a node's values under its name, what all rows of a step share once."""
    shared = ("epoch", "payload_bytes", "tx_bytes", "rx_bytes", "lr", "wall_s")
    wanted: dict[str, list[tuple[int, float]]] = {}
    for r in history:
        for name, value in r.items():
            if name not in ("step", "node") and value is not None and (r["node"] is None or name not in shared):
                tag = name if r["node"] is None else f"node_{r['node']}/{name}"
                wanted.setdefault(tag, []).append((r["step"], value))
    return wanted


def close(found: Any, wanted: Any) -> None:
    """Compare as float32, in which TensorBoard stores."""
    assert found.keys() == wanted.keys()
    for tag, points in wanted.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        assert np.allclose([v for _, v in found[tag]], [v for _, v in points], rtol=1e-6), tag


def test_tensorboard_holds_the_history(history: History, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(TensorBoardLogger(tmp_path), history)
    wanted = expected(history)
    assert [tag for tag in wanted if "/" in tag] == ["node_0/train_loss", "node_1/train_loss"]
    close(scalars(tmp_path / "run_1"), wanted)
    events = EventAccumulator(str(tmp_path / "run_1")).Reload()
    (text,) = events.Tensors("run/text_summary")
    assert '"H": 2' in text.tensor_proto.string_val[0].decode()


def test_tensorboard_hides_what_a_resumed_run_does_again(history: History, tmp_path: Path) -> None:
    wrong = [{**r, "train_loss": 77.0} if r["step"] == 3 else r for r in history if r["step"] <= 3]
    write(TensorBoardLogger(tmp_path), wrong)
    assert scalars(tmp_path / "run_1")["train_loss"][-1] == (3, 77.0)
    write(TensorBoardLogger(tmp_path), history.rows_after(2), RUN | {"resumed_step": 2})
    close(scalars(tmp_path / "run_1"), expected(history))


def test_tensorboard_runs_in_one_folder_do_not_overlap(history: History, tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    write(logger, [{"step": 900, "node": None, "train_loss": 77.0}])
    write(logger, history)
    assert logger.folder == tmp_path / "run_2"
    assert scalars(tmp_path / "run_1")["train_loss"] == [(900, 77.0)]
    close(scalars(tmp_path / "run_2"), expected(history))
    write(TensorBoardLogger(tmp_path), history.rows_after(3), RUN | {"resumed_step": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run_1", "run_2"]


# Weights & Biases


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """W&B with no network, all its files in a folder of their own."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "settings"))
    yield tmp_path / "runs"
    import wandb

    wandb.teardown()


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run: W&B's protobufs in LevelDB's log format (blocks of 32 KiB)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):  # being written
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def when_written(path: Path) -> list[Any]:
    """Return the records of an offline run that has ended; W&B's own process may still be writing them."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        records = list(wandb_records(path)) if path.stat().st_size else []
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.05)
    raise AssertionError(f"{path} has no end: {path.stat().st_size} bytes")


def steps_logged(path: Path) -> list[dict[str, Any]]:
    """Return what each `log` call brought, without W&B's own keys."""
    found = []
    for record in when_written(path):
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append({name: value for name, value in items.items() if not name.startswith("_")})
    return found


def test_wandb_gets_one_call_a_step_over_the_axis_step(history: History, offline: Path) -> None:
    write(
        WandbLogger(project="gym", experiment_name="first", config={"extra": 1}, dir=offline),
        history,
        RUN | {"seed": 5},
    )
    (path,) = offline.rglob("*.wandb")
    logged = steps_logged(path)
    assert [values["step"] for values in logged] == [0, 1, 2, 3, 4]
    found: dict[str, list[tuple[int, float]]] = {}
    for values in logged:
        for name, value in values.items():
            if name != "step":
                found.setdefault(name, []).append((values["step"], value))
    assert found == expected(history)

    records = list(wandb_records(path))
    (run,) = (r.run for r in records if r.HasField("run"))
    assert (run.project, run.display_name) == ("gym", "first")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {k: config[k] for k in ("num_nodes", "strategy", "seed", "extra")} == RUN | {"seed": 5, "extra": 1}
    axes = {r.metric.glob_name or r.metric.name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "step"
    summary = {i.key: i.value_json for r in records if r.HasField("summary") for i in r.summary.update}
    assert summary["val_loss"] == "3.0"
    assert "train_loss" not in summary


def test_wandb_leaves_a_run_of_the_users_alone(history: History, offline: Path) -> None:
    import wandb

    offline.mkdir()
    users: Any = wandb.init(project="users", dir=str(offline))
    write(WandbLogger(project="ours", dir=offline, mode="offline"), history)
    assert id(wandb.run) == id(users)
    users.log({"mine": 1})
    users.finish()
    found = sorted(len(steps_logged(path)) for path in offline.rglob("*.wandb"))
    assert found == [1, 5]


# MLflow

MLFLOW = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """MLflow's tables take a second to make, so tests share them and differ in their projects."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def in_mlflow(logger: MLflowLogger) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """Return a run and its values as {name: [(step, value)]}, read with a client of the test's own."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(logger.tracking_uri)
    run = client.get_run(logger.run_id)
    histories = {name: client.get_metric_history(logger.run_id, name) for name in run.data.metrics}
    return run, {name: sorted((x.step, x.value) for x in found) for name, found in histories.items()}


def runs_in(project: str, database: str) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(database)
    experiment = client.get_experiment_by_name(project)
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


@MLFLOW
def test_mlflow_holds_the_history_and_the_options(history: History, database: str) -> None:
    logger = MLflowLogger("holds", "first", database, config={"extra": 1, "long": "x" * 7000, "none": {}})
    write(logger, history, RUN | {"seed": 5})
    run, values = in_mlflow(logger)
    assert values == expected(history)
    wanted = {"num_nodes": "2", "strategy.name": "DiLoCo", "strategy.H": "2", "seed": "5", "extra": "1", "none": "{}"}
    assert run.data.params == wanted | {"long": "x" * 5997 + "..."}
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED") and run.info.end_time
    write(logger, history)  # the same logger in a second run
    assert len(runs_in("holds", database)) == 2


@MLFLOW
def test_a_resumed_run_is_a_new_one_in_mlflow_with_all_records(history: History, database: str) -> None:
    first = write(MLflowLogger("resumed", "a", database), history.rows_after(-1), finish=False)
    again = MLflowLogger("resumed", "a", database)
    resume(again, history, 2)
    run, values = in_mlflow(again)
    assert values == expected(history) and run.info.status == "FINISHED"
    assert again.run_id != first.run_id and len(runs_in("resumed", database)) == 2  # type: ignore[attr-defined]
    first.finish({})


@MLFLOW
def test_mlflow_gets_records_once_if_a_run_goes_back(history: History, database: str) -> None:
    logger = write(MLflowLogger("back", "a", database), (r for r in history if r["step"] <= 2), finish=False)
    logger.restore(lambda: (r for r in history if r["step"] <= 2))
    for record in history.rows_after(2):
        logger.log(record)
    logger.finish({})
    assert in_mlflow(logger)[1] == expected(history)  # type: ignore[arg-type]


@MLFLOW
def test_mlflow_takes_values_that_are_no_numbers(database: str) -> None:
    logger = MLflowLogger("odd", tracking_uri=database)
    nan, inf = float("nan"), float("inf")
    write(logger, [{"step": 1, "node": None, "val f(1)": nan, "b": -inf, "c": np.float32(2.5), "d": "text", "e": True}])
    run, values = in_mlflow(logger)
    ((step, value),) = values.pop("val f_1_")
    assert step == 1 and np.isnan(value)
    ((_, value),) = values.pop("b")
    assert value < -1e300  # MLflow's databases hold no infinity
    assert values == {"c": [(1, 2.5)], "e": [(1, 1.0)]} and run.data.tags["d"] == "text"


@MLFLOW
def test_mlflow_that_fails_is_told_once_and_training_goes_on(
    history: History, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import sqlite3

    logger = MLflowLogger("fails", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    logger.start(RUN)
    with sqlite3.connect(tmp_path / "mlflow.db") as opened:
        opened.execute("drop table metrics")
    opened.close()
    for record in history:
        logger.log(record)
    logger.finish({})
    told = [line for line in capfd.readouterr().err.splitlines() if "no longer receives records" in line]
    assert len(told) == 1 and "metrics" in told[0] and "training continues" in told[0]


@MLFLOW
@pytest.mark.parametrize(
    "where", ["http://127.0.0.1:{port}", "sqlite:///{folder}/file/mlflow.db", "{folder}/files", "x:"]
)
def test_mlflow_that_cannot_be_used_is_told_at_the_start(where: str, tmp_path: Path) -> None:
    import socket

    (tmp_path / "file").write_text("x")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens there
        uri = where.format(port=free.getsockname()[1], folder=tmp_path)
        own = Own()
        with pytest.raises(ArgumentError, match=r"project='p' with tracking_uri='.*' cannot be used .*pass another"):
            combine([own, MLflowLogger("p", tracking_uri=uri)]).start(RUN)
    assert own.calls == [("start", 2), ("finish", None)]


@MLFLOW
@pytest.mark.parametrize("processes", [1, 2])
def test_mlflow_follows_a_run_that_fails_is_stopped_and_ends(processes: int, database: str, tmp_path: Path) -> None:
    """The status of each MLflow run, newest first, and in the last one each value as in the history."""
    import torch

    from exogym import LocalTrainer
    from exogym.strategy import DiLoCoStrategy

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    logger = MLflowLogger("fit", f"{processes}", database)

    def raises(error: BaseException, at: int) -> Any:
        def callback(loop: Any) -> None:
            if loop.step == at:
                raise error

        return callback

    def train(*callbacks: Any) -> LocalTrainer:
        trainer = LocalTrainer(torch.nn.Linear(3, 1), data, data, loss_fn=torch.nn.functional.mse_loss)
        torch.nn.init.zeros_(trainer.model.weight)
        torch.nn.init.zeros_(trainer.model.bias)
        trainer.fit(
            DiLoCoStrategy(H=2, lr=0.1), num_nodes=2, max_steps=9, batch_size=4, processes=processes, device="cpu",
            logger=logger, callbacks=list(callbacks), save_dir=tmp_path / "kept", checkpoint_interval=2,
            resume=True,
        )  # fmt: skip
        return trainer

    def status() -> list[str]:
        return [run.info.status for run in runs_in("fit", database) if run.info.run_name == f"{processes}"]

    with pytest.raises(RuntimeError, match="no luck"):
        train(raises(RuntimeError("no luck"), 5))
    assert status() == ["FAILED"]
    with pytest.raises(KeyboardInterrupt):
        train(raises(KeyboardInterrupt(), 9))
    assert status() == ["KILLED", "FAILED"]
    history = train().history
    assert status() == ["FINISHED", "KILLED", "FAILED"]
    logger.run_id = runs_in("fit", database)[0].info.run_id
    values = in_mlflow(logger)[1]
    wanted = expected(history)
    assert values.keys() == wanted.keys()
    for name in wanted.keys() - {"wall_s"}:
        assert values[name] == wanted[name], name
