"""A logger for MLflow, and the thread that sends to MLflow's server."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from exogym.core.progress import notice
from exogym.errors import ArgumentError, checked
from exogym.logger.base import Record
from exogym.logger.services import ByStep, as_param, flat, in_one_line, need

PAUSE_S = 1.0  # between two requests
PATIENCE_S = 30.0  # wait for the server at the end of a run
METRICS, PARAMS = 1000, 100  # MLflow's limits of a request
STATUS = {"done": "FINISHED", "stopped": "KILLED", "error": "FAILED"}
OFFLINE = {"MLFLOW_DISABLE_TELEMETRY": "true"}
SOON = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class Outbox:
    """Send items in a thread, at most once per `PAUSE_S`. If sending fails, print one message and drop all items.

    Args:
        send: a function that sends a list of items.
        place: the destination, for the message.
    """

    def __init__(self, send: Callable[[list[Any]], None], place: str):
        self._send, self._place = send, place
        self._items: list[Any] = []
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=f"exogym: {place}", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        with self._lock:
            if self._is_open:
                self._items.append(item)

    def close(self) -> bool:
        """Send all items and end the thread, within `PATIENCE_S`. Return whether every item was sent."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        self._wake.set()
        self._thread.join(PATIENCE_S if was_open else 0.0)
        if was_open and self._thread.is_alive():
            self._give_up(f"it does not answer for {PATIENCE_S:g} s")
        return was_open and not self._items and not self._thread.is_alive()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(PAUSE_S)
            with self._lock:
                items, is_last = list(self._items), not self._is_open
            if items:
                try:
                    self._send(items)
                except Exception as error:  # MLflow's own, or those of what it uses
                    return self._give_up(in_one_line(error))
            with self._lock:
                del self._items[: len(items)]

    def _give_up(self, why: str) -> None:
        with self._lock:
            self._is_open = False
        notice(f"{self._place} no longer receives records: {why}; training continues")


class MLflowLogger(ByStep):
    """Log to MLflow: a run with parameters, metrics by step, and the run's end as its status.

    Values of single nodes have names such as `node_3/train_loss`; values of the whole step (bytes, lr, seconds) are
    logged once. A resumed run becomes a new MLflow run with the same name and the earlier records. A thread sends at
    most one request per second. If the server fails during training, the logger prints one message and training
    continues. The logger disables MLflow's usage reports unless your script has already imported mlflow.

    Args:
        project: MLflow's experiment, which is created if it does not exist.
        experiment_name: the run's name. Default: a name that MLflow generates.
        tracking_uri: a database or a server, such as "sqlite:///runs/mlflow.db" or "http://host:5000". Default:
            MLflow's settings.
        config: values to add to the run's parameters. Each parameter's text is truncated to 6000 characters.

    Raises:
        ExoGymError: mlflow is not installed.

    >>> logger = MLflowLogger(project="diloco", experiment_name="H=100", tracking_uri="sqlite:///runs/mlflow.db")
    """

    @checked
    def __init__(
        self, project: str, experiment_name: str | None = None, tracking_uri: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        need("mlflow", "mlflow", "MLflowLogger")
        self.project, self.experiment_name, self.tracking_uri = project, experiment_name, tracking_uri
        self.config = dict(config or {})
        self.run_id: str | None = None
        self._client: Any = None
        self._outbox: Outbox | None = None

    def start(self, run: Mapping[str, Any]) -> None:
        """Start an MLflow run.

        Raises:
            ArgumentError: MLflow refuses the project or the tracking_uri, or the server does not answer.
        """
        self.finish({})
        self.ended = "done"
        params = {name: as_param(value) for name, value in flat({**run, **self.config})}
        with environment(OFFLINE if "mlflow" not in sys.modules else {}):
            from mlflow.tracking import MlflowClient
        try:
            with environment(SOON):
                self._client = MlflowClient(self.tracking_uri)
                self.run_id = self._new_run(params)
        except Exception as error:
            raise ArgumentError(
                f"project={self.project!r} with tracking_uri={self.tracking_uri!r} cannot be used "
                f"({in_one_line(error)}): start the server, or pass another tracking_uri"
            ) from error
        self._outbox = Outbox(self._send, f"MLflow ({self._client.tracking_uri})")

    def _new_run(self, params: dict[str, str]) -> str:
        """Return the id of a new MLflow run with these parameters."""
        from mlflow.entities import Param

        client, all_params = self._client, [Param(*item) for item in params.items()]
        experiment = client.get_experiment_by_name(self.project)
        number = client.create_experiment(self.project) if experiment is None else experiment.experiment_id
        run_id: str = client.create_run(number, run_name=self.experiment_name).info.run_id
        for first in range(0, len(all_params), PARAMS):
            client.log_batch(run_id, params=all_params[first : first + PARAMS])
        return run_id

    def restore(self, records: Callable[[], Iterable[Record]]) -> None:
        """Log a resumed run's earlier records. A run that goes back after losing a host has already logged them."""
        for record in records() if self._step is None else ():
            self.log(record)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        if self._outbox is not None:
            self._outbox.put((step, int(time.time() * 1000), values))

    def _send(self, items: list[tuple[int, int, dict[str, Any]]]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics: list[Any] = []
        for step, at_ms, values in items:
            for name, value in values.items():
                name = re.sub(r"[^\w/.\- ]", "_", name)
                if isinstance(value, str):
                    self._client.log_batch(self.run_id, tags=[RunTag(name, value)])
                else:
                    metrics.append(Metric(name, float(value), at_ms, step))
        for first in range(0, len(metrics), METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + METRICS])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the remaining values and set the MLflow run's status: FINISHED, KILLED or FAILED."""
        if self._outbox is None:
            return
        self._flush()
        outbox, self._outbox = self._outbox, None
        if outbox.close():
            try:
                with environment(SOON):
                    self._client.set_terminated(self.run_id, STATUS[self.ended])
            except Exception as error:
                notice(f"MLflow does not know that the run has ended: {in_one_line(error)}")
        self._client = None


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that the user has not set, and remove them afterward."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
