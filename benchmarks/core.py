"""Speed and memory of the core, as ratios against a hand-written loop measured in the same run.

    python benchmarks/core.py              all figures, about five minutes
    python benchmarks/core.py --repeat 3   fewer repetitions

One intra-op thread. Peers and ExoGym take turns, and each ratio is the median over the turns. Seconds are CPU
seconds of the process, so other load on the machine counts little.

fedavg    MLP 784-200-10, batch 20, plain SGD, 100 clients with 30 local steps a round, all clients or 10 of them at
          a time. The peer: one module, weights copied in per client, autograd, torch.optim.SGD, running average.
sparta    the same model and data, 100 nodes, p = 0.005, communicating at every step; the same peer.
ddp       4 nodes of a 0.8M-parameter GPT against one model trained on the same batches (gradients accumulated).
memory    1,000 nodes of the MLP, in a process of its own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.core.record.metrics import peak_memory_bytes
from exogym.data.stream import Stream
from exogym.models import CharGPT
from exogym.strategy import FedAvgStrategy, SimpleReduceStrategy, SPARTAStrategy

BATCH, LOCAL_STEPS, LR = 20, 30, 0.1
loss_fn = nn.functional.cross_entropy


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def digits(examples: int) -> TensorDataset:
    """Return random pictures with learnable labels. Their content does not change the speed."""
    torch.manual_seed(0)
    x = torch.rand(examples, 784)
    return TensorDataset(x, (x[:, :10] + 0.3 * torch.rand(examples, 10)).argmax(1))


def hand_fedavg(data: TensorDataset, clients: int, rounds: int, chosen: list[list[int]]) -> tuple[float, float]:
    """Train with a loop as written by hand. Return (node-steps per CPU second, loss of the final model)."""
    x, y = data.tensors
    stream = Stream(data, clients, batch_size=BATCH)
    steps = [0] * clients
    order = [[torch.from_numpy(stream.indices(c, s)[0]) for s in range(rounds * LOCAL_STEPS)] for c in range(clients)]
    model = mlp()
    theta = [p.detach().clone() for p in model.parameters()]
    start, done = time.process_time(), 0
    for members in chosen:
        total = [torch.zeros_like(t) for t in theta]
        for client in members:
            with torch.no_grad():
                for p, t in zip(model.parameters(), theta, strict=True):
                    p.copy_(t)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(LOCAL_STEPS):
                batch = order[client][steps[client]]
                optimizer.zero_grad()
                loss_fn(model(x[batch]), y[batch]).backward()
                optimizer.step()
                steps[client] += 1
            done += LOCAL_STEPS
            with torch.no_grad():
                for t, p in zip(total, model.parameters(), strict=True):
                    t.add_(p)
        theta = [t / len(members) for t in total]
    seconds = time.process_time() - start
    with torch.no_grad():
        for p, t in zip(model.parameters(), theta, strict=True):
            p.copy_(t)
        return done / seconds, float(loss_fn(model(x), y))


def exogym_run(strategy: object, data: TensorDataset, nodes: int, steps: int, acting: int) -> tuple[float, float]:
    model = mlp()
    trainer = LocalTrainer(model, data, loss_fn=loss_fn)
    start = time.process_time()
    trainer.fit(strategy, num_nodes=nodes, max_steps=steps, batch_size=BATCH, device="cpu", log_interval=LOCAL_STEPS)
    seconds = time.process_time() - start
    x, y = data.tensors
    with torch.no_grad():
        return acting * steps / seconds, float(loss_fn(model(x), y))


def clients_of(fraction: float, clients: int, rounds: int) -> list[list[int]]:
    """Return the clients that FedAvgStrategy draws, so that the hand-written loop trains the same clients."""
    if fraction == 1:
        return [list(range(clients))] * rounds
    from exogym.core.base.rng import numpy_generator

    size = max(math.ceil(fraction * clients), 1)
    return [
        sorted(numpy_generator(0, "clients", r).choice(clients, size, replace=False).tolist()) for r in range(rounds)
    ]


def fedavg_and_sparta(repeat: int, rounds: int = 2) -> None:
    data = digits(12000)
    ratios: dict[str, list[float]] = {"fedavg 100 at a time": [], "fedavg 10 at a time": [], "sparta p=0.005": []}
    rates: list[float] = []
    for _ in range(repeat):
        peer, peer_loss = hand_fedavg(data, 100, rounds, clients_of(1.0, 100, rounds))
        rates.append(peer)
        ours, loss = exogym_run(FedAvgStrategy("sgd", H=LOCAL_STEPS, lr=LR), data, 100, rounds * LOCAL_STEPS, 100)
        assert abs(loss - peer_loss) < 2e-3, (loss, peer_loss)
        ratios["fedavg 100 at a time"].append(ours / peer)
        sparta, _ = exogym_run(SPARTAStrategy("sgd", 0.005, lr=LR), data, 100, rounds * LOCAL_STEPS, 100)
        ratios["sparta p=0.005"].append(sparta / peer)
        few = 10 * rounds
        peer, peer_loss = hand_fedavg(data, 100, few, clients_of(0.1, 100, few))
        strategy = FedAvgStrategy("sgd", H=LOCAL_STEPS, lr=LR, client_fraction=0.1)
        ours, loss = exogym_run(strategy, data, 100, few * LOCAL_STEPS, 10)
        assert abs(loss - peer_loss) < 2e-3, (loss, peer_loss)
        ratios["fedavg 10 at a time"].append(ours / peer)
    print(
        f"hand-written loop: {statistics.median(rates):,.0f} node-steps per CPU second; final losses agree within 2e-3"
    )
    for name, values in ratios.items():
        report(name, values)


def ddp(repeat: int, steps: int = 40, nodes: int = 4, batch: int = 8) -> None:
    vocabulary, block = 65, 64

    def gpt() -> nn.Module:
        torch.manual_seed(1)
        return CharGPT(vocabulary, block, n_layer=4, n_head=4, n_embd=128)

    torch.manual_seed(0)
    tokens = torch.randint(0, vocabulary, (nodes * batch * steps, block + 1))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    size = sum(p.numel() for p in gpt().parameters())
    ratios = []
    for _ in range(repeat):
        model = gpt()
        stream = Stream(data, nodes, batch_size=batch)
        batches = [[next(iter(stream.batches(n, s, 1))) for n in range(nodes)] for s in range(steps)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        start = time.process_time()
        for per_node in batches:
            optimizer.zero_grad()
            for one in per_node:
                (model(one)["loss"] / nodes).backward()
            optimizer.step()
        peer = time.process_time() - start
        trainer = LocalTrainer(gpt(), data)
        start = time.process_time()
        strategy = SimpleReduceStrategy("adamw", lr=1e-3)
        trainer.fit(strategy, num_nodes=nodes, max_steps=steps, batch_size=batch, device="cpu")
        ratios.append(peer / (time.process_time() - start))
    report(f"ddp, 4 nodes, GPT of {size / 1e6:.2f}M", ratios)


def memory(nodes: int = 1000) -> None:
    data = digits(20 * nodes)
    trainer = LocalTrainer(mlp(), data, loss_fn=loss_fn)
    trainer.fit(FedAvgStrategy("sgd", H=10, lr=LR), num_nodes=nodes, max_steps=10, batch_size=BATCH, device="cpu")
    peak = peak_memory_bytes()
    rows = nodes * sum(p.numel() for p in mlp().parameters()) * 4
    limit = 1.2 * rows + 500e6
    print(
        f"memory, {nodes:,} nodes: peak {peak / 1e6:,.0f} MB for {rows / 1e6:,.0f} MB of parameters (plain SGD has no "
        f"state) and {data.tensors[0].nbytes / 1e6:.0f} MB of data; 1.2 x parameters + 500 MB = {limit / 1e6:,.0f} MB"
    )


def report(name: str, ratios: list[float]) -> None:
    print(f"{name}: {statistics.median(ratios):.3f} of the peer's speed (from {min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", choices=["fedavg", "ddp", "memory"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only in (None, "fedavg"):
        fedavg_and_sparta(arguments.repeat)
    if arguments.only in (None, "ddp"):
        ddp(arguments.repeat)
    if arguments.only == "memory":
        memory()
    elif arguments.only is None:
        subprocess.run([sys.executable, __file__, "--only", "memory"], check=True)


if __name__ == "__main__":
    main()
