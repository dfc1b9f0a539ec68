"""HALoS: islands with servers below a global server, against a plain loop, its identities, bytes, time and laws."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import os
import signal
from typing import Any

import pytest
import torch
from battery import each
from problems import BATCH, Regressor, loss_of, put, same, shards, train, unlike, vector
from torch import Tensor

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.clock import StepTime
from exogym.errors import ArgumentError
from exogym.network import Network
from exogym.strategy import AsyncDiLoCoStrategy, HALoSStrategy, OptimSpec
from exogym.study.advise import advise
from exogym.testing import fingerprint, small_problem

SIZE = 57 * 8
TIMED = ("wall_s", "memory_bytes", "device_use", "examples_per_s")
FREE = "1000000000000Gbps"  # messages that take no time


# The reference, written from the method's description and its authors' simulator before `exogym.contrib.halos`


class Nesterov:
    """Delayed Nesterov on a vector: each change at once with the rate, the momentum after every `delay` changes."""

    def __init__(self, at: Tensor, rate: float, beta: float, delay: int):
        self.at, self.rate, self.beta, self.delay = at.clone(), rate, beta, delay
        self.m, self.sum, self.count = torch.zeros_like(at), torch.zeros_like(at), 0

    def step(self, delta: Tensor) -> None:
        self.sum, self.count = self.sum + delta, self.count + 1
        self.at = self.at - self.rate * delta
        if self.count % self.delay == 0:
            self.m = self.beta * self.m + self.sum / self.delay
            self.at = self.at - self.rate * self.delay * self.beta * self.m
            self.sum = torch.zeros_like(delta)


def by_hand(
    seconds: list[float], steps: int, *, size: int = 2, H: int = 3, K: int = 4, alpha: float = 0.25,
    low: tuple[float, float, int] = (0.2, 0.9, 3), high: tuple[float, float, int] = (0.15, 0.5, 2),
    near_s: float = 0.0, far_s: float = 0.0, work: list[int] | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """Return the global model after `steps` local steps per node, and how many messages the islands sent up."""
    count, data = len(seconds), shards(len(seconds))
    models = [copy.deepcopy(Regressor()) for _ in data]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False) for model in models]
    first = vector(models[0])
    work = work or [H] * count
    islands = [Nesterov(first, *low) for _ in range(-(-count // size))]
    center = Nesterov(first, *high)
    merged, since = [first.clone() for _ in islands], [0] * len(islands)
    message: dict[int, Tensor] = {}
    given, done, taken, start = [first.clone() for _ in data], [0] * count, [0] * count, [0.0] * count
    UP, DOWN, ARRIVAL, STEP = range(4)  # what comes first among events of one moment
    events = [(seconds[w], STEP, w) for w in range(count)]
    heapq.heapify(events)
    total = sent = 0
    while not (events[0][1] == STEP and total == count * steps):
        now, kind, who = heapq.heappop(events)
        if kind == STEP:
            x, y = data[who].tensors
            k = taken[who] % (len(x) // BATCH) * BATCH
            optimizers[who].zero_grad()
            loss_of(models[who], x[k : k + BATCH], y[k : k + BATCH]).backward()
            optimizers[who].step()
            total, taken[who], done[who] = total + 1, taken[who] + 1, done[who] + 1
            if done[who] == work[who]:
                heapq.heappush(events, (now + near_s, ARRIVAL, who))
            else:
                heapq.heappush(events, (start[who] + (done[who] + 1) * seconds[who], STEP, who))
        elif kind == ARRIVAL:
            r = who // size
            islands[r].step(given[who] - vector(models[who]))
            since[r] += 1
            given[who] = islands[r].at.clone()  # before the global model comes, even if that takes no time
            put(models[who], given[who])
            start[who], done[who] = now + near_s, 0
            heapq.heappush(events, (start[who] + seconds[who], STEP, who))
            if since[r] == K:  # never again until the answer is merged
                message[r], sent = merged[r] - islands[r].at, sent + 1
                heapq.heappush(events, (now + far_s, UP, r))
        elif kind == UP:
            center.step(message[who])
            message[who] = center.at.clone()
            heapq.heappush(events, (now + far_s, DOWN, who))
        else:
            islands[who].at = (1 - alpha) * islands[who].at + alpha * message[who]
            merged[who], since[who] = islands[who].at.clone(), 0
    return center.at, sent


SECONDS = [4.0, 2.1, 1.3, 3.7]


def made(**options: Any) -> Any:
    given = {"H": 3, "lr": 0.01, "island_delay": 3, "accumulation": 4} | options
    return HALoSStrategy(OptimSpec("adamw", foreach=False), **given)


# options, network and what the reference is told
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "at once": ({}, FREE, {}),
    "every arrival": ({"accumulation": 1, "merge": 1.0}, FREE, {"K": 1, "alpha": 1.0}),
    "one island": ({"island_size": 4}, FREE, {"size": 4}),
    "a smaller island": ({"island_size": 3}, FREE, {"size": 3}),
    "rates": (
        {"island_lr": 0.4, "island_momentum": 0.5, "outer_lr": 0.6, "outer_momentum": 0.7, "outer_delay": 1},
        FREE,
        {"low": (0.4, 0.5, 3), "high": (0.6, 0.7, 1)},
    ),
    "far": (
        {"accumulation": 2, "merge": 0.6},
        Network.groups([2, 2], Network(1e30, 0.25), Network(1e30, 2.75)),
        {"K": 2, "alpha": 0.6, "near_s": 0.25, "far_s": 2.75},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_a_loop_in_plain_torch(name: str) -> None:
    (options, network, wanted), steps = CASES[name], 30
    run = train(made(**options), steps=steps, network=network, step_seconds=SECONDS)
    theta, sent = by_hand(SECONDS, steps, **wanted)
    same(run.model, theta, 1e-11)
    assert sent >= 4 and run.trainer.traffic["relay push"]["calls"] == sent
    for other in ({"alpha": 0.9}, {"K": 3}, {"low": (0.2, 0.9, 2)}, {"high": (0.15, 0.5, 3)}, {"far_s": 6.1}):
        unlike(run.model, by_hand(SECONDS, steps, **wanted | other)[0])


def test_dynamic_local_updates_follow_the_whole_fleet() -> None:
    seconds = [4.0, 2.0, 1.0, 1.6]
    run = train(made(H=8, dylu=True), steps=30, network=FREE, step_seconds=seconds)
    same(run.model, by_hand(seconds, 30, work=[2, 4, 8, 5])[0], 1e-11)
    unlike(run.model, by_hand(seconds, 30, work=[2, 4, 8, 8])[0])


# Identities


def test_one_island_below_a_server_that_takes_all_is_asynchronous_diloco() -> None:
    """The global server then holds the island's parameters, so a merge changes nothing."""
    speeds: dict[str, Any] = {"network": FREE, "step_seconds": SECONDS, "steps": 20}
    options = {"island_size": 4, "accumulation": 1, "outer_momentum": 0.0}
    wanted = train(AsyncDiLoCoStrategy("adamw", H=3, lr=0.01, period=3, outer_lr=0.6), **speeds).model
    same(train(made(outer_lr=1.0, **options), **speeds).model, wanted, 1e-11)
    for other in ({"outer_lr": 0.9}, {"outer_lr": 1.0, "accumulation": 2}, {"outer_lr": 1.0, "island_size": 2}):
        unlike(train(made(**options | other), **speeds).model, wanted)


