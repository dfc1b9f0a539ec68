"""The training loop. It trains stretch by stretch, for every number of processes.

A stretch ends at the earliest of the strategy's next event, an evaluation, a checkpoint, a callback, the end
of an epoch (if it has an evaluation) and the end of training.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from exogym.core.base import pulse
from exogym.core.communicator import Wire, gather, say
from exogym.core.compute.spans import Losses
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.core.progress import GOING_ON
from exogym.core.record.history import History
from exogym.core.record.metrics import Evaluator, spread, usage
from exogym.core.record.observers import Fields, Observer, Observers
from exogym.core.training.driver import Driver
from exogym.core.training.standing import Agenda, Reports, RunStanding, Totals, divides
from exogym.errors import Stopped

if TYPE_CHECKING:
    from exogym.core.training.resuming import Kept
    from exogym.core.training.timing import Timing

ONCE = "EXOGYM_SIGTERM_ONCE"  # set if both a scheduler and a launcher send each process the same SIGTERM
TRACE_CHARACTERS = 4000


class TrainingLoop:
    """Train a fleet to the last step of its schedule.

    With several processes, each runs this loop over its own rows. The main process also evaluates, records, logs and
    calls callbacks, while the other processes send it the rows that it needs.

    Attributes:
        standing: the run's progress, which checkpoints save and load.
        call: a function that calls the due callbacks; `call(False)` calls only those that follow an evaluation.
        figures: functions that return further values for an evaluation's record. Only the main process calls them.
        recovery: in a run whose hosts come and go, a function that runs the training and recovers lost hosts.
        at_rest: a function that is called before each stretch, while processes send no messages.
    """

    def __init__(
        self, agenda: Agenda, driver: Driver, fleet: Fleet, worker: Worker, evaluator: Evaluator | None,
        history: History, observers: Observers, timing: Timing | None = None,
        kept: Kept | None = None, endings: Sequence[Callable[[], None]] = (),
    ):  # fmt: skip
        self.timing = timing
        self.agenda, self.driver, self.fleet, self.worker = agenda, driver, fleet, worker
        self.observers, self.wire = observers, fleet.comm.wire
        self.endings = [driver.close, *endings]
        self.reports = Reports(observers, fleet.comm, agenda, tells_who=driver.seats is None)
        self.standing = RunStanding(agenda, driver, fleet, history, self.reports)
        if kept is not None:
            self.save_into(kept, agenda.checkpoint_interval)
        driver.evaluator = evaluator
        self.call: Callable[[bool], None] = lambda every: None
        if agenda.callbacks:
            from exogym.core.training.calling import Calling

            self.call = Calling(agenda, self.standing, timing).call
        self.figures: list[Callable[[], dict[str, float]]] = [] if timing is None else [timing.values]
        self.recovery: Callable[[Callable[[], bool]], bool] | None = None
        self.at_rest: Callable[[], None] = lambda: None
        self._together = False  # all processes have reached the end, and may communicate once more
        self._is_warm = False
        self._cpu_start = 0.0

    @property
    def step(self) -> int:
        return self.standing.step

    @property
    def history(self) -> History:
        return self.standing.history

    @property
    def description(self) -> dict[str, Any]:
        """The run's description: everything that decides its result."""
        return self.standing.description

    # From the beginning to the end

    def run(self) -> None:
        """Train to the end. SIGINT (Ctrl-C) raises KeyboardInterrupt and SIGTERM SystemExit.

        With a `save_dir`, the run first writes a checkpoint with each node's state.
        """
        try:
            kept = self.standing.kept
            writer = (None if kept is None else kept.writer) or contextlib.nullcontext()
            with Interrupt(self.wire, waiting_signals(self.wire, kept is not None)) as interrupt, writer:
                self.worker.should_stop = self.reports.between_steps(interrupt, lambda: self.step)
                finished = (self.recovery or self._without_recovery)(self._run)
                if not finished:  # if the signal reaches this process only now, record it: it must not kill the process
                    path = None if kept is None else kept.save()
                    say_stopped(self.wire, interrupt.received, self.step, self.driver.losses, path)
                self._together = True
            if not finished or interrupt.received is not None:
                leave(interrupt.received, self.step)
            self._tell("done")
        except (KeyboardInterrupt, SystemExit) as stop:
            self._tell("stopped", why=str(stop.__cause__ or stop))
            raise
        except BaseException as error:
            self._tell("error", error=type(error).__name__, why=str(error), trace=last_lines(error))
            raise
        finally:
            self.observers.finish(next(self.history.rows_after(self.step - 1, node=None), {}))

    def end(self) -> None:
        """Give the model its own memory back, with the final model's values, and free the run's resources.

        After a failure the other processes may have ended. Then the model gets the average of this process's rows.
        """
        try:
            with torch.no_grad():
                if self.standing.outcome is not None:
                    self.worker.set_home(*self.standing.outcome)
                elif self._together:
                    self.worker.set_home(*self.driver.model())
                else:
                    self.worker.set_home(*self.driver.model_left(), together=False)
        finally:
            # Break reference cycles: otherwise shared memory stays until the garbage collection.
            self.worker.should_stop = lambda: False
            self.fleet.state.parts.clear()
            try:
                for ending in self.endings:
                    ending()
            finally:
                if self.standing.kept is not None:
                    self.standing.kept.release()

    def _without_recovery(self, run: Callable[[], bool]) -> bool:
        self.wire.agree(False)  # nobody trains before all can receive a stop
        return run()

    def _run(self) -> bool:
        """Train, and return False if a signal stopped it."""
        standing, agenda = self.standing, self.agenda
        standing.start_clock()
        self._cpu_start = time.process_time()
        if standing.step < agenda.total_steps and not self.driver.losses.under_way:
            # On resume from a shorter run's end: events that its checkpoint could not contain.
            if standing.evaluated_at != standing.step and (standing.step == 0 or agenda.evaluation_due(standing.step)):
                self._evaluate()
                self.call(False)
            self._log()
        while standing.step < agenda.total_steps and not standing.stopped:
            self.at_rest()
            if not self._take_stretch():
                return False
        if agenda.final_sync:
            self._measure_apart()
            before = self._totals()
            self.driver.finish(standing.step)
            self.reports.sent(standing.step, before.sent)
        self._evaluate()
        if self.timing is not None and not self.wire.is_hidden:
            for node in self.driver.algorithm.nodes:
                self.history.add_evaluation(standing.step, standing.epoch, self.timing.values(node), node=node)
        self.call(False)
        self._log()
        return True

    def _take_stretch(self) -> bool:
        """Train a stretch, and do everything due at its end. Return False if a signal stopped it before."""
        standing, agenda, losses = self.standing, self.agenda, self.driver.losses
        first, before = standing.step, self._totals()
        last = losses.last if losses.under_way else agenda.stretch_end(first, self.driver.algorithm.next_event(first))
        standing.apart = None
        self.driver.before_sync = self._measure_apart if agenda.may_be_evaluated(last) else None
        with pulse.at(pulse.WORKING if self._is_warm else pulse.STARTING):
            found = self.driver.advance(first, last)
            if found is not None and last == agenda.total_steps and self.worker.trials is not None:
                self.worker.trials.end()
        self._is_warm = True
        if found is None:
            return False
        standing.step = last
        if not self.wire.is_hidden:
            lr, has_clock = self.driver.algorithm.lr, self.timing is not None
            self.reports.stretch(self.history, (first, last), *found, lr, before, self._totals(), has_clock)
        self.reports.sent(last, before.sent)
        at_end = last == agenda.total_steps
        # Evaluation first, then callbacks, then records to observers, then the checkpoint, which holds all of these.
        if not at_end and agenda.evaluation_due(last):
            self._evaluate()
        self.call(True)
        at_end = at_end or standing.stopped
        self._log(last - 1 if at_end else last)
        if (kept := standing.kept) is not None:
            if at_end:
                kept.save()
            elif divides(agenda.checkpoint_interval, last):
                kept.save_behind()
            else:
                kept.look()
        return True

    # Between stretches

    def _measure_apart(self) -> None:
        """Measure the consensus distance, unless it was measured before an earlier synchronization in this step."""
        if self.standing.apart is None:
            self.standing.apart = spread(self.fleet)

    def _evaluate(self) -> None:
        """Evaluate the averaged model, add the result and the run's figures to the history, and tell observers."""
        standing = self.standing
        if standing.kept is not None:
            standing.kept.beat()
        values: dict[str, Any] = dict(self.driver.evaluate())
        after = spread(self.fleet)
        values |= (standing.apart or after) | {"consensus_distance_after": after["consensus_distance"]}
        standing.evaluated_at = standing.step
        if self.wire.is_hidden:
            return
        totals, span_s = self._totals(), standing.span_s()
        values |= dict(zip(("payload_bytes", "tx_bytes", "rx_bytes"), totals.payload_tx_rx, strict=True))
        values |= {"wall_s": totals.wall_s, "lr": self.driver.algorithm.lr(max(0, standing.step - 1))}
        values |= usage(self.worker.device, time.process_time() - self._cpu_start, span_s)
        if self.reports.examples:
            values["examples_per_s"] = self.reports.examples / span_s
        if self.fleet.buffers:
            values["buffer_bytes"] = float(self.fleet.comm.ledger.buffer_bytes.mean())
        for figures in self.figures:
            values |= figures()
        values |= self.fleet.state.figures()
        self.history.add_evaluation(standing.step, standing.epoch, values)
        self.observers.beat(standing.step, {k: values[k] for k in ("val_loss", "val_accuracy") if k in values})
        self._tell("evaluation", **{name: x for name, x in values.items() if name.startswith("val_")})
        if self.timing is not None:
            self._tell("clock", **self.timing.parts())

    def _totals(self) -> Totals:
        return Totals.of(self.fleet.comm, 0.0 if self.timing is None else self.timing.time_s, self.standing.wall_s())

    def _tell(self, kind: str, **fields: Any) -> None:
        self.reports.tell(kind, self.step, **fields)

    def _log(self, last: int | None = None) -> None:
        self.reports.log(self.history, self.step if last is None else last)

    # For runs whose hosts come and go

    def take_over(self, recovery: Callable[[Callable[[], bool]], bool], at_rest: Callable[[], None]) -> None:
        """Set `recovery`, which runs the training, and `at_rest`, which the loop calls before each stretch."""
        self.recovery, self.at_rest = recovery, at_rest

    def keep_outcome(self) -> None:
        """Store the final model now, while all processes that hold a share of the model are still present."""
        self.standing.outcome = self.driver.model()

    def observe(self, observer: Observer, run: Fields, step: int) -> None:
        """Add an observer, which already has the run's records up to `step`."""
        observer.start({**run, "resumed_step": step})
        self.observers.all.append(observer)
        self.reports.logged = step
        self.reports.restore(self.history)

    def save_into(self, kept: Kept, interval: int | None) -> None:
        """Write checkpoints into the folder `kept` from now on, every `interval` steps."""
        self.standing.kept, self.agenda.checkpoint_interval = kept, interval
        self.reports.signs.append(kept.beat)
        kept.begin(self.standing, self.reports.tell)


