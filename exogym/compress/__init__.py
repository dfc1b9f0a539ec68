"""Compressors: quantisers that really pack, and the block cosine transform."""

from exogym.compress.dct import BlockDCT
from exogym.compress.quantize import dequantize, quantize

__all__ = ["BlockDCT", "dequantize", "quantize"]
