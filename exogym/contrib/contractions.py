"""Contractions: compressors C whose messages approximate the row, as EF21 and CHOCO-SGD need them.

For each row x there is a delta > 0 with |x - C(x)|^2 <= (1 - delta) |x|^2: delta = k / P for top-k, and delta = |x|_1^2
/ (d |x|_2^2) for the scaled sign of each tensor of d entries.
"""

from __future__ import annotations

from exogym.core.compress import Compressor, Quantized, ScaledSign, TopK, tensors
from exogym.core.fleet.layout import Layout
from exogym.errors import ArgumentError, check_choice, check_number

KINDS = ("topk", "sign")


class Contraction:
    """A choice of contraction.

    Args:
        kind: "topk" sends the k = max(1, round(density P)) entries of largest magnitude among all P parameters of one
            dtype, k (b + 4) bytes for values of b bytes. "sign" sends each entry's sign and each tensor's mean
            magnitude, ceil(P / 8) bytes and 4 bytes per tensor.
        density: k / P for "topk", over 0 and at most 1. None means 0.01.

    Raises:
        ArgumentError: a value is not allowed, or `density` is given for "sign".

    >>> Contraction("topk", 0.1).payload_bytes(1000, 4), Contraction("sign").payload_bytes(1000, 4)
    (800.0, 125.0)
    """

    def __init__(self, kind: str, density: float | None = None):
        check_choice("compressor", kind, KINDS)
        if kind == "sign" and density is not None:
            raise ArgumentError(f"compressor='sign' sends all entries: leave density={density!r} out")
        self.kind, self.density = kind, 0.01 if density is None else density
        check_number("density", self.density, over=0, most=1, more=": the share of entries to send")

    def of(self, layout: Layout) -> Compressor:
        """Return the compressor of rows with this layout."""
        if self.kind == "topk":
            return TopK(layout.numel, self._kept(layout.numel))
        return Quantized(ScaledSign(), tensors(layout))

    def payload_bytes(self, P: float, b: float) -> float:
        return self._kept(P) * (b + 4.0) if self.kind == "topk" else P / 8

    def _kept(self, P: float) -> int:
        return max(1, round(self.density * P))
