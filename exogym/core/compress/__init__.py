"""Compressors: quantizers that pack codes into bytes, top-k, error feedback, and the block cosine transform.

This example defines a compressor that sends the means of pairs, and uses ExoGym's compressors on a fleet's rows:

>>> import torch
>>> from exogym.fleet import Fleet
>>> class Pairs(Compressor):
...     def __init__(self, count):
...         self.count = count
...     def encode(self, x, noise=None):
...         return [x.view(len(x), -1, 2).mean(2)]
...     def decode(self, means):
...         return means.repeat_interleave(2, dim=1)
>>> pairs = Pairs(4)
>>> pairs.decode(*pairs.encode(torch.tensor([[1.0, 3.0, 0.0, 2.0]]))).tolist()
[[2.0, 2.0, 1.0, 1.0]]
>>> fleet = Fleet(torch.nn.Linear(4, 4), range(2), 2, torch.device("cpu"))
>>> layout, x = fleet.blocks[0].layout, fleet.blocks[0].params
>>> signs = Quantized(ScaledSign(), tensors(layout))
>>> codes, scales = signs.encode(x)
>>> codes.shape, scales.shape  # 20 bits in 3 bytes, and a scale for each of two tensors
(torch.Size([2, 3]), torch.Size([2, 2]))
>>> largest = ChunkTopK(layout, k=4, chunk=16, quantizer=None)
>>> int((largest.decode(*largest.encode(x)) != 0).sum(1)[0])  # 4 of 16, and 1 of 4
5
>>> quantizer: Quantizer = Stochastic(levels=4)
>>> codes, norm = quantizer.encode(x[:, :16], noise_of(fleet, 16, 0, "example"))
>>> int(codes.max()) < 2**quantizer.bits
True
"""

from exogym.core.compress.compressor import (
    ChunkTopK,
    Compressor,
    Quantized,
    TopK,
    buckets,
    noise_of,
    tensors,
    with_feedback,
)
from exogym.core.compress.dct import BlockDCT
from exogym.core.compress.quantize import (
    E3M0,
    Absmax,
    Quantizer,
    ScaledSign,
    Statistical,
    Stochastic,
    dequantize,
    quantize,
)

__all__ = [
    "E3M0",
    "Absmax",
    "BlockDCT",
    "ChunkTopK",
    "Compressor",
    "Quantized",
    "Quantizer",
    "ScaledSign",
    "Statistical",
    "Stochastic",
    "TopK",
    "buckets",
    "dequantize",
    "noise_of",
    "quantize",
    "tensors",
    "with_feedback",
]
