"""Texts and a small language model in folders, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = ("the red fox runs", "a blue bird sings", "the old man sleeps", "a cold wind blows")


def folder_of_texts(folder: Path, count: int = 12, sentences: int = 30) -> Path:
    """Write `count` files of simple sentences, in three formats, into `folder`; return it."""
    (folder / "more").mkdir(parents=True, exist_ok=True)
    for i in range(count):
        text = " ".join(f"{WORDS[(i + j * j) % 4]}." for j in range(sentences))
        (folder / ("more" if i % 2 else ".") / f"{i:02d}.{'md' if i % 3 else 'txt'}").write_text(text + "\n")
    return folder


def save_small(folder: Path, kind: str = "Llama", tokenizer: bool = True, **sizes: Any) -> Path:
    """Write a small random model of transformers with a vocabulary of bytes into `folder`; return it."""
    import transformers

    from exogym.home.language import load_vocabulary

    words = load_vocabulary("small-random").tokenizer
    small = {
        "Llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "max_position_embeddings": 64},
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    }[kind]  # fmt: skip
    head = "LlamaForCausalLM" if kind == "Llama" else "GPT2LMHeadModel"
    ends = {"bos_token_id": None, "eos_token_id": words.eos_token_id}
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": len(words)} | small | ends | sizes)
    getattr(transformers, head)(config).save_pretrained(folder)
    if tokenizer:
        words.save_pretrained(folder)
    return folder
