"""A character-level GPT: a decoder-only transformer like GPT-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exogym.core.base.modes import evaluation_mode
from exogym.errors import ArgumentError, check_count, checked


class CharGPT(nn.Module):
    """A GPT with token and learned position embeddings, pre-norm blocks of causal attention and MLP, and a tied head.

    Given tokens x, h_0 = E[x] + Q, where E embeds tokens and Q positions. Each of L layers computes h <- h +
    Attn(LN(h)) and then h <- h + W_2 gelu(W_1 LN(h)), where LN is layer normalization and W_1, W_2 are the layer's MLP.
    The output is the logits, LN(h_L) E^T.

    E is also the head (Press & Wolf 2017), so its parameters count once: P = V d + T d + L (12 d^2 + 2 d) + d. Linear
    layers have no bias, and LN has only a gain. Weights are initialized from a normal distribution with the standard
    deviation 0.02, or 0.02 / sqrt(2 L) if they write to the residual stream (Radford et al. 2019), so the first loss
    is about ln V.

    Args:
        vocab_size: V, the number of tokens in the vocabulary.
        block_size: T, the largest number of tokens in x.
        n_layer: L, the number of layers.
        n_head: the number of attention heads in a layer.
        n_embd: the width d, a multiple of `n_head`.
        dropout: dropout probability after the embedding, attention and MLP, and of the attention weights.

    >>> model = CharGPT(vocab_size=65, block_size=16, n_layer=1, n_head=2, n_embd=32)
    >>> x = torch.zeros(2, 16, dtype=torch.long)
    >>> model((x, x))["logits"].shape, sum(p.numel() for p in model.parameters())
    (torch.Size([2, 16, 65]), 14976)
    """

    tensor_plan: ClassVar = {
        "blocks.*.attend.qkv": "colwise_rep",  # its outputs hold q, k and v in a row, so they are put together
        "blocks.*.attend.out": "rowwise_rep",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
    }
    cut_points: ClassVar = "blocks.*"

    @checked
    def __init__(
        self,
        vocab_size: int,
        block_size: int = 64,
        n_layer: int = 2,
        n_head: int = 4,
        n_embd: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {
            "vocab_size": vocab_size,
            "block_size": block_size,
            "n_layer": n_layer,
            "n_head": n_head,
            "n_embd": n_embd,
        }
        for name, given in sizes.items():
            check_count(name, given)
        if n_embd % n_head:
            raise ArgumentError(f"n_embd={n_embd} must be a multiple of n_head={n_head}")
        if not 0 <= dropout < 1:
            raise ArgumentError(f"dropout={dropout!r} must be a probability below 1")
        self.vocab_size, self.block_size = vocab_size, block_size
        self.tokens = nn.Embedding(vocab_size, n_embd)
        self.positions = nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(n_embd, n_head, dropout) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_stream = name.endswith(("attend.out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * n_layer) ** 0.5 if into_stream else 0.02)

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return {"loss": the mean cross-entropy in nats per token, "logits": (batch, T, V)} for a batch (x, y).

        x (batch, T) int64 contains tokens, y (batch, T) the token after each, and V is the vocabulary's size.
        """
        x, y = batch
        logits = self.logits(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}

    def logits(self, x: Tensor) -> Tensor:
        """Return logits (batch, T, V) for the next token after each token of x (batch, T). V is `vocab_size`."""
        length = x.shape[1]
        if length > self.block_size:
            raise ArgumentError(
                f"x has {length} tokens, but the model has block_size={self.block_size}: use shorter examples, or "
                "build the model with a larger block_size"
            )
        h = self.drop(self.tokens(x) + self.positions.weight[:length])
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    @torch.no_grad()
    def generate(self, x: Tensor, count: int, temperature: float = 1.0) -> Tensor:
        """Sample `count` tokens after x (batch, T), and return x with these tokens, (batch, T + count).

        The model is in evaluation mode during the call, and samples use torch's default generator.
        """
        with evaluation_mode(self):
            for _ in range(count):
                scores = self.logits(x[:, -self.block_size :])[:, -1] / temperature
                x = torch.cat([x, torch.multinomial(scores.softmax(-1), 1)], dim=1)
        return x


class GPTBlock(nn.Module):
    """A layer of width d: h <- h + Attn(LN(h)), then h <- h + MLP(LN(h)) with an MLP of width 4 d."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(n_embd, bias=False)
        self.attend = Attention(n_embd, n_head, dropout)
        self.norm2 = nn.LayerNorm(n_embd, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd, bias=False),
            nn.GELU(),
            nn.Linear(4 * n_embd, n_embd, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, h: Tensor) -> Tensor:
        """Return the layer's output (batch, T, d) for its input `h` (batch, T, d): T tokens of width d."""
        h = h + self.attend(self.norm1(h))
        return h + self.mlp(self.norm2(h))


class Attention(nn.Module):
    """Causal multi-head attention, softmax(q k^T / sqrt(d / heads)) v, for width d (Vaswani et al. 2017).

    One linear layer gives the queries q, keys k and values v. A token attends only to itself and earlier tokens.
    """

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.out = nn.Linear(n_embd, n_embd, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        """Return the attention's output (batch, T, d) for its input `h` (batch, T, d): T tokens of width d."""
        q, k, v = (
            self.qkv(h).unflatten(-1, (3, self.n_head, -1)).transpose(1, 3).unbind(2)
        )  # each (batch, heads, T, d / heads)
        dropped = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        return self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