def test_islands_that_merge_nothing_are_fleets_of_their_own() -> None:
    speeds: dict[str, Any] = {"network": FREE, "steps": 12}
    data = shards(4)
    both = train(made(merge=0.0), data, step_seconds=[2.0, 1.0, 2.0, 1.0], **speeds).rows
    alone = AsyncDiLoCoStrategy(OptimSpec("adamw", foreach=False), H=3, lr=0.01, period=3, outer_lr=0.6)
    for nodes in ([0, 1], [2, 3]):
        wanted = train(alone, [data[i] for i in nodes], 2, step_seconds=[2.0, 1.0], **speeds).rows
        same(both[nodes], wanted, 1e-11)
        merged = train(made(merge=0.25), data, step_seconds=[2.0, 1.0, 2.0, 1.0], **speeds).rows
        unlike(merged[nodes], wanted)


# Time and bytes


def test_no_node_waits_for_the_global_server() -> None:
    """The same nodes' times on lines between islands that are 1,000 times slower; the relays end later."""
    speeds: dict[str, Any] = {"step_seconds": [0.4, 0.3, 0.2, 0.1], "steps": 40}
    runs = []
    for between in ("1Mbps,1ms", "1kbps,1s"):
        network = Network.groups([2, 2], "1Mbps,5ms", between)
        runs.append(train(made(accumulation=2), network=network, **speeds))
    near, far = runs
    assert near.trainer.clock.time_s.tolist() == far.trainer.clock.time_s.tolist()
    assert far.trainer.clock.seconds("sending").tolist() == near.trainer.clock.seconds("sending").tolist()
    assert near.trainer.traffic["relay push"]["calls"] > 2 * far.trainer.traffic["relay push"]["calls"] > 0
    alike = train(AsyncDiLoCoStrategy(H=3, lr=0.01), network=Network.groups([2, 2], "1Mbps,5ms", "1kbps,1s"), **speeds)
    assert alike.trainer.clock.seconds("sending").min() > 10 * far.trainer.clock.seconds("sending").max()


