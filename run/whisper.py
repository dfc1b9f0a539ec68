"""Fine-tune Whisper on your recordings, on one computer or several, and print its share of wrong words.

python run/whisper.py --data recordings
python run/whisper.py --data recordings --num_nodes 2 --hosts distributed_hosts.json

`recordings` is a folder with a manifest.csv with the columns audio and text. Without --data, espeak-ng reads lines of
Shakespeare aloud. Without --weights, the script uses tiny.en; see exogym.home.whisper.weights.
"""

import argparse
import time

from exogym import LocalTrainer, NetworkTrainer
from exogym.distributed import get_rank, is_initialized
from exogym.errors import run_script
from exogym.home.speech import read_audio
from exogym.progress import readable_bytes
from exogym.strategy import DiLoCoStrategy
from exogym.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder with a manifest, or from Hugging Face's save_to_disk")
    parser.add_argument("--weights", help="a folder with weights, or a name on the Hugging Face hub")
    parser.add_argument("--num_nodes", type=int, default=2)
    parser.add_argument("--max_steps", "--steps", type=int, default=40, help="steps of each node (default: 40)")
    parser.add_argument("--batch_size", type=int, default=2, help="clips per node and step (default: 2)")
    parser.add_argument("--H", type=int, default=8, help="steps between two averages (default: 8)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lora_rank", type=int, default=8)
    parser.add_argument("--window_s", type=float, help="leave out longer clips (default: the longest clip's length)")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="less memory, more time")
    parser.add_argument("--hosts", help="train on the hosts in this file (default: here, or by torchrun)")
    parser.add_argument("--min_hosts", type=int, help="continue without lost hosts while this many are left")
    parser.add_argument("--save", help="folder for the final model, in transformers' format")
    parser.add_argument("--transcribe", nargs="*", default=[], metavar="FILE", help="files to transcribe at the end")
    args = parser.parse_args()

    task = load_task(
        "whisper", args.data, weights=args.weights, lora_rank=args.lora_rank, window_s=args.window_s,
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
    heard = task.evaluates or f"all {len(task.val)} held-out clips"
    print(f"{task.description}; {task.origin}; evaluated on {heard}; {args.num_nodes} nodes")
    for row in trainer.history.rows(node=None):
        if row["val_loss"] is not None:
            sent = readable_bytes(row["tx_bytes"])
            print(
                f"step {row['step']:4d}  word error rate {row['val_wer']:.1%}  loss {row['val_loss']:.3f}  "
                f"sent per node {sent}"
            )
    print(f"{time.perf_counter() - start:.0f} s")
    if args.save:
        model.save_pretrained(args.save)
    for file in args.transcribe:
        print(f"{file}: {model.transcribe([read_audio(file)[0]])[0]}")


if __name__ == "__main__":
    run_script(main)
