r"""Compare the times on which advice rests with measured times of the same trainings, among real processes.

    python -m research.advised runs/judge/judge.json --json advised.json --csv research/results/advised.csv
    python -m research.advised runs/judge/judge.json --list

`python -m research judge TABLE` takes a method's time to a target loss as steps to the loss times seconds per step, by
formula. Here four hosts train the table's tasks with the table's settings, until the loss is reached.

**Which cells.** The rule was written before the first run. A candidate is a task of the table on four nodes, a network
of the judge, a target (1, 1.02 or 1.1 times DDP's loss), a method and a seed for which the tuned run of this seed
reaches the target. Its predicted time is `LEAST_S` to `MOST_S` seconds if a step takes `STEP_S`. The draw takes the
tasks in turn. From a task's candidates it keeps those whose network was drawn least often, of these those whose
method was drawn least often, and takes one at random.

**Measured.** Hosts are processes in network namespaces with real-time priority. Networks of equal lines with at most
0.1 ms of latency are cables with `tc tbf` (`namespaces.py`), the others are taps (`switched.py`). A network's rates are
payload, and its jitter's mean is added to the latency. A forward pass sleeps, so that hosts compute at the same time
although they share the machine's cores. The slow computer sleeps longer. Seconds count from the first evaluation to the
step at which the loss is reached, interpolated between evaluations, as in the table. Seconds of evaluations do not
count; they are in the column *evaluating*. The losses must be the table's losses.

**Predicted.** *formula* is what the judge says: steps to the loss times the formula's seconds per step. *tcp* is the
same for these lines with `tcp=True`. *probes* is the same with `exogym advise` on measurements of these lines, as
`exogym doctor --measure` makes them. *tcp* and *probes* also have the nodes' two agreements at each evaluation that
interrupts a round, as on a run's clock. All know the step's seconds: the method's own step on four hosts without
limits, less communication, measured beforehand. Nothing is fitted.

`--json` stores each cell (see `cells.py`); `--turn 200` begins no cell after 200 seconds; `--again disturbed` repeats
cells with more than a quarter of a core of other work. The script fails if a prediction from probes is off by more than
`--limit`, or if a loss differs. Needs Linux, root, /dev/net/tun and Debian's iproute2.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.base.rng import numpy_generator
from exogym.core.training.loop import TrainingLoop
from exogym.machines.distributed import probing
from exogym.network import Network
from exogym.network.links import UniformLinks
from exogym.network.measured import never_falling
from exogym.network.overheads import PAYLOAD_SHARE
from exogym.network.pricing import AGREEMENTS
from exogym.study.advise import advise
from exogym.study.advise.beliefs import h_of
from exogym.study.compare.session import Session
from research.atlas.halves import halved
from research.atlas.places import KINDS, Place, studies_of
from research.atlas.steps import LEVELS, REFERENCE, SHARE, Curve, curves_of, named
from research.atlas.table import Row, Table
from research.judge.judging import Site, _own_size, sites
from research.reproduce import Reproduction

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from cells import AGAIN, Cells
from namespaces import Hosts, enter, hosts, load, measured
from switched import Switched

COUNT, NODES = 20, 4
STEP_S, SLEEP_S = 0.055, 0.05
LEAST_S, MOST_S = 5.0, 20.0
NEAR_S = 1e-4  # the latency that a cable stands for
FREE_STEPS, FREE_SEGMENTS = 10, 4
SAME = 1e-5  # relative: the table has six digits
PROBED_BYTES = (16, 1 << 12, 1 << 14, 1 << 16, 1 << 18)
REPEATS, MESSAGES = 3, 6
PROBED = ("exact all_reduce", "all_gather", "all_to_all")
PREDICTIONS = ("formula", "tcp", "probes")
RATES = ("up", "down", "bandwidth", "server")  # in a network's description
SHOWN = ("task", "network", "level", "method", "seed", "steps", "own_s", *(f"{p}_s" for p in PREDICTIONS), "measured_s")


@dataclass(frozen=True)
class Job:
    """A training: the table's place, method and seed, on a network, until the target loss.

    Attributes:
        strategy, lr: as the table's tuned row has them.
        target: the loss to reach.
        steps: steps to the target, interpolated between the row's evaluations.
        last: the evaluation's step at which the loss is at most the target.
    """

    place: str
    task: str
    network: str
    level: float
    method: str
    seed: int
    strategy: str
    lr: float
    target: float
    steps: float
    last: int

    def __str__(self) -> str:
        return f"{self.place}/{self.network}/{self.level:g}/{self.method}/{self.seed}"


# ---------------------------------------------------------------- which cells


def drawn(table: Table, count: int = COUNT) -> list[Job]:
    """Return the cells that the rule draws from a table."""
    pool: dict[str, list[Job]] = {}
    for job in candidates(table):
        pool.setdefault(job.task, []).append(job)
    rng, chosen = numpy_generator(0, "advised"), list[Job]()
    for task in itertools.islice(itertools.cycle(sorted(pool)), count):
        left = [job for job in pool[task] if job not in chosen]
        for name in ("network", "method"):
            times = Counter(getattr(job, name) for job in chosen)
            least = min(times[getattr(job, name)] for job in left)
            left = [job for job in left if times[getattr(job, name)] == least]
        chosen.append(left[int(rng.integers(len(left)))])
    return chosen


def candidates(table: Table) -> list[Job]:
    """Return all candidates, in a fixed order."""
    found = []
    seconds = functools.cache(lambda parameters, network, method: step_s(parameters, sites(NODES)[network], method))
    for place, about in sorted(table.places.items()):
        reference = curves_of(table, place).get(REFERENCE)
        kind = place.rpartition("-")[0]
        if about["nodes"] != NODES or reference is None or kind not in KINDS or KINDS[kind].clients is not None:
            continue
        rows = [row for row in table.rows if row["place"] == place and row["kind"] == "tuned" and "error" not in row]
        for row, network, level in itertools.product(rows, sites(NODES), LEVELS):
            curve, target = Curve(tuple(row["steps"]), tuple(row["losses"])), level * reference.at(SHARE)
            steps = curve.until(target)
            if not 1 <= steps < curve.steps[-1]:
                continue
            predicted_s = steps * seconds(about["parameters"], network, named(row))
            if LEAST_S <= predicted_s <= MOST_S:
                last = next(int(s) for s, loss in zip(curve.steps, curve.losses, strict=True) if loss <= target)
                found.append(Job(
                    place, KINDS[kind].task, network, level, named(row), row["seed"], row["strategy"], row["lr"],
                    target, steps, last,
                ))  # fmt: skip
    return found


def step_s(parameters: float, site: Site, method: str, own_s: float = STEP_S, network: Any = None) -> float:
    """Return a method's seconds per step, by formula or, with `network`, on measured lines."""
    each_s = [own_s / speed for speed in site.speeds or (1.0,) * NODES]
    advice = advise(
        parameters=parameters, num_nodes=NODES, network=Network.of(network or site.network), step_seconds=each_s,
        strategies=[method], algorithm="recorded",
    )  # fmt: skip
    return advice.rows[0].seconds_per_step


