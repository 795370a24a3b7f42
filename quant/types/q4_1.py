"""Q4_1: 32 values in 20 bytes: float16 scale and minimum, 4-bit quants (spec/quant.md, sections 2, 3, 5 and 6)."""

from __future__ import annotations

from quant.kernel import Kernel
from quant.lanes import WIDTH
from quant.pack import get_nibbles, put_nibbles
from quant.small import AboveMinimum

BATCH = WEIGHTED_BATCH = WIDTH
SUMS_OVER = "row"

_type = AboveMinimum(nbytes=20, top=15, put=put_nibbles, get=get_nibbles)
quantize = Kernel(_type.quantize, memories=2, name="q4_1.quantize")
quantize_weighted = Kernel(_type.quantize_weighted, memories=4, name="q4_1.quantize_weighted")
dequantize = Kernel(_type.dequantize, memories=2, name="q4_1.dequantize")
