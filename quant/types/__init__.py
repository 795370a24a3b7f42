"""One module per block type that can be written; `quant.block` has their facts and finds them by name."""