class Interrupt:
    """A context manager that only records the first signal among `signals`. A second signal takes effect at once.

    If the variable EXOGYM_SIGTERM_ONCE is set, a second SIGTERM is ignored, because each process gets the signal twice.

    Calling the object returns whether this process must stop. Processes that share memory all stop together.

    >>> with Interrupt(Wire([0])) as interrupt:
    ...     interrupt()
    False
    """

    def __init__(self, wire: Wire, signals: Sequence[signal.Signals] = ()):
        self.wire, self.signals = wire, signals
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        return self.received is not None or self.wire.asked_to_stop()

    def __enter__(self) -> Interrupt:
        # Only the main thread may set handlers. Keep a handler that is neither Python's nor the default.
        if not self.wire.is_hidden and threading.current_thread() is threading.main_thread():
            for number in self.signals:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.wire.ask_to_stop()
        self._restore(but=signal.SIGTERM if number == signal.SIGTERM and ONCE in os.environ else None)

    def _restore(self, but: signal.Signals | None = None) -> None:
        for number in [number for number in self._before if number != but]:
            signal.signal(number, self._before.pop(number))

    def __exit__(self, *error: object) -> None:
        self._restore()


def waiting_signals(wire: Wire, saves: bool) -> list[signal.Signals]:
    """Return the signals that wait for the end of a step: SIGTERM, and SIGINT if the run `saves` or shares its rows."""
    return [signal.SIGTERM, *([signal.SIGINT] if saves or wire.is_shared else [])]


