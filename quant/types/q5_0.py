"""Q5_0: 32 values in 22 bytes: float16 scale, 5-bit quants around 16 (spec/quant.md, sections 2, 3, 5 and 6)."""

from __future__ import annotations

from quant.kernel import Kernel
from quant.lanes import WIDTH
from quant.pack import get_five_bits, put_five_bits
from quant.small import AroundZero

BATCH = WEIGHTED_BATCH = WIDTH
SUMS_OVER = "row"

_type = AroundZero(nbytes=22, zero=16, put=put_five_bits, get=get_five_bits)
quantize = Kernel(_type.quantize, memories=2, name="q5_0.quantize")
quantize_weighted = Kernel(_type.quantize_weighted, memories=4, name="q5_0.quantize_weighted")
dequantize = Kernel(_type.dequantize, memories=2, name="q5_0.dequantize")