# ---------------------------------------------------------------- in a host

SESSIONS: dict[str, Session] = {}  # by job; hosts are forks, so they have them too
SPANS: dict[str, list[tuple[float, float]]] = {}  # of the last training: evaluations, and other measures of its nodes
FOUND: dict[str, list[float]] = {}


def session_of(job: Job, steps: int) -> Session:
    """Return the session with which the table's run was trained. `steps`: of the table's runs at this place."""
    work = Reproduction(tempfile.gettempdir(), seeds=(job.seed,), problem=functools.partial(halved, "test"))
    (study,) = studies_of([Place(job.place.rpartition("-")[0], NODES)], [job.method], steps)
    return work.session(replace(study.cell, strategy=job.strategy, lr=job.lr))


def train(job: dict[str, Any], mark: Callable[[Any], Any], **options: Any) -> LocalTrainer:
    """Train a job up to the evaluation that reaches its target. `job["free"]`: some segments of plain steps."""
    import torch.distributed as dist

    session, sleep_s = SESSIONS[job["key"]], job["sleeps_s"][dist.get_rank()]
    (entry,) = session.entries.values()
    seed = session.setting.seeds[0]
    model = session.task.make_model(seed)
    model.register_forward_pre_hook(lambda module, _: time.sleep(sleep_s if module.training else 0.0))
    given = session.fit_options(entry) | options
    given |= {"max_steps": job["last"] + 1, "final_sync": False}
    if job["free"]:
        given |= {"max_steps": FREE_STEPS * FREE_SEGMENTS + 1, "val_interval": 10**6}
        given["callbacks"] = [Every(FREE_STEPS, mark, may_end=False)]
    del given["processes"]
    SPANS.clear()
    trainer = LocalTrainer(model, session.task.train, session.val, loss_fn=session.loss_fn)
    trainer.fit(entry.strategy, seed=seed, **given)
    rows = [row for row in trainer.history.rows(None) if row["val_loss"] is not None] if dist.get_rank() == 0 else []
    FOUND.clear()
    FOUND.update({"steps": [row["step"] for row in rows], "losses": [row["val_loss"] for row in rows]})
    return trainer


