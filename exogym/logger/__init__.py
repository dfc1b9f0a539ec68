"""Loggers receive a run's records during training: CSV, JSON lines, W&B and others, or your own.

A record is a row of the history (`exogym.core.record.history`): a dict with `step`, `node` (a rank, or None for the
averaged model), `train_loss` and other values, where None means missing. Records arrive in the order of steps, in each
step with the averaged model's first. Your own logger is a function that takes a record, or an object with the method
`log` and, if needed, `start` and `finish`:

>>> records = []
>>> logger = combine([records.append, JSONLinesLogger("runs/metrics.jsonl")])

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = check_writable(f"{folder}/runs")  # raises ArgumentError if it is not
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "NOT_IN_JSON",
    "CSVLogger",
    "JSONLinesLogger",
    "Logger",
    "MLflowLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "check_writable",
    "combine",
    "in_json",
]

if TYPE_CHECKING:
    from exogym.logger.base import NOT_IN_JSON, Logger, check_writable, combine, in_json
    from exogym.logger.files import CSVLogger, JSONLinesLogger
    from exogym.logger.mlflow import MLflowLogger
    from exogym.logger.services import TensorBoardLogger, WandbLogger
else:
    __getattr__, __dir__ = lazily(__name__)