def test_a_relay_takes_a_message_to_a_server_and_back() -> None:
    """456 bytes at 1 kbit/s and 1 s of latency: 4.648 s up, as long down, and the next arrival is sent again.

    The first D leaves at 0.5 s and arrives at 5.148 s. Theta is merged at 9.796 s. The second D leaves at 10 s and
    arrives at 14.648 s.
    """
    network = Network.groups([1, 1], "1Gbps", "1kbps,1s", server="1Gbps")  # no relay waits for the other one
    seen: list[tuple[float, Tensor]] = []
    look = Every(1, lambda loop: seen.append((loop.timing.time_s, loop.driver.model()[0][0].clone())))
    options: dict[str, Any] = {"island_size": 1, "H": 1, "accumulation": 1}
    train(made(**options), num_nodes=2, steps=40, network=network, step_seconds=0.5, callbacks=[look])
    moved = [now for (_, old), (now, new) in itertools.pairwise(seen) if not torch.equal(new, old)]
    assert moved == pytest.approx([5.0, 14.5], abs=0.01)  # the steps that last until 5.5 s and 15 s


def test_relays_count_for_the_first_node_of_their_island() -> None:
    run = train(made(accumulation=2, H=2), steps=12)
    rounds, relays = 6, 6 * 2 // 2  # of a node, of an island
    assert run.payload.tolist() == [SIZE * (rounds + relays * (node % 2 == 0)) for node in range(4)]
    assert run.tx.tolist() == run.rx.tolist() == run.payload.tolist()
    traffic = {name: row["payload_bytes"] for name, row in run.trainer.traffic.items() if "push" in name}
    assert traffic == {"island push": 4 * rounds * SIZE, "relay push": 2 * relays * SIZE}
    row = advise(
        parameters=57, num_nodes=4, network=FREE, step_seconds=1.0, bytes_per_element=8,
        strategies=[made(accumulation=2, H=2)],
    ).rows[0]  # fmt: skip
    assert row.tx_bytes_per_step == pytest.approx(run.payload.mean() / 12)


def test_the_last_steps_reach_the_global_server() -> None:
    """What nodes have not pushed and islands have not sent counts in the end, and nodes wait for it."""
    network = Network.groups([2, 2], Network(1e30, 0.25), Network(1e30, 2.75))
    options: dict[str, Any] = {"steps": 7, "network": network, "step_seconds": SECONDS}
    ends = {final: train(made(), final_sync=final, **options) for final in (False, True)}
    unlike(ends[True].model, ends[False].model)
    up, down = (ends[True].trainer.traffic[f"relay {way}"] for way in ("push", "pull"))
    assert up["tx_bytes"] == down["rx_bytes"] > 0
    later = ends[True].trainer.clock.last_s - ends[False].trainer.clock.last_s
    assert 5.5 <= later < 7.0
    still = train(made(outer_lr=0.0), final_sync=True, **options)
    same(still.model, vector(Regressor()))


