"""The training loop: stretches of independent steps between events, for every layout.

A stretch ends at the earliest of the strategy's next event, an evaluation, a checkpoint, a callback, the end
of an epoch (where there is an evaluation) and the end of training.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.callbacks import Callback
from exogym.core.base import pulse
from exogym.core.compute.finite import is_finite
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.core.fleet.seats import Seats
from exogym.core.fleet.state import Shared
from exogym.core.progress import GOING_ON, Progress
from exogym.core.record.history import History
from exogym.core.record.metrics import Evaluator, spread, usage
from exogym.core.record.observers import Fields, Observer, Observers
from exogym.core.saving.checkpoint import save
from exogym.core.saving.keepers import Keepers
from exogym.core.saving.snapshots import for_disk
from exogym.core.training.agenda import Agenda
from exogym.core.training.driver import Driver
from exogym.core.training.interrupt import Interrupt
from exogym.core.training.reports import Reports, Standing
from exogym.core.training.timing import Timing
from exogym.errors import ArgumentError, Stopped
from exogym.faults import Outages


class TrainingLoop:
    """Trains a fleet to the end of its agenda.

    Attributes:
        step: steps done; `epoch`: of the last one, from 0.
        history, fleet: as they stand.
        stopped: whether a callback ended the training.
        carry: takes the training through, where that is more than to run it.
        at_rest: called before each stretch, where nothing is in flight.

    With several processes each runs this loop over its own rows; the main one evaluates, records, logs and calls
    callbacks, and the others serve it meanwhile.
    """

    def __init__(
        self, agenda: Agenda, driver: Driver, fleet: Fleet, worker: Worker, evaluator: Evaluator | None,
        history: History, observers: Observers, progress: Progress, timing: Timing | None = None,
        endings: Sequence[Callable[[], None]] = (),
    ):  # fmt: skip
        self.timing = timing
        self.agenda, self.driver, self.fleet, self.worker = agenda, driver, fleet, worker
        self.evaluator, self.history, self.observers, self.progress = evaluator, history, observers, progress
        self.endings = [driver.close, *endings]
        self.wire = fleet.comm.wire
        self.step, self.stopped = 0, False
        for k, callback in enumerate(agenda.callbacks):
            if isinstance(callback, Callback):
                name = f"callback {k} {type(callback).__name__}"
                fleet.state.register(name, Shared(callback.state, callback.load_state))
        self.outcome: tuple[list[Tensor], dict[str, Tensor]] | None = None  # the final model, where it is known already
        self.together = False  # whether all processes have come to the end, and may meet once more
        self._calling_back = self._warm = False
        self.spent = (0, 0.0, 0.0)  # steps trained after the first stretch, their seconds, and those without the wire
        self.evaluated_at = -1
        self.apart: dict[str, float] | None = None  # the spread before this step's synchronisation, where it was taken
        self.wall_before = 0.0
        signs = [] if agenda.save_dir is None else [self._keep]
        self.reports = Reports(observers, fleet.comm, agenda, signs, tells_who=driver.seats is None)
        self._start = self._cpu_start = 0.0
        self.carry: Callable[[Callable[[], bool]], bool] | None = None
        self.at_rest: Callable[[], None] = lambda: None

    @property
    def epoch(self) -> int:
        return max(0, self.step - 1) // self.agenda.steps_per_epoch

    def run(self) -> None:
        """Train to the end.

        Raises:
            KeyboardInterrupt, SystemExit: SIGINT (Ctrl-C) or SIGTERM came; with a `save_dir` the run was saved first,
                where each node stood.
        """
        try:
            with self.progress, Interrupt(self.wire, self._signals()) as interrupt:
                self.worker.should_stop = self.reports.between_steps(interrupt, lambda: self.step)
                finished = (self.carry or self._carry)(self._run)
                if not finished:  # a signal that comes to this process only now is to be noted, not to kill it
                    self._save_stopped(interrupt.received)
                self.together = True
            if not finished or interrupt.received is not None:
                self._leave(interrupt.received)
            self._tell("done")
        except (KeyboardInterrupt, SystemExit) as stop:
            self._tell("stopped", why=str(stop.__cause__ or stop))
            raise
        except BaseException as error:
            self._tell("error", error=type(error).__name__, why=str(error))
            raise
        finally:
            self.observers.finish(next(self.history.rows_after(self.step - 1, node=None), {}))

    def end(self) -> None:
        """Give the model its own memory back, holding the consensus, and end what the run had started.

        After a failure the other processes may be gone, so the model then holds the average of the rows here.
        """
        try:
            with torch.no_grad():
                if self.outcome is not None:
                    self.worker.set_home(*self.outcome)
                elif self.together:
                    self.worker.set_home(*self.model_of(None))
                else:
                    self.worker.set_home(*self._what_is_left(), together=False)
        finally:
            # Else the loop would hold itself, and the memory that processes share, until the garbage is collected.
            self.worker.should_stop = lambda: False
            self.fleet.state.parts.clear()
            try:
                for ending in self.endings:
                    ending()
            finally:
                if self.agenda.keepers is not None:
                    self.agenda.keepers.release()

    def _what_is_left(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the model after a failure: of the nodes at hand, those with finite numbers if there are any."""
        fleet = self.fleet
        if not self.wire.is_shared:
            self.driver.meet_finite()
            return self.model_of(None)
        finite = [row for row in range(len(fleet)) if all(is_finite(block.params[row]) for block in fleet.blocks)]
        rows = finite or list(range(len(fleet)))
        buffers = {name: x[rows[0]].clone() for name, x in fleet.buffers.items()}
        return [block.params[rows].mean(0) for block in fleet.blocks], buffers

    def _carry(self, run: Callable[[], bool]) -> bool:
        self.wire.barrier()  # nobody trains before all can be told to stop
        return run()

    def _run(self) -> bool:
        """Train; return False where a signal stopped it."""
        agenda = self.agenda
        self._start, self._cpu_start = time.perf_counter(), time.process_time()
        if self.step < agenda.total_steps and not self.driver.losses.under_way:
            # On resume: what a checkpoint from the end of a shorter run could not know of.
            if self.evaluated_at != self.step and (self.step == 0 or agenda.evaluation_due(self.step)):
                self._evaluate()
                self._call_back(every=False)
            self._log()
        while self.step < agenda.total_steps and not self.stopped:
            self.at_rest()
            first, last, before = self.step, self._stretch_end(), self._standing()
            self.apart = None
            self.driver.before_sync = self._measure_apart if agenda.may_be_evaluated(last) else None
            with pulse.at(pulse.WORKING if self._warm else pulse.STARTING):
                losses = self._advance(first, last)
            self._warm = True
            if losses is None:
                return False
            self.step = last
            nodes, values = losses
            if not self.wire.is_hidden:
                self.reports.stretch(
                    self.history, (first, last), nodes, values, self.driver.lr, before, self._standing(),
                    self.timing is not None,
                )  # fmt: skip
            self.reports.sent(self.step, before.sent)
            at_end = last == agenda.total_steps
            if not at_end and agenda.evaluation_due(self.step):
                self._evaluate()
            self._call_back()
            at_end = at_end or self.stopped
            self._log(self.step - 1 if at_end else self.step)
            if agenda.checkpoint_due(self.step) or (at_end and agenda.save_dir is not None):
                self.save()
        if agenda.final_sync:
            self._measure_apart()
            before = self._standing()
            self.driver.finish(self.step)
            self.reports.sent(self.step, before.sent)
        self._evaluate()
        if self.timing is not None and not self.wire.is_hidden:
            for node in self.driver.seated:
                self.history.add_evaluation(self.step, self.epoch, self.timing.values(node), node=node)
        self._call_back(every=False)
        self._log()
        return True

    def _advance(self, first: int, last: int) -> tuple[Sequence[int], Tensor] | None:
        """Take a stretch, and note the time: all of it, and this process's own, without the wire."""
        start, waited_s = time.perf_counter(), self.wire.waited_s
        losses = self.driver.advance(first, last)
        took_s = time.perf_counter() - start
        if self._warm:  # the first stretch warms up
            steps, training_s, own_s = self.spent
            self.spent = (steps + last - first, training_s + took_s, own_s + took_s - self.wire.waited_s + waited_s)
        return losses

    def _signals(self) -> list[signal.Signals]:
        """Return the signals that wait until the run can end well, between two steps.

        Ctrl-C, which raises KeyboardInterrupt by itself, waits only to save, or for all processes to meet.
        """
        waits = self.agenda.save_dir is not None or self.wire.is_shared
        return [signal.SIGTERM, *([signal.SIGINT] if waits else [])]

    def _save_stopped(self, received: signal.Signals | None) -> None:
        """Save where each node stands, and say what resumes."""
        stopped = f"stopped by {Stopped(received, self.step)}{self._in_stretch()}"
        if self.agenda.save_dir is not None:
            path = self.save()
            self.wire.say(
                f"{stopped}; saved in {path}. The same fit with save_dir={str(self.agenda.save_dir)!r}, resume=True "
                "goes on from there",
                GOING_ON,
            )
        elif received is signal.SIGTERM:
            self.wire.say(f"{stopped}; nothing is saved, since the run has no save_dir", GOING_ON)

    def _leave(self, received: signal.Signals | None) -> None:
        """End as the signal asks; one that came too late to stop the run, too."""
        stopped = Stopped(received, self.step)
        if received is signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM) from stopped
        raise stopped

    def _in_stretch(self) -> str:
        losses = self.driver.losses
        if not losses.under_way:
            return ""
        taken = losses.counts.sum(1).tolist()
        return f", {min(taken)} to {max(taken)} local steps into the next stretch" if max(taken) else ""

    def evaluate(self, node: int | None = None) -> dict[str, float]:
        """Evaluate the averaged (or outer) model, or one node's, on the validation set; {} without one.

        Raises:
            ArgumentError: no such node, or one that sits out the round: it holds no model.
        """
        if self.evaluator is None:
            return {}
        if node is not None and node not in self.driver.seated:
            raise ArgumentError(
                f"evaluate({node!r}): wanted a node of 0 to {self.fleet.num_nodes - 1}, and where clients are sampled "
                "one of the round, as in fleet.comm.present"
            )
        self._ask("evaluate", node)
        vectors, buffers = self.model_of(node)
        values = self.evaluator(vectors, buffers) if self.wire.process == 0 else {}  # of the first node's processes
        return self._known_to_all(values)

    def measure(self, vectors: list[Tensor], buffers: dict[str, Tensor]) -> dict[str, float]:
        """In a callback: evaluate parameters, (P,) per block, and buffers on the validation set; {} without one."""
        if self.evaluator is None or self.wire.devices.parts == 1:
            return {} if self.evaluator is None else self.evaluator(vectors, buffers)
        self._ask("measure")
        return self._measure_together(vectors, buffers)

    def _measure_together(self, vectors: list[Tensor] | None, buffers: dict[str, Tensor]) -> dict[str, float]:
        """Evaluate with the processes of the first node; only the main one knows `vectors`, and what they come to."""
        if self.wire.process or self.evaluator is None:
            return {}
        here, inside = [], self.wire.devices
        for b, block in enumerate(self.fleet.blocks):
            layout = block.layout
            whole = block.params.new_zeros(layout.total) if vectors is None else vectors[b].clone()
            here.append(inside.sum(whole)[layout.columns.to(whole.device)])
        told = {name: buffers.get(name, torch.zeros_like(x[0])) for name, x in self.fleet.buffers.items()}
        return self.evaluator(here, {name: inside.sum(x) for name, x in told.items()})

    def average(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return (P,) per block and the buffers of the averaged (or outer) model; traffic is not recorded."""
        self._ask("average")
        vectors, buffers = self.model_of(None)
        return self.fleet.whole(vectors), buffers

    def rows(self) -> list[Tensor]:
        """Return the parameters of all nodes, (N, P) per block, in a callback; traffic is not recorded.

        Where clients are sampled, of those at work: `fleet.comm.present`.
        """
        self._ask("rows")
        return self.fleet.whole([self.wire.rows(block.params, self.driver.seated) for block in self.fleet.blocks])

    def _known_to_all(self, values: dict[str, float]) -> dict[str, float]:
        """Return what the main process found in every process that somebody looks at."""
        return values if self.wire.shares_memory else self.wire.tell(values)

    def model_of(self, node: int | None) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return (P,) vectors and buffers of the averaged (or outer) model, or of one node's, in every process."""
        if node is None:
            return self.driver.consensus(), self.driver.consensus_buffers()
        rows = self.wire.rows
        vectors = [rows(block.params, [node])[0] for block in self.fleet.blocks]
        return vectors, {name: rows(x, [node])[0] for name, x in self.fleet.buffers.items()}

    def save(self) -> Path:
        """Write a checkpoint of this moment; return its folder."""
        self._ask("save")
        agenda = self.agenda
        if self.worker.insides is not None:
            self._share_insides()
        path = save(agenda.save_dir, for_disk(self), agenda.keep_checkpoints, self.wire, agenda.keepers)
        self._tell("checkpoint", path=str(path))
        return path

    # Between stretches

    def _stretch_end(self) -> int:
        losses, step = self.driver.losses, self.step
        return losses.last if losses.under_way else self.agenda.stretch_end(step, self.driver.next_event(step))

    def _measure_apart(self) -> None:
        """Take how far the nodes are apart, unless it was taken before an earlier synchronisation of this step."""
        if self.apart is None:
            self.apart = spread(self.fleet)

    def _evaluate(self) -> None:
        if self.agenda.keepers is not None:
            self.agenda.keepers.beat()
        values: dict[str, Any] = dict(self.evaluate())
        after = spread(self.fleet)
        values |= (self.apart or after) | {"consensus_distance_after": after["consensus_distance"]}
        self.evaluated_at = self.step
        if self.wire.is_hidden:
            return
        payload, tx, rx = self._standing().payload_tx_rx
        wall_s = self.wall_s()
        span = wall_s - self.wall_before
        values |= {
            "payload_bytes": payload,
            "tx_bytes": tx,
            "rx_bytes": rx,
            "wall_s": wall_s,
            "lr": self.driver.lr(max(0, self.step - 1)),
        }
        values |= usage(self.worker.device, time.process_time() - self._cpu_start, span)
        if self.reports.examples:
            values["examples_per_s"] = self.reports.examples / span
        if self.fleet.buffers:
            values["buffer_bytes"] = float(self.fleet.comm.ledger.buffer_bytes.mean())
        if self.worker.insides is not None:
            self._share_insides()
            values["inside_bytes"] = float(self.fleet.comm.ledger.inside_bytes.mean())
        if self.timing is not None:
            values |= self.timing.values()
        values |= self.fleet.state.figures()
        self.history.add_evaluation(self.step, self.epoch, values)
        self.observers.beat(self.step, {k: values[k] for k in ("val_loss", "val_accuracy") if k in values})
        self._tell("evaluation", **{name: x for name, x in values.items() if name.startswith("val_")})
        if self.timing is not None:
            self._tell("clock", **self.timing.parts())

    def _share_insides(self) -> None:
        """Let every process know what was said inside of each node, which counts it."""
        if self.wire.is_shared:
            ledger = self.fleet.comm.ledger
            ledger.inside_bytes[:] = np.max(self.wire.gather(ledger.inside_bytes.tolist()), axis=0)

    def _call_back(self, every: bool = True) -> None:
        due = self.agenda.due_callbacks(self.step, self.evaluated_at == self.step, every)
        if not due:
            return
        if not self.wire.is_main:
            self._serve()
            return
        self._calling_back = True
        try:
            for callback in due:
                self.beat()
                if callback(self) is True:
                    if isinstance(callback, Callback) and not callback.may_end:
                        raise ArgumentError(f"{type(callback).__name__} says may_end=False and returned True: drop one")
                    self.stopped = True
        finally:
            self._calling_back = False
        self.wire.tell(["go on", self.stopped])

    def beat(self) -> None:
        """Say, from a callback that takes long, that it goes on: the time that `hang_s` gives it starts anew."""
        pulse.beat()

    def _ask(self, wish: str, value: Any = None) -> None:
        """In a callback: have the other processes, which `_serve`, do what this one is about to."""
        if self._calling_back:
            self.wire.tell([wish, value])

    def _serve(self) -> None:
        """Take part in what the main process's callbacks ask of all, until they are done."""
        while True:
            wish, value = self.wire.tell(None)
            if wish == "evaluate":
                self.evaluate(value)
            elif wish == "save":
                self.save()
            elif wish == "average":
                self.average()
            elif wish == "rows":
                self.rows()
            elif wish == "measure":
                self._measure_together(None, {})
            else:
                self.stopped = value
                return

    # Where it stands

    @property
    def description(self) -> dict[str, Any]:
        """What decides the run."""
        return self.agenda.description

    @property
    def outages(self) -> Outages | None:
        """Who was away when, where that is not planned but happens."""
        there = self.driver.attendance
        return there.faults if there is not None and isinstance(there.faults, Outages) else None

    @property
    def seats(self) -> Seats | None:
        """Who has a row, where there are fewer rows than nodes."""
        return self.driver.seats

    def may_be_away(self, node: int, step: int) -> bool:
        """Say whether a node may have been away at `step`, so that nobody keeps a row of it."""
        there = self.driver.attendance
        return there is not None and node not in there.up(step)

    def counters(self) -> dict[str, Any]:
        """Return what says where the run stands, JSON-able; beside the state of the fleet and the history."""
        losses = self.driver.losses
        return {
            "step": self.step,
            "begun_end": losses.last if losses.under_way else None,
            "logged": self.reports.logged,
            "evaluated": self.evaluated_at,
            "apart": self.apart,
            "wall_s": self.wall_s(),
        }

    def stand(self, counters: dict[str, Any]) -> None:
        """Stand where `counters` were taken; state and history are put back by the caller, after this."""
        losses, end = self.driver.losses, counters["begun_end"]
        losses.forget()
        if end is not None:
            losses.begin(counters["step"], end)
        self.step, self.reports.logged, self.evaluated_at = (counters[name] for name in ("step", "logged", "evaluated"))
        self.wall_before, self.apart = counters["wall_s"], counters.get("apart")
        self.outcome, self.stopped = None, False
        if self.driver.attendance is not None:
            self.driver.meet(self.driver.attendance.up(self.step))

    def keep_outcome(self) -> None:
        """Keep the final model now, while all who hold it are there."""
        self.outcome = self.model_of(None)

    def take_description(self, description: dict[str, Any]) -> None:
        self.agenda.description = description

    def take_history(self, history: History) -> None:
        self.history = history

    def carry_on(self, logged: int, wall_s: float) -> None:
        """After going back in a run that went on: what was told is not told again, and the time has passed."""
        self.reports.logged, self.wall_before = max(logged, self.reports.logged), wall_s

    def take_over(self, carry: Callable[[Callable[[], bool]], bool], at_rest: Callable[[], None]) -> None:
        """Let `carry` take the run through, and call `at_rest` before each stretch, where nothing is in flight."""
        self.carry, self.at_rest = carry, at_rest

    def observe(self, observer: Observer, run: Fields, step: int) -> None:
        """Tell one more observer of the run, who knows of all that happened up to `step`."""
        observer.start({**run, "resumed_step": step})
        self.observers.add(observer)
        self.reports.logged = step
        self.reports.restore(self.history)

    def save_into(self, folder: Path | None, interval: int | None, keepers: Keepers | None = None) -> None:
        """Write checkpoints into `folder`, kept by `keepers` where these are known."""
        self.agenda.save_dir, self.agenda.checkpoint_interval = folder, interval
        self.agenda.keepers = keepers
        self.reports.signs[:] = [] if folder is None else [self._keep]

    def _keep(self) -> None:
        if self.agenda.keepers is not None:  # of another folder, after recovery
            self.agenda.keepers.beat()

    def _standing(self) -> Standing:
        return Standing.of(self.fleet.comm, 0.0 if self.timing is None else self.timing.time_s, self.wall_s())

    def _tell(self, kind: str, **fields: Any) -> None:
        self.reports.tell(kind, self.step, **fields)

    def _log(self, last: int | None = None) -> None:
        self.reports.log(self.history, self.step if last is None else last)

    def wall_s(self) -> float:
        return self.wall_before + (time.perf_counter() - self._start if self._start else 0.0)
