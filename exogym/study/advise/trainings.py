"""The trainings of a pilot. Each stops at a step with a checkpoint, and continues from it bit by bit.

out/run.json           the options that decide the results
out/<strategy>/        checkpoints/, curve.json with the evaluations so far, and error.json if the training failed
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exogym.callbacks import Callback
from exogym.core.base.files import regular_text, write_json
from exogym.core.progress import GOING_ON, without_notices
from exogym.errors import ArgumentError, TrainingError
from exogym.study.compare.folder import RUN, Folder, check_same, lock_of, saved_in
from exogym.study.compare.run import asked_of
from exogym.study.compare.session import Session
from exogym.trainer import LocalTrainer

CURVE, ERROR = "curve.json", "error.json"
Watch = Callable[[str, int, float], object]


class Trainings:
    """Trains the strategies of a comparison's session for some of their steps. Only the first seed is trained.

    Args:
        session: the strategies, and the settings of the planned run.
        out: folder of the runs; created if needed. A killed pilot continues there.
        watch: function that gets the strategy, the step and the validation loss after each evaluation.

    Raises:
        ArgumentError: the folder holds other runs, or another process trains there.
    """

    def __init__(self, session: Session, out: str | os.PathLike[str], watch: Watch | None = None) -> None:
        self.session, self.path, self.watch = session, Path(out).expanduser(), watch
        asked = {"pilot": True, **json.loads(json.dumps(asked_of(session)))}
        try:
            if (self.path / RUN).exists():
                check_same(out, "pilot", saved_in(out), asked)
            elif self.path.exists() and any(self.path.iterdir()):
                raise ArgumentError(f"out={os.fspath(out)!r} holds other files: give a new folder, or a pilot's folder")
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"out={os.fspath(out)!r} cannot be written ({error.strerror}): give another folder"
            ) from error
        lock = lock_of(self.path)  # before the first file: run.json belongs to the process that trains here
        write_json(self.path / RUN, asked)
        self._folder = Folder(self.path, session.entries, lock=lock)

    def __enter__(self) -> Trainings:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.release()

    def train(self, method: str, until: int, period: int = 1) -> list[tuple[float, float]]:
        """Train until a step, from where the training stopped before. Return the evaluations so far: step and loss.

        The evaluations are at step 0, at `period` times 1, 2, 4, 8 ..., and at each step `until`. After a failed
        training the last loss is NaN.
        """
        (seed, *_), entry = self.session.setting.seeds, self.session.entries[method]
        child = self._folder.child(method, seed)
        child.mkdir(exist_ok=True)
        seen = _Seen(child / CURVE, until, period, lambda step, loss: self._tell(method, step, loss))
        if seen.is_done:
            return seen.curve_until(until)
        trainer = LocalTrainer(
            self.session.task.make_model(seed), self.session.train, self.session.val, loss_fn=self.session.loss_fn
        )
        options = self.session.fit_options(entry) | {"val_interval": self.session.setting.steps, "final_sync": False}
        try:
            with without_notices(None if seen.curve else GOING_ON):  # the first stretch reports its choices
                trainer.fit(
                    entry.strategy, seed=seed, callbacks=[seen], save_dir=child / "checkpoints", keep_checkpoints=1,
                    resume=True, **options,
                )  # fmt: skip
        except TrainingError as error:
            write_json(child / ERROR, str(error).partition("\n")[0])
            seen.add(until, math.nan)
        return seen.curve_until(until)

    def why(self, method: str) -> str:
        """Return in one line why a method's training failed."""
        file = self._folder.child(method, self.session.setting.seeds[0]) / ERROR
        return str(json.loads(regular_text(file))) if file.exists() else "its validation loss was not finite"

    def _tell(self, method: str, step: int, loss: float) -> None:
        self._folder.beat()
        if self.watch is not None:
            self.watch(method, step, loss)


class _Seen(Callback):
    """Evaluates at chosen steps, writes the losses into a file, and ends the training at the last of these steps."""

    at_evaluations = True

    def __init__(self, path: Path, until: int, period: int, tell: Callable[[int, float], object]) -> None:
        self.path, self.until, self.tell = path, until, tell
        self.curve: dict[int, float] = {}
        if path.exists():
            saved = json.loads(regular_text(path))
            self.curve = {int(step): math.nan if loss is None else loss for step, loss in saved.items()}
        self.is_done = max(self.curve, default=-1) >= until
        self.marks = {period << k for k in range(until.bit_length()) if period << k < until} | {until}
        self.steps = math.gcd(*self.marks)

    def __call__(self, loop: Any) -> bool:
        if loop.step in {0, *self.marks} and loop.step not in self.curve:
            self.add(loop.step, loop.evaluate()["val_loss"])
        return loop.step >= self.until

    def add(self, step: int, loss: float) -> None:
        self.curve[step] = loss
        plain = {str(s): x if math.isfinite(x) else None for s, x in sorted(self.curve.items())}
        write_json(self.path, plain, indent=None)
        self.tell(step, loss)

    def curve_until(self, until: int) -> list[tuple[float, float]]:
        return [(step, loss) for step, loss in sorted(self.curve.items()) if step <= until]
