"""Compressors: quantisers that really pack, top-k, error feedback, and the block cosine transform."""

from exogym.compress.compressor import (
    ChunkTopK,
    Compressor,
    Quantized,
    TopK,
    buckets,
    mean_in_shards,
    noise_of,
    tensors,
    with_feedback,
)
from exogym.compress.dct import BlockDCT
from exogym.compress.quantize import E3M0, Absmax, Quantizer, ScaledSign, Statistical, Stochastic, dequantize, quantize

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
    "mean_in_shards",
    "noise_of",
    "quantize",
    "tensors",
    "with_feedback",
]
