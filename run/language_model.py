"""Fine-tune a language model on your texts, on one computer or several, and print its perplexity.

python run/language_model.py --data texts
python run/language_model.py --data texts --num_nodes 2 --hosts distributed_hosts.json

`texts` is a folder with files .txt, .md or .jsonl. Without --data, the script uses Shakespeare's plays. Without
--weights, it uses SmolLM2-135M-Instruct; see exogym.home.language.weights.
"""

import argparse
import math
import time

from exogym import LocalTrainer, NetworkTrainer
from exogym.distributed import get_rank, is_initialized
from exogym.errors import run_script
from exogym.progress import readable_bytes
from exogym.strategy import DiLoCoStrategy
from exogym.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder with texts, or a file")
    parser.add_argument("--weights", help="a folder with weights, or a GGUF file")
    parser.add_argument("--num_nodes", type=int, default=2)
    parser.add_argument("--max_steps", "--steps", type=int, default=40, help="steps of each node (default: 40)")
    parser.add_argument("--batch_size", type=int, default=2, help="blocks per node and step (default: 2)")
    parser.add_argument("--block_size", type=int, default=128, help="tokens of a block (default: 128)")
    parser.add_argument("--H", type=int, default=8, help="steps between two averages (default: 8)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lora_rank", type=int, default=8)
    parser.add_argument("--gradient_checkpointing", action="store_true", help="less memory, more time")
    parser.add_argument("--hosts", help="train on the hosts in this file (default: here, or by torchrun)")
    parser.add_argument("--min_hosts", type=int, help="continue without lost hosts while this many are left")
    parser.add_argument("--save", help="folder for the final model, in transformers' format")
    parser.add_argument("--write", nargs="*", default=[], metavar="TEXT", help="texts to continue at the end")
    args = parser.parse_args()

    task = load_task(
        "language", args.data, weights=args.weights, block_size=args.block_size, lora_rank=args.lora_rank,
        gradient_checkpointing=args.gradient_checkpointing,
    )  # fmt: skip
    model = task.make_model(seed=0)
    strategy = DiLoCoStrategy(
        H=args.H, lr=args.lr, outer_lr=task.outer_lr, outer_momentum=task.outer_momentum, max_norm=task.max_norm,
        lr_scheduler=task.lr_scheduler, warmup_steps=min(task.warmup_steps, args.max_steps // 10),
    )  # fmt: skip
    if args.hosts:
        trainer = NetworkTrainer(args.hosts, model, task.train, task.val, min_hosts=args.min_hosts)
    else:
        trainer = LocalTrainer(model, task.train, task.val)
    start = time.perf_counter()
    trainer.fit(
        strategy, num_nodes=args.num_nodes, max_steps=args.max_steps, batch_size=args.batch_size,
        val_interval=args.max_steps,
    )  # fmt: skip

    if is_initialized() and get_rank() > 0:  # torchrun starts several processes with the same model; one prints
        return
    used = task.evaluates or f"all {len(task.val)} held-out blocks"
    print(f"{task.description}; {task.origin}; evaluated on {used}; {args.num_nodes} nodes")
    for row in trainer.history.rows(node=None):
        if row["val_loss"] is not None:
            sent = readable_bytes(row["tx_bytes"])
            print(f"step {row['step']:4d}  perplexity {math.exp(row['val_loss']):.2f}  sent per node {sent}")
    print(f"{time.perf_counter() - start:.0f} s")
    if args.save:
        model.save_pretrained(args.save)
    for text, more in zip(args.write, model.write(args.write), strict=True):
        print(f"{text}{more}")


if __name__ == "__main__":
    run_script(main)