def timed(name: str) -> None:
    """Note when this process enters and leaves a method of the loop."""
    call = getattr(TrainingLoop, name)

    def around(loop: Any) -> None:
        start = time.perf_counter()
        call(loop)
        SPANS.setdefault(name, []).append((start, time.perf_counter()))

    setattr(TrainingLoop, name, around)


def seen() -> dict[str, Any]:
    """Return the last training's evaluations: "steps", "losses", and "seconds" of training and of evaluating so far."""
    evaluations, asides = SPANS["_evaluate"], SPANS.get("_measure_apart", [])
    begin_s, seconds, spent_s = evaluations[0][1], [], []
    for k, (start, _) in enumerate(evaluations[: len(FOUND["steps"])]):
        inside = [*evaluations[1:k], *(span for span in asides if begin_s <= span[0] < start)]
        spent_s.append(math.fsum(end - at for at, end in inside))
        seconds.append(max(0.0, start - begin_s - spent_s[-1]))
    return FOUND | {"seconds": seconds, "evaluating_s": spent_s}


# ---------------------------------------------------------------- measuring


def sleeps_s(site: Site, own_s: float) -> list[float]:
    """Return each host's sleep, so that a host of speed v takes own_s / v for a step."""
    return [SLEEP_S + own_s / speed - own_s for speed in site.speeds or (1.0,) * NODES]


def own_step_s(group: Hosts, cells: Cells, job: Job) -> float:
    """Return the seconds of a method's step on all hosts at once, without communication."""
    key = step_key(job)
    if not cells.has(key):
        group.limit(None)
        with cells.watched(group.pids) as about:
            order = {"key": str(job), "sleeps_s": [SLEEP_S] * NODES, "last": 0, "free": True}
            free = measured(group.train(order))
        cells.put(key, about | {"step_s": (free["run_s"] - free["comm_s"]) / FREE_STEPS})
    return float(cells.rows[key]["step_s"])


def step_key(job: Job) -> str:
    return f"{job.place}/{job.method}/{job.seed}/step"


def probe(group: Hosts, cells: Cells, name: str) -> None:
    """Measure the lines that the hosts have now. The measurements have a cell of their own."""
    key = f"{name}/probes"
    if not cells.has(key):
        with cells.watched(group.pids) as about:
            fields = group.call(fields_of)[0]
        cells.put(key, about | {"fields": fields})