def say_stopped(wire: Wire, received: signal.Signals | None, step: int, losses: Losses, path: Path | None) -> None:
    """Print at which step the nodes stopped, and how to resume the run from the checkpoint at `path`, if one exists."""
    here = losses.counts.sum(1).tolist() if losses.under_way else [0]
    taken = [count for counts in gather(wire, here) for count in counts]
    within = f" plus {min(taken)} to {max(taken)} local steps per node" if max(taken) else ""
    stopped = f"stopped by {Stopped(received, step)}{within}"
    if path is not None:
        again = f"To resume, call the same fit with save_dir={str(path.parent)!r}, resume=True"
        say(wire, f"{stopped}; saved in {path}. {again}", GOING_ON)
    elif received is signal.SIGTERM:
        say(wire, f"{stopped}; nothing is saved: the run has no save_dir", GOING_ON)


def leave(received: signal.Signals | None, step: int) -> None:
    """Raise the exception that belongs to a received signal, even if the signal came too late to stop the run."""
    stopped = Stopped(received, step)
    if received is signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM) from stopped
    raise stopped


def last_lines(error: BaseException) -> str:
    """Return the last lines of an error's traceback, at most 4000 characters.

    >>> last_lines(ValueError("why"))
    'ValueError: why'
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    return text if len(text) <= TRACE_CHARACTERS else text[-TRACE_CHARACTERS:].partition("\n")[2]