def test_the_last_steps_of_islands_with_relays_under_way_reach_the_global_server() -> None:
    """The relays of step 3 never end by themselves. The Delta of step 6 are in no D, but those of step 7 are."""
    options: dict[str, Any] = {"num_nodes": 2, "network": Network.groups([1, 1], FREE, Network(1e30, 1000.0))}
    sums = {"island_momentum": 0.0, "outer_momentum": 0.0, "outer_lr": 1.0, "merge": 0.0}  # servers that only subtract

    def after(steps: int, final_sync: bool) -> Any:
        strategy = made(island_size=1, accumulation=1, **sums)
        return train(strategy, steps=steps, final_sync=final_sync, step_seconds=1.0, **options)

    first, last = after(3, True), after(7, True)
    moved = (after(6, False).rows - last.rows).sum(0)
    same(last.model, first.model - moved, 1e-11)
    unlike(last.model, first.model)
    assert [run.trainer.traffic["relay push"]["calls"] for run in (first, last)] == [2, 4]


# Layouts and stops


def fit(**options: Any) -> Any:
    """Train a model with batch normalisation on unequal, unsteady nodes, with relays always under way."""
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
    strategy = HALoSStrategy(lr=0.02, H=3, dylu=True, accumulation=2, island_delay=3, warmup_steps=4)
    given: dict[str, Any] = {"num_nodes": 4, "max_steps": 17, "batch_size": 8, "device": "cpu", "val_interval": 4}
    given |= {
        "network": Network.groups([2, 2], "1Mbps,1ms", "200kbps,30ms", jitter="3ms"),
        "step_seconds": StepTime([0.1, 0.05, 0.02, 0.03], sigma=0.3),
    }
    trainer.fit(strategy, **given | options)
    rows = [{k: v for k, v in row.items() if k not in TIMED} for row in trainer.history]
    return fingerprint(trainer.model), rows, trainer.traffic, trainer.clock.time_s.tolist()


@pytest.mark.parametrize("stop", each([5, 9, 11], fast=[9]))
def test_a_run_goes_on_from_a_checkpoint_with_relays_under_way(stop: int, tmp_path: Any) -> None:
    def halt(loop: Any) -> None:
        under_way.append(loop.driver.algorithm.order.relays.tolist())
        os.kill(os.getpid(), signal.SIGINT)

    under_way: list[list[int]] = []
    with pytest.raises(KeyboardInterrupt):
        fit(save_dir=tmp_path, callbacks=[Every(stop, halt, may_end=False)])
    assert fit(save_dir=tmp_path, resume=True, processes=2) == fit()
    assert max(under_way[0]) > 0


# Refusals


@pytest.mark.parametrize(("options", "words"), [
    ({"H": 0}, "H=0 must be"), ({"H": lambda r: 3}, "H="), ({"island_size": 0}, "island_size=0 must be"),
    ({"island_delay": 0}, "island_delay=0"), ({"accumulation": 0}, "accumulation=0"),
    ({"outer_delay": 0}, "outer_delay=0"), ({"merge": 1.5}, "merge=1.5"),
    ({"island_lr": -1.0}, "island_lr=-1.0"), ({"outer_lr": "high"}, "outer_lr='high'"),
    ({"island_momentum": 2.0}, "island_momentum=2.0"), ({"outer_momentum": math.nan}, "outer_momentum=nan"),
    ({"regions": 2}, "has no argument 'regions'"),
])  # fmt: skip
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        HALoSStrategy(**options)


@pytest.mark.parametrize(("options", "words"), [
    ({"network": Network.groups([1, 3], "1Gbps", "1Mbps")}, "nodes 0 to 1 are one island .* choose island_size"),
])  # fmt: skip
def test_bad_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fit(**options)
