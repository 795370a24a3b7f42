"""Decoding and judging what was converted; may use `quant` and `converter`, nothing there uses this."""
