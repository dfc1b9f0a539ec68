"""Train the cells of claims that do not come out with a second program, and compare the losses with ExoGym's.

Some claims of results/claims.md do not come out. Is this the paper, the setting, or a mistake in ExoGym? This program
trains the cells of the claims `CLAIMS` again at the full size, with the settings of claims.json and its low inner rate.
Its methods are plain loops, written from the papers, and share no code with ExoGym's strategies and trainer. Only the
task (model, data, schedule) and the cells' options come from ExoGym. The initial weights are the same, but batches are
drawn differently. So losses are equal in distribution, not in bits.

    python -m research.claims_by_hand research/results/claims.json --json research/results/claims_by_hand.json
    python -m research.claims_by_hand CLAIMS --json research/results/claims_by_hand.json --same-batches
    python -m research.claims_by_hand CLAIMS --json research/results/claims_by_hand.json sparseloco diloco:H=30

CLAIMS is research/results/claims.json. Each of the first two commands trains about an hour on one core. Runs that the
JSON file has are skipped, and each run is saved when it ends. So you may stop the program and start it again. Words
after the options choose cells whose method has a word. With --same-batches the nodes get the batches of ExoGym's run.
Then losses differ by rounding only, until training has amplified the rounding.

The JSON file: {"cells": {"<place>|<method>": {"val_loss": [the loss for each seed], ...}}, "curves": ...,
"same_batches": {"cells": ..., "curves": ...}}. Place and method are the fields of rows in claims.json. R11 also has
means late in training, of the loss of the outer parameters, the loss of the nodes' mean, and the nodes' own losses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.core.base.rng import numpy_generator, stream_seed
from exogym.data.partition import IID, parse_partitioner
from research.atlas.claims import CENTRAL, Central, studies_at
from research.atlas.halves import halved
from research.atlas.table import RATES, SEEDS
from research.atlas.training import Study
from research.reproduce.checks import late_mean
from research.reproduce.training import STEP_S

CLAIMS = ("R4", "R5", "R6", "R7", "R8", "R11", "R13", "momentum", "scaffold", "sparse-bytes")
NESTEROV = {"outer_lr": 0.7, "outer_momentum": 0.9}  # where neither the task nor a trial has another value
BITS_PER_S = 1e9  # of a node's line, in the runs of claims.json; latency is 0
LATE = ("val_loss", "mean_val_loss", "node_val_loss")
Watch = Callable[[int, Tensor], None]  # receives the step and the outer parameters


# ---------------------------------------------------------------- the task


class Data:
    """A task with its examples as tensors: x, y of shape (examples, ...). `sgd`: without AdamW."""

    def __init__(self, name: str, steps: int | None = None, sgd: bool = False) -> None:
        task, split = halved("test", name)
        self.task, self.sgd = replace(task, max_steps=steps or task.max_steps), sgd
        self.partition = split or parse_partitioner(task.partitioner or "iid")
        self.train, self.val = (
            [torch.stack(column) for column in zip(*(part[k] for k in range(len(part))), strict=True)]
            for part in (self.task.train, self.task.val)
        )
        self.judge = Node(self, 0, 0, 0.0)  # for evaluations only

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate for a step, counted from 0: warm-up, then a cosine that ends at 0."""
        warm, steps = self.task.warmup_steps, self.task.max_steps
        if self.task.lr_scheduler == "constant":
            return 1.0
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))

    @torch.no_grad()
    def loss(self, theta: Tensor) -> float:
        """Return the test loss of parameters."""
        self.judge.row = theta
        return self.judge.model(self.val)["loss"].item()


