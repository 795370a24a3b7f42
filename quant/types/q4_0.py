"""Q4_0: 32 values in 18 bytes: float16 scale, 4-bit quants around 8 (spec/quant.md, sections 2, 3, 5 and 6)."""

from __future__ import annotations

from quant.kernel import Kernel
from quant.lanes import WIDTH
from quant.pack import get_nibbles, put_nibbles
from quant.small import AroundZero

BATCH = WEIGHTED_BATCH = WIDTH
SUMS_OVER = "row"

_type = AroundZero(nbytes=18, zero=8, put=put_nibbles, get=get_nibbles)
quantize = Kernel(_type.quantize, memories=2, name="q4_0.quantize")
quantize_weighted = Kernel(_type.quantize_weighted, memories=4, name="q4_0.quantize_weighted")
dequantize = Kernel(_type.dequantize, memories=2, name="q4_0.dequantize")
