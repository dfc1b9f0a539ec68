"""Compressors: quantisers that really pack, top-k, error feedback, and the block cosine transform."""

from exogym.compress.compressor import Compressor, Quantized, TopK, buckets, noise_of, tensors, with_feedback
from exogym.compress.dct import BlockDCT
from exogym.compress.quantize import E3M0, Absmax, Quantizer, ScaledSign, Stochastic, dequantize, quantize

__all__ = [
    "E3M0",
    "Absmax",
    "BlockDCT",
    "Compressor",
    "Quantized",
    "Quantizer",
    "ScaledSign",
    "Stochastic",
    "TopK",
    "buckets",
    "dequantize",
    "noise_of",
    "quantize",
    "tensors",
    "with_feedback",
]
