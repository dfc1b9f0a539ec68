"""Compare strategies on CIFAR-10: a table, two pictures and the numbers, in a new folder under runs/.

No package contains CIFAR-10. You need a file cifar10.npz with x_train (n, 32, 32, 3) uint8, y_train, x_test, y_test.

python run/cifar10_comparison.py --data /path/to/cifar10.npz
"""

import argparse
import sys

from exogym.compare import Standing, compare
from exogym.errors import run_script
from exogym.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="cifar10.npz or its folder; or set the environment variable EXOGYM_DATA")
    parser.add_argument("--steps", "--max_steps", type=int, default=400, help="steps of each node (default: 400)")
    parser.add_argument("--num_nodes", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", default="runs", help="folder in which to make the results' folder (default: runs)")
    args = parser.parse_args()

    strategies: dict[str, str | Strategy] = {
        "single": "single",  # one node alone; communication must beat it
        "ddp": SimpleReduceStrategy(inner_optim="adamw", lr=args.lr),
        "diloco": DiLoCoStrategy(inner_optim="adamw", H=10, lr=args.lr),
        "sparta": SPARTAStrategy(inner_optim="adamw", p_sparta=0.01, lr=args.lr),
        "fedavg": FedAvgStrategy(inner_optim="adamw", H=10, lr=args.lr),
        "demo": DeMoStrategy(lr=1e-3),
    }
    result = compare(
        load_task("cifar10", args.data), strategies, num_nodes=args.num_nodes, max_steps=args.steps,
        batch_size=args.batch_size, seeds=args.seeds, lr=args.lr, out=args.out, watch=say,
    )  # fmt: skip
    print(result.to_markdown())
    print(f"\nwritten to {result.folder}")


def say(at: Standing) -> None:
    if at.step == at.steps:
        print(f"{at.label}, run {at.run} of {at.runs}: validation loss {at.val_loss:.3f}", file=sys.stderr)


if __name__ == "__main__":
    run_script(main)