class Node:
    """A node with its model, its optimizer's state and its share of the examples."""

    def __init__(self, data: Data, seed: int, rank: int, lr: float, count: int = 4, same_batches: bool = False) -> None:
        task, self.rank, self.seed, self.same_batches = data.task, rank, seed, same_batches
        self.data, self.lr, self.model = data, lr, task.make_model(seed)
        kind = torch.optim.SGD if data.sgd else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=lr, fused=True)
        if same_batches or not isinstance(data.partition, IID):
            self.share = torch.from_numpy(data.partition.split(task.train, count, seed)[rank])
        else:
            self.share = torch.randperm(len(data.train[0]), generator=torch.Generator().manual_seed(seed))[rank::count]
        self.batches = self._batches()

    def _batches(self) -> Iterator[Tensor]:
        """Yield batches of the node's examples, in a new order in each pass."""
        draws, drawn = torch.Generator().manual_seed(self.seed), isinstance(self.data.partition, IID)
        for epoch in itertools.count():
            if self.same_batches:
                draws.manual_seed(stream_seed(self.seed, "shuffle", epoch, self.rank))
            elif epoch == 0 and drawn:  # the share is in a random order
                yield from self.share.split(self.data.task.batch_size)
                continue
            order = torch.randperm(len(self.share), generator=draws)
            yield from self.share[order].split(self.data.task.batch_size)

    def step(self, number: int, correction: Tensor | None = None) -> Tensor | None:
        """Take a local step with the learning rate of step `number` of the run.

        With a correction, add it to the gradient, and return the gradient before that.
        """
        chosen, before = next(self.batches), None
        self.model([column[chosen] for column in self.data.train])["loss"].backward()
        if correction is not None:
            before = torch.cat([p.grad.flatten() for p in self.model.parameters()])
            for p, part in zip(self.model.parameters(), self.parts(correction), strict=True):
                p.grad.add_(part)
        if self.data.task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.data.task.max_norm)
        self.optimizer.param_groups[0]["lr"] = self.lr * self.data.factor(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return before

    @property
    def row(self) -> Tensor:
        """A copy of the node's parameters, as one vector."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    @row.setter
    def row(self, values: Tensor) -> None:
        with torch.no_grad():
            for p, part in zip(self.model.parameters(), self.parts(values), strict=True):
                p.copy_(part)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector, in the parameters' shapes."""
        shapes = [p.shape for p in self.model.parameters()]
        pieces = vector.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class Nesterov:
    """SGD with Nesterov's momentum and without weight decay: v <- mu v + g, theta <- theta - eta (g + mu v)."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.eta, self.mu, self.v = options["outer_lr"], options["outer_momentum"], 0.0

    def step(self, theta: Tensor, g: Tensor) -> None:
        self.v = self.mu * self.v + g
        theta -= self.eta * (g + self.mu * self.v)


# ---------------------------------------------------------------- the methods
#
# Each gets the nodes, the method's options, and `watch`, which it calls with the outer parameters after each step.


def diloco(nodes: Sequence[Node], options: dict[str, Any], watch: Watch) -> None:
    """DiLoCo, arXiv:2311.08105. Steps that remain at the end make a short round."""
    theta, outer, steps = nodes[0].row, Nesterov(options), nodes[0].data.task.max_steps
    for t in range(1, steps + 1):
        for node in nodes:
            node.step(t - 1)
        if t % options["H"] == 0 or t == steps:
            outer.step(theta, torch.stack([theta - node.row for node in nodes]).mean(0))
            for node in nodes:
                node.row = theta
        watch(t, theta)


def fedavg(nodes: Sequence[Node], options: dict[str, Any], watch: Watch) -> None:
    """FedAvg, arXiv:1602.05629: after H steps, the mean of the clients of the round."""
    if "client_fraction" in options:
        sampled(nodes, options, watch, control=False)
    else:
        diloco(nodes, options | {"outer_lr": 1.0, "outer_momentum": 0.0}, watch)


def scaffold(nodes: Sequence[Node], options: dict[str, Any], watch: Watch) -> None:
    """SCAFFOLD, arXiv:1910.06378, option II: a client's new control variate is the mean of its round's gradients."""
    sampled(nodes, options, watch, control=True)


def sampled(nodes: Sequence[Node], options: dict[str, Any], watch: Watch, control: bool) -> None:
    """Rounds of H steps, each with a random share of the nodes as clients."""
    N, H, steps = len(nodes), options["H"], nodes[0].data.task.max_steps
    eta, theta = options.get("server_lr", 1.0), nodes[0].row
    c, own = torch.zeros_like(theta), [torch.zeros_like(theta) for _ in nodes]
    count, draws = math.ceil(options["client_fraction"] * N), np.random.default_rng(nodes[0].seed)
    for round_ in range(steps // H):
        if nodes[0].same_batches:
            draws = numpy_generator(nodes[0].seed, "clients", round_)
        clients = sorted(draws.choice(N, count, replace=False).tolist())
        ends, changes = [], []
        for i in clients:
            nodes[i].row = theta
            seen = [nodes[i].step(round_ * H + k, c - own[i] if control else torch.zeros_like(c)) for k in range(H)]
            ends.append(nodes[i].row)
            new = torch.stack([g for g in seen if g is not None]).mean(0)
            changes.append(new - own[i])
            own[i] = new
        theta = theta + eta * (torch.stack(ends).mean(0) - theta)
        c = c + torch.stack(changes).sum(0) / N
        for k in range(H):
            watch(round_ * H + k + 1, theta)


def delayed_diloco(nodes: Sequence[Node], options: dict[str, Any], watch: Watch) -> None:
    """DiLoCo with averages that arrive a round late, arXiv:2502.12996. At the end, both that are left arrive."""
    theta, outer, steps = nodes[0].row, Nesterov(options), nodes[0].data.task.max_steps
    late = torch.zeros_like(theta)
    for t in range(1, steps + 1):
        for node in nodes:
            node.step(t - 1)
        if t % options["H"] == 0 or t == steps:
            mean = torch.stack([theta - node.row for node in nodes]).mean(0)
            outer.step(theta, late)
            late = mean
            if t == steps:
                outer.step(theta, late)
            for node in nodes:
                node.row = theta
        watch(t, theta)


def eager_diloco(nodes: Sequence[Node], options: dict[str, Any], watch: Watch) -> None:
    """Eager updates, arXiv:2502.12996: the other nodes' share is a round late. The result is the nodes' mean."""
    N, steps = len(nodes), nodes[0].data.task.max_steps
    thetas, outers = [node.row for node in nodes], [Nesterov(options) for _ in nodes]
    others = [torch.zeros_like(theta) for theta in thetas]
    for t in range(1, steps + 1):
        for node in nodes:
            node.step(t - 1)
        if t % options["H"] == 0 or t == steps:
            shares = [(theta - node.row) / N for theta, node in zip(thetas, nodes, strict=True)]
            for i, node in enumerate(nodes):
                outers[i].step(thetas[i], shares[i] + others[i])
                others[i] = sum(shares) - shares[i]
                node.row = thetas[i]
        watch(t, torch.stack([node.row for node in nodes]).mean(0))


def streaming_diloco(nodes: Sequence[Node], options: dict[str, Any], watch: Watch) -> None:
    """Streaming DiLoCo, arXiv:2501.18512. At the end, each fragment that is not on its way is sent once more."""
    H, F, alpha = (options[name] for name in ("H", "num_fragments", "fragment_update_alpha"))
    delay, bits, steps = options["fragment_sync_delay"], options.get("bits", 32), nodes[0].data.task.max_steps
    theta, outer = nodes[0].row, [Nesterov(options) for _ in range(F)]
    owner = torch.empty(len(theta), dtype=torch.int64)  # each entry's fragment: layers in turn, the last has the rest
    for (name, _), part in zip(nodes[0].model.named_parameters(), nodes[0].parts(owner), strict=True):
        kind, number, *_ = name.split(".")
        part.fill_(int(number) % (F - 1) if kind == "blocks" else F - 1)
    flying: dict[int, tuple[int, Tensor]] = {}  # fragment to its arrival's step and mean

    def send(p: int, t: int) -> None:
        deltas = [theta - node.row for node in nodes]
        if bits == 4:
            deltas = [torch.cat([e3m0(x).flatten() for x in nodes[0].parts(delta)]) for delta in deltas]
        flying[p] = t + delay, torch.stack(deltas).mean(0)[owner == p]

    def arrive(p: int) -> None:
        mine = owner == p
        part = theta[mine]
        outer[p].step(part, flying.pop(p)[1])
        theta[mine] = part
        for node in nodes:
            node.row = torch.where(mine, alpha * node.row + (1 - alpha) * theta, node.row)

    for t in range(1, steps + 1):
        for node in nodes:
            node.step(t - 1)
        for p in range(F):
            if (t - p * H // F) % H == 0:
                send(p, t)
        for p in [p for p, (at, _) in flying.items() if at == t]:
            arrive(p)
        if t == steps:
            for p in range(F):
                if p not in flying:
                    send(p, t)
                arrive(p)
        watch(t, theta)


def e3m0(x: Tensor) -> Tensor:
    """Round to a sign and one of seven powers of two below the largest entry, or to 0."""
    scale = x.abs().max()
    if scale == 0:
        return x
    exponent = torch.log2(x.abs() / scale).neg()  # infinite for 0
    return torch.where(exponent <= 6.5, x.sign() * scale * 2 ** -exponent.round().clamp(max=6), 0.0)


def sparseloco(nodes: Sequence[Node], options: dict[str, Any], watch: Watch) -> None:
    """SparseLoCo, arXiv:2508.15706: error feedback, no outer momentum; the mean is over all nodes or the senders."""
    theta, steps = nodes[0].row, nodes[0].data.task.max_steps
    errors = [torch.zeros_like(theta) for _ in nodes]
    for t in range(1, steps + 1):
        for node in nodes:
            node.step(t - 1)
        if t % options["H"] == 0 or t == steps:
            sent = []
            for node, e in zip(nodes, errors, strict=True):
                e.mul_(options["error_decay"]).add_(theta - node.row)
                sent.append(torch.cat([two_bits(largest(part)).flatten() for part in node.parts(e)]))
                e -= sent[-1]
            shares, mean = torch.stack(sent), options.get("aggregation") != "contributors"
            theta -= options["outer_lr"] * (
                shares.mean(0) if mean else shares.sum(0) / (shares != 0).sum(0).clamp(min=1)
            )
            for node in nodes:
                node.row = theta
        watch(t, theta)


def largest(e: Tensor) -> Tensor:
    """Keep the 64 largest entries of 4,096, in blocks of at most 64 x 64; other entries become 0."""
    table = e if e.ndim == 2 else e[None]
    most = (64, 64) if e.ndim == 2 else (1, 4096)
    a, b = (max(d for d in range(1, m + 1) if n % d == 0) for n, m in zip(table.shape, most, strict=True))
    blocks = table.reshape(len(table) // a, a, -1, b).transpose(1, 2)
    flat = blocks.reshape(-1, a * b)
    places = flat.abs().topk(max(1, round(64 * a * b / 4096))).indices
    kept = torch.zeros_like(flat).scatter(1, places, flat.gather(1, places))
    return kept.reshape(blocks.shape).transpose(1, 2).reshape(e.shape)


def two_bits(v: Tensor) -> Tensor:
    """Replace a tensor's entries that are not 0 by their bin's mean; four bins span six standard deviations."""
    values = v[v != 0]
    if len(values) < 2:
        return v
    codes = (((values - values.mean()) / (6 * values.std() / 4)).round() + 2).clamp(0, 3)
    return v.masked_scatter(v != 0, torch.stack([values[codes == code].mean() for code in codes]))


def async_diloco(nodes: Sequence[Node], options: dict[str, Any], watch: Watch) -> None:
    """Asynchronous DiLoCo, arXiv:2401.09135, on a clock: a step takes STEP_S / speed, and a message its bytes' time.

    A step of the run is N local steps of any nodes. At the end nodes push their unfinished rounds.
    """
    N, rule, speeds = len(nodes), options["rule"], options["speeds"]
    H = [max(1, int(v / max(speeds) * options["H"])) if options.get("dylu") else options["H"] for v in speeds]
    theta, naive = nodes[0].row, Nesterov(options)
    eta, beta, m, A = options["outer_lr"], options["outer_momentum"], torch.zeros_like(theta), torch.zeros_like(theta)
    pulled, version = [theta.clone() for _ in nodes], [0] * N
    done, arrivals = [0] * N, 0  # steps of each node since its last push, and pushes

    def arrive(w: int) -> None:
        nonlocal arrivals
        delta = pulled[w] - nodes[w].row
        if rule == "delayed_nesterov":  # with c = 0
            A.add_(delta)
            theta.sub_(eta * delta / N)
            if (arrivals + 1) % N == 0:
                m.mul_(beta).add_(A / N)
                theta.sub_(eta * beta * m)
                A.zero_()
        else:
            staleness = arrivals - version[w]
            naive.step(theta, delta / N * ((1 + staleness) ** -0.5 if rule == "discount" else 1))
        arrivals += 1
        pulled[w], version[w], done[w] = theta.clone(), arrivals, 0
        nodes[w].row = theta

    # Times are whole nanoseconds, so that steps at the same time are equal. Then pushes come first, then lower ranks.
    message, begin = round(32 * len(theta) / BITS_PER_S * 1e9), [0] * N
    PUSH, STEP = 0, 1

    def time_of(w: int, number: int) -> int:
        return begin[w] + number * round(STEP_S / speeds[w] * 1e9)

    events = [(time_of(w, 1), STEP, w) for w in range(N)]
    taken, total = 0, N * nodes[0].data.task.max_steps
    while True:
        events.sort()
        at, what, w = events[0]
        if what == PUSH:
            arrive(w)
            begin[w] = at + message
        else:
            if taken and taken % N == 0:
                if taken == total:
                    break
                watch(taken // N, theta)
            nodes[w].step(taken // N)
            taken, done[w] = taken + 1, done[w] + 1
        ends = done[w] == H[w]
        events[0] = (at + message, PUSH, w) if ends else (time_of(w, done[w] + 1), STEP, w)
    left = [(at if what == PUSH else time_of(w, done[w]) + message, w) for at, what, w in events if done[w]]
    for _, w in sorted(left):
        arrive(w)
    watch(total // N, theta)


METHODS = {
    each.__name__: each
    for each in (diloco, fedavg, scaffold, delayed_diloco, eager_diloco, streaming_diloco, sparseloco, async_diloco)
}


# ---------------------------------------------------------------- cells and results


@dataclass(frozen=True)
class HandCell:
    """A cell: its study, its rows of claims.json with seeds 1, 2 and 3, and its defaults."""

    study: Study
    rows: Sequence[dict[str, Any]]
    defaults: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.study.place}|{self.study.method}"

    @property
    def options(self) -> dict[str, Any]:
        texts = dict(part.split("=") for part in self.study.method.split(":")[1:]) | self.rows[0]["options"]
        given = {name: number(value) for name, value in texts.items()} | {"speeds": self.study.cell.speeds}
        return self.defaults | {"lr": self.defaults.get("inner_rate")} | given

    def theirs(self, name: str) -> list[float]:
        """Return ExoGym's loss for each seed."""
        if not name.startswith("late_"):
            return [row["loss"] for row in self.rows]
        curves = ({"val_loss": row["losses"], **row["curves"]} for row in self.rows)
        return [late_mean(each[name.removeprefix("late_")]) for each in curves]

    def data(self) -> Data:
        return Data(self.study.cell.task, self.study.cell.steps, self.options.get("inner_optim") == "sgd")

    def train(self, data: Data, seed: int, same_batches: bool) -> tuple[dict[str, float], list[float]]:
        """Return the losses, and the curve of the outer parameters' loss."""
        count = self.study.cell.nodes or data.task.num_nodes
        nodes = [Node(data, seed, r, self.options["lr"], count, same_batches) for r in range(count)]
        curves: dict[str, list[float]] = {name: [] for name in LATE}

        def watch(step: int, theta: Tensor) -> None:
            if step not in self.rows[0]["steps"]:
                return
            curves["val_loss"].append(data.loss(theta))
            if self.study.cell.replicas:
                curves["mean_val_loss"].append(data.loss(torch.stack([node.row for node in nodes]).mean(0)))
                curves["node_val_loss"].append(statistics.fmean(data.loss(node.row) for node in nodes))

        watch(0, nodes[0].row)
        kind = "eager_" if self.options.get("eager") else "delayed_" if self.options.get("delay") else ""
        METHODS[kind + self.study.method.partition(":")[0]](nodes, self.options, watch)
        late = {f"late_{name}": late_mean(curve) for name, curve in curves.items() if self.study.cell.replicas}
        return {"val_loss": curves["val_loss"][-1], **late}, curves["val_loss"]


def number(text: str) -> Any:
    """Return an option's value: a number, a truth value or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def keys_of(central: Central) -> dict[str, str]:
    """Return a dict from a claim's labels to the cells' keys."""
    return {label: f"{each.place}|{each.method}" for label, each in studies_at(central, "full").items()}


def cells_of(table: dict[str, Any], centrals: Iterable[Central]) -> Iterator[HandCell]:
    """Yield the cells of which the table has runs."""
    for study in dict.fromkeys(study for each in centrals for study in studies_at(each, "full").values()):
        mine = [row for row in table["rows"] if (row["place"], row["method"]) == (study.place, study.method)]
        rows = [row for row in mine if row["kind"] == RATES[0]]
        given = next((row["arguments"] for row in mine if row.get("arguments")), {})
        if rows:
            defaults = {name: value for name, value in given.items() if value is not None}
            yield HandCell(study, sorted(rows, key=lambda row: SEEDS.index(row["seed"])), NESTEROV | defaults)


def train(cells: Sequence[HandCell], path: Path, same_batches: bool) -> dict[str, Any]:
    """Train the missing runs, and return all results."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": {}, "curves": {}}
    part = found.setdefault("same_batches", {"cells": {}, "curves": {}}) if same_batches else found
    left = [(cell, seed) for cell in cells for seed in SEEDS[len(part["curves"].get(cell.key, [])) :]]
    if not left:
        return found
    data = {cell.key: cell.data() for cell, _ in left}
    steps = sum(
        data[cell.key].task.max_steps * (cell.study.cell.nodes or data[cell.key].task.num_nodes) for cell, _ in left
    )
    print(f"{len(left)} runs, about {math.ceil(1.15 * step_s(data[left[0][0].key]) * steps / 60)} minutes", flush=True)
    for cell, seed in left:
        start = time.perf_counter()
        losses, curve = cell.train(data[cell.key], seed, same_batches)
        for name, loss in losses.items():
            part["cells"].setdefault(cell.key, {}).setdefault(name, []).append(round(loss, 5))
        part["curves"].setdefault(cell.key, []).append([round(loss, 5) for loss in curve])
        new = path.with_suffix(".part")
        new.write_text(json.dumps(found) + "\n")
        os.replace(new, path)
        print(f"{cell.key}, seed {seed}: {losses['val_loss']:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    return found


def step_s(data: Data) -> float:
    """Return about how many seconds a local step takes."""
    node = Node(data, 0, 0, 0.001)
    node.step(0)
    start = time.perf_counter()
    for _ in range(20):
        node.step(0)
    return (time.perf_counter() - start) / 20


# ---------------------------------------------------------------- the table


def spread(losses: Sequence[float]) -> str:
    return f"{statistics.fmean(losses):.4f} ± {(max(losses) - min(losses)) / 2:.4f}"


def effect(central: Central, losses: Callable[[str, str], Sequence[float]]) -> float:
    """Return a claim's mean log(worse / better), from a function that returns a key's losses with a name."""
    keys = keys_of(central)
    late = "" if central.of_worse == "val_loss" else "late_"
    better = losses(keys[central.better], f"{late}val_loss")
    worse = losses(keys[central.worse], f"{late}{central.of_worse}")
    return statistics.fmean(math.log(w) - math.log(b) for b, w in zip(better, worse, strict=True))


def report(cells: Sequence[HandCell], centrals: Iterable[Central], found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of two tables: the cells' losses, and the claims' effects where all cells are trained."""
    by_key = {cell.key: cell for cell in cells}
    same = found.get("same_batches", {"cells": {}, "curves": {}})
    yield "| cell | loss | ExoGym | by hand | difference | same batches | difference |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for cell in cells:
        for name, losses in (found["cells"].get(cell.key) or same["cells"].get(cell.key, {})).items():
            line = [cell.key.replace("|", ", "), name, spread(cell.theirs(name))]
            for part in (found, same):
                losses = part["cells"].get(cell.key, {}).get(name, [])
                change = statistics.fmean(losses) - statistics.fmean(cell.theirs(name)[: len(losses)]) if losses else 0
                line += [spread(losses), f"{change:+.4f}"] if losses else ["", ""]
            yield f"| {' | '.join(line)} |"
    yield "\n| claim | effect, ExoGym | by hand | same batches |\n| --- | --- | --- | --- |"
    for central in (each for each in centrals if by_key.keys() >= {*keys_of(each).values()}):
        line = [f"{effect(central, lambda key, name: by_key[key].theirs(name)):+.4f}"]
        for part in (found, same):
            whole = all(len(part["curves"].get(key, [])) == len(SEEDS) for key in keys_of(central).values())
            line += [f"{effect(central, lambda key, name, of=part['cells']: of[key][name]):+.4f}" if whole else ""]
        yield f"| {central.name} | {' | '.join(line)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", type=Path, help="ExoGym's results, research/results/claims.json")
    parser.add_argument("--json", type=Path, required=True, help="file of this program's results")
    parser.add_argument("words", nargs="*", metavar="cells", help="train only cells whose method contains a word")
    parser.add_argument("--same-batches", action="store_true", help="train on the batches of ExoGym's runs")
    given = parser.parse_intermixed_args()  # words may follow the options
    torch.set_num_threads(1)
    table = json.loads(given.claims.read_text())
    centrals = [CENTRAL[name] for name in CLAIMS]
    cells = list(cells_of(table, centrals))
    chosen = [cell for cell in cells if not given.words or any(word in cell.study.method for word in given.words)]
    found = train(chosen, given.json, given.same_batches)
    print("\n".join(report(cells, centrals, found)))


if __name__ == "__main__":
    main()
