"""How large may the batch be? Train DDP and DiLoCo on the same number of examples, in growing batches.

A batch twice as large means half as many steps, and so half as many synchronizations. How much loss does this cost? In
"Scaling laws for DiLoCo" (Charles et al., arXiv:2503.09799) large batches hurt data-parallel training more than DiLoCo.
Those runs have thousands of steps. If H stays and steps become few, DiLoCo has too few rounds. The learning rate grows
with the square root of the batch, as usual with Adam. All nodes together share a batch.
python run/diloco_scaling_batchsize.py --dataset digits --batches 16,32,64,128
python run/diloco_scaling_batchsize.py --dataset shakespeare --examples 32000 --network wifi --step_seconds 20ms
"""

import argparse
import math
import sys

from exogym.compare import Standing, compare
from exogym.errors import ArgumentError, run_script
from exogym.network import readable_seconds
from exogym.progress import readable_bytes
from exogym.study.compare.comparison import markdown
from exogym.study.compare.summary import spread_text
from exogym.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits", help="digits, mnist, shakespeare or cifar10 (default: digits)")
    parser.add_argument("--data", help="file or folder of the data, if not in the usual places")
    parser.add_argument("--batches", default="16,32,64,128", help="sizes for all nodes (default: 16,32,64,128)")
    parser.add_argument("--examples", type=int, default=9600, help="examples for all nodes (default: 9600)")
    parser.add_argument("--steps", "--max_steps", type=int, help="steps of each run, instead of --examples")
    parser.add_argument("--strategies", default="ddp,diloco:H=10,diloco:H=30")
    parser.add_argument("--num_nodes", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--network", help="also predict the time on this network, such as wifi or 100Mbps,20ms")
    parser.add_argument("--step_seconds", help="time of a node's step there with the smallest batch, such as 20ms")
    parser.add_argument("--plot", default="diloco_scaling_batchsize.png", help="picture to write")
    args = parser.parse_args()

    batches = [int(text) for text in args.batches.split(",")]
    for batch in batches:
        if batch % args.num_nodes:
            raise ArgumentError(f"--batches: {batch} must be a multiple of the {args.num_nodes} nodes")
    task, results = load_task(args.dataset, args.data), {}
    for batch in batches:
        timing = {"network": args.network, "step_seconds": args.step_seconds} if args.network else {}
        results[batch] = compare(
            task, args.strategies, num_nodes=args.num_nodes, batch_size=batch // args.num_nodes,
            max_steps=args.steps or max(1, args.examples // batch), lr=task.lr * math.sqrt(batch / batches[0]),
            seeds=args.seeds, watch=say, **timing,
        )  # fmt: skip

    methods = [row["strategy"] for row in results[batches[0]].rows]
    heads, lines = ["batch", "steps", *methods, "sent/node"], []
    for batch, result in results.items():
        sent = " / ".join(readable_bytes(row["tx_bytes"]) for row in result.rows)
        if args.network:
            sent += ", " + " / ".join(readable_seconds(row["time_s"]) for row in result.rows)
        losses = [spread_text(row, "val_loss", "{:.4f}") for row in result.rows]
        lines.append([str(batch), str(result.description["setting"]["steps"]), *losses, sent])
    print(markdown(heads, lines))
    draw(methods, results, args.plot)


def say(at: Standing) -> None:
    if at.step == at.steps:
        print(f"{at.label}, run {at.run} of {at.runs}: validation loss {at.val_loss:.3f}", file=sys.stderr)


def draw(methods: list[str], results: dict, path: str) -> None:  # type: ignore[type-arg]
    """Draw each method's loss against the batch."""
    from matplotlib.figure import Figure

    figure = Figure((6.4, 3.6), 100, layout="constrained")
    axes = figure.add_subplot()
    for k, method in enumerate(methods):
        rows = [result.rows[k] for result in results.values()]
        spread = [row["val_loss_std"] or 0.0 for row in rows]
        axes.errorbar([*results], [row["val_loss"] for row in rows], spread, fmt="o-", capsize=3, label=method)
    axes.set_xscale("log", base=2)
    axes.set_xticks([*results], [str(batch) for batch in results])
    axes.set(xlabel="examples in a batch of all nodes", ylabel="validation loss after the same number of examples")
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    run_script(main)
