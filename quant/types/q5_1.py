"""Q5_1: 32 values in 24 bytes: float16 scale and minimum, 5-bit quants (spec/quant.md, sections 2, 3, 5 and 6)."""

from __future__ import annotations

from quant.kernel import Kernel
from quant.lanes import WIDTH
from quant.pack import get_five_bits, put_five_bits
from quant.small import AboveMinimum

BATCH = WEIGHTED_BATCH = WIDTH
SUMS_OVER = "row"

_type = AboveMinimum(nbytes=24, top=31, put=put_five_bits, get=get_five_bits)
quantize = Kernel(_type.quantize, memories=2, name="q5_1.quantize")
quantize_weighted = Kernel(_type.quantize_weighted, memories=4, name="q5_1.quantize_weighted")
dequantize = Kernel(_type.dequantize, memories=2, name="q5_1.dequantize")