def fields_of() -> dict[str, Any]:
    """Measure this host's lines, with the functions of `exogym doctor --measure` and fewer repeats."""
    probing.MESSAGES = MESSAGES
    calls, tables = probing._calls(NODES), {}
    for kind in PROBED:
        parts = NODES if kind in probing.OF_ALL_PARTS else 1
        times = {size: probing._times(calls[kind], probing._numbers(kind, size), REPEATS) for size in PROBED_BYTES}
        medians = never_falling({size // parts: statistics.median(took) for size, took in times.items()})
        tables[kind] = {str(size): seconds for size, seconds in medians.items()}
    return {"num_nodes": NODES, "collectives": tables, "message_s": probing._message_s()}


def row_of(job: Job, own_s: float, known: Row, group: Hosts) -> dict[str, Any]:
    """Train a job, and return its row without predictions. `known`: the table's row."""
    table_losses = dict(zip(map(int, known["steps"]), known["losses"], strict=True))
    sleeps = sleeps_s(sites(NODES)[job.network], own_s)
    answers = group.train({"key": str(job), "sleeps_s": sleeps, "last": job.last, "free": False})
    found = group.call(seen)[0]
    upto = [k for k, step in enumerate(found["steps"]) if step <= job.last]
    steps, losses = ([found[name][k] for k in upto] for name in ("steps", "losses"))
    differ = max(abs(loss / table_losses[int(step)] - 1) for step, loss in zip(steps, losses, strict=True))
    arrived = Curve(tuple(steps), tuple(losses)).until(job.target)
    measured_s = float(np.interp(arrived, steps, [found["seconds"][k] for k in upto]))
    wire_s = math.fsum(end - start for start, end, _ in answers[0]["spans"])
    return asdict(job) | {
        "arrived": arrived, "differ": differ, "measured_s": measured_s, "on_the_wire_s": wire_s,
        "evaluating_s": found["evaluating_s"][upto[-1]],
    }  # fmt: skip


def with_predictions(job: Job, table: Table, cells: Cells) -> dict[str, Any]:
    """Return a measured cell's row with the predicted seconds, and the shares by which they are off."""
    parameters, steps = _own_size(table.places[job.place]), table_row(table, job)["steps"]
    own_s = cells.rows[step_key(job)]["step_s"]
    row = cells.rows[str(job)] | {"own_s": own_s, "off": {}}
    site, probed = sites(NODES)[job.network], Network.of(cells.rows[f"{job.network}/probes"]["fields"])
    for name, network in zip(PREDICTIONS, (site.network, over_tcp(site.network), probed), strict=True):
        row[f"{name}_s"] = job.steps * step_s(parameters, site, job.method, own_s, network)
        row[f"{name}_s"] += evaluations(job, steps) * AGREEMENTS * network.message_s
        row["off"][name] = row[f"{name}_s"] / row["measured_s"] - 1
    return row


def over_tcp(network: Network) -> Network:
    """Return the network with `tcp=True`. Its lines' rates are higher, because the network's rates are payload."""

    def scaled(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: scaled(key, one) for key, one in value.items()}
        if name not in RATES:
            return value
        return [one / PAYLOAD_SHARE for one in value] if isinstance(value, list) else value / PAYLOAD_SHARE

    return Network.of(scaled("", network.at(0.0).describe()) | {"tcp": True})


def evaluations(job: Job, steps: Sequence[int]) -> int:
    """Return how many evaluations before the arrival ended a stretch in which nodes would not have communicated."""
    H = int(h_of(job.method) or 1)
    return sum(0 < step < job.steps and step % H > 0 for step in steps)


def table_row(table: Table, job: Job) -> Row:
    key = ("tuned", job.place, job.method, job.seed)
    return next(row for row in table.rows if (row["kind"], row["place"], named(row), row["seed"]) == key)


def is_near(network: Network) -> bool:
    return isinstance(network.links, UniformLinks) and network.links.latency_s <= NEAR_S


def compare(jobs: Sequence[Job], table: Table, cells: Cells) -> None:
    """Measure the wanted cells, and print each row."""
    for job in jobs:
        SESSIONS[str(job)] = session_of(job, table.places[job.place]["steps"])
    for name in ("_evaluate", "_measure_apart"):
        timed(name)
    far = Switched(NODES, train, urgent=True)
    try:
        with hosts(NODES, train, urgent=True) as near:
            far.connect()
            near.meet()
            far.meet()
            for job in jobs:
                known = all(map(cells.has, (str(job), step_key(job), f"{job.network}/probes")))
                if known or cells.is_over:
                    cells.left += not known
                    continue
                own_s, network = own_step_s(near, cells, job), sites(NODES)[job.network].network
                if is_near(network):
                    near.limit(f"{float(network.links.line(0)[0]) / PAYLOAD_SHARE / 1e6:.0f}mbit")
                else:
                    far.set(network)
                group: Hosts = near if is_near(network) else far
                probe(group, cells, job.network)
                if not cells.has(str(job)):
                    with cells.watched(group.pids) as about:
                        row = row_of(job, own_s, table_row(table, job), group)
                    cells.put(str(job), row | about)
                show(with_predictions(job, table, cells))
    finally:
        far.close()


def show(row: dict[str, Any]) -> None:
    out = [f"{row['task']:8s} {row['network']:17s} {row['level']:4g} {row['method']:21s} {row['steps']:6.1f}"]
    out += [f"{row[f'{name}_s']:8.2f} {row['off'][name]:+7.1%}" for name in PREDICTIONS]
    out += [f"{row['measured_s']:8.2f} {row['evaluating_s']:10.2f} {row['differ']:9.1e} {row['others_cores']:6.2f}"]
    print(*out, "disturbed" if row["is_disturbed"] else "", flush=True)


def report(rows: Sequence[dict[str, Any]], limit: float) -> str:
    """Print how many cells are within `limit`. Return what is wrong, or ""."""
    for name in PREDICTIONS:
        off = [abs(row["off"][name]) for row in rows]
        print(f"{name}: {sum(x <= limit for x in off)} of {len(rows)} within {limit:.0%}, the worst {max(off):.1%} off")
    print(f"disturbed: {sum(row['is_disturbed'] for row in rows)}")
    wrong = [f"{row['place']}'s losses differ by {row['differ']:.1e}" for row in rows if row["differ"] > SAME]
    missed = sum(abs(row["off"]["probes"]) > limit for row in rows)
    return "; ".join(wrong + [f"{missed} cells are off by more than {limit:.0%}"] * bool(missed))


def write_csv(path: str, rows: Sequence[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as out:
        lines = csv.writer(out)
        lines.writerow([*SHOWN, *(f"{p}_off" for p in PREDICTIONS), "evaluating_s", "losses_differ", "others_cores"])
        for row in rows:
            numbers = [*(row["off"][name] for name in PREDICTIONS), row["evaluating_s"], row["differ"]]
            shown = [*(row[name] for name in SHOWN), *numbers, row["others_cores"]]
            lines.writerow([f"{x:.4g}" if isinstance(x, float) else x for x in shown])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", metavar="TABLE", help="a table of python -m research benchmark --trials")
    parser.add_argument("--list", action="store_true", help="print the drawn cells, and measure nothing")
    parser.add_argument("--only", default="", help="words, by commas: measure only cells whose name has one of them")
    parser.add_argument("--limit", type=float, default=0.10, help="largest share by which a prediction may be off")
    parser.add_argument("--json", metavar="FILE", help="file for measured cells; they are not measured again")
    parser.add_argument("--csv", metavar="FILE", help="file for the table")
    parser.add_argument("--again", choices=AGAIN, help="cells to measure again")
    parser.add_argument("--turn", type=float, help="seconds after which no cell begins")
    given = parser.parse_args()
    table = Table(given.table)
    jobs = [job for job in drawn(table) if any(word in str(job) for word in given.only.split(","))]
    if given.list:
        for job in jobs:
            step = step_s(table.places[job.place]["parameters"], sites(NODES)[job.network], job.method)
            print(f"{job!s:60s} {job.steps:7.1f} {job.steps * step:6.1f}")
        return
    enter()
    cells = Cells(given.json, given.again, given.limit, given.turn)
    print(load())
    print(
        "task     network          level method                 steps  formula     off      tcp     off",
        end="",
    )
    print("   probes     off measured evaluating    losses others")
    compare(jobs, table, cells)
    print(load())
    rows = [with_predictions(job, table, cells) for job in jobs if str(job) in cells.rows]
    for row in rows:
        show(row)
    wrong = report(rows, given.limit)
    if given.csv:
        write_csv(given.csv, rows)
    if cells.left or wrong:
        raise SystemExit(f"advised: {cells.left} cells are left: give the command again" if cells.left else wrong)


if __name__ == "__main__":
    main()
