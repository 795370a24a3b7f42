"""Measuring drafts over a matrix of settings, and choosing by what was measured; may use `verify`, `converter`, `quant`."""
